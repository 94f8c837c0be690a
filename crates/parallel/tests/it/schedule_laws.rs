//! Laws that hold for every schedule at every size. Dependencies are checked when an order is created.

use farflung_base::{Bandwidth, Bytes, Link, Nanos, Rank};
use farflung_parallel::ParallelError;
use farflung_parallel::pipeline::{
    BackwardOrder, Boundary, CollectiveTimes, ComputeOrder, Lowering, Method, PipelineCost, Schedule,
    Settings, StageCost, lower_bound, peaks, simulate,
};
use proptest::prelude::*;

fn settings() -> impl Strategy<Value = (Method, Settings)> {
    let sizes = (prop::sample::select(Method::ALL.to_vec()), 1_u32..10, 1_u32..24, 1_u32..5, 1_u16..4);
    let costs = (1_u64..20, 1_u64..20, 1_u64..20, 0_u64..40, any::<bool>());
    (sizes, costs, prop::option::of(1_u32..30)).prop_map(
        |((method, p, m, v, slices), (f, i, w, hop, ascending), memory)| {
            let cost = StageCost { forward: Nanos(f), input: Nanos(i), weight: Nanos(w), ..StageCost::UNIT };
            let several = matches!(method, Method::Interleaved | Method::BreadthFirst);
            let chunks = match method {
                Method::Hanayo => Some(2 * v),
                _ => several.then_some(v),
            };
            // A third of the sizes have a number of microbatches that is a multiple of the ranks, which some
            // methods need.
            let m = if m % 3 == 0 { p * (m / 3) } else { m };
            let settings = Settings {
                chunks,
                slices,
                backward: if ascending { BackwardOrder::Ascending } else { BackwardOrder::Descending },
                cost: vec![cost],
                hop: Nanos(hop),
                memory,
                ..Settings::new(p, m)
            };
            (method, settings)
        },
    )
}

