//! Tests of replicas that mix with neighbours: compared with plain loops and with the methods to which they
//! reduce, and resumed from any step.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use crate::synchronise::{CPU, Case, PLAIN, STEPS, far, layout, local, make, random, trace};
use farflung_base::Philox;
use farflung_comm::{Communicator, memory};
use farflung_compress::{CodecSpec, Payload, RoundKey};
use farflung_optim::OptimError;
use farflung_optim::sync::{
    CHOCO, D_PSGD, EVENT, EXPONENTIAL, Graph, LOW_PRECISION, MONIQUA, MomentPeriods, NOLOCO, Neighbour,
    Neighbours, RANDOM_PAIRS, SGP, SHIFT_ONE, StepEnd, SyncMethod, SyncSettings,
};

/// Parameters of all ranks.
type All = Vec<Vec<f64>>;

fn start(ranks: usize) -> All {
    vec![random(1).into_iter().map(f64::from).collect(); ranks]
}

/// Takes each rank's own step.
fn learn(params: &mut All, step: u64) {
    for (rank, params) in params.iter_mut().enumerate() {
        params.iter_mut().zip(local(rank, step)).for_each(|(p, g)| *p -= 0.01 * f64::from(g));
    }
}

/// Sets all ranks to their weighted mean, which they take after the last step.
fn end_by(params: &mut All, weights: &[f64]) {
    let all: f64 = weights.iter().sum();
    let mean = |i: usize| params.iter().zip(weights).map(|(p, w)| w * p[i]).sum::<f64>() / all;
    let mean: Vec<f64> = (0..params[0].len()).map(mean).collect();
    params.fill(mean);
}

fn end(params: &mut All) {
    end_by(params, &vec![1.0; params.len()]);
}

/// Returns weights of ranks that train on unequal numbers of tokens, where 1 is an equal share.
fn unequal(ranks: usize) -> &'static [f64] {
    [&[][..], &[1.0], &[0.5, 1.5], &[0.5, 1.0, 1.5], &[0.5, 1.0, 1.5, 1.0], &[0.4, 1.0, 2.0, 1.0, 0.6]][ranks]
}

/// Returns a neighbour's weight as in the methods' documentation.
fn part(graph: Graph, weights: &[f64], rank: usize, meeting: &Neighbours, of: Neighbour) -> f64 {
    let (own, theirs) = (weights[rank], weights[of.rank as usize]);
    match graph {
        Graph::Exponential => of.weight * weights.iter().copied().fold(f64::INFINITY, f64::min) / own,
        _ if meeting.from.len() == 1 => theirs / (theirs + own),
        _ => of.weight * (theirs / own).min(1.0),
    }
}

/// Checks that a method gave these parameters after each step.
fn compare(method: &SyncMethod, got: &[crate::synchronise::Trace], wanted: &[All], within: f64) {
    assert_eq!((wanted.len() as u64, got.len()), (STEPS, wanted[0].len()));
    for (step, params) in wanted.iter().enumerate() {
        for (rank, params) in params.iter().enumerate() {
            let off = far(&got[rank][step].0, params);
            let ranks = got.len();
            assert!(off < within, "{}, {ranks} ranks, step {step}, rank {rank}: {off}", method.name);
        }
    }
    assert!(
        got.windows(2).all(|pair| pair[0].last().unwrap().0 == pair[1].last().unwrap().0),
        "equal at the end"
    );
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
        for (ranks, weights) in [1, 2, 3, 5].into_iter().flat_map(|n| [(n, &[1.0; 5][..n]), (n, unequal(n))])
        {
            let got = trace(method, PLAIN, ranks, weights, None);
            let (mut params, mut wanted) = (start(ranks), Vec::new());
            for step in 1..=STEPS {
                let before = params.clone();
                learn(&mut params, step);
                for (rank, params) in params.iter_mut().enumerate() {
                    // From the second step on, each rank mixes the parameters that its neighbours had before
                    // this step.
                    let round = step.checked_sub(2);
                    let meeting = round.map(|round| graph.meeting(rank as u32, ranks as u32, round));
                    let meeting = meeting.unwrap_or_default();
                    for &neighbour in &meeting.from {
                        let weight = part(graph, weights, rank, &meeting, neighbour);
                        let from = neighbour.rank;
                        for i in 0..params.len() {
                            params[i] += weight * (before[from as usize][i] - before[rank][i]);
                        }
                    }
                }
                if step == STEPS {
                    end_by(&mut params, weights);
                }
                wanted.push(params.clone());
            }
            compare(method, &got, &wanted, 1e-6);
        }
    }
}

