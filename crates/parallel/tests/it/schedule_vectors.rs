//! Compares schedules with lists and figures that others published or computed. 4 ranks and 8 microbatches
//! unless stated otherwise.

use farflung_base::{Nanos, Rank};
use farflung_parallel::pipeline::{
    Boundary, Comparison, ComputeOrder, Method, PipelineCost, Settings, StageCost, peaks, simulate,
};

fn order(method: Method, p: u32, m: u32) -> ComputeOrder {
    method.order(&Settings::new(p, m)).expect("the method admits the size")
}

fn unit(tenths: u64) -> Nanos {
    Nanos::from_micros(100 * tenths)
}

fn stage(f: u64, i: u64, w: u64) -> StageCost {
    StageCost { forward: unit(f), input: unit(i), weight: unit(w), ..StageCost::UNIT }
}

/// Returns the makespan and the span bubbles, in tenths of a unit.
fn times(order: &ComputeOrder, cost: StageCost, hop: Nanos) -> (u64, Vec<u64>) {
    let cost = PipelineCost::uniform(order, cost, Boundary::latency(hop));
    let simulation = simulate(order, &cost).expect("the costs are for this order");
    let tenths = |t: Nanos| t.0 / unit(1).0;
    let ranks = (0..order.placement().ranks()).map(Rank);
    (tenths(simulation.makespan()), ranks.map(|r| tenths(simulation.span_bubble(r))).collect())
}

#[test]
fn lists_are_the_published_ones() {
    for (method, m, text) in [
        (Method::OneFOneB, 8, include_str!("../vectors/1f1b.txt")),
        (Method::Interleaved, 8, include_str!("../vectors/interleaved.txt")),
        (Method::ZbH1, 8, include_str!("../vectors/zb-h1.txt")),
        (Method::ZbH2, 8, include_str!("../vectors/zb-h2.txt")),
        (Method::ZbV, 8, include_str!("../vectors/zbv.txt")),
        (Method::VHalf, 8, include_str!("../vectors/v-half.txt")),
        (Method::VMin, 8, include_str!("../vectors/v-min.txt")),
        (Method::Chimera, 4, include_str!("../vectors/chimera.txt")),
        (Method::Hanayo, 4, include_str!("../vectors/hanayo.txt")),
        (Method::DualPipe, 8, include_str!("../vectors/dualpipe.txt")),
        (Method::DualPipeV, 8, include_str!("../vectors/dualpipev.txt")),
    ] {
        let made = order(method, 4, m);
        assert_eq!(made.to_string(), text, "{method}");
        let read: ComputeOrder = text.parse().unwrap();
        assert_eq!(read, made, "{method} reads back");
    }
}

/// Odd numbers of ranks, fewer microbatches than ranks, three chunks. The lists come from an independent
/// program that implements the rules of the papers. Above each list are its name, ranks, microbatches and
/// chunks.
#[test]
fn lists_of_other_sizes_are_those_of_an_independent_program() {
    let text = include_str!("../vectors/other-sizes.txt");
    let mut lists = 0;
    for list in text.split("# ").skip(1) {
        let (head, list) = list.split_once('\n').unwrap();
        let mut words = head.split(' ');
        let method: Method = words.next().unwrap().parse().unwrap();
        let mut number = || words.next().map(|n| n.parse().unwrap());
        let settings = Settings::new(number().unwrap(), number().unwrap());
        let made = method.order(&Settings { chunks: number(), ..settings }).unwrap();
        assert_eq!(made.to_string(), list, "{head}");
        lists += 1;
    }
    assert_eq!(lists, 12);
}

/// Makespan, span bubbles and peaks, with one unit per chunk operation and free links.
#[test]
fn figures_are_the_published_ones() {
    type Row = (Method, u64, [u64; 4], [u32; 4]);
    let rows: [Row; 12] = [
        (Method::GPipe, 33, [9, 6, 3, 0], [8, 8, 8, 8]),
        (Method::OneFOneB, 33, [9, 6, 3, 0], [4, 3, 2, 1]),
        (Method::ZbH1, 27, [3, 2, 1, 0], [4, 4, 4, 4]),
        (Method::ZbH2, 27, [0; 4], [7, 7, 7, 7]),
        (Method::Interleaved, 57, [9, 6, 3, 0], [11, 9, 7, 5]),
        (Method::BreadthFirst, 57, [9, 6, 3, 0], [16; 4]),
        (Method::ZbV, 51, [0; 4], [8; 4]),
        (Method::VHalf, 53, [5, 3, 3, 2], [6; 4]),
        (Method::VMin, 59, [11, 9, 7, 6], [4; 4]),
        (Method::DualPipeV, 54, [6, 5, 4, 3], [9; 4]),
        (Method::DualPipe, 26, [2, 1, 1, 2], [5; 4]),
        (Method::PipeDream, 33, [9, 6, 3, 0], [4, 3, 2, 1]),
    ];
    for (method, makespan, span_bubbles, held) in rows {
        let made = order(method, 4, 8);
        let (time, bubbles) = times(&made, StageCost::UNIT, Nanos::ZERO);
        assert_eq!((time, bubbles), (10 * makespan, span_bubbles.map(|b| 10 * b).to_vec()), "{method}");
        assert_eq!(peaks(&made), held, "{method}");
    }
}

