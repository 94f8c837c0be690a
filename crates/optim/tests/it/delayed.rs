//! Tests of averages that are applied later: compared with plain loops and with the methods to which they
//! reduce, and resumed from any step.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::thread;

use crate::synchronise::{CPU, Case, PLAIN, STEPS, elements, far, layout, local, make, random, trace};
use farflung_comm::{Communicator, memory};
use farflung_optim::AverageConfig;
use farflung_optim::sync::{
    COCKTAIL, DILOCO, Delayed, DelayedSettings, Merge, MomentPeriods, STREAMING, StepEnd, SyncSettings,
    Timeline,
};
use farflung_tensor::{ParamLayout, Shape};

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

/// Computes the method by plain loops in f64 over whole vectors, with an exact mean.
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
    ];
    for (method, case) in cases {
        let whole = trace(method, case, 3, &EQUAL, None);
        for cut in 1..STEPS {
            let gone_on = trace(method, case, 3, &EQUAL, Some(cut));
            assert!(gone_on == whole, "{}, after step {cut}", method.name);
        }
    }
}

/// A fragment that was sent on another timeline has other elements. It is dropped, and its change is sent
/// later.
#[test]
fn what_is_in_flight_is_not_taken_up_on_another_timeline() {
    let params = CPU.tensor(&random(1), layout().len()).unwrap();
    let sync =
        |case| make(&STREAMING, case, Communicator::new(memory::cluster(1).pop().unwrap()), &[1.0], &params);
    let mut leaves = sync(PLAIN);
    leaves.start_exchanges(&params, StepEnd { step: 2, last: false }, 1.0).unwrap();
    leaves.wait_in_flight().unwrap();
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
fn what_no_timeline_has_is_refused() {
    let comm = || Communicator::new(memory::cluster(1).pop().unwrap());
    let params = CPU.tensor(&random(1), layout().len()).unwrap();
    let refused = |settings: DelayedSettings| {
        let sync = SyncSettings {
            apart: Vec::new(),
            comm: comm(),
            device: &CPU,
            layout: &layout(),
            average: AverageConfig::default(),
            every: 1,
            moments: MomentPeriods::of(1),
            outer_lr: 1.0,
            outer_momentum: 0.0,
            fragments: 1,
            delay: 0,
            mixing: 0.0,
            trigger: PLAIN.trigger,
            asynchronous: PLAIN.asynchronous,
            consensus_rate: 1.0,
            theta: 0.1,
            bits: 8,
            weights: vec![1.0; 8],
            rounds: None,
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

/// Eager updates as in their paper, in f64: each worker has its own outer state, which is driven by the last
/// round's mean with the worker's own part replaced by the fresh one.
#[test]
fn eager_updates_do_what_plain_loops_do() {
    use farflung_optim::sync::EAGER;
    for weights in [&[1.0, 1.0, 1.0][..], &[0.5, 1.0, 1.5], &[1.0]] {
        let ranks = weights.len();
        let case = Case { every: 4, ..PLAIN };
        let got = trace(&EAGER, case, ranks, weights, None);
        let start: Vec<f64> = random(1).into_iter().map(f64::from).collect();
        let len = start.len();
        let mut x = vec![start.clone(); ranks];
        let mut params = x.clone();
        let mut v = vec![vec![0.0; len]; ranks];
        let (mut left, mut mean) = (vec![vec![0.0; len]; ranks], vec![0.0; len]);
        for step in 1..=STEPS {
            for (rank, params) in params.iter_mut().enumerate() {
                params.iter_mut().zip(local(rank, step)).for_each(|(p, g)| *p -= f64::from(0.01 * g));
            }
            if step % case.every == 0 || step == STEPS {
                let mut next = vec![0.0; len];
                for rank in 0..ranks {
                    let part = weights[rank] / ranks as f64;
                    for i in 0..len {
                        let change = x[rank][i] - params[rank][i];
                        let d = mean[i] + part * (change - left[rank][i]);
                        v[rank][i] = case.momentum * v[rank][i] + d;
                        x[rank][i] -= 0.7 * (d + case.momentum * v[rank][i]);
                        left[rank][i] = change;
                        next[i] += part * change;
                    }
                }
                mean = next;
                params.clone_from(&x);
            }
            if step == STEPS {
                let sum = |i: usize| params.iter().zip(weights).map(|(p, w)| w * p[i]).sum::<f64>();
                let all: Vec<f64> = (0..len).map(|i| sum(i) / ranks as f64).collect();
                params.fill(all);
            }
            for (rank, (got, wanted)) in got.iter().zip(&params).enumerate() {
                let off = far(&got[step as usize - 1].0, wanted);
                assert!(off < 1e-5, "{weights:?}, rank {rank}, step {step}: {off}");
            }
        }
        for cut in [3, 4, 9, 26] {
            assert!(trace(&EAGER, case, ranks, weights, Some(cut)) == got, "{weights:?}, from step {cut}");
        }
        let coded = Case { codec: "int8+ef", ..case };
        let got = trace(&EAGER, coded, ranks, weights, None);
        assert!(trace(&EAGER, coded, ranks, weights, Some(9)) == got, "{weights:?}, int8");
    }
}

/// torchft's streaming fixture, where averages are not delayed; torchft sends delayed rounds one step earlier
/// than this crate. Parameters 1, gradients 2, inner rate 1, outer SGD rate 2, H = 6, two fragments.
#[test]
fn torchfts_streaming_fixture() {
    let layout = ParamLayout::new(["a", "b"].map(|name| (name.to_owned(), Shape::from(64))));
    for (mixing, wanted) in [
        (0.0, [[-11.0, -5.0], [-17.0, -23.0], [-35.0, -29.0]]),
        (0.5, [[-8.0, -5.0], [-14.0, -17.0], [-24.5, -23.0]]),
        (1.0, [[-5.0, -5.0], [-11.0, -11.0], [-17.0, -17.0]]),
    ] {
        let comm = Communicator::new(memory::cluster(1).remove(0));
        let mut params = CPU.tensor(&vec![1.0_f32; layout.len()], layout.len()).unwrap();
        let mut sync = (STREAMING.build)(SyncSettings {
            apart: Vec::new(),
            comm,
            device: &CPU,
            layout: &layout,
            average: AverageConfig::default(),
            every: 6,
            moments: MomentPeriods::of(1),
            outer_lr: 2.0,
            outer_momentum: 0.0,
            fragments: 2,
            delay: 0,
            mixing,
            trigger: 0.0,
            asynchronous: PLAIN.asynchronous,
            consensus_rate: 1.0,
            theta: 0.1,
            bits: 8,
            weights: vec![1.0],
            rounds: None,
            params: &params,
        })
        .unwrap();
        for step in 1..=9 {
            let after = StepEnd { step, last: false };
            let moved: Vec<f32> = params.to_vec::<f32>().unwrap().iter().map(|p| p - 2.0).collect();
            params.write(&moved).unwrap();
            sync.mix(&mut params, after, 1.0).unwrap();
            if sync.is_due(after) {
                sync.exchange(&params, after, 1.0).unwrap();
                sync.prepare().unwrap();
                sync.commit(&mut params).unwrap();
            }
            sync.start_exchanges(&params, after, 1.0).unwrap();
            if step % 3 == 0 {
                let all = params.to_vec::<f32>().unwrap();
                // Fragments are counted from the last parameters, which are ready first.
                let got = [1, 0].map(|i| all[layout.params()[i].start]);
                let wanted: [f32; 2] = wanted[step as usize / 3 - 1];
                let near = got.iter().zip(wanted).all(|(got, wanted)| (got - wanted).abs() < 1e-5);
                assert!(near, "mixing {mixing}, step {step}: {got:?}, expected {wanted:?}");
            }
        }
    }
}