/// Push-sum as in its paper, in f64: numerators and weights are pushed, and parameters are their quotient.
#[test]
fn push_sum_does_what_plain_loops_do() {
    for (ranks, weights) in [1, 2, 3, 5].into_iter().flat_map(|n| [(n, &[1.0; 5][..n]), (n, unequal(n))]) {
        let got = trace(&SGP, PLAIN, ranks, weights, None);
        let (mut params, mut wanted) = (start(ranks), Vec::new());
        let mut masses = weights.to_vec();
        for step in 1..=STEPS {
            let before = params.clone();
            learn(&mut params, step);
            if let Some(round) = step.checked_sub(2) {
                let kept = if ranks == 1 { 1.0 } else { 0.5 };
                let (mut tops, mut next) = (Vec::new(), Vec::new());
                for rank in 0..ranks {
                    let from = Graph::Exponential.meeting(rank as u32, ranks as u32, round).from;
                    let from = from.first().map(|neighbour| neighbour.rank as usize);
                    next.push(kept * masses[rank] + from.map_or(0.0, |from| 0.5 * masses[from]));
                    let top = |i: usize| {
                        let pushed = from.map_or(0.0, |from| 0.5 * masses[from] * before[from][i]);
                        let own = weights[rank] * (params[rank][i] - before[rank][i]);
                        kept * masses[rank] * before[rank][i] + pushed + own
                    };
                    tops.push((0..before[rank].len()).map(top).collect::<Vec<f64>>());
                }
                masses = next;
                for ((params, top), mass) in params.iter_mut().zip(&tops).zip(&masses) {
                    params.iter_mut().zip(top).for_each(|(z, top)| *z = top / mass);
                }
            }
            if step == STEPS {
                end_by(&mut params, &masses);
            }
            wanted.push(params.clone());
        }
        let total: f64 = masses.iter().sum();
        assert!((total - weights.iter().sum::<f64>()).abs() < 1e-9);
        // With these weights the push-sum weights change, so that dividing by them matters.
        assert!(
            ranks < 3 || weights[0] > 0.9 || masses.iter().zip(weights).any(|(m, w)| (m - w).abs() > 0.1)
        );
        compare(&SGP, &got, &wanted, 1e-6);
    }
}

/// Replicas that take no steps of their own from the second step on converge to the weighted mean.
#[test]
fn what_copies_come_to_is_the_mean_by_weights() {
    let plain = [&D_PSGD, &SHIFT_ONE, &EXPONENTIAL, &SGP, &RANDOM_PAIRS, &CHOCO, &LOW_PRECISION, &MONIQUA];
    for method in plain {
        let weights = unequal(5);
        let case = Case { rate: 1.0, bits: 24, still_after: 1, ..PLAIN };
        let got = trace(method, case, 5, weights, None);
        let mut wanted = start(5);
        learn(&mut wanted, 1);
        end_by(&mut wanted, weights);
        // Compares the parameters before the last step, because after it all replicas take the mean itself.
        for (rank, trace) in got.iter().enumerate() {
            let off = far(&trace[STEPS as usize - 2].0, &wanted[rank]);
            assert!(off < 2e-4, "{}, rank {rank}: {off}", method.name);
            assert!(far(&trace[STEPS as usize - 1].0, &wanted[rank]) < 1e-6, "{}", method.name);
        }
    }
}

