//! Averages that are taken up later, and neighbours that mix: against plain loops, as the methods that they
//! degenerate to, and from any step.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::thread;

use farflung_base::Philox;
use farflung_comm::{Communicator, memory};
use farflung_optim::AverageConfig;
use farflung_optim::sync::{
    After, COCKTAIL, D_PSGD, DILOCO, Delayed, DelayedSettings, EXPONENTIAL, Graph, Merge, Neighbour,
    RANDOM_PAIRS, SHIFT_ONE, STREAMING, SyncMethod, SyncSettings, Synchroniser, Timeline,
};
use farflung_tensor::{Device, ParamLayout, Shape, Tensor};

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

const STEPS: u64 = 27;

fn layout() -> ParamLayout {
    let shapes = [(5, 7), (9, 3), (4, 4), (8, 8), (3, 11)];
    ParamLayout::new(shapes.iter().enumerate().map(|(i, &(r, c))| (format!("p{i}"), Shape::from([r, c]))))
}

fn elements() -> Vec<usize> {
    layout().params().iter().flat_map(farflung_tensor::Param::range).collect()
}

fn random(seed: u64) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    let mut flat = vec![0.0; layout().len()];
    for i in elements() {
        flat[i] = 2.0 * draw.uniform(i as u64) - 1.0;
    }
    flat
}

/// How far a rank's local step goes.
fn local(rank: usize, step: u64) -> Vec<f32> {
    random(100 * step + rank as u64)
}

#[derive(Clone, Copy)]
struct Case {
    every: u64,
    fragments: usize,
    delay: u64,
    mixing: f64,
    momentum: f64,
    codec: &'static str,
    warmup: u64,
}

const PLAIN: Case =
    Case { every: 6, fragments: 3, delay: 2, mixing: 0.5, momentum: 0.9, codec: "none", warmup: 0 };

fn make(method: &SyncMethod, case: Case, comm: Communicator, params: &Tensor) -> Box<dyn Synchroniser> {
    let average =
        AverageConfig { codec: case.codec.parse().unwrap(), warmup: case.warmup, ..AverageConfig::default() };
    (method.build)(SyncSettings {
        comm,
        device: &CPU,
        layout: &layout(),
        average,
        every: case.every,
        outer_lr: 0.7,
        outer_momentum: case.momentum,
        fragments: case.fragments,
        delay: case.delay,
        mixing: case.mixing,
        params,
    })
    .unwrap()
}

/// Parameters, and those in common, after each step.
type Trace = Vec<(Vec<f32>, Vec<f32>)>;

