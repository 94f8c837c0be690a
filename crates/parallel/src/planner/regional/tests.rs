//! Tests of regional planning on small clusters written by hand.

use std::fmt::Write as _;

use farflung_base::Link;

use super::*;
use crate::Speed;

const LAYERS: usize = 6;

fn chain(cluster: &Cluster, microbatches: u32, state: u64) -> RegionalChain {
    let layer = ChainLayer {
        operations: 6_000_000_000,
        state: Bytes(state),
        activations: Bytes(10),
        output: Bytes(1000),
    };
    let machine = |device: &crate::Machine| ChainMachine {
        flops: match device.speed {
            Speed::Flops(rate) | Speed::TokensPerSecond(rate) => rate,
        },
        memory: device.memory,
    };
    RegionalChain {
        layers: vec![layer; LAYERS],
        forward: vec![2_000_000_000; LAYERS],
        machines: cluster.ranks().map(machine).collect(),
        gradients: vec![Bytes(1_000_000); LAYERS],
        tied: Bytes(0),
        microbatches,
    }
}

fn cluster(text: &str) -> Cluster {
    text.parse().unwrap()
}

const TWO: &str = r#"
default = "10mbit,50ms"
[[region]]
name = "east"
inside = "10gbit,10us"
[[region]]
name = "west"
inside = "10gbit,10us"
[[device]]
name = "e"
count = 4
flops = "1 TFLOPS"
memory = "1KB"
region = "east"
[[device]]
name = "w"
count = 4
flops = "1 TFLOPS"
memory = "1KB"
region = "west"
"#;

#[test]
fn clustering_finds_the_regions_that_a_file_does_not_name() {
    let mut text = String::new();
    for (site, machine) in [(0, "a"), (1, "b"), (0, "c"), (1, "d"), (2, "e"), (0, "f")] {
        let _ = write!(text, "[[device]]\nname = \"{machine}{site}\"\nflops = \"1 TFLOPS\"\n");
    }
    let names = ["a0", "b1", "c0", "d1", "e2", "f0"];
    for (i, a) in names.iter().enumerate() {
        for b in &names[i + 1..] {
            let link = if a[1..] == b[1..] { "1gbit,1ms" } else { "50mbit,40ms" };
            let _ = write!(text, "[[link]]\nbetween = [\"{a}\", \"{b}\"]\nlink = \"{link}\"\n");
        }
    }
    let sites = Sites::of(&cluster(&text), Bytes(1_000_000)).unwrap();
    let found: Vec<Vec<u32>> = sites.all.iter().map(|s| s.machines.iter().map(|r| r.0).collect()).collect();
    assert_eq!(found, [vec![0, 2, 5], vec![1, 3], vec![4]]);
    // Equal links give one site. Entries that are much farther apart than the instances of one entry give one
    // site each.
    let one = "default = \"1gbit,1ms\"\n[[device]]\nname = \"a\"\ncount = 9\nflops = \"1 TFLOPS\"\n";
    assert_eq!(Sites::of(&cluster(one), Bytes(1000)).unwrap().all.len(), 1);
    let far = "default = \"1mbit,1ms\"\n[[device]]\nname = \"a\"\ncount = 2\nflops = \"1 TFLOPS\"\n\
        [[device]]\nname = \"b\"\ncount = 2\nflops = \"1 TFLOPS\"\n[[link]]\nbetween = [\"a\", \"a\"]\n\
        link = \"1gbit,1us\"\n[[link]]\nbetween = [\"b\", \"b\"]\nlink = \"1gbit,1us\"\n";
    assert_eq!(Sites::of(&cluster(far), Bytes(100_000)).unwrap().all.len(), 2);
}

#[test]
fn a_plan_uses_every_machine_once_and_every_layer_once() {
    let cluster = cluster(TWO);
    let chain = chain(&cluster, 8, 400);
    let found = regional(&chain, &cluster).unwrap();
    assert!(found.plans.is_sorted_by_key(|plan| plan.time.step()));
    for plan in &found.plans {
        let mut machines: Vec<u32> = plan.pipelines.iter().flatten().map(|rank| rank.0).collect();
        machines.sort_unstable();
        machines.dedup();
        assert_eq!(machines.len(), plan.pipelines.len() * plan.stages.len());
        assert_eq!(
            plan.stages.iter().cloned().flatten().collect::<Vec<_>>(),
            (0..LAYERS).collect::<Vec<_>>()
        );
        assert_eq!(plan.microbatches.iter().sum::<u32>(), 8);
        // A machine of 1,000 bytes holds two layers of 400.
        assert!(plan.stages.iter().all(|layers| layers.len() <= 2));
        assert!(plan.time.step() >= found.bound, "{plan:?}");
    }
}

