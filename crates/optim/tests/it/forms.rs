//! Tests of coded averages by every algorithm. The flat algorithm gives the bits of the published method. The
//! others give values near the mean, the same on all ranks. Rounds can be rolled back, and residuals continue
//! from saved state.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::sync::LazyLock;
use std::thread;

use farflung_base::{AccessLink, Algorithm, Bandwidth, Nanos, Philox, Rank, Topology};
use farflung_comm::{Communicator, memory};
use farflung_compress::{CodecSpec, Compressor as _, Payload, RoundKey, State};
use farflung_optim::{Average, AverageConfig, OptimError};
use farflung_tensor::{Device, ParamLayout, Shape, Tensor};

/// Returns a topology with regions of three and two ranks, far from each other and behind different uplinks.
fn topology() -> Topology {
    let mut topology = Topology::uniform(5, "1gbit,1ms".parse().unwrap());
    for rank in 0..5 {
        let port = AccessLink { up: Bandwidth(10_000_000 << rank), down: Bandwidth(1 << 30) };
        topology.set_access_link(Rank(rank), port);
        for other in (0..5).filter(|other| (rank < 3) != (*other < 3)) {
            topology.set_link(Rank(rank), Rank(other), "50mbit,30ms".parse().unwrap());
        }
    }
    topology
}

/// Returns a topology with regions of one, two and two ranks.
fn three_regions() -> Topology {
    let mut topology = Topology::uniform(5, "1gbit,1ms".parse().unwrap());
    let region = |rank: u32| rank.div_ceil(2);
    for (a, b) in (0..5).flat_map(|a| (0..5).map(move |b| (a, b))).filter(|&(a, b)| region(a) != region(b)) {
        topology.set_link(Rank(a), Rank(b), "50mbit,30ms".parse().unwrap());
    }
    topology
}

fn forms() -> impl Iterator<Item = (Algorithm, Topology)> {
    let all = Algorithm::CODED.into_iter().chain([Algorithm::Auto]).map(|form| (form, topology()));
    all.chain([(Algorithm::Hierarchical, three_regions())])
}