/// Trains on some ranks; the `cut` ends and goes on from what was saved after that step.
fn trace(method: &SyncMethod, case: Case, ranks: usize, weights: &[f64], cut: Option<u64>) -> Vec<Trace> {
    let rank = |comm: Communicator| {
        let number = comm.rank().index();
        let mut params = CPU.tensor(&random(1), layout().len()).unwrap();
        let mut sync = make(method, case, comm.clone(), &params);
        let mut trace = Vec::new();
        for step in 1..=STEPS {
            let after = After { step, last: step == STEPS };
            let moved: Vec<f32> = params.to_vec::<f32>().unwrap();
            let moved: Vec<f32> = moved.iter().zip(local(number, step)).map(|(p, g)| p - 0.01 * g).collect();
            params.write(&moved).unwrap();
            sync.mix(&mut params).unwrap();
            let mut meets = sync.is_due(after);
            while meets {
                sync.exchange(&params, after, weights[number]).unwrap();
                sync.prepare().unwrap();
                sync.commit(&mut params).unwrap();
                meets = sync.goes_on();
            }
            sync.depart(&params, after, weights[number]).unwrap();
            let common = sync.common().map_or_else(Vec::new, |common| common.to_vec().unwrap());
            trace.push((params.to_vec().unwrap(), common));
            if cut == Some(step) {
                sync.settle().unwrap();
                let states = sync.states().into_iter().chain(sync.own_states());
                let states: BTreeMap<String, Vec<f32>> =
                    states.map(|(name, state)| (name.to_owned(), state.to_vec().unwrap())).collect();
                let saved: BTreeMap<String, Vec<f32>> =
                    sync.average().save("").unwrap().into_iter().collect();
                let (steps, round) = (sync.steps(), sync.average().round());
                sync = make(method, case, comm.clone(), &CPU.tensor(&random(2), layout().len()).unwrap());
                sync.restore(steps, &|name| states.get(name).cloned()).unwrap();
                sync.average_mut().restore("", round, |name| saved.get(name).map(Vec::as_slice)).unwrap();
            }
        }
        trace
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = memory::cluster(ranks)
            .into_iter()
            .map(|endpoint| scope.spawn(|| rank(Communicator::new(endpoint))))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const EQUAL: [f64; 3] = [1.0; 3];

#[test]
fn one_fragment_without_delay_and_mixing_is_diloco_to_the_bit() {
    for momentum in [0.0, 0.9] {
        for codec in ["none", "int4+ef", "topk:0.2/f16+ef"] {
            let case = Case { fragments: 1, delay: 0, mixing: 0.0, momentum, codec, ..PLAIN };
            let (diloco, streaming) =
                (trace(&DILOCO, case, 3, &EQUAL, None), trace(&STREAMING, case, 3, &EQUAL, None));
            for (step, (a, b)) in diloco.iter().flatten().zip(streaming.iter().flatten()).enumerate() {
                assert_eq!(a.0, b.0, "{codec}, step {step}");
            }
        }
    }
}

/// The method as plain loops in f64 over whole vectors, with a mean that loses nothing.
fn reference(case: Case, merge: Merge, outer_lr: f64, weights: &[f64]) -> Vec<(Vec<Vec<f64>>, Vec<f64>)> {
    let timeline = Timeline::new(case.every, case.fragments as u64, case.delay).unwrap();
    let fragments = {
        let cut = thread::scope(|scope| {
            let rank = |endpoint| {
                let params = CPU.tensor(&random(1), layout().len()).unwrap();
                let average = AverageConfig { fragments: case.fragments, ..AverageConfig::default() };
                let comm = Communicator::new(endpoint);
                farflung_optim::Average::new(comm, &CPU, &layout(), average).map(|a| {
                    let of = |fragment| a.fragment(fragment).into_iter().flatten().collect::<Vec<_>>();
                    (params, (0..case.fragments).map(of).collect::<Vec<_>>())
                })
            };
            let endpoint = memory::cluster(1).pop().unwrap();
            scope.spawn(move || rank(endpoint).unwrap().1).join().unwrap()
        });
        let mut all = cut.concat();
        all.sort_unstable();
        assert_eq!(all, elements(), "each element is in one fragment");
        cut
    };
    let ranks = weights.len();
    let start: Vec<f64> = random(1).into_iter().map(f64::from).collect();
    let (mut params, mut anchor) = (vec![start.clone(); ranks], start.clone());
    let mut momentum = vec![0.0; start.len()];
    let mut sent = vec![vec![0.0; start.len()]; ranks];
    let mut all = Vec::new();
    for step in 1..=STEPS {
        for (rank, params) in params.iter_mut().enumerate() {
            params.iter_mut().zip(local(rank, step)).for_each(|(p, g)| *p -= 0.01 * f64::from(g));
        }
        let mut take_up = |elements: &[usize],
                           merge: Merge,
                           params: &mut [Vec<f64>],
                           sent: &[Vec<f64>],
                           anchor: &mut [f64]| {
            for &i in elements {
                let mean = sent.iter().zip(weights).map(|(d, w)| w * d[i]).sum::<f64>() / ranks as f64;
                momentum[i] = case.momentum * momentum[i] + mean;
                let before = anchor[i];
                anchor[i] -= outer_lr * (mean + case.momentum * momentum[i]);
                for (params, sent) in params.iter_mut().zip(sent) {
                    params[i] = match merge {
                        Merge::Mix(own) => own * params[i] + (1.0 - own) * anchor[i],
                        Merge::Rebase => params[i] + sent[i] + anchor[i] - before,
                    };
                }
            }
        };
        let last = step == STEPS;
        let away = if case.delay > 0 { timeline.away(step - 1) } else { None };
        if let Some(back) = away.filter(|_| last || timeline.returns(step).is_some()) {
            take_up(&fragments[back], merge, &mut params, &sent, &mut anchor);
        }
        if let Some(leaves) = timeline.leaves(step).filter(|_| !last) {
            for (sent, params) in sent.iter_mut().zip(&params) {
                fragments[leaves].iter().for_each(|&i| sent[i] = anchor[i] - params[i]);
            }
            if case.delay == 0 {
                take_up(&fragments[leaves], merge, &mut params, &sent, &mut anchor);
            }
        }
        if last {
            for (sent, params) in sent.iter_mut().zip(&params) {
                for i in elements() {
                    sent[i] = anchor[i] - params[i];
                }
            }
            take_up(&elements(), Merge::Mix(0.0), &mut params, &sent, &mut anchor);
        }
        all.push((params.clone(), anchor.clone()));
    }
    all
}

fn far(got: &[f32], wanted: &[f64]) -> f64 {
    let off: f64 = got.iter().zip(wanted).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    (off / wanted.iter().map(|w| w * w).sum::<f64>()).sqrt()
}

#[test]
fn it_does_what_plain_loops_do() {
    let cases = [
        PLAIN,
        Case { delay: 0, ..PLAIN },
        Case { fragments: 6, delay: 1, mixing: 0.0, momentum: 0.0, ..PLAIN },
        Case { fragments: 2, delay: 3, mixing: 1.0, ..PLAIN },
        Case { every: 1, fragments: 1, delay: 1, ..PLAIN },
        Case { every: 40, fragments: 4, delay: 5, ..PLAIN },
    ];
    for (number, case) in cases.into_iter().enumerate() {
        for weights in [EQUAL, [0.5, 1.0, 1.5]] {
            let got = trace(&STREAMING, case, 3, &weights, None);
            let wanted = reference(case, Merge::Mix(case.mixing), 0.7, &weights);
            for (step, (params, anchor)) in wanted.iter().enumerate() {
                for (rank, params) in params.iter().enumerate() {
                    let (own, common) = &got[rank][step];
                    let off = (far(own, params), far(common, anchor));
                    assert!(off.0 < 1e-6 && off.1 < 1e-6, "case {number}, step {step}, rank {rank}: {off:?}");
                }
            }
            assert!(got.windows(2).all(|pair| pair[0].last() == pair[1].last()), "equal at the end");
        }
    }
    let case = Case { every: 1, fragments: 1, delay: 1, momentum: 0.0, ..PLAIN };
    let got = trace(&COCKTAIL, case, 3, &EQUAL, None);
    for (step, (params, anchor)) in reference(case, Merge::Rebase, 1.0, &EQUAL).iter().enumerate() {
        for (rank, params) in params.iter().enumerate() {
            let (own, common) = &got[rank][step];
            assert!(far(own, params) < 1e-6 && far(common, anchor) < 1e-6, "step {step}, rank {rank}");
        }
    }
}

#[test]
fn a_run_goes_on_from_any_step_with_the_same_bits() {
    let lossy = Case { codec: "int4+ef", warmup: 1, ..PLAIN };
    let cases = [
        (&STREAMING, lossy),
        (&STREAMING, Case { fragments: 2, delay: 3, codec: "powersgd:2", ..PLAIN }),
        (&COCKTAIL, Case { codec: "rolling:2/topk:0.5/int4+ef", ..PLAIN }),
        (&D_PSGD, PLAIN),
        (&SHIFT_ONE, PLAIN),
        (&EXPONENTIAL, PLAIN),
        (&RANDOM_PAIRS, PLAIN),
    ];
    for (method, case) in cases {
        let whole = trace(method, case, 3, &EQUAL, None);
        for cut in 1..STEPS {
            let gone_on = trace(method, case, 3, &EQUAL, Some(cut));
            assert!(gone_on == whole, "{}, after step {cut}", method.name);
        }
    }
}

/// What left on another timeline is of other elements: it is dropped, and nothing is lost but its delay.
#[test]
fn what_is_in_flight_is_not_taken_up_on_another_timeline() {
    let params = CPU.tensor(&random(1), layout().len()).unwrap();
    let sync = |case| make(&STREAMING, case, Communicator::new(memory::cluster(1).pop().unwrap()), &params);
    let mut leaves = sync(PLAIN);
    leaves.depart(&params, After { step: 2, last: false }, 1.0).unwrap();
    leaves.settle().unwrap();
    let states = leaves.states().into_iter().chain(leaves.own_states());
    let states: BTreeMap<String, Vec<f32>> =
        states.map(|(name, state)| (name.to_owned(), state.to_vec().unwrap())).collect();
    assert_eq!(states.len(), 4);
    for (case, flies) in [(PLAIN, true), (Case { fragments: 2, ..PLAIN }, false)] {
        let mut other = sync(case);
        other.restore(0, &|name| states.get(name).cloned()).unwrap();
        assert_eq!(other.own_states().len(), usize::from(flies));
    }
}

#[test]
fn gossip_does_what_plain_loops_do() {
    let graphs = [
        (&D_PSGD, Graph::Ring),
        (&SHIFT_ONE, Graph::ShiftOne),
        (&EXPONENTIAL, Graph::Exponential),
        (&RANDOM_PAIRS, Graph::RandomPairs { seed: 0 }),
    ];
    for (method, graph) in graphs {
        for ranks in [1, 2, 3, 5] {
            let got = trace(method, PLAIN, ranks, &[1.0; 5], None);
            let mut params = vec![random(1).into_iter().map(f64::from).collect::<Vec<_>>(); ranks];
            for step in 1..=STEPS {
                let before = params.clone();
                for (rank, params) in params.iter_mut().enumerate() {
                    for (p, g) in params.iter_mut().zip(local(rank, step)) {
                        *p -= 0.01 * f64::from(g);
                    }
                    // What neighbours had before the step, from the second on.
                    let round = step.checked_sub(2);
                    let meeting = round.map(|round| graph.meeting(rank as u32, ranks as u32, round));
                    for Neighbour { rank: from, weight } in meeting.unwrap_or_default().from {
                        for i in 0..params.len() {
                            params[i] += weight * (before[from as usize][i] - before[rank][i]);
                        }
                    }
                }
                if step == STEPS {
                    let mean = |i: usize| params.iter().map(|p| p[i]).sum::<f64>() / ranks as f64;
                    let mean: Vec<f64> = (0..params[0].len()).map(mean).collect();
                    params.fill(mean);
                }
                for (rank, params) in params.iter().enumerate() {
                    let off = far(&got[rank][step as usize - 1].0, params);
                    assert!(off < 1e-6, "{}, {ranks} ranks, step {step}, rank {rank}: {off}", method.name);
                }
            }
        }
    }
}

#[test]
fn what_no_timeline_has_is_refused() {
    let comm = || Communicator::new(memory::cluster(1).pop().unwrap());
    let params = CPU.tensor(&random(1), layout().len()).unwrap();
    let refused = |settings: DelayedSettings| {
        let sync = SyncSettings {
            comm: comm(),
            device: &CPU,
            layout: &layout(),
            average: AverageConfig::default(),
            every: 1,
            outer_lr: 1.0,
            outer_momentum: 0.0,
            fragments: 1,
            delay: 0,
            mixing: 0.0,
            params: &params,
        };
        Delayed::new(sync, settings).unwrap_err().to_string()
    };
    let merge = Merge::Mix(0.5);
    let good =
        DelayedSettings { every: 6, fragments: 2, delay: 1, outer_lr: 1.0, outer_momentum: 0.0, merge };
    for (settings, field) in [
        (DelayedSettings { fragments: 7, ..good }, "fragments"),
        (DelayedSettings { delay: 4, ..good }, "delay"),
        (DelayedSettings { every: 0, ..good }, "every"),
        (DelayedSettings { merge: Merge::Mix(1.5), ..good }, "mixing"),
        (DelayedSettings { merge: Merge::Mix(f64::NAN), ..good }, "mixing"),
    ] {
        let said = refused(settings);
        assert!(said.contains(field), "{said}");
    }
}
