//! Tests of the cost model, the searches and the simulation of layouts.

use farflung_base::Rank;

use super::*;
use crate::seeded_rng::SeededRng;
use crate::shipped;

fn case(number: usize) -> PairCosts {
    let cluster = shipped::cluster(&format!("dtfm-{number}")).unwrap();
    PairCosts::new(&cluster.topology().unwrap(), 8, Workload::PUBLISHED).unwrap()
}

fn seconds(layout: &Layout) -> [f64; 3] {
    let LayoutCost { data_parallel, pipeline } = layout.cost;
    [data_parallel, farflung_base::Nanos(2 * pipeline.0), layout.cost.total()]
        .map(farflung_base::Nanos::as_secs_f64)
}

fn close(layout: &Layout, expected: [f64; 3]) {
    for (seen, expected) in seconds(layout).into_iter().zip(expected) {
        assert!((seen - expected).abs() < 1e-4, "{:?} is not {expected}", seconds(layout));
    }
}

#[test]
fn costs_are_those_of_the_published_scheduler() {
    let vectors = [
        (1, [0.0910, 16.8896, 16.9806], [2.9120, 0.5278, 3.4398]),
        (3, [1.8340, 15.8141, 17.6481], [5.5169, 10.5700, 16.0868]),
        (5, [4.6200, 54.8169, 59.4369], [22.7584, 26.4600, 49.2184]),
    ];
    for (number, by_group, by_pipeline) in vectors {
        let costs = case(number);
        close(&Layout::of_groups(&contiguous(&costs), &costs).unwrap(), by_group);
        close(&Layout::of_groups(&transposed(&costs), &costs).unwrap(), by_pipeline);
    }
}

#[test]
fn the_path_of_case_5_is_the_published_one() {
    let costs = case(5);
    // Regions in the order of the path: Oregon, Virginia, London, Frankfurt, Ireland, Ohio, Tokyo, Seoul.
    let layout = Layout::of_groups(&contiguous(&costs), &costs).unwrap();
    assert_eq!(layout.order, [0, 1, 5, 6, 7, 2, 3, 4]);
}

/// Small networks in which all pairs differ.
fn uneven(devices: usize, groups: u32, seed: u64) -> PairCosts {
    let mut draw = SeededRng::new(seed, 9);
    let mut topology = farflung_base::Topology::uniform(devices, farflung_base::Link::FREE);
    for (a, b) in (0..devices).flat_map(|a| (0..devices).map(move |b| (a, b))) {
        let bandwidth = farflung_base::Bandwidth(100_000_000 + 1_000_000 * draw.below(3000) as u64);
        let latency = farflung_base::Nanos::from_millis(draw.below(100) as u64);
        topology.set_link(Rank(a as u32), Rank(b as u32), farflung_base::Link { bandwidth, latency });
    }
    PairCosts::new(&topology, groups, Workload::PUBLISHED).unwrap()
}

#[test]
fn pipelines_pass_through_their_groups_and_cost_what_is_said() {
    let costs = uneven(12, 4, 3);
    let layout = Layout::of_groups(&random(&costs, 5), &costs).unwrap();
    let mut hops = [0; 3];
    for pipeline in &layout.pipelines {
        for (stage, rank) in pipeline.iter().enumerate() {
            assert!(layout.groups[layout.order[stage]].contains(rank));
        }
        for (stage, pair) in pipeline.windows(2).enumerate() {
            hops[stage] = costs.hop(pair[0].index(), pair[1].index()).max(hops[stage]);
        }
    }
    assert_eq!(hops.iter().sum::<u64>(), layout.cost.pipeline.0);
    let given = Layout::as_given(&layout.pipelines, &costs).unwrap();
    assert_eq!(given.cost, layout.cost);
    let mut longer = layout.pipelines.clone();
    longer[1].push(Rank(0));
    let mut emptier = layout.pipelines.clone();
    emptier.push(Vec::new());
    let mut twice = layout.pipelines.clone();
    twice[1] = twice[0].clone();
    let stages = layout.order.len();
    for (pipelines, says) in [
        (longer, format!("`pipelines` is one of {} devices, expected {stages} devices in each", stages + 1)),
        (emptier, "`pipelines` is one of 0 devices".to_owned()),
        (twice, "each device of the network once".to_owned()),
    ] {
        let error = Layout::as_given(&pipelines, &costs).unwrap_err().to_string();
        assert!(error.contains(&says), "{error}");
    }
}