/// Moniqua as in its paper, in f64: `q = Q(x / B mod 1)`, and `x_j = (q_j B - x_i) mod B + x_i`.
#[test]
fn moniqua_does_what_plain_loops_do() {
    for (bits, rate, within) in [(8, 1.0, 1e-3), (16, 0.5, 1e-5), (1, 0.05, 1e-3), (3, 0.2, 1e-3)] {
        let case = Case { rate, bits, ..PLAIN };
        let levels = f64::from(1 << bits);
        let modulus = 2.0 * case.theta / (1.0 - 1.0 / levels);
        let centred = |x: f64, of: f64| (x + of / 2.0).rem_euclid(of) - of / 2.0;
        let elements = crate::synchronise::elements();
        for ranks in [2, 3, 5] {
            let got = trace(&MONIQUA, case, ranks, &[1.0; 5][..ranks], None);
            let (mut params, mut wanted) = (start(ranks), Vec::new());
            for step in 1..=STEPS {
                let before = params.clone();
                learn(&mut params, step);
                if step > 1 {
                    let draws = Philox::new(0x4d6f_6e69_7175_6100, step - 2);
                    for (k, &e) in elements.iter().enumerate() {
                        let draw = (f64::from(draws.uniform(k as u64)) - 0.5) / levels;
                        let sent: Vec<f64> = before
                            .iter()
                            .map(|x| {
                                let z = centred(x[e] / modulus + draw, 1.0);
                                (((z + 0.5) * levels).floor() + 0.5) / levels - 0.5 - draw
                            })
                            .collect();
                        for rank in 0..ranks {
                            let x = before[rank][e];
                            let seen = |j: usize| centred(sent[j] * modulus - x, modulus) + x;
                            let meeting = Graph::Ring.meeting(rank as u32, ranks as u32, 0);
                            for n in meeting.from {
                                params[rank][e] += rate * n.weight * (seen(n.rank as usize) - seen(rank));
                            }
                        }
                    }
                }
                if step == STEPS {
                    end(&mut params);
                }
                wanted.push(params.clone());
            }
            compare(&MONIQUA, &got, &wanted, within);
        }
    }
}

#[test]
fn a_bound_that_does_not_hold_ends_the_run_and_names_the_neighbour() {
    let case = Case { theta: 1e-3, ..PLAIN };
    let ranks = memory::cluster(2).into_iter().map(|endpoint| {
        move || {
            let comm = Communicator::new(endpoint);
            let rank = comm.rank().0;
            let moved: Vec<f32> = random(1).iter().map(|x| x + 0.01 * rank as f32).collect();
            let mut params = CPU.tensor(&moved, layout().len()).unwrap();
            let mut sync = make(&MONIQUA, case, comm, &[1.0; 2], &params);
            let after = |step| StepEnd { step, last: false };
            sync.start_exchanges(&params, after(1), 1.0).unwrap();
            let refused = sync.mix(&mut params, after(2), 1.0).unwrap_err();
            assert!(matches!(refused, OptimError::TooFar { from, .. } if from == 1 - rank), "{refused}");
            assert!(refused.to_string().contains("--theta"), "{refused}");
            assert_eq!(params.to_vec::<f32>().unwrap(), moved);
        }
    });
    let ranks: Vec<_> = ranks.map(std::thread::spawn).collect();
    for rank in ranks {
        rank.join().unwrap();
    }
}