fn on_ranks<T: Send>(topology: &Topology, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let ranks: Vec<_> = memory::cluster(topology.size())
            .into_iter()
            .map(|endpoint| {
                let rank = &rank;
                scope.spawn(move || {
                    let comm = Communicator::new(endpoint).with_deadline(Nanos::from_millis(20_000));
                    rank(comm.with_topology(topology.clone()).unwrap())
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

fn layout() -> ParamLayout {
    ParamLayout::new(
        [vec![40, 50], vec![64], vec![3, 3]]
            .iter()
            .enumerate()
            .map(|(i, shape)| (format!("p{i}"), Shape::new(shape).unwrap())),
    )
}

/// Returns values of parameters, in their order without padding.
fn random(seed: u64, len: usize) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    (0..len).map(|i| 2.0 * draw.uniform(i as u64) - 1.0).collect()
}

fn flat(layout: &ParamLayout, values: &[f32]) -> Tensor {
    let mut flat = vec![0.0; layout.len()];
    let mut values = values.iter();
    for param in layout.params() {
        flat[param.range()].iter_mut().zip(&mut values).for_each(|(f, v)| *f = *v);
    }
    CPU.tensor(&flat, flat.len()).unwrap()
}

fn bits(layout: &ParamLayout, flat: &Tensor) -> Vec<u32> {
    let flat = flat.to_vec::<f32>().unwrap();
    layout.params().iter().flat_map(|p| flat[p.range()].iter().map(|v| v.to_bits())).collect()
}

fn config(codec: &str, algorithm: Algorithm, bucket_bytes: usize) -> AverageConfig {
    AverageConfig {
        codec: codec.parse().unwrap(),
        algorithm,
        bucket_bytes,
        seed: 5,
        ..AverageConfig::default()
    }
}

/// Computes the two-sided compression of Tang et al. 2021 for all ranks in one thread, with the codecs alone.
fn written_out(codec: CodecSpec, n: usize, rounds: &[Vec<Vec<f32>>]) -> Vec<Vec<u32>> {
    let len = rounds[0][0].len();
    let shard = |r: usize| len * r / n..len * (r + 1) / n;
    let mut workers: Vec<Vec<_>> = (0..n).map(|_| (0..n).map(|_| codec.build()).collect()).collect();
    let mut servers: Vec<_> = (0..n).map(|_| codec.of_results().build()).collect();
    let mut means = Vec::new();
    for (round, inputs) in rounds.iter().enumerate() {
        let key = |shard, rank| RoundKey { seed: 5, round: round as u64, shard, rank: Rank(rank as u32) };
        let mut payload = Payload::new();
        let mut mean = Vec::new();
        for owner in 0..n {
            let mut sum = vec![0.0_f32; shard(owner).len()];
            for rank in 0..n {
                let x = &inputs[rank][shard(owner)];
                workers[rank][owner].compress(x, key(owner as u32, rank), &mut payload).unwrap();
                let mut decoded = vec![0.0; x.len()];
                workers[rank][owner].decompress(payload.view(), &mut decoded).unwrap();
                if rank == 0 {
                    sum = decoded;
                } else {
                    sum.iter_mut().zip(&decoded).for_each(|(s, d)| *s += d);
                }
            }
            for s in &mut sum {
                *s *= 1.0 / n as f32;
            }
            servers[owner].compress(&sum, key((n + owner) as u32, owner), &mut payload).unwrap();
            servers[owner].decompress(payload.view(), &mut sum).unwrap();
            mean.extend(sum.iter().map(|s| s.to_bits()));
        }
        workers.iter_mut().flatten().chain(&mut servers).for_each(State::commit);
        means.push(mean);
    }
    means
}

#[test]
fn the_flat_form_has_the_bits_of_the_compression_as_it_is_written_down() {
    let layout = layout();
    for codec in ["int8:16+ef", "random:7/sign:100+ef", "topk:0.1/int4-sr:64+ef", "f16"] {
        let rounds: Vec<Vec<Vec<f32>>> = (0..3)
            .map(|round| (0..5).map(|rank| random(10 * round + rank, layout.count())).collect())
            .collect();
        let want = written_out(codec.parse().unwrap(), 5, &rounds);
        let seen = on_ranks(&topology(), |comm| {
            let config = config(codec, Algorithm::Direct, usize::MAX);
            let mut average = Average::new(comm.clone(), &CPU, &layout, config).unwrap();
            let round = |inputs: &Vec<Vec<f32>>| {
                let mut grads = flat(&layout, &inputs[comm.rank().index()]);
                average.all(&mut grads).unwrap();
                average.commit();
                // There is only one bucket, so values are in the layout's order.
                bits(&layout, &grads)
            };
            rounds.iter().map(round).collect::<Vec<_>>()
        });
        for seen in seen {
            assert!(seen == want, "{codec}");
        }
    }
}

#[test]
fn an_all_gather_has_the_bits_of_the_mean_of_what_each_rank_encoded_once() {
    let layout = layout();
    for codec in ["int8:16+ef", "topk:0.1/int4-sr:64+ef", "dct:8/topk:4of64/sign:8+ef", "dgc:0.05"] {
        let rounds: Vec<Vec<Vec<f32>>> = (0..3)
            .map(|round| (0..5).map(|rank| random(10 * round + rank, layout.count())).collect())
            .collect();
        let mut codecs: Vec<_> = (0..5).map(|_| codec.parse::<CodecSpec>().unwrap().build()).collect();
        let want: Vec<Vec<u32>> = (0..)
            .zip(&rounds)
            .map(|(round, inputs)| {
                let mut sum = vec![0.0_f32; layout.count()];
                for (rank, x) in (0..).zip(inputs) {
                    let key = RoundKey { seed: 5, round, shard: 0, rank: Rank(rank) };
                    let (mut payload, mut decoded) = (Payload::new(), vec![0.0; x.len()]);
                    let codec = &mut codecs[rank as usize];
                    codec.compress(x, key, &mut payload).unwrap();
                    codec.decompress(payload.view(), &mut decoded).unwrap();
                    codec.commit();
                    sum.iter_mut().zip(&decoded).for_each(|(s, d)| *s += d);
                }
                sum.iter().map(|s| (s * (1.0 / 5.0)).to_bits()).collect()
            })
            .collect();
        let seen = on_ranks(&topology(), |comm| {
            let config = config(codec, Algorithm::AllGather, usize::MAX);
            let mut average = Average::new(comm.clone(), &CPU, &layout, config).unwrap();
            let round = |inputs: &Vec<Vec<f32>>| {
                let mut grads = flat(&layout, &inputs[comm.rank().index()]);
                average.all(&mut grads).unwrap();
                average.commit();
                bits(&layout, &grads)
            };
            rounds.iter().map(round).collect::<Vec<_>>()
        });
        for seen in seen {
            assert!(seen == want, "{codec}");
        }
    }
}

#[test]
fn a_momentum_corrected_average_gathers_momentum_once_and_goes_on_after_a_rollback_and_a_resume() {
    let (layout, topology) = (layout(), topology());
    let rounds: Vec<Vec<Vec<f32>>> =
        (0..4).map(|round| (0..5).map(|rank| random(10 * round + rank, layout.count())).collect()).collect();
    // Workers use the paper's momentum correction, servers use error feedback.
    let want = written_out("dgc:0.05".parse().unwrap(), 5, &rounds);
    on_ranks(&topology, |comm| {
        let new = || {
            let config = config("dgc:0.05", Algorithm::Direct, usize::MAX);
            Average::new(comm.clone(), &CPU, &layout, config).unwrap()
        };
        let mut average = new();
        for (round, want) in want.iter().enumerate() {
            average.all(&mut flat(&layout, &random(900, layout.count()))).unwrap();
            average.rollback();
            if round == 2 {
                let (saved, rounds) = (average.save("x.").unwrap(), average.round());
                assert!(saved.iter().any(|(name, _)| name.ends_with("worker1.momentum")));
                average = new();
                let get = |name: &str| saved.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_slice());
                average.restore("x.", rounds, get).unwrap();
            }
            let mut grads = flat(&layout, &rounds[round][comm.rank().index()]);
            average.all(&mut grads).unwrap();
            average.commit();
            assert!(bits(&layout, &grads) == *want, "round {round}");
        }
    });
}

#[test]
fn every_form_has_equal_replicas_near_the_mean() {
    let layout = layout();
    for (form, topology) in forms() {
        for codec in ["int8:16+ef", "f16", "none+ef"] {
            let results = on_ranks(&topology, |comm| {
                let mut average =
                    Average::new(comm.clone(), &CPU, &layout, config(codec, form, 4096)).unwrap();
                let mut seen = Vec::new();
                for round in 0..3 {
                    let mut grads =
                        flat(&layout, &random(10 * round + u64::from(comm.rank().0), layout.count()));
                    average.all(&mut grads).unwrap();
                    average.commit();
                    seen.push(bits(&layout, &grads));
                }
                seen
            });
            // A ring loses precision at each of its four hops.
            let bound = if form == Algorithm::Ring { 0.08 } else { 0.03 };
            for round in 0..3 {
                let inputs: Vec<_> =
                    (0..5).map(|rank| random(10 * round as u64 + rank, layout.count())).collect();
                for (rank, seen) in results.iter().enumerate() {
                    assert_eq!(seen[round], results[0][round], "{form} {codec}, rank {rank}");
                }
                for (i, &bits) in results[0][round].iter().enumerate() {
                    let mean = inputs.iter().map(|x| x[i]).sum::<f32>() / 5.0;
                    assert!((f32::from_bits(bits) - mean).abs() < bound, "{form} {codec}");
                }
            }
        }
    }
}

#[test]
fn feedback_makes_up_for_what_a_two_level_average_lost() {
    // The sum of the applied means stays within one round's loss of the sum of the exact means.
    let layout = layout();
    let drift = |codec: &str, topology: &Topology| {
        let totals = on_ranks(topology, |comm| {
            let config = config(codec, Algorithm::Hierarchical, 4096);
            let mut average = Average::new(comm.clone(), &CPU, &layout, config).unwrap();
            let own = random(comm.rank().0.into(), layout.count());
            let mut total = vec![0.0_f64; layout.count()];
            for _ in 0..60 {
                let mut grads = flat(&layout, &own);
                average.all(&mut grads).unwrap();
                average.commit();
                for (t, g) in total.iter_mut().zip(bits(&layout, &grads)) {
                    *t += f64::from(f32::from_bits(g));
                }
            }
            total
        });
        let inputs: Vec<_> = (0..5).map(|rank| random(rank, layout.count())).collect();
        let mean = |i: usize| inputs.iter().map(|x| f64::from(x[i])).sum::<f64>() / 5.0;
        (0..layout.count()).map(|i| (totals[0][i] - 60.0 * mean(i)).abs()).fold(0.0, f64::max)
    };
    for topology in [topology(), three_regions()] {
        let (with, without) = (drift("int8:16+ef", &topology), drift("int8:16", &topology));
        assert!(with < 0.03 && without > 3.0 * with, "{with} {without}");
    }
}

#[test]
fn in_every_form_a_round_that_is_not_committed_never_was_and_saved_residuals_go_on() {
    let layout = layout();
    for (form, topology) in forms() {
        on_ranks(&topology, |comm| {
            let rank = u64::from(comm.rank().0);
            let new = || Average::new(comm.clone(), &CPU, &layout, config("int8:16+ef", form, 4096)).unwrap();
            let step = |average: &mut Average, round: u64| {
                let mut grads = flat(&layout, &random(10 * round + rank, layout.count()));
                average.all(&mut grads).unwrap();
                average.commit();
                bits(&layout, &grads)
            };
            let (mut plain, mut given_up) = (new(), new());
            for round in 0..2 {
                given_up.all(&mut flat(&layout, &random(900 + round, layout.count()))).unwrap();
                assert!(matches!(given_up.save(""), Err(OptimError::Compress(_))));
                given_up.rollback();
                assert_eq!(step(&mut plain, round), step(&mut given_up, round), "{form}");
            }
            let saved = plain.save("x.").unwrap();
            assert_eq!(saved, given_up.save("x.").unwrap(), "{form}");
            assert!(saved.iter().any(|(_, residual)| residual.iter().any(|&e| e != 0.0)), "{form}");

            let mut restored = new();
            let get = |name: &str| saved.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_slice());
            restored.restore("x.", plain.round(), get).unwrap();
            for round in 2..4 {
                assert_eq!(step(&mut plain, round), step(&mut restored, round), "{form}");
            }
        });
    }
}

#[test]
fn an_algorithm_without_a_coded_form_is_refused_by_name() {
    let layout = layout();
    on_ranks(&Topology::uniform(2, "lan".parse().unwrap()), |comm| {
        let refused = Average::new(comm, &CPU, &layout, config("int8", Algorithm::Moshpit, 4096));
        assert!(refused.unwrap_err().to_string().contains("`moshpit`"));
    });
}
