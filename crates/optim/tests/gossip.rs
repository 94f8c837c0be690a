//! Copies that mix with neighbours: against plain loops, as the methods that they degenerate to, and from any
//! step.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod synchronise;

use farflung_comm::{Communicator, memory};
use farflung_compress::{CodecSpec, Payload, RoundKey};
use farflung_optim::sync::{
    CHOCO, D_PSGD, EXPONENTIAL, Graph, LOW_PRECISION, Meeting, NOLOCO, Neighbour, RANDOM_PAIRS, SHIFT_ONE,
    SyncMethod, SyncSettings,
};
use synchronise::{CPU, Case, PLAIN, STEPS, far, layout, local, make, random, trace};

/// Parameters of all ranks.
type All = Vec<Vec<f64>>;

fn start(ranks: usize) -> All {
    vec![random(1).into_iter().map(f64::from).collect(); ranks]
}

/// Each rank's own step.
fn learn(params: &mut All, step: u64) {
    for (rank, params) in params.iter_mut().enumerate() {
        params.iter_mut().zip(local(rank, step)).for_each(|(p, g)| *p -= 0.01 * f64::from(g));
    }
}

/// The mean of all ranks, which they take after the last step.
fn end(params: &mut All) {
    let n = params.len() as f64;
    let mean: Vec<f64> = (0..params[0].len()).map(|i| params.iter().map(|p| p[i]).sum::<f64>() / n).collect();
    params.fill(mean);
}

/// That a method gave these parameters after each step.
fn compare(method: &SyncMethod, got: &[synchronise::Trace], wanted: &[All], within: f64) {
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
        for ranks in [1, 2, 3, 5] {
            let got = trace(method, PLAIN, ranks, &[1.0; 5], None);
            let (mut params, mut wanted) = (start(ranks), Vec::new());
            for step in 1..=STEPS {
                let before = params.clone();
                learn(&mut params, step);
                for (rank, params) in params.iter_mut().enumerate() {
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
                    end(&mut params);
                }
                wanted.push(params.clone());
            }
            compare(method, &got, &wanted, 1e-6);
        }
    }
}

/// `NoLoCo` as its paper writes it, over whole vectors in f64.
#[test]
fn noloco_does_what_plain_loops_do() {
    let (rate, mu) = (0.7, PLAIN.momentum);
    for ranks in [1, 2, 3, 4] {
        let weights = &[0.5, 1.0, 1.5, 1.0][..ranks];
        let got = trace(&NOLOCO, PLAIN, ranks, weights, None);
        let (mut params, mut wanted) = (start(ranks), Vec::new());
        let (mut slow, mut v) = (params.clone(), vec![vec![0.0; params[0].len()]; ranks]);
        let mut round = 0;
        for step in 1..=STEPS {
            learn(&mut params, step);
            if step == STEPS {
                end(&mut params);
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
                        v[i][e] =
                            mu * v[i][e] + rate * moved + rate * (0.5 * (old[i][e] + old[j][e]) - old[i][e]);
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

/// BAGUA's low-precision ring and CHOCO-SGD, written from the papers: every rank holds replicas of all in f64;
/// the codec alone is ours.
fn with_replicas(case: Case, ranks: usize, choco: Option<f64>) -> Vec<All> {
    let mut codecs: Vec<_> =
        (0..ranks).map(|_| case.codec.parse::<CodecSpec>().unwrap().build_memoryless()).collect();
    let elements = synchronise::elements();
    let (mut params, mut all) = (start(ranks), Vec::new());
    let mut replicas = params.clone();
    for step in 1..=STEPS {
        learn(&mut params, step);
        let before = replicas.clone();
        for i in 0..ranks {
            let Meeting { from, .. } = Graph::Ring.meeting(i as u32, ranks as u32, 0);
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
        // A codec that loses nothing, for which rounding cannot fall to the other side.
        let case = PLAIN;
        compare(
            &LOW_PRECISION,
            &trace(&LOW_PRECISION, case, ranks, &[1.0; 5], None),
            &with_replicas(case, ranks, None),
            1e-6,
        );
        compare(
            &CHOCO,
            &trace(&CHOCO, case, ranks, &[1.0; 5], None),
            &with_replicas(case, ranks, Some(0.5)),
            1e-6,
        );
        // One that does: a value near the middle of two codes may take the other one, which a later step
        // corrects.
        for codec in ["int8", "topk:0.3/f16"] {
            let case = Case { codec, ..PLAIN };
            compare(
                &LOW_PRECISION,
                &trace(&LOW_PRECISION, case, ranks, &[1.0; 5], None),
                &with_replicas(case, ranks, None),
                2e-3,
            );
            compare(
                &CHOCO,
                &trace(&CHOCO, case, ranks, &[1.0; 5], None),
                &with_replicas(case, ranks, Some(0.5)),
                2e-3,
            );
        }
    }
}

/// With all of what neighbours differ by and nothing lost, CHOCO-SGD is D-PSGD.
#[test]
fn choco_without_loss_is_d_psgd() {
    let case = Case { rate: 1.0, ..PLAIN };
    let (choco, plain) = (trace(&CHOCO, case, 4, &[1.0; 4], None), trace(&D_PSGD, case, 4, &[1.0; 4], None));
    for (a, b) in choco.iter().flatten().zip(plain.iter().flatten()) {
        let b: Vec<f64> = b.0.iter().map(|&x| f64::from(x)).collect();
        assert!(far(&a.0, &b) < 1e-6);
    }
}

/// In pairs without a codec, everyone ends up with everyone's steps; the distance between copies stays bounded.
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
        // Twenty-seven steps of their own would be 0.08 away.
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
        (&RANDOM_PAIRS, PLAIN),
        (&NOLOCO, PLAIN),
        (&LOW_PRECISION, Case { codec: "minmax8", ..PLAIN }),
        (&LOW_PRECISION, Case { codec: "int4-sr", ..PLAIN }),
        (&CHOCO, Case { codec: "sign", ..PLAIN }),
        (&CHOCO, Case { codec: "random:3/f16", ..PLAIN }),
    ];
    for (method, case) in cases {
        let whole = trace(method, case, 3, &[1.0; 3], None);
        for cut in 1..STEPS {
            let gone_on = trace(method, case, 3, &[1.0; 3], Some(cut));
            assert!(gone_on == whole, "{} {}, after step {cut}", method.name, case.codec);
        }
    }
}

#[test]
fn a_rate_that_leads_nowhere_and_a_protocol_are_refused() {
    let params = CPU.tensor(&random(1), layout().len()).unwrap();
    let settings = |case: Case| SyncSettings {
        comm: Communicator::new(memory::cluster(1).pop().unwrap()),
        device: &CPU,
        layout: Box::leak(Box::new(layout())),
        average: farflung_optim::AverageConfig { codec: case.codec.parse().unwrap(), ..Default::default() },
        every: 1,
        outer_lr: 1.0,
        outer_momentum: 0.0,
        fragments: 1,
        delay: 0,
        mixing: 0.0,
        consensus_rate: case.rate,
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
    assert!(make(&CHOCO, PLAIN, Communicator::new(memory::cluster(1).pop().unwrap()), &params).is_apart());
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