/// `NoLoCo` as in its paper, over whole vectors in f64.
#[test]
fn noloco_does_what_plain_loops_do() {
    let (rate, mu) = (0.7, PLAIN.momentum);
    for ranks in [1, 2, 3, 4] {
        let weights = unequal(ranks);
        let got = trace(&NOLOCO, PLAIN, ranks, weights, None);
        let (mut params, mut wanted) = (start(ranks), Vec::new());
        let (mut slow, mut v) = (params.clone(), vec![vec![0.0; params[0].len()]; ranks]);
        let mut round = 0;
        for step in 1..=STEPS {
            learn(&mut params, step);
            if step == STEPS {
                end_by(&mut params, weights);
            } else if step.is_multiple_of(PLAIN.every) {
                let old = slow.clone();
                for i in 0..ranks {
                    let graph = Graph::RandomPairs { seed: 0 };
                    let j =
                        graph.meeting(i as u32, ranks as u32, round).from.first().map(|n| n.rank as usize);
                    let j = j.unwrap_or(i);
                    for e in 0..v[i].len() {
                        let d = |k: usize| params[k][e] - old[k][e];
                        let moved = (weights[i] * d(i) + weights[j] * d(j)) / (weights[i] + weights[j]);
                        let slow_mean =
                            (weights[i] * old[i][e] + weights[j] * old[j][e]) / (weights[i] + weights[j]);
                        v[i][e] = mu * v[i][e] + rate * moved + rate * (slow_mean - old[i][e]);
                        slow[i][e] = old[i][e] + v[i][e];
                    }
                }
                params.clone_from(&slow);
                round += 1;
            }
            wanted.push(params.clone());
        }
        compare(&NOLOCO, &got, &wanted, 1e-6);
    }
}

/// Computes BAGUA's low-precision ring or CHOCO-SGD, as in the papers: every rank holds replicas of all ranks'
/// parameters in f64. The codec is the one under test.
fn with_replicas(case: Case, ranks: usize, choco: Option<f64>) -> Vec<All> {
    let mut codecs: Vec<_> =
        (0..ranks).map(|_| case.codec.parse::<CodecSpec>().unwrap().build_memoryless()).collect();
    let elements = crate::synchronise::elements();
    let (mut params, mut all) = (start(ranks), Vec::new());
    let mut replicas = params.clone();
    for step in 1..=STEPS {
        learn(&mut params, step);
        let before = replicas.clone();
        for i in 0..ranks {
            let Neighbours { from, .. } = Graph::Ring.meeting(i as u32, ranks as u32, 0);
            let near = |e: usize| -> f64 {
                let away = |n: &Neighbour| n.weight * (before[n.rank as usize][e] - before[i][e]);
                from.iter().map(away).sum()
            };
            for e in 0..params[i].len() {
                params[i][e] += choco.unwrap_or(1.0) * near(e);
            }
            let z: Vec<f32> = elements.iter().map(|&e| (params[i][e] - before[i][e]) as f32).collect();
            let key = RoundKey { seed: 0, round: step - 1, shard: 0, rank: farflung_base::Rank(i as u32) };
            let (mut payload, mut u) = (Payload::new(), vec![0.0; z.len()]);
            codecs[i].compress(&z, key, &mut payload).unwrap();
            codecs[i].decompress(payload.view(), &mut u).unwrap();
            for (&e, u) in elements.iter().zip(u) {
                replicas[i][e] += f64::from(u);
            }
            if choco.is_none() {
                params[i].clone_from(&replicas[i]);
            }
        }
        if step == STEPS {
            end(&mut params);
        }
        all.push(params.clone());
    }
    all
}

#[test]
fn replicas_do_what_plain_loops_do() {
    for ranks in [1, 2, 3, 5] {
        // A lossless codec, so that no value can be rounded in another way.
        let case = PLAIN;
        compare(
            &LOW_PRECISION,
            &trace(&LOW_PRECISION, case, ranks, &[1.0; 5][..ranks], None),
            &with_replicas(case, ranks, None),
            1e-6,
        );
        compare(
            &CHOCO,
            &trace(&CHOCO, case, ranks, &[1.0; 5][..ranks], None),
            &with_replicas(case, ranks, Some(0.5)),
            1e-6,
        );
        // A lossy codec: a value near the middle of two codes may be rounded to the other one, which a later
        // step corrects.
        for codec in ["int8", "topk:0.3/f16"] {
            let case = Case { codec, ..PLAIN };
            compare(
                &LOW_PRECISION,
                &trace(&LOW_PRECISION, case, ranks, &[1.0; 5][..ranks], None),
                &with_replicas(case, ranks, None),
                2e-3,
            );
            compare(
                &CHOCO,
                &trace(&CHOCO, case, ranks, &[1.0; 5][..ranks], None),
                &with_replicas(case, ranks, Some(0.5)),
                2e-3,
            );
        }
    }
}