#[test]
fn chimera_takes_the_published_slots() {
    let slots = |p, m| times(&order(Method::Chimera, p, m), stage(10, 5, 5), Nanos::ZERO).0 / 10;
    assert_eq!([slots(4, 4), slots(4, 8), slots(8, 8)], [10, 18, 22]);
    assert_eq!(times(&order(Method::Chimera, 4, 4), StageCost::UNIT, Nanos::ZERO).0, 160);
    assert_eq!(peaks(&order(Method::Chimera, 4, 4)), [3, 4, 4, 3]);
    assert_eq!(peaks(&order(Method::Chimera, 8, 8)), [5, 6, 7, 8, 8, 7, 6, 5]);
}

#[test]
fn hanayo_has_the_computed_bubbles() {
    let (makespan, _) = times(&order(Method::Hanayo, 4, 4), StageCost::UNIT, Nanos::ZERO);
    assert_eq!(makespan, 360);
    for (waves, ratio) in [(1, 0.368), (2, 0.238), (4, 0.135)] {
        let settings = Settings { chunks: Some(2 * waves), ..Settings::new(8, 8) };
        let made = Method::Hanayo.order(&settings).unwrap();
        let cost = PipelineCost::uniform(&made, StageCost::UNIT, Boundary::latency(Nanos::ZERO));
        let found = simulate(&made, &cost).unwrap().bubble_fraction();
        assert!((found - ratio).abs() < 5e-4, "{waves} waves: {found}");
    }
}

/// Makespans with slow links, for 4 ranks and 8 microbatches. Where there are two chunks, each has half the
/// size.
#[test]
fn slow_links_cost_what_the_table_says() {
    let hops = [0, 5, 10, 20, 40];
    for (method, chunked, expected) in [
        (Method::GPipe, false, [330, 360, 390, 450, 570]),
        (Method::OneFOneB, false, [330, 410, 490, 650, 970]),
        (Method::ZbH2, false, [270, 285, 300, 420, 660]),
        (Method::ZbH1, false, [270, 330, 410, 570, 890]),
        (Method::Interleaved, true, [285, 355, 460, 700, 1180]),
        // At half a unit, the source has 330; its own list, executed by hand, takes 325.
        (Method::ZbV, true, [255, 325, 415, 635, 1075]),
    ] {
        let made = order(method, 4, 8);
        let cost = if chunked { stage(5, 5, 5) } else { stage(10, 10, 10) };
        let found = hops.map(|hop| times(&made, cost, unit(hop)).0);
        assert_eq!(found, expected, "{method}");
    }
}

/// In steady state, 1F1B takes `T + 2c(p-1)/p` per microbatch. With a warm-up of the right slope, it takes the
/// time of `GPipe`.
#[test]
fn slow_links_follow_the_law() {
    for p in [2_u32, 4, 8] {
        for hop in [5_u64, 10, 30] {
            let makespan = |m| times(&order(Method::OneFOneB, p, m), StageCost::UNIT, unit(hop)).0;
            let (few, many) = (16 * p, 32 * p);
            let period = (makespan(many) - makespan(few)) as f64 / f64::from(many - few);
            let law = 30.0 + 2.0 * hop as f64 * f64::from(p - 1) / f64::from(p);
            assert!((period - law).abs() < 1e-9, "p={p} c={hop}: {period} {law}");

            let m = 128;
            let settings = Settings { hop: unit(hop), ..Settings::new(p, m) };
            let steep = Method::OneFOneBSlope.order(&settings).unwrap();
            let bound = u64::from(m) * 30 + u64::from(p - 1) * (30 + 2 * hop);
            assert_eq!(times(&steep, StageCost::UNIT, unit(hop)).0, bound, "p={p} c={hop}");
            let mu = 1 + (2 * hop).div_ceil(30) as u32;
            assert_eq!(peaks(&steep)[0], mu * (p - 1) + 1);
        }
    }
    let settings = |mu| Settings { slope: Some(mu), ..Settings::new(8, 128) };
    let found = [1, 2, 3].map(|mu| {
        let made = Method::OneFOneBSlope.order(&settings(mu)).unwrap();
        times(&made, stage(10, 10, 10), unit(30)).0
    });
    // The time of GPipe here is 447 units, reached with slope 3.
    assert_eq!(found, [11130, 6240, 4470]);
    // Memory for 20 microbatches allows slope 2.
    let tight = Settings { hop: unit(30), memory: Some(20), ..Settings::new(8, 128) };
    let made = Method::OneFOneBSlope.order(&tight).unwrap();
    assert_eq!((peaks(&made)[0], times(&made, stage(10, 10, 10), unit(30)).0), (15, 6240));
}

