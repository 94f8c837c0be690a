//! Tests of the topology file through the public API: its meaning, its errors, and printing.

use farflung_base::{AccessLink, Bandwidth, Bytes, Link, Nanos, Rank};
use farflung_parallel::{
    Between, Cluster, Machine, ParallelError, Power, Price, Region, Speed, TensorEfficiency,
};
use proptest::prelude::*;

const CONTINENTS: &str = include_str!("../../examples/continents.toml");
const HOMES: &str = include_str!("../../examples/homes.toml");

#[test]
fn the_closest_link_counts() {
    let cluster: Cluster = CONTINENTS.parse().unwrap();
    let names = cluster.rank_names();
    assert_eq!(names, ["anna", "bert.0", "bert.1", "rented.0", "rented.1", "rented.2", "rented.3"]);
    let t = cluster.topology().unwrap();
    let link = |a, b| t.link(Rank(a), Rank(b)).to_string();
    assert_eq!(link(0, 1), "100mbit,15ms");
    assert_eq!(link(1, 2), "1gbit,200us");
    assert_eq!(link(1, 3), "400mbit,75ms");
    assert_eq!(link(0, 3), "100mbit,80ms");
    assert_eq!(link(6, 0), "100mbit,80ms");
    assert_eq!(link(3, 4), "100gbit,10us");
    assert_eq!(
        t.access_link(Rank(0)),
        AccessLink { up: Bandwidth(20_000_000), down: Bandwidth(200_000_000) }
    );
    assert_eq!(t.access_link(Rank(3)).up, Bandwidth::UNLIMITED);
    assert_eq!(t.rate(Rank(3), Rank(1)), Bandwidth(40_000_000));
    assert_eq!(cluster.devices[0].memory, Some(Bytes(12_000_000_000)));
    assert_eq!(cluster.devices[1].speed, Speed::Flops(9_500_000_000_000));
}

#[test]
fn uniform_is_the_topology_of_that_name() {
    let link: Link = "20mbit,25ms".parse().unwrap();
    let cluster = Cluster::uniform(4, Speed::TokensPerSecond(1), link);
    assert_eq!(cluster.topology().unwrap(), farflung_base::Topology::uniform(4, link));
    assert_eq!(cluster.to_string().parse(), Ok(cluster));
}