/// Gradients of 2 MB per stage take seconds over 10 Mbit/s, hidden states of 1,000 bytes take 51 ms: pipelines
/// cross the slow link. With hidden states of 1 MB and gradients of 1,000 bytes, averages cross it.
#[test]
fn what_crosses_the_slow_link_is_what_is_smaller() {
    let cluster = cluster(TWO);
    let mut chain = chain(&cluster, 8, 400);
    let crosses =
        |plan: &RegionalPlan| plan.pipelines.iter().all(|row| row[0].0 < 4 && row[row.len() - 1].0 >= 4);
    let found = regional(&chain, &cluster).unwrap();
    assert!(crosses(&found.plans[0]), "{:?}", found.plans[0]);
    chain.gradients = vec![Bytes(1000); LAYERS];
    for layer in &mut chain.layers {
        layer.output = Bytes(1_000_000);
    }
    let found = regional(&chain, &cluster).unwrap();
    let stays = found.plans[0].pipelines.iter().all(|row| row.iter().all(|rank| rank.0 < 4) || row[0].0 >= 4);
    assert!(stays, "{:?}", found.plans[0]);
}

#[test]
fn too_little_memory_is_an_error_that_says_how_much() {
    let cluster = cluster(TWO);
    let error = regional(&chain(&cluster, 8, 1000), &cluster).unwrap_err();
    assert!(matches!(error, ParallelError::TooSmall { needs: Bytes(6060), has: Bytes(8000), .. }), "{error}");
}

/// Returns a chain of equal layers of 12 G operations, one for each of equal machines of 4 GFLOPS, whose memory
/// holds the state of one layer.
fn equal_layers(stages: usize, microbatches: u32, forward: u64) -> RegionalChain {
    let (state, activations, output) = (Bytes(1000), Bytes(0), Bytes(0));
    RegionalChain {
        layers: vec![ChainLayer { operations: 12_000_000_000, state, activations, output }; stages],
        forward: vec![forward; stages],
        machines: vec![ChainMachine { flops: 4_000_000_000, memory: Some(state) }; stages],
        gradients: vec![Bytes(0); stages],
        tied: Bytes(0),
        microbatches,
    }
}

/// Equal machines and free links: the bound is at least the time at all machines' full rates, at most the time
/// of a simulated pipeline, and near the full rates for many microbatches. The forward may take any share of
/// the three seconds of a microbatch.
#[test]
fn the_bound_is_below_every_simulated_pipeline_and_near_the_rates() {
    let sizes = [(2, 2), (4, 4), (8, 8), (4, 16), (8, 64)];
    let shares = [0, 100, 600, 750, 1000, 1500, 2700, 3000];
    for ((stages, microbatches), forward) in sizes.iter().flat_map(|&size| shares.map(|share| (size, share)))
    {
        let bound = lower_bound(&equal_layers(stages, microbatches, forward * 4_000_000));
        let ideal = 3.0 * f64::from(microbatches);
        assert!(bound.as_secs_f64() >= ideal, "{bound}");
        let settings = crate::pipeline::Settings::new(stages as u32, microbatches);
        let half = Nanos::from_millis((3000 - forward) / 2);
        let cost = crate::pipeline::StageCost {
            forward: Nanos::from_millis(forward),
            input: half,
            weight: half,
            ..crate::pipeline::StageCost::default()
        };
        for method in [crate::pipeline::Method::ZbH1, crate::pipeline::Method::OneFOneB] {
            let order = method.order(&settings).unwrap();
            let hop = crate::pipeline::Boundary::latency(Nanos::ZERO);
            let cost = crate::pipeline::PipelineCost::uniform(&order, cost, hop);
            let took = crate::pipeline::simulate(&order, &cost).unwrap().makespan();
            assert!(took >= bound, "{method} {stages} {microbatches} {forward}: {took} below {bound}");
        }
    }
    // A larger share makes the last stage wait longer.
    let bounds = shares.map(|share| lower_bound(&equal_layers(8, 8, share * 4_000_000)));
    assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]), "{bounds:?}");
    assert_eq!(bounds[0], Nanos::from_millis(24_000));
    let many = lower_bound(&equal_layers(4, 100_000, 4_000_000_000));
    assert!((many.as_secs_f64() / 300_000.0 - 1.0).abs() < 1e-4, "{many}");
}

#[test]
fn equal_links_have_the_textbook_times() {
    let link: Link = "1gbit,10ms".parse().unwrap();
    let bytes = Bytes(100_000_000);
    assert_eq!(ring_time(&[link; 8], bytes), Nanos::from_millis(1540));
    // Access links carry 7 shards of 12.5 MB in each phase.
    let busiest = link.bandwidth.transfer(Bytes(87_500_000));
    let exchange = Exchange { ranks: 8, slowest: link, busiest };
    assert_eq!(direct_time(exchange, bytes), Nanos::from_millis(2 * 710));
    assert_eq!((ring_time(&[link], bytes), ring_time(&[], bytes)), (Nanos::ZERO, Nanos::ZERO));
}