/// With a rate of 1 and a lossless codec, CHOCO-SGD is D-PSGD.
#[test]
fn choco_without_loss_is_d_psgd() {
    let case = Case { rate: 1.0, ..PLAIN };
    let (choco, plain) = (trace(&CHOCO, case, 4, &[1.0; 4], None), trace(&D_PSGD, case, 4, &[1.0; 4], None));
    for (a, b) in choco.iter().flatten().zip(plain.iter().flatten()) {
        let b: Vec<f64> = b.0.iter().map(|&x| f64::from(x)).collect();
        assert!(far(&a.0, &b) < 1e-6);
    }
}

/// All workers' steps reach all workers, and the distance between replicas stays bounded.
#[test]
fn copies_stay_near_each_other() {
    for (method, codec) in
        [(&LOW_PRECISION, "minmax8"), (&CHOCO, "sign"), (&NOLOCO, "none"), (&D_PSGD, "none")]
    {
        let case = Case { codec, rate: 0.2, ..PLAIN };
        let got = trace(method, case, 5, &[1.0; 5], None);
        let apart = |step: usize| {
            let first: Vec<f64> = got[0][step].0.iter().map(|&x| f64::from(x)).collect();
            got.iter().map(|trace| far(&trace[step].0, &first)).fold(0.0, f64::max)
        };
        let most = (0..STEPS as usize).map(apart).fold(0.0, f64::max);
        // After 27 steps without mixing they would be 0.08 apart.
        assert!(most > 0.0 && most < 0.06, "{}: {most}", method.name);
        assert!(apart(STEPS as usize - 1) == 0.0);
    }
}

#[test]
fn a_run_goes_on_from_any_step_with_the_same_bits() {
    let cases = [
        (&D_PSGD, PLAIN),
        (&SHIFT_ONE, PLAIN),
        (&EXPONENTIAL, PLAIN),
        (&SGP, PLAIN),
        (&RANDOM_PAIRS, PLAIN),
        (&NOLOCO, PLAIN),
        (&LOW_PRECISION, Case { codec: "minmax8", ..PLAIN }),
        (&LOW_PRECISION, Case { codec: "int4-sr", ..PLAIN }),
        (&CHOCO, Case { codec: "sign", ..PLAIN }),
        (&CHOCO, Case { codec: "random:3/f16", ..PLAIN }),
        (&MONIQUA, PLAIN),
        (&MONIQUA, Case { bits: 1, rate: 0.05, ..PLAIN }),
    ];
    for (method, case) in cases {
        let weights: &[f64] = if method.name == SGP.name { unequal(3) } else { &[1.0; 3] };
        let whole = trace(method, case, 3, weights, None);
        for cut in 1..STEPS {
            let gone_on = trace(method, case, 3, weights, Some(cut));
            assert!(gone_on == whole, "{} {}, after step {cut}", method.name, case.codec);
        }
    }
}

