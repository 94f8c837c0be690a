//! Tests of `Average` over endpoints in one process: exact means, exact bytes, equal replicas, error feedback
//! that loses nothing, and rounds that change nothing when they are rolled back.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::sync::{Barrier, LazyLock};
use std::thread;

use farflung_base::{Nanos, Philox};
use farflung_comm::{CommError, Communicator, memory};
use farflung_optim::{
    AdamW, Average, AverageConfig, OptimError, adamw, agree, diloco_outer, global_norm, sgd, token_weight,
};
use farflung_optim::{LrSchedule, OuterOptimizer, Sgd};
use farflung_tensor::{Device, ParamLayout, Shape, Tensor};

const CODECS: [&str; 9] =
    ["none", "f16", "bf16", "int8", "int8:7", "none+ef", "f16+ef", "bf16+ef", "int8:16+ef"];

/// Runs `rank` on one thread per rank and returns the results in rank order.
fn on_ranks<T: Send>(n: usize, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let ranks: Vec<_> = memory::cluster(n)
            .into_iter()
            .map(|endpoint| {
                let rank = &rank;
                scope.spawn(move || {
                    rank(Communicator::new(endpoint).with_deadline(Nanos::from_millis(20_000)))
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Returns a layout of matrices, vectors, a parameter larger than most buckets here, and one of a single
/// element. Most are followed by padding.
fn layout() -> ParamLayout {
    let shapes = [vec![7, 11], vec![7], vec![40, 50], vec![50], vec![1], vec![64], vec![3, 3]];
    ParamLayout::new(shapes.iter().enumerate().map(|(i, s)| (format!("p{i}"), Shape::new(s).unwrap())))
}

fn config(codec: &str, bucket_bytes: usize, overlap: bool) -> AverageConfig {
    AverageConfig {
        codec: codec.parse().unwrap(),
        bucket_bytes,
        overlap,
        seed: 5,
        ..AverageConfig::default()
    }
}

/// Returns a flat buffer with `value(element index)` in parameters and zero in padding.
fn fill(layout: &ParamLayout, mut value: impl FnMut(usize) -> f32) -> Vec<f32> {
    let mut flat = vec![0.0; layout.len()];
    for p in layout.params() {
        for i in p.range() {
            flat[i] = value(i);
        }
    }
    flat
}

fn random(layout: &ParamLayout, seed: u64, scale: f32) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    fill(layout, |i| scale * (2.0 * draw.uniform(i as u64) - 1.0))
}

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

fn flat(values: &[f32]) -> Tensor {
    CPU.tensor(values, values.len()).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Returns the ranges of the parameters in the order `order`. Each ends at the start of the next parameter.
fn spans(layout: &ParamLayout, order: impl Iterator<Item = usize>) -> Vec<std::ops::Range<usize>> {
    let params = layout.params();
    order.map(|i| params[i].start..params.get(i + 1).map_or(layout.len(), |p| p.start)).collect()
}

#[test]
fn a_bucket_leaves_after_its_last_range_and_those_before_it() {
    let (layout, config) = (layout(), config("none", 300, true));
    let span = |first: usize, last: usize| layout.params()[first].start..layout.params()[last].range().end;
    // Buckets of at most 75 elements, from the end: 9 + 64 + 1, 50, 2000, 7, 77. Larger parameters are alone.
    assert_eq!(config.buckets(&layout), [74, 50, 2000, 7, 77]);
    assert_eq!(config.ready_after(&layout, &[span(4, 6), span(2, 3), span(0, 1)]), [0, 1, 1, 2, 2]);
    // If the last parameter is ready last, its bucket delays all others. A bucket that is never ready is never
    // sent.
    assert_eq!(config.ready_after(&layout, &[span(0, 5), span(6, 6)]), [1; 5]);
    assert_eq!(config.ready_after(&layout, &[span(3, 6)]), [0, 0, 1, 1, 1]);
}

#[test]
fn means_of_integers_are_exact_whatever_the_buckets_and_the_order_of_ready_calls() {
    let layout = layout();
    let n = layout.params().len();
    for bucket_bytes in [1, 300, 4096, usize::MAX] {
        for overlap in [false, true] {
            on_ranks(3, |comm| {
                let rank = comm.rank().index();
                let mut average =
                    Average::new(comm.clone(), &CPU, &layout, config("none", bucket_bytes, overlap)).unwrap();
                for round in 0..3 {
                    let mut grads = flat(&fill(&layout, |i| (3 * i + (rank + round) * 6) as f32));
                    let mut averaging = average.begin();
                    // Each rank marks ranges in another order; the collectives still match.
                    let order: Box<dyn Iterator<Item = usize>> = match rank {
                        0 => Box::new((0..n).rev()),
                        1 => Box::new(0..n),
                        _ => Box::new((0..n).map(move |i| (i * 3 + round) % n)),
                    };
                    for span in spans(&layout, order) {
                        averaging.ready(span, &grads).unwrap();
                    }
                    let averaged = averaging.finish(&mut grads).unwrap();
                    average.commit();
                    let want = fill(&layout, |i| (3 * i + 6 * (1 + round)) as f32);
                    assert_eq!(grads.to_vec::<f32>().unwrap(), want);
                    assert_eq!(averaged.elements, layout.count());
                    assert_eq!(averaged.payload.0, 4 * layout.count() as u64);
                    assert!(averaged.buckets >= 1 && (bucket_bytes != 1 || averaged.buckets == n));
                }
                assert_eq!(average.round(), 3);
            });
        }
    }
}

#[test]
fn exactly_the_parameters_travel() {
    let layout = layout();
    let sent = on_ranks(3, |comm| {
        let mut average = Average::new(comm.clone(), &CPU, &layout, config("none", 1000, true)).unwrap();
        let mut grads = flat(&random(&layout, 1, 1.0));
        average.all(&mut grads).unwrap();
        comm.stats().sent.payload.0
    });
    // In a ring of n ranks, all together send each element 2 (n - 1) times.
    assert_eq!(sent.iter().sum::<u64>(), 2 * 2 * 4 * layout.count() as u64);
}

#[test]
fn the_sizes_of_coded_payloads_are_those_of_the_wire_page() {
    let layout = layout();
    // One bucket: three shards of 736 elements, each with a header of 28 bytes.
    let (count, headers) = (layout.count() as u64, 3 * 28);
    for (codec, want) in [("f16+ef", headers + 2 * count), ("none+ef", headers + 4 * count)] {
        on_ranks(3, |comm| {
            let mut average = Average::new(comm, &CPU, &layout, config(codec, usize::MAX, true)).unwrap();
            let averaged = average.all(&mut flat(&random(&layout, 1, 1.0))).unwrap();
            assert_eq!((averaged.payload.0, averaged.buckets), (want, 1));
        });
    }
}

#[test]
fn replicas_have_the_same_bits_near_the_mean_with_every_codec() {
    let layout = layout();
    for codec in CODECS {
        let results = on_ranks(3, |comm| {
            let mut average = Average::new(comm.clone(), &CPU, &layout, config(codec, 4096, true)).unwrap();
            let mut seen = Vec::new();
            for round in 0..3 {
                let mut grads = flat(&random(&layout, 10 * round + comm.rank().0 as u64, 1.0));
                average.all(&mut grads).unwrap();
                average.commit();
                seen.push(grads.to_vec::<f32>().unwrap());
            }
            seen
        });
        for round in 0..3 {
            let [a, b, c] = [0, 1, 2].map(|rank| random(&layout, 10 * round as u64 + rank, 1.0));
            for (rank, seen) in results.iter().enumerate() {
                assert_eq!(bits(&seen[round]), bits(&results[0][round]), "{codec}, rank {rank}");
            }
            // int8 loses at most half a step of 1/127 on each side, and as much again through the error
            // feedback.
            for i in 0..layout.len() {
                let mean = (a[i] + b[i] + c[i]) / 3.0;
                assert!((results[0][round][i] - mean).abs() < 0.02, "{codec}");
            }
        }
    }
}

#[test]
fn feedback_telescopes_over_rounds() {
    // The sum of the applied means is the sum of the exact means minus what the residuals still hold. So the
    // distance stays bounded over many rounds; without feedback it grows.
    let layout = layout();
    let rounds = 60;
    let drift = |codec: &str| {
        let result = on_ranks(3, |comm| {
            let mut average = Average::new(comm.clone(), &CPU, &layout, config(codec, 4096, true)).unwrap();
            let mut total = vec![0.0_f64; layout.len()];
            let own = random(&layout, comm.rank().0 as u64, 1.0);
            for _ in 0..rounds {
                let mut grads = flat(&own);
                average.all(&mut grads).unwrap();
                average.commit();
                for (t, g) in total.iter_mut().zip(grads.to_vec::<f32>().unwrap()) {
                    *t += f64::from(g);
                }
            }
            // The missing part is in the residuals: the mean of the workers' residuals, plus the server's
            // residual.
            (total, average.save("").unwrap())
        });
        let [a, b, c] = [0, 1, 2].map(|rank| random(&layout, rank, 1.0));
        let mean = |i: usize| (f64::from(a[i]) + f64::from(b[i]) + f64::from(c[i])) / 3.0;
        let error = |i: usize| (result[0].0[i] - rounds as f64 * mean(i)).abs();
        let worst = (0..layout.len()).map(error).fold(0.0, f64::max);
        let held: f64 = result
            .iter()
            .flat_map(|(_, saved)| saved)
            .map(|(name, e)| {
                let sum: f64 = e.iter().map(|&e| f64::from(e)).sum();
                if name.contains("worker") { sum / 3.0 } else { sum }
            })
            .sum();
        let applied: f64 = result[0].0.iter().sum();
        let given: f64 = rounds as f64 * (0..layout.len()).map(mean).sum::<f64>();
        (worst, (applied + held - given).abs())
    };
    let (worst, lost) = drift("int8:16+ef");
    assert!(worst < 0.03, "{worst}");
    assert!(lost < 1e-3, "{lost}");
    let (worst, lost) = drift("int8:16");
    assert!(worst > 0.1, "{worst}");
    assert!(lost > 1e-2, "{lost}");
}

#[test]
fn a_round_that_is_not_committed_never_was() {
    let layout = layout();
    on_ranks(3, |comm| {
        let rank = comm.rank().0 as u64;
        let run = |give_up: bool| {
            let mut average =
                Average::new(comm.clone(), &CPU, &layout, config("int8:16+ef", 4096, true)).unwrap();
            let mut seen = Vec::new();
            for round in 0..4 {
                if give_up {
                    average.all(&mut flat(&random(&layout, 900 + round, 3.0))).unwrap();
                    assert!(matches!(average.save(""), Err(OptimError::Compress(_))));
                    // There are two ways to drop a round: a rollback, and beginning a new round.
                    if round % 2 == 0 {
                        average.rollback();
                    }
                }
                let mut grads = flat(&random(&layout, 10 * round + rank, 1.0));
                average.all(&mut grads).unwrap();
                average.commit();
                average.commit();
                seen.push(bits(&grads.to_vec::<f32>().unwrap()));
            }
            assert_eq!(average.round(), 4);
            (seen, average.save("x.").unwrap())
        };
        assert_eq!(run(false), run(true));
    });
}

#[test]
fn saved_residuals_continue_with_the_same_bits() {
    let layout = layout();
    on_ranks(3, |comm| {
        let rank = comm.rank().0 as u64;
        let new = || Average::new(comm.clone(), &CPU, &layout, config("int8:16+ef", 4096, true)).unwrap();
        let mut average = new();
        let empty = average.save("a.").unwrap();
        assert!(empty.iter().all(|(_, values)| values.is_empty()) && !empty.is_empty());
        let step = |average: &mut Average, round: u64| {
            let mut grads = flat(&random(&layout, 10 * round + rank, 1.0));
            average.all(&mut grads).unwrap();
            average.commit();
            bits(&grads.to_vec::<f32>().unwrap())
        };
        step(&mut average, 0);
        step(&mut average, 1);
        let saved = average.save("a.").unwrap();
        assert!(
            saved.iter().any(|(name, v)| name == "a.bucket0.worker2.residual" && v.iter().any(|&e| e != 0.0))
        );
        assert!(saved.iter().any(|(name, _)| name == "a.bucket1.server.residual"));
        let round = average.round();
        let want = [2, 3].map(|round| step(&mut average, round));

        let mut restored = new();
        let get = |name: &str| saved.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_slice());
        let short =
            |name: &str| get(name).map(|v| if name.ends_with("0.server.residual") { &v[1..] } else { v });
        for result in [
            restored.restore("b.", round, get),
            restored.restore("a.", round, short),
            restored.restore("a.", round, |name| get(name).filter(|_| !name.contains("bucket0.server"))),
        ] {
            assert!(matches!(result, Err(OptimError::State { .. })), "{result:?}");
        }
        assert_eq!((restored.save("a.").unwrap(), restored.round()), (empty, 0));
        restored.restore("a.", round, get).unwrap();
        assert_eq!(restored.round(), 2);
        assert_eq!([2, 3].map(|round| step(&mut restored, round)), want);
    });
}

#[test]
fn a_gradient_that_is_not_finite_reaches_all_ranks_and_changes_nothing() {
    let layout = layout();
    for codec in CODECS {
        on_ranks(3, |comm| {
            let mut average = Average::new(comm.clone(), &CPU, &layout, config(codec, 4096, true)).unwrap();
            let step = |average: &mut Average, bad: bool| {
                let mut values = random(&layout, comm.rank().0 as u64, 1.0);
                if bad && comm.rank().0 == 1 {
                    values[layout.params()[2].start + 1000] = f32::NAN;
                }
                let mut grads = flat(&values);
                average.all(&mut grads).unwrap();
                let norm = global_norm(&grads).unwrap();
                assert_eq!(norm.is_finite(), !bad, "{codec}");
                if agree(&comm, norm.is_finite()).unwrap() { average.commit() } else { average.rollback() }
            };
            step(&mut average, false);
            let before = average.save("").unwrap();
            step(&mut average, true);
            assert_eq!((average.save("").unwrap(), average.round()), (before, 1));
            step(&mut average, false);
            assert_eq!(average.round(), 2);
        });
    }
}

#[test]
fn a_rank_that_fails_leaves_the_others_as_they_were() {
    let layout = layout();
    for (codec, overlap) in [("none", true), ("none", false), ("int8:16+ef", true), ("int8:16+ef", false)] {
        // No rank fails before all have finished their first round, because an abort overtakes messages in
        // flight.
        let first = Barrier::new(3);
        on_ranks(3, |comm| {
            let rank = comm.rank().0;
            let mut average =
                Average::new(comm.clone(), &CPU, &layout, config(codec, 1000, overlap)).unwrap();
            average.all(&mut flat(&random(&layout, rank.into(), 1.0))).unwrap();
            average.commit();
            first.wait();
            let before = average.save("").unwrap();

            let values = random(&layout, 100 + u64::from(rank), 1.0);
            let mut grads = flat(&values);
            let mut averaging = average.begin();
            let ready = spans(&layout, (0..layout.params().len()).rev());
            if rank == 1 {
                // Simulates an error outside of the average, after half of the backward pass.
                for span in &ready[..4] {
                    averaging.ready(span.clone(), &grads).unwrap();
                }
                drop(averaging);
                // The others miss the buckets that this rank had not started. A rank that fails drops its
                // communicator.
                drop(comm);
                assert_eq!(average.save("").unwrap(), before);
                return;
            }
            for span in ready {
                averaging.ready(span, &grads).unwrap();
            }
            let error = averaging.finish(&mut grads).unwrap_err();
            assert!(matches!(error, OptimError::Comm(_)), "{error}");
            assert_eq!(bits(&grads.to_vec::<f32>().unwrap()), bits(&values));
            assert_eq!((average.save("").unwrap(), average.round()), (before, 1));
            assert!(matches!(agree(&comm, true), Err(OptimError::Comm(CommError::Poisoned(_)))));
        });
    }
}

#[test]
fn ranges_are_checked() {
    let layout = layout();
    on_ranks(1, |comm| {
        let problem = |result: Result<_, OptimError>| match result {
            Err(OptimError::Ready { parameter, problem }) => format!("{parameter}: {problem}"),
            other => format!("{:?}", other.map(|()| "fine")),
        };
        let mut average = Average::new(comm.clone(), &CPU, &layout, AverageConfig::default()).unwrap();
        let mut grads = flat(&random(&layout, 1, 1.0));
        let p = layout.params();
        let mut averaging = average.begin();
        assert_eq!(problem(averaging.ready(0..70, &grads)), "p0: marked ready only in part");
        assert_eq!(problem(averaging.ready(70..p[2].start, &grads)), "p0: marked ready only in part");
        averaging.ready(p[1].start..p[3].start, &grads).unwrap();
        assert_eq!(
            problem(averaging.ready(p[2].start..layout.len(), &grads)),
            "p2: marked ready twice in one round"
        );
        averaging.ready(p[1].range().end..p[2].start, &grads).unwrap();
        assert!(matches!(averaging.ready(0..layout.len() + 1, &grads), Err(OptimError::Tensor(_))));
        assert!(matches!(averaging.ready(0..64, &flat(&[0.0; 64])), Err(OptimError::Tensor(_))));
        let unfinished = averaging.finish(&mut grads).map(|_| ());
        assert_eq!(problem(unfinished), "p0: not marked ready before the end of the round");
        let none = AverageConfig { bucket_bytes: 0, ..AverageConfig::default() };
        assert!(matches!(Average::new(comm, &CPU, &layout, none), Err(OptimError::Setting { .. })));
    });
}

#[test]
fn all_ranks_must_agree() {
    for (votes, want) in [([true, true, true], true), ([true, false, true], false), ([false; 3], false)] {
        let results = on_ranks(3, |comm| agree(&comm, votes[comm.rank().index()]).unwrap());
        assert_eq!(results, [want; 3]);
    }
}

#[test]
fn ranks_with_unequal_tokens_give_the_mean_over_tokens() {
    // Rank r has 10 (r + 1) tokens; the gradient of each token's loss is the token's number.
    let layout = ParamLayout::new([("w".to_owned(), Shape::from(1))]);
    let world = 3;
    let tokens = |rank: usize| 10 * (rank + 1);
    let total: usize = (0..world).map(tokens).sum();
    let want = (0..total).sum::<usize>() as f32 / total as f32;
    on_ranks(world, |comm| {
        let rank = comm.rank().index();
        let first: usize = (0..rank).map(tokens).sum();
        let sum = (first..first + tokens(rank)).sum::<usize>() as f32;
        let mut grads = flat(&fill(&layout, |_| sum * token_weight(world, total as u64)));
        Average::new(comm, &CPU, &layout, AverageConfig::default()).unwrap().all(&mut grads).unwrap();
        let got = grads.to_vec::<f32>().unwrap()[0];
        assert!((got - want).abs() < 1e-5 * want, "{got} {want}");
    });
}

#[test]
fn diloco_of_one_step_of_sgd_is_plain_averaging() {
    let layout = layout();
    let steps = 5;
    let lr = 0.05;
    let start = random(&layout, 77, 1.0);
    let gradient = |rank: u64, step: u64, params: &[f32]| {
        // A quadratic bowl whose centre depends on the rank and the step.
        let centre = random(&layout, 1000 + 10 * step + rank, 1.0);
        params.iter().zip(centre).map(|(p, c)| p - c).collect::<Vec<_>>()
    };
    let inner = || {
        let settings = Sgd { schedule: LrSchedule::constant(lr), ..Sgd::default() };
        sgd(settings).build(&CPU, &layout).unwrap()
    };
    let plain = on_ranks(3, |comm| {
        let rank = comm.rank().0.into();
        let mut average = Average::new(comm, &CPU, &layout, AverageConfig::default()).unwrap();
        let (mut chain, mut params) = (inner(), flat(&start));
        for step in 0..steps {
            let mut grads = flat(&gradient(rank, step, &params.to_vec::<f32>().unwrap()));
            average.all(&mut grads).unwrap();
            let prepared = chain.prepare(&grads).unwrap();
            chain.commit(&mut params, &grads, prepared).unwrap();
            average.commit();
        }
        params.to_vec::<f32>().unwrap()
    });
    let diloco = on_ranks(3, |comm| {
        let rank = comm.rank().0.into();
        let mut average = Average::new(comm, &CPU, &layout, AverageConfig::default()).unwrap();
        let (mut chain, mut params) = (inner(), flat(&start));
        let outer = diloco_outer(1.0, 0.0).build(&CPU, &layout).unwrap();
        let mut outer = OuterOptimizer::new(outer, &params).unwrap();
        for step in 0..steps {
            let grads = flat(&gradient(rank, step, &params.to_vec::<f32>().unwrap()));
            let prepared = chain.prepare(&grads).unwrap();
            chain.commit(&mut params, &grads, prepared).unwrap();
            average.all(outer.delta(&params).unwrap()).unwrap();
            let prepared = outer.prepare().unwrap();
            outer.commit(&mut params, prepared).unwrap();
            average.commit();
        }
        assert_eq!(outer.step(), steps);
        params.to_vec::<f32>().unwrap()
    });
    assert_eq!(bits(&plain[0]), bits(&plain[2]));
    assert_eq!(bits(&diloco[0]), bits(&diloco[1]));
    for (a, b) in plain[0].iter().zip(&diloco[0]) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
}

#[test]
fn pseudo_gradients_average_as_in_prime() {
    // Worker r has its anchor at r + 1 and moved to (r + 1) / 2: the mean of the distances is (world + 1) / 4.
    let layout = layout();
    for world in [2, 3] {
        on_ranks(world, |comm| {
            let at = comm.rank().0 as f32 + 1.0;
            let outer = diloco_outer(0.7, 0.9).build(&CPU, &layout).unwrap();
            let mut outer = OuterOptimizer::new(outer, &flat(&fill(&layout, |_| at))).unwrap();
            let delta = outer.delta(&flat(&fill(&layout, |_| at / 2.0))).unwrap();
            Average::new(comm, &CPU, &layout, AverageConfig::default()).unwrap().all(delta).unwrap();
            let want = fill(&layout, |_| (world as f32 + 1.0) / 4.0);
            assert_eq!(delta.to_vec::<f32>().unwrap(), want);
        });
    }
}

#[test]
fn training_with_int8_and_feedback_keeps_replicas_equal_and_converges() {
    let layout = layout();
    let target = random(&layout, 3, 1.0);
    let results = on_ranks(3, |comm| {
        let mut average =
            Average::new(comm.clone(), &CPU, &layout, config("int8:64+ef", 4096, true)).unwrap();
        let settings = AdamW {
            weight_decay: 0.0,
            clip: Some(1.0),
            schedule: LrSchedule::constant(0.02),
            ..AdamW::default()
        };
        let mut chain = adamw(settings).build(&CPU, &layout).unwrap();
        let mut params = flat(&fill(&layout, |_| 0.0));
        for step in 0..150 {
            let noise = random(&layout, 1000 * step + u64::from(comm.rank().0), 0.1);
            let now = params.to_vec::<f32>().unwrap();
            let grads: Vec<_> = (0..now.len()).map(|i| now[i] - target[i] + noise[i]).collect();
            let mut grads = flat(&grads);
            average.all(&mut grads).unwrap();
            let prepared = chain.prepare(&grads);
            assert!(agree(&comm, prepared.is_ok()).unwrap());
            chain.commit(&mut params, &grads, prepared.unwrap()).unwrap();
            average.commit();
        }
        params.to_vec::<f32>().unwrap()
    });
    assert_eq!(bits(&results[0]), bits(&results[1]));
    assert_eq!(bits(&results[0]), bits(&results[2]));
    let distance =
        |a: &[f32]| a.iter().zip(&target).map(|(a, t)| f64::from(a - t).powi(2)).sum::<f64>().sqrt();
    let (before, after) = (distance(&vec![0.0; target.len()]), distance(&results[0]));
    assert!(after < 0.1 * before, "{before} {after}");
}