#[test]
fn exhaustive_search_prices_each_division_once_and_local_search_finds_its_optimum() {
    for (devices, groups) in [(8, 2), (8, 4), (9, 3)] {
        let costs = uneven(devices, groups, devices as u64);
        let best = exhaustive(&costs).unwrap();
        assert_eq!(Some(best.evaluations), partitions(devices, groups as usize));
        let found = local_search(&costs, 2000, 1).unwrap();
        assert_eq!(found.layout.cost.total(), best.layout.cost.total(), "{devices} in {groups}");
        assert!(evolution(&costs, 300, 1).unwrap().layout.cost.total() >= best.layout.cost.total());
    }
    assert_eq!(
        (partitions(12, 3), partitions(12, 4), partitions(12, 6)),
        (Some(5775), Some(15400), Some(10395))
    );
    assert_eq!(partitions(64, 8), None);
}

#[test]
fn searches_are_functions_of_their_seed() {
    let costs = uneven(12, 3, 1);
    for find in [local_search, evolution] {
        let first = find(&costs, 400, 7).unwrap();
        assert_eq!(first, find(&costs, 400, 7).unwrap());
        assert_eq!(first.evaluations, 400);
        for found in first.runners_up.iter().chain([&first.layout]) {
            let again = Layout::of_groups(&found.groups, &costs).unwrap();
            assert_eq!(again.cost, found.cost);
            assert!(found.cost.total() >= first.layout.cost.total());
        }
    }
}

#[test]
fn local_search_is_never_worse_than_both_structured_layouts() {
    for number in 1..=5 {
        let costs = case(number);
        let found = local_search(&costs, 8, 0).unwrap().layout.cost.total();
        for groups in [contiguous(&costs), transposed(&costs)] {
            assert!(found <= Layout::of_groups(&groups, &costs).unwrap().cost.total(), "case {number}");
        }
    }
}

#[test]
fn one_group_and_one_device_a_group_are_layouts_too() {
    let alone = uneven(6, 1, 2);
    let found = search(&alone, 100, 0).unwrap();
    assert_eq!((found.layout.cost.pipeline.0, found.layout.pipelines.len()), (0, 6));
    let line = uneven(6, 6, 2);
    let found = local_search(&line, 100, 0).unwrap();
    assert_eq!((found.layout.cost.data_parallel.0, found.layout.pipelines.len()), (0, 1));
    assert_eq!(found.layout.cost, exhaustive(&line).unwrap().layout.cost);
}

#[test]
fn what_cannot_be_laid_out_is_refused() {
    let cluster = shipped::cluster("dtfm-1").unwrap().topology().unwrap();
    let said = |groups| PairCosts::new(&cluster, groups, Workload::PUBLISHED).unwrap_err().to_string();
    assert!(said(7).contains("divisor of the 64 devices") && said(0).contains("is 0"));
    let mut dead = cluster.clone();
    dead.set_link(
        Rank(3),
        Rank(9),
        farflung_base::Link { bandwidth: farflung_base::Bandwidth(0), ..farflung_base::Link::FREE },
    );
    let error = PairCosts::new(&dead, 8, Workload::PUBLISHED).unwrap_err().to_string();
    assert!(error.contains("rank 3 to rank 9"), "{error}");
    let costs = case(1);
    let mut groups = contiguous(&costs);
    groups[0][0] = Rank(9);
    assert!(Layout::of_groups(&groups, &costs).unwrap_err().to_string().contains("device 9"));
    groups[0][0] = Rank(99);
    assert!(Layout::of_groups(&groups, &costs).unwrap_err().to_string().contains("device 99"));
    assert!(local_search(&costs, 0, 0).is_err() && evolution(&costs, 0, 0).is_err());
}

/// Seconds of a step from an independent event simulation in Python, to the digits printed there.
#[test]
fn simulated_steps_are_those_of_an_independent_simulation() {
    let seen: Vec<[f64; 2]> = [1, 3, 5]
        .map(|number| {
            let costs = case(number);
            [contiguous(&costs), transposed(&costs)].map(|groups| {
                let layout = Layout::of_groups(&groups, &costs).unwrap();
                simulate_layout(&layout, &costs, &TrainingLoad::gpt3_xl(24, 512)).unwrap().as_secs_f64()
            })
        })
        .to_vec();
    let expected = [[5.08, 7.61], [10.07, 10.41], [18.98, 28.66]];
    for (seen, expected) in seen.iter().flatten().zip(expected.iter().flatten()) {
        assert!((seen - expected).abs() <= 0.0051, "{seen} is not {expected}");
    }
}