#[test]
fn a_rate_that_leads_nowhere_and_a_protocol_are_refused() {
    let params = CPU.tensor(&random(1), layout().len()).unwrap();
    let settings = |case: Case| SyncSettings {
        apart: Vec::new(),
        comm: Communicator::new(memory::cluster(1).pop().unwrap()),
        device: &CPU,
        layout: Box::leak(Box::new(layout())),
        average: farflung_optim::AverageConfig { codec: case.codec.parse().unwrap(), ..Default::default() },
        every: 1,
        moments: MomentPeriods::of(1),
        outer_lr: 1.0,
        outer_momentum: 0.0,
        fragments: 1,
        delay: 0,
        mixing: 0.0,
        trigger: case.trigger,
        asynchronous: case.asynchronous,
        consensus_rate: case.rate,
        theta: 0.1,
        bits: 8,
        weights: vec![1.0],
        rounds: None,
        params: &params,
    };
    for (case, said) in [
        (Case { rate: 0.0, ..PLAIN }, "consensus-rate"),
        (Case { rate: 1.5, ..PLAIN }, "consensus-rate"),
        (Case { codec: "powersgd:2", ..PLAIN }, "powersgd:2"),
    ] {
        let error = (CHOCO.build)(settings(case)).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    assert!(
        make(&CHOCO, PLAIN, Communicator::new(memory::cluster(1).pop().unwrap()), &[1.0], &params)
            .replicas_differ()
    );
}

#[test]
fn a_method_of_ones_own_is_found_by_its_name_and_names_are_not_taken_twice() {
    static OWN: SyncMethod = SyncMethod { name: "somebody's own", ..D_PSGD };
    assert!(SyncMethod::by_name(OWN.name).is_none());
    SyncMethod::register(&OWN).unwrap();
    assert_eq!(SyncMethod::by_name(OWN.name).unwrap().name, OWN.name);
    for taken in [&OWN, &CHOCO] {
        assert!(SyncMethod::register(taken).unwrap_err().to_string().contains(taken.name));
    }
}

/// Event-triggered averages in f64: every rank stores what each rank sent last, tensor by tensor.
#[test]
fn event_triggered_averages_do_what_plain_loops_do() {
    let layout = layout();
    for (ranks, trigger) in [(1, 0.03), (2, 0.03), (3, 0.03), (5, 0.02), (4, 0.0), (4, 1e9)] {
        let case = Case { trigger, ..PLAIN };
        let got = trace(&EVENT, case, ranks, &[1.0; 5], None);
        let (mut params, mut wanted) = (start(ranks), Vec::new());
        let mut sent = params.clone();
        let (mut before, mut events, mut all) = (sent.clone(), 0, 0);
        for step in 1..=STEPS {
            learn(&mut params, step);
            for i in 0..ranks {
                // Mixes what neighbours had sent by the previous step.
                for Neighbour { rank, weight } in Graph::Ring.meeting(i as u32, ranks as u32, 0).from {
                    for e in 0..params[i].len() {
                        params[i][e] += weight * (before[rank as usize][e] - before[i][e]);
                    }
                }
            }
            for (params, sent) in params.iter().zip(&mut sent) {
                for range in layout.params().iter().map(farflung_tensor::Param::range) {
                    let far: f64 = range.clone().map(|e| (params[e] - sent[e]).powi(2)).sum();
                    let size: f64 = range.clone().map(|e| sent[e] * sent[e]).sum();
                    all += 1;
                    if far >= trigger * trigger * size {
                        events += 1;
                        range.for_each(|e| sent[e] = params[e]);
                    }
                }
            }
            before.clone_from(&sent);
            if step == STEPS {
                end(&mut params);
            }
            wanted.push(params.clone());
        }
        compare(&EVENT, &got, &wanted, 1e-6);
        let some = events > 0 && events < all;
        assert_eq!(some, trigger > 0.0 && trigger < 1.0, "{ranks} ranks, {trigger}: {events} of {all}");
        for cut in [1, 7, 26] {
            assert!(
                trace(&EVENT, case, ranks, &[1.0; 5], Some(cut)) == got,
                "{ranks} ranks, from step {cut}"
            );
        }
        if trigger < f64::MIN_POSITIVE {
            assert!(got == trace(&D_PSGD, case, ranks, &[1.0; 5], None));
        }
    }
}