/// `DualPipe` on 8 ranks with 20 microbatches: (p/2-1)(F&B + B - 3W). Also the closed forms of zero bubble for
/// unequal costs.
#[test]
fn closed_forms_of_span_bubbles() {
    let (_, bubbles) = times(&order(Method::DualPipe, 8, 20), StageCost::UNIT, Nanos::ZERO);
    assert_eq!(bubbles.iter().max(), Some(&60));
    for (f, i, w) in [(10, 12, 8), (10, 13, 7), (10, 10, 10)] {
        let span = |method, m| {
            let (_, bubbles) = times(&order(method, 4, m), stage(f, i, w), Nanos::ZERO);
            bubbles.into_iter().max().unwrap()
        };
        assert_eq!(span(Method::OneFOneB, 16), 3 * (f + i + w));
        assert_eq!(span(Method::ZbH1, 16), 3 * (f + i - w));
        assert_eq!(span(Method::ZbH2, 16), 3 * (f + i - 2 * w));
    }
    // These schedules are made for equal costs and are simulated with unequal costs.
    let found = [Method::VMin, Method::VHalf, Method::ZbH2].map(|method| {
        let (_, bubbles) = times(&order(method, 4, 16), stage(10, 12, 8), Nanos::ZERO);
        bubbles.into_iter().max().unwrap()
    });
    assert_eq!(found, [304, 78, 18]);
}

/// `DeepSpeed`'s `TrainSchedule` runs all ranks in lock-step. The order on each rank is that of 1F1B.
#[test]
fn deepspeeds_lock_steps_are_1f1b() {
    for (p, m) in [(4_i64, 8_i64), (7, 12), (3, 2)] {
        let made = order(Method::OneFOneB, p as u32, m as u32);
        for (s, list) in (0..).zip(made.lists()) {
            let mut expected = Vec::new();
            for step in 0..2 * (m + p - 1) {
                let (even_step, even_stage) = (step % 2 == 0, s % 2 == 0);
                let (kind, i) = match (even_step, even_stage) {
                    (true, true) => ('F', step / 2 - s / 2),
                    (false, false) => ('F', (step - 1) / 2 - s / 2),
                    (true, false) => ('B', step / 2 - p + (s + 1) / 2),
                    (false, true) => ('B', (step - 1) / 2 - p + 1 + s / 2),
                };
                if (0..m).contains(&i) {
                    expected.push(format!("{s}{kind}{i}"));
                }
            }
            let found: Vec<String> = list.iter().map(ToString::to_string).collect();
            assert_eq!(found, expected, "stage {s} of {p}");
        }
    }
}

/// Compares all methods and checks which one is chosen.
#[test]
fn compared() {
    let comparison = Comparison {
        ranks: 4,
        microbatches: 8,
        slices: 2,
        cost: vec![StageCost::UNIT],
        boundaries: vec![Boundary::latency(Nanos::from_micros(500))],
        memory: Some(4),
        overlap_percent: 0,
    };
    let compared = comparison.run().unwrap();
    assert_eq!(compared.best().map(|(method, _)| method), Some(Method::ZbV));
    insta::assert_snapshot!(compared.to_string());
    let refused = Comparison { cost: vec![StageCost::UNIT; 3], ..comparison.clone() };
    assert!(refused.run().is_err());
    let refused = Comparison { boundaries: vec![Boundary::latency(Nanos::ZERO); 3], ..comparison };
    assert!(refused.run().unwrap_err().to_string().contains("boundaries"));
}

/// Each boundary has its own link. The link after the last rank is used only by methods that go round.
#[test]
fn compared_on_unequal_links() {
    let boundaries = [0, 20, 0, 70].map(|tenths| Boundary::latency(unit(tenths))).to_vec();
    let comparison = Comparison {
        ranks: 4,
        microbatches: 8,
        slices: 1,
        cost: vec![StageCost::UNIT],
        boundaries,
        memory: None,
        overlap_percent: 0,
    };
    let makespan = |comparison: &Comparison, wanted: Method| {
        let compared = comparison.run().unwrap();
        let (_, row) = compared.rows.into_iter().find(|(method, _)| *method == wanted).unwrap();
        row.unwrap().makespan.0 / unit(1).0
    };
    assert_eq!(makespan(&comparison, Method::GPipe), 330 + 40);
    let (order, cost) = comparison.order(Method::BreadthFirst).unwrap();
    let found: Vec<Nanos> = cost.boundaries.iter().map(|b| b.link.latency).collect();
    assert_eq!(found, [0, 20, 0, 70, 0, 20, 0].map(unit));
    assert_eq!(order.placement().depth(), 8);
    let paired = Comparison { overlap_percent: 100, ..comparison.clone() };
    assert!(makespan(&paired, Method::DualPipe) < makespan(&comparison, Method::DualPipe));
}