/// Returns the order, or `None` if the method does not support the sizes.
fn admitted(method: Method, settings: &Settings) -> Option<ComputeOrder> {
    let order = method.order(settings);
    if let Err(error) = &order {
        let refused = matches!(error, ParallelError::NotAdmitted { method: by, .. } if *by == method);
        assert!(refused, "{method} {settings:?}: {error}");
    }
    order.ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_order_is_whole_and_within_its_memory((method, settings) in settings()) {
        let Some(order) = admitted(method, &settings) else { return Ok(()) };
        for (rank, held) in peaks(&order).into_iter().enumerate() {
            let bound = method.peak_bound(&settings, rank as u32);
            prop_assert!(u64::from(held) <= bound, "{method} rank {rank}: {held} of {bound}");
        }
        let text = order.to_string();
        let read: ComputeOrder = text.parse().unwrap();
        prop_assert_eq!(read.with_updates(order.updates()), order);
    }

    /// Lowered lists have matching sends and receives, end with a few buffers, parse back, and pass the check
    /// again.
    #[test]
    fn every_order_lowers(
        (method, settings) in settings(),
        ahead in 0_u32..4,
        offload in prop::option::of(1_u32..6),
        flags in any::<[bool; 3]>(),
        recompute in any::<bool>(),
    ) {
        let Some(order) = admitted(method, &settings) else { return Ok(()) };
        let order = if recompute { order.with_recompute() } else { order };
        let [replicas, tied, sharded] = flags;
        let schedule = Schedule::new(order, &Lowering { ahead, replicas, tied, sharded, offload }).unwrap();
        // In these methods, ranks may run far ahead of each other and have the messages of all microbatches in
        // flight.
        let far_ahead = matches!(
            method,
            Method::BreadthFirst | Method::OneFOneBSlope | Method::ZbAuto | Method::Varuna | Method::Hanayo
        );
        let most = if far_ahead { settings.microbatches } else { 2 };
        prop_assert!(schedule.buffers() <= most, "{method}: {}", schedule.buffers());
        let again = schedule.lists().iter().map(|list| {
            list.iter().map(|entry| entry.to_string().parse().unwrap()).collect()
        });
        let again = Schedule::check(schedule.order().clone(), again.collect()).unwrap();
        prop_assert_eq!(again, schedule);
    }

    /// No order is faster than the work of a rank, or than a microbatch's path through all stages and back.
    #[test]
    fn no_order_beats_its_bounds((method, settings) in settings(), wire in 0_u64..60, overlap in 0_u8..=100) {
        let Some(order) = admitted(method, &settings) else { return Ok(()) };
        let stage = settings.cost[0];
        // 8 Gbit/s is one byte per nanosecond.
        let link = Link { bandwidth: Bandwidth(8_000_000_000), latency: settings.hop };
        let boundary = Boundary { link, forward: Bytes(wire), backward: Bytes(wire / 2) };
        let mut cost = PipelineCost::uniform(&order, stage, boundary);
        cost.overlap_percent = overlap;
        let simulation = simulate(&order, &cost).unwrap();
        let depth = u64::from(order.placement().depth());
        // A slice passes the stages faster than a whole microbatch.
        let through = match order.slices() {
            1 if order.is_forward_only() => depth * stage.forward.0,
            1 => depth * (stage.forward + stage.input).0 + stage.weight.0,
            _ => 0,
        };
        prop_assert!(simulation.makespan().0 >= through);
        let bound = lower_bound(&order, &cost);
        prop_assert!(simulation.makespan() >= bound, "{method}: {bound} is no bound");
        for rank in (0..order.placement().ranks()).map(Rank) {
            let slots = simulation.slots(rank);
            prop_assert!(slots.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert_eq!(simulation.busy(rank) + simulation.bubble(rank), simulation.makespan());
            prop_assert!(simulation.span_bubble(rank) <= simulation.bubble(rank));
        }
    }

    /// Averages start when a stage's last backward is done everywhere and end within the step. Averages of zero
    /// time change nothing.
    #[test]
    fn collectives_only_add((method, settings) in settings(), time in 0_u64..200, replicas in any::<bool>()) {
        let Some(order) = admitted(method, &settings) else { return Ok(()) };
        let cost = PipelineCost::uniform(&order, settings.cost[0], Boundary::latency(settings.hop));
        let plain = simulate(&order, &cost).unwrap().makespan();
        let depth = order.placement().depth() as usize;
        let schedule = Schedule::new(order, &Lowering { replicas, ..Lowering::default() }).unwrap();
        let simulated = |time| {
            let times = CollectiveTimes { reduce: vec![Nanos(time); depth], ..CollectiveTimes::default() };
            schedule.simulate(&cost, &times).unwrap()
        };
        prop_assert_eq!(simulated(0).makespan(), plain);
        let step = simulated(time);
        prop_assert!(step.makespan() >= plain && step.makespan() <= simulated(time + 1).makespan());
        for reduction in step.reductions() {
            let list = &schedule.order().lists()[reduction.rank.index()];
            let last = list.iter().rposition(|op| op.actions().any(|a| a.stage == reduction.stage));
            // A copy of the model without microbatches has nothing to wait for.
            let done = last.map_or(Nanos::ZERO, |op| step.compute().slots(reduction.rank)[op].end);
            prop_assert_eq!(reduction.ready, done, "{}: stage {}", method, reduction.stage);
            prop_assert!(reduction.slot.start >= done && reduction.slot.end <= step.makespan());
            let alone = schedule.order().placement().copies() == 1
                && schedule.order().placement().depth() == schedule.order().placement().ranks();
            prop_assert!(!alone || reduction.slot.start == done);
        }
    }

    /// For schedules whose bubble has a closed form, the simulated bubble equals it.
    #[test]
    fn bubbles_are_their_closed_forms(p in 1_u32..9, rounds in 2_u32..5, f in 1_u64..9, i in 1_u64..9, w in 1_u64..9) {
        let m = 2 * p * rounds;
        let stage = StageCost { forward: Nanos(f), input: Nanos(i), weight: Nanos(w), ..StageCost::UNIT };
        let simulated = |method: Method, settings: &Settings, at: &dyn Fn(&ComputeOrder, &PipelineCost)| {
            let order = method.order(settings).unwrap();
            at(&order, &PipelineCost::uniform(&order, stage, Boundary::latency(Nanos::ZERO)));
        };
        let gap = u64::from(p - 1);
        let work = f + i + w;
        for (method, bubble) in [
            (Method::GPipe, gap * work),
            (Method::OneFOneB, gap * work),
            (Method::TeraPipe, gap * work),
            (Method::Interleaved, gap * work),
            (Method::BreadthFirst, gap * work),
            (Method::Inference, gap * f),
        ] {
            simulated(method, &Settings::new(p, m), &|order, cost| {
                let simulation = simulate(order, cost).unwrap();
                assert_eq!(simulation.bubble(Rank(0)), Nanos(bubble), "{method}");
            });
        }
        for (method, weights) in [(Method::ZbH1, 1), (Method::ZbH2, 2)] {
            simulated(method, &Settings::new(p, m), &|order, cost| {
                let simulation = simulate(order, cost).unwrap();
                let most = (0..p).map(|r| simulation.span_bubble(Rank(r)).0).max().unwrap();
                let closed = (gap * (f + i)).saturating_sub(weights * gap * w);
                // A W fills no more of the gaps than its own time. Even if the W do not fit into the gaps, the
                // bubble is smaller than that of 1F1B.
                assert!(most >= closed, "{method}: {most} {closed}");
                assert!(gap == 0 || most < gap * work, "{method}: {most} of {}", gap * work);
                if f == i && i == w {
                    assert_eq!(most, closed, "{method}");
                }
            });
        }
    }
}

#[test]
fn what_a_method_cannot_do_is_refused_with_the_reason() {
    let refused = |method: Method, settings: Settings| method.order(&settings).unwrap_err().to_string();
    let at = Settings::new;
    assert_eq!(
        refused(Method::Interleaved, at(4, 6)),
        "schedule interleaved does not support 6 microbatches: it needs a multiple of the 4 stages"
    );
    assert!(refused(Method::ZbH2, at(4, 6)).contains("at least 7 for 4 stages"));
    assert!(refused(Method::Chimera, at(3, 4)).contains("3 stages: it needs an even number"));
    assert!(refused(Method::Chimera, at(4, 5)).contains("half go in each direction"));
    assert!(refused(Method::DualPipe, at(4, 6)).contains("at least 8"));
    assert!(refused(Method::DualPipeV, at(4, 7)).contains("at least 8"));
    assert!(refused(Method::OneFOneB, at(0, 1)).contains("0 stages"));
    assert!(refused(Method::OneFOneB, at(1, 0)).contains("0 microbatches"));
    assert!(refused(Method::OneFOneB, Settings { chunks: Some(2), ..at(2, 2) }).contains("2 chunks"));
    assert!(refused(Method::Hanayo, Settings { chunks: Some(3), ..at(2, 2) }).contains("two for each wave"));
    assert!(refused(Method::DualPipe, Settings { chunks: Some(3), ..at(2, 4) }).contains("3 chunks"));
    assert!(refused(Method::ZbV, Settings { chunks: Some(1), ..at(2, 2) }).contains("1 chunks"));
    assert!(refused(Method::ZbAuto, Settings { memory: Some(0), ..at(2, 2) }).contains("0 memory"));
    assert!(refused(Method::Varuna, Settings { memory: Some(0), ..at(2, 2) }).contains("0 memory"));
    assert!(refused(Method::OneFOneBSlope, Settings { memory: Some(3), ..at(4, 8) }).contains("room for 4"));
    assert!(refused(Method::ZbH2, at(u32::MAX, 1)).contains("at least 8589934589"));
    assert!(refused(Method::TeraPipe, Settings { slices: 0, ..at(2, 2) }).contains("slices"));
    assert!(refused(Method::OneFOneBSlope, Settings { slope: Some(0), ..at(2, 2) }).contains("0 mu"));
    assert!(refused(Method::GPipe, at(1 << 20, 1 << 20)).contains("actions of a schedule are too many"));
    assert!(
        refused(Method::ZbAuto, Settings { cost: vec![StageCost::UNIT; 3], ..at(2, 2) })
            .contains("3 entries")
    );
    let unknown = "2f2b".parse::<Method>().unwrap_err().to_string();
    assert!(unknown.contains("2f2b") && unknown.contains("zb-h1"), "{unknown}");
}

/// A bound is asked for before it is known whether the method supports the settings.
#[test]
fn a_limit_of_no_memory_has_a_bound_too() {
    for method in Method::ALL {
        let settings = Settings { memory: Some(0), ..Settings::new(4, 8) };
        assert!(method.peak_bound(&settings, 0) <= 16, "{method}");
    }
    let none = Settings { memory: Some(0), ..Settings::new(4, 8) };
    assert_eq!(Method::ZbAuto.peak_bound(&none, 0), 0);
}

#[test]
fn names_are_unique_and_read_back() {
    for method in Method::ALL {
        assert_eq!(method.name().parse(), Ok(method));
        assert!(!method.summary().is_empty());
    }
}

#[test]
fn an_overlapped_pair_saves_what_the_cost_says() {
    let order = Method::DualPipe.order(&Settings::new(4, 20)).unwrap();
    let mut cost = PipelineCost::uniform(&order, StageCost::UNIT, Boundary::latency(Nanos::ZERO));
    let slow = simulate(&order, &cost).unwrap().makespan();
    cost.overlap_percent = 100;
    assert!(simulate(&order, &cost).unwrap().makespan() < slow);
}