/// Checks that the example with one text replaced fails at this line with these words.
fn refused(from: &str, to: &str, line: usize, words: &[&str]) {
    assert!(CONTINENTS.contains(from), "{from}");
    let error = CONTINENTS.replacen(from, to, 1).parse::<Cluster>().expect_err(to);
    let text = error.to_string();
    let found = match &error {
        ParallelError::TopologyFile { line, .. } | ParallelError::TopologyLine { line, .. } => *line,
        _ => 0,
    };
    assert_eq!(found, line, "{text}");
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

#[test]
fn a_regions_line_is_shared_by_its_devices_towards_all_others() {
    let text = r#"
        default = "1gbit,1ms"
        [[region]]
        name = "office"
        up = "50mbit"
        down = "80mbit"
        [[device]]
        name = "a"
        count = 2
        flops = "1 TFLOPS"
        region = "office"
        [[device]]
        name = "b"
        flops = "1 TFLOPS"
    "#;
    let topology = text.parse::<Cluster>().unwrap().topology().unwrap();
    assert_eq!((topology.region(Rank(0)), topology.region(Rank(2))), (Some(0), None));
    let rate = |a, b| topology.rate(Rank(a), Rank(b)).0;
    assert_eq!([rate(0, 1), rate(1, 2), rate(2, 1)], [1_000_000_000, 50_000_000, 80_000_000]);
    let error = text.replace("50mbit", "0bit").parse::<Cluster>().unwrap_err().to_string();
    assert!(error.contains("line 4") && error.contains("office") && error.contains("up"), "{error}");
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    refused("up = \"20mbit\"", "upload = \"20mbit\"", 22, &["upload", "`up`"]);
    refused("[[link]]", "[[links]]", 41, &["links", "device"]);
    refused("up = \"20mbit\"", "up = \"20\"", 22, &["`20`", "bandwidth", "mbit"]);
    refused("up = \"20mbit\"", "up = 20", 22, &["up = 20"]);
    refused("memory = \"12GB\"", "memory = \"12\"", 20, &["`12`", "GiB"]);
    refused("\"9.5 TFLOPS\"", "\"9.5 tokens\"", 28, &["9.5 tokens", "TFLOPS"]);
    refused("\"100mbit,15ms\"", "\"100mbit\"", 10, &["`100mbit`", "LATENCY"]);
    refused("\"100mbit,15ms\"", "\"0bit,15ms\"", 10, &["no bandwidth"]);
    refused("up = \"20mbit\"", "up = \"0mbit\"", 18, &["anna", "up", "zero"]);
    refused("region = \"europe\"", "region = \"asia\"", 21, &["no region `asia`", "oregon"]);
    refused("[\"europe\", \"oregon\"]", "[\"europe\", \"utah\"]", 42, &["`utah`", "rented"]);
    refused("[\"bert\", \"bert\"]", "[\"oregon\", \"europe\"]", 46, &["oregon - europe", "twice"]);
    refused("[\"bert\", \"bert\"]", "[\"europe\", \"europe\"]", 46, &["twice"]);
    refused("name = \"bert\"", "name = \"anna\"", 26, &["`anna`", "twice"]);
    refused("name = \"bert\"", "name = \"b ert\"", 26, &["`b ert`"]);
    refused("tokens_per_second = 12000", "count = 1", 18, &["anna", "flops", "tokens_per_second"]);
    refused("count = 4", "count = 0", 34, &["rented", "count", "zero"]);
    refused("count = 4", "count = -4", 35, &["count = -4"]);
    refused("name = \"anna\"", "name = ", 18, &["name ="]);
    refused("up = \"20mbit\"", "price = \"cheap\"", 22, &["`cheap`", "1.25/h"]);
    refused("up = \"20mbit\"", "price = 2", 22, &["price = 2"]);
    refused("up = \"20mbit\"", "price = \"1e30/h\"", 22, &["`1e30/h`"]);
    refused("up = \"20mbit\"", "price = \"99999999999/h\"", 22, &["at most"]);
    refused("up = \"20mbit\"", "power = \"350\"", 22, &["`350`", "kW"]);
    refused("up = \"20mbit\"", "power = \"-5W\"", 22, &["`-5W`", "350W"]);
}

#[test]
fn a_missing_link_is_named_and_counts_are_bounded() {
    let text = CONTINENTS.replace("default = \"50mbit,90ms\"", "");
    assert!(text.parse::<Cluster>().is_ok(), "all pairs are given without the default");
    let text = text.replace("between = [\"europe\", \"oregon\"]", "between = [\"bert\", \"anna\"]");
    let error = text.parse::<Cluster>().unwrap_err();
    let missing = ParallelError::MissingLink { from: "bert.0".to_owned(), to: "rented.0".to_owned() };
    let ParallelError::TopologyLine { line, text: shown, cause } = &error else { panic!("{error}") };
    assert_eq!((shown.as_str(), &**cause), ("name = \"bert\"", &missing));
    assert_eq!(text.lines().nth(line - 1).map(str::trim), Some(shown.as_str()));
    let many = HOMES.replace("count = 4", "count = 4294967295").parse::<Cluster>().unwrap_err();
    assert!(matches!(many, ParallelError::TooManyRanks { ranks: 4_294_967_295, .. }), "{many}");
    let mut entries: Cluster = HOMES.parse().unwrap();
    entries.devices = vec![entries.devices[0].clone(); 4097];
    entries.devices.iter_mut().for_each(|device| device.count = 1);
    let message = entries.check().unwrap_err().to_string();
    assert_eq!(message, "4097 entries of devices are too many: at most 4096 are supported");
    assert_eq!("default = \"home\"".parse::<Cluster>(), Err(ParallelError::NoDevices));
}

fn any_link() -> impl Strategy<Value = Link> {
    (1_u64..1 << 50, 0_u64..1 << 50).prop_map(|(b, ns)| Link { bandwidth: Bandwidth(b), latency: Nanos(ns) })
}

fn any_device() -> impl Strategy<Value = Machine> {
    let speed = prop_oneof![
        (1_u64..i64::MAX as u64).prop_map(Speed::TokensPerSecond),
        (1_u64..u64::MAX).prop_map(Speed::Flops)
    ];
    let port = || prop::option::of((1_u64..1 << 50).prop_map(Bandwidth));
    let memory = prop::option::of(any::<u64>().prop_map(Bytes));
    let price = prop::option::of((0_u64..1_000_000_000_000_000).prop_map(Price));
    let power = prop::option::of(any::<u64>().prop_map(Power));
    let efficiency = prop::collection::vec(1_u8..=100, 0..5)
        .prop_map(|percents| TensorEfficiency::new(percents).expect("percents"));
    let access = (port(), port());
    (1_u32..4, speed, memory, prop::option::of(0_usize..3), access, price, power, efficiency).prop_map(
        |(count, speed, memory, region, (up, down), price, power, tensor_efficiency)| Machine {
            name: String::new(),
            count,
            speed,
            memory,
            price,
            power,
            region: region.map(|r| format!("region-{r}")),
            up,
            down,
            tensor_efficiency,
        },
    )
}

fn any_cluster() -> impl Strategy<Value = Cluster> {
    let rate = || prop::option::of((1_u64..1 << 50).prop_map(Bandwidth));
    let regions = prop::collection::vec((prop::option::of(any_link()), rate(), rate()), 3);
    let links = prop::option::of(any_link());
    (any_link(), regions, prop::collection::vec(any_device(), 1..6), links).prop_map(
        |(default, insides, mut devices, between)| {
            for (i, device) in devices.iter_mut().enumerate() {
                device.name = format!("d{i}");
            }
            let name = |i| format!("region-{i}");
            let regions = insides.into_iter().zip(0..);
            let regions =
                regions.map(|((inside, up, down), i)| Region { name: name(i), inside, up, down }).collect();
            let ends = ["d0".to_owned(), name(2)];
            let links = between.map(|link| Between { ends, link }).into_iter().collect();
            Cluster { default: Some(default), regions, devices, links }
        },
    )
}

proptest! {
    #[test]
    fn prints_and_parses_back(cluster in any_cluster()) {
        prop_assert_eq!(cluster.to_string().parse(), Ok(cluster));
    }

    #[test]
    fn no_text_panics(text in "[\\PC\n]{0,200}", cut in 0_usize..CONTINENTS.len()) {
        let _ = text.parse::<Cluster>();
        let cut = (0..=cut).rev().find(|&i| CONTINENTS.is_char_boundary(i)).unwrap();
        let _ = CONTINENTS[..cut].parse::<Cluster>();
    }
}

#[test]
fn tensor_efficiency_is_read_printed_and_checked() {
    let file = |list: &str| {
        format!("default = 'lan'\n[[device]]\nname = 'a'\nflops = '1 TFLOPS'\ntensor_efficiency = {list}\n")
    };
    let read: Cluster = file("[96, 90, 75]").parse().unwrap();
    let measured = &read.devices[0].tensor_efficiency;
    assert_eq!([1, 2, 3, 4, 8, 64].map(|ranks| measured.percent(ranks)), [100, 96, 90, 90, 75, 75]);
    assert_eq!(read.to_string().parse::<Cluster>().unwrap(), read);
    let less = TensorEfficiency::new(vec![99, 50]).unwrap();
    let least = TensorEfficiency::least(&[measured, &less, &TensorEfficiency::default()]);
    assert_eq!(least.percents(), [96, 50, 50]);
    for wrong in ["[0]", "[101]", "[96.5]", "'96%'", "[-1]"] {
        let said = file(wrong).parse::<Cluster>().unwrap_err().to_string();
        assert!(said.contains("line 5") && said.contains("percentages from 1 to 100"), "{wrong}: {said}");
    }
}
