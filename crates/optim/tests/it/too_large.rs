//! Tests of finite gradients that are too large for their codec: all ranks see the same mean, take or skip the
//! step together, and residuals stay finite.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::sync::Arc;
use std::thread;

use farflung_base::{Nanos, Philox};
use farflung_comm::{Communicator, memory};
use farflung_optim::{Average, AverageConfig, agree, global_norm};
use farflung_tensor::{Device, ParamLayout, Shape};

/// Each of three ranks reduces a shard of four squares of 8 x 8.
const LEN: usize = 3 * 4 * 64;
/// Codecs that reject some finite values; some do so only with a residual.
const CODECS: [&str; 9] = [
    "dct:8",
    "dct:8+ef",
    "dct:8/int4+ef",
    "dct:8/topk:4of64/sign+ef:0.9",
    "topk:0.5/dct:8/int8+ef+lz4",
    "rolling:2/dct:8/int4+ef",
    "uint8+ef",
    "uint3:50+ef",
    "unbiased:4/int8",
];

type Saved = Vec<(String, Vec<f32>)>;

/// One rank of a job that averages one gradient per step, as a training loop does.
struct Job {
    comm: Communicator,
    device: Device,
    average: Average,
}

impl Job {
    fn new(endpoint: Arc<memory::Memory>, codec: &str) -> Self {
        let comm = Communicator::new(endpoint).with_deadline(Nanos::from_millis(20_000));
        let layout = ParamLayout::new([("w".to_owned(), Shape::from(LEN))]);
        let config = AverageConfig { codec: codec.parse().unwrap(), ..AverageConfig::default() };
        let device = Device::cpu(1).unwrap();
        let average = Average::new(comm.clone(), &device, &layout, config).unwrap();
        Self { comm, device, average }
    }

    /// Takes a step. Returns the mean, and whether the step was taken.
    fn step(&mut self, gradient: &[f32]) -> (Vec<f32>, bool) {
        let mut flat = self.device.tensor(gradient, gradient.len()).unwrap();
        self.average.all(&mut flat).unwrap();
        let finite = global_norm(&flat).unwrap().is_finite();
        // All ranks have the same mean, so the vote is unanimous.
        assert_eq!(agree(&self.comm, finite).unwrap(), finite);
        if finite {
            self.average.commit();
        } else {
            self.average.rollback();
        }
        (flat.to_vec::<f32>().unwrap(), finite)
    }

    /// Returns the state of the codecs. Checks that it is finite.
    fn saved(&self) -> Saved {
        let saved = self.average.save("").unwrap();
        assert!(saved.iter().all(|(_, values)| values.iter().all(|value| value.is_finite())));
        saved
    }
}

fn on_ranks<T: Send>(codec: &str, rank: impl Fn(usize, Job) -> T + Sync) -> Vec<T> {
    let endpoints = memory::cluster(3).into_iter().enumerate();
    thread::scope(|scope| {
        let spawn = |(i, endpoint)| {
            let rank = &rank;
            scope.spawn(move || rank(i, Job::new(endpoint, codec)))
        };
        let ranks: Vec<_> = endpoints.map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn normal(rank: usize, round: u64) -> Vec<f32> {
    let mut x = vec![0.0; LEN];
    Philox::new(round, rank as u64).fill_normal(1.0, &mut x);
    x
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the largest numbers, alternately of both signs, for a third of the elements.
fn turns(sign: f32) -> Vec<f32> {
    (0..LEN / 3).map(|i| if i % 2 == 0 { sign * f32::MAX } else { -sign * f32::MAX }).collect()
}

#[test]
fn a_step_with_too_large_values_is_skipped_by_all_ranks_and_never_was() {
    for codec in CODECS {
        for large in [&turns(1.0)[..], &[1e38; 64], &[f32::MAX]] {
            let seen = on_ranks(codec, |rank, mut job| {
                let first = job.step(&normal(rank, 0));
                let before = job.saved();
                let mut gradient = normal(rank, 1);
                if rank == 1 {
                    gradient[..large.len()].copy_from_slice(large);
                }
                let (mean, taken) = job.step(&gradient);
                // The mean is finite if a mask left out the large values in this round.
                let finite = mean.iter().all(|m| m.abs() < 1e19);
                assert_eq!(taken, finite, "{codec}");
                if !taken {
                    assert_eq!((job.saved(), job.average.round()), (before, 1), "{codec}");
                }
                let third = job.step(&normal(rank, 2));
                job.saved();
                assert!(first.1 && (third.1 || taken), "{codec}");
                [first.0, mean, third.0].map(|mean| bits(&mean))
            });
            assert!(seen.iter().all(|means| *means == seen[0]), "{codec}");
        }
    }
}

/// Values that are too large for the codec may have a small mean. The step is then taken with all values of all
/// ranks, and the residuals of the ranks that could not encode theirs stay as they were.
#[test]
fn a_small_mean_of_too_large_values_is_taken_and_loses_nothing() {
    for codec in CODECS.into_iter().filter(|codec| codec.contains("+ef")) {
        let seen = on_ranks(codec, |rank, mut job| {
            assert!(job.step(&normal(rank, 0)).1);
            let before = job.saved();
            let mut gradient = normal(rank, 1);
            if rank < 2 {
                gradient[..LEN / 3].copy_from_slice(&turns(if rank == 0 { 1.0 } else { -1.0 }));
            }
            let (mean, taken) = job.step(&gradient);
            assert!(taken, "{codec}");
            let after = job.saved();
            if rank < 2 {
                let of = |saved: &Saved| {
                    let shard = saved.iter().find(|(name, _)| name == "bucket0.worker0.residual");
                    bits(&shard.unwrap().1)
                };
                assert_eq!(of(&after), of(&before), "{codec}");
            }
            if codec == "dct:8+ef" {
                // Without a lossy stage the mean is a third of the third rank's values, since the others
                // cancel.
                let given = normal(2, 1);
                assert!(mean.iter().zip(given).take(LEN / 3).all(|(m, g)| (m - g / 3.0).abs() < 1e-5));
            }
            assert!(job.step(&normal(rank, 2)).1);
            job.saved();
            bits(&mean)
        });
        assert!(seen.iter().all(|mean| *mean == seen[0]), "{codec}");
    }
}
