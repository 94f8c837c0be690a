//! Tests of averages by protocols: `PowerSGD` has the bits of the method itself, exact bytes, rejections that
//! all ranks see, and rounds that are rolled back; and of codecs and protocols of the caller's own.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]
#![expect(clippy::float_cmp, reason = "these means are exact")]

use std::sync::LazyLock;
use std::thread;

use farflung_base::{Nanos, Philox};
use farflung_comm::{Communicator, memory};
use farflung_compress::{
    CodecId, CompressError, Compressor, MatrixShape, Payload, PayloadRef, PowerSgd, Protocol, RoundKey, State,
};
use farflung_optim::{Average, AverageConfig, Coding, OptimError};
use farflung_tensor::{Device, Param, ParamLayout, Shape, Tensor};

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

fn on_ranks<T: Send>(n: usize, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let rank = &rank;
        let comms = memory::cluster(n).into_iter().map(|endpoint| Communicator::new(endpoint));
        let comms: Vec<_> = comms.map(|comm| comm.with_deadline(Nanos::from_millis(20_000))).collect();
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(comm))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Returns a layout with two matrices that become smaller at low rank, one that does not, and vectors between
/// them.
fn layout() -> ParamLayout {
    let shapes = [vec![30], vec![40, 50], vec![50], vec![3, 3], vec![64, 20], vec![1]];
    ParamLayout::new(shapes.iter().enumerate().map(|(i, s)| (format!("p{i}"), Shape::new(s).unwrap())))
}

fn config(codec: Coding, bucket_bytes: usize) -> AverageConfig {
    AverageConfig { codec, bucket_bytes, seed: 5, ..AverageConfig::default() }
}

fn named(bucket_bytes: usize) -> AverageConfig {
    config("powersgd:3".parse().unwrap(), bucket_bytes)
}

fn random(layout: &ParamLayout, seed: u64) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    let mut flat = vec![0.0; layout.len()];
    for i in layout.params().iter().flat_map(Param::range) {
        flat[i] = 2.0 * draw.uniform(i as u64) - 1.0;
    }
    flat
}

fn tensor(values: &[f32]) -> Tensor {
    CPU.tensor(values, values.len()).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The method itself, matrix by matrix, for two ranks, whose sums have only one order.
struct WrittenOut {
    methods: Vec<Option<[PowerSgd; 2]>>,
}

impl WrittenOut {
    fn new(layout: &ParamLayout) -> Self {
        let of = |param: &Param| match *param.shape.dims() {
            [rows, columns] if 3 * (rows + columns) < rows * columns => {
                let new = || PowerSgd::new(rows, columns, 3, 5 + param.start as u64).unwrap();
                Some([new(), new()])
            }
            _ => None,
        };
        Self { methods: layout.params().iter().map(of).collect() }
    }

    fn round(&mut self, layout: &ParamLayout, x: &[Vec<f32>; 2]) -> Vec<f32> {
        let mean = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a + b) * 0.5).collect::<Vec<_>>();
        let mut out = vec![0.0; layout.len()];
        for (param, methods) in layout.params().iter().zip(&mut self.methods) {
            let [a, b] = [&x[0][param.range()], &x[1][param.range()]];
            let Some([first, second]) = methods else {
                out[param.range()].copy_from_slice(&mean(a, b));
                continue;
            };
            first.begin(a).unwrap();
            second.begin(b).unwrap();
            while let Some(mean) = first.outgoing().map(|a| mean(a, second.outgoing().unwrap())) {
                first.incoming(&mean).unwrap();
                second.incoming(&mean).unwrap();
            }
            second.end(&mut vec![0.0; a.len()]).unwrap();
            first.end(&mut out[param.range()]).unwrap();
            first.commit();
            second.commit();
        }
        out
    }
}

#[test]
fn power_sgd_has_the_bits_of_the_method_as_it_is_written_down() {
    let layout = layout();
    let x: Vec<[Vec<f32>; 2]> =
        (0..4).map(|round| [0, 1].map(|rank| random(&layout, 10 * round + rank))).collect();
    let mut written_out = WrittenOut::new(&layout);
    let want: Vec<_> = x.iter().map(|x| bits(&written_out.round(&layout, x))).collect();
    for bucket_bytes in [1, 9000, usize::MAX] {
        let seen = on_ranks(2, |comm| {
            let new = || Average::new(comm.clone(), &CPU, &layout, named(bucket_bytes)).unwrap();
            let mut average = new();
            let round = |(i, x): (usize, &[Vec<f32>; 2])| {
                // A round that is rolled back, and one that is dropped in the middle, change nothing.
                average.all(&mut tensor(&random(&layout, 900))).unwrap();
                average.rollback();
                let mut averaging = average.begin();
                averaging.ready(0..0, &tensor(&random(&layout, 901))).unwrap();
                drop(averaging);
                if i == 2 {
                    let (saved, rounds) = (average.save("x.").unwrap(), average.round());
                    assert!(saved.iter().any(|(name, _)| name.ends_with(".p4.residual")), "{saved:?}");
                    let get = |name: &str| saved.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_slice());
                    average = new();
                    let error = average.restore("y.", rounds, get).unwrap_err();
                    assert!(matches!(error, OptimError::State { found: 0, .. }), "{error}");
                    let short = |name: &str| get(name).map(|values| &values[..values.len().min(7)]);
                    let error = average.restore("x.", rounds, short).unwrap_err();
                    assert!(matches!(error, OptimError::State { found: 7, .. }), "{error}");
                    average.restore("x.", rounds, get).unwrap();
                }
                let mut grads = tensor(&x[comm.rank().index()]);
                average.all(&mut grads).unwrap();
                average.commit();
                bits(&grads.to_vec().unwrap())
            };
            x.iter().enumerate().map(round).collect::<Vec<_>>()
        });
        for seen in seen {
            assert!(seen == want, "buckets of {bucket_bytes}");
        }
    }
}

#[test]
fn what_travels_are_the_factors_and_the_vectors() {
    let layout = layout();
    let sent = on_ranks(3, |comm| {
        let mut average = Average::new(comm.clone(), &CPU, &layout, named(9000)).unwrap();
        let averaged = average.all(&mut tensor(&random(&layout, 1))).unwrap();
        let sizes = named(9000).exchanges(&layout).unwrap();
        let elements: usize = sizes.iter().flatten().sum();
        // Two matrices are sent as two factors of three vectors each; everything else is sent as it is.
        assert_eq!(elements, 3 * (40 + 50) + 3 * (64 + 20) + 30 + 50 + 9 + 1);
        assert_eq!((averaged.payload.0, sizes.len()), (4 * elements as u64, averaged.buckets));
        comm.stats().sent.payload.0
    });
    // In a ring of n ranks, all together send each element 2 (n - 1) times.
    assert_eq!(sent.iter().sum::<u64>(), 2 * 2 * 4 * (3 * 90 + 3 * 84 + 90));
}

#[test]
fn what_one_rank_refuses_no_rank_takes() {
    let layout = layout();
    let spoilt = layout.params()[4].range();
    for bad in [f32::NAN, f32::NEG_INFINITY, 3e38] {
        let seen = on_ranks(3, |comm| {
            let mut average = Average::new(comm.clone(), &CPU, &layout, named(usize::MAX)).unwrap();
            let mut other = Average::new(comm.clone(), &CPU, &layout, named(usize::MAX)).unwrap();
            for round in 0..3 {
                let values = random(&layout, 10 * round + u64::from(comm.rank().0));
                let mut worse = values.clone();
                if comm.rank().0 == 1 {
                    worse[spoilt.start + 5] = bad;
                }
                let mut grads = tensor(&worse);
                average.all(&mut grads).unwrap();
                average.rollback();
                let seen: Vec<f32> = grads.to_vec().unwrap();
                assert!(seen[spoilt.clone()].iter().all(|v| v.is_nan()), "{bad}");
                assert!(seen[..spoilt.start].iter().all(|v| v.is_finite()));
                // The next round has the same result as without the rejected one.
                let (mut grads, mut same) = (tensor(&values), tensor(&values));
                average.all(&mut grads).unwrap();
                other.all(&mut same).unwrap();
                average.commit();
                other.commit();
                let (a, b): (Vec<f32>, Vec<f32>) = (grads.to_vec().unwrap(), same.to_vec().unwrap());
                assert_eq!(bits(&a), bits(&b));
            }
            bits(&average.save("").unwrap()[1].1)
        });
        assert!(!seen[0].is_empty() && seen[0] != seen[1]);
    }
}

/// Encodes every value as a byte that counts eighths.
#[derive(Debug)]
struct Eighths;

impl State for Eighths {}

impl Compressor for Eighths {
    fn compress(&mut self, x: &[f32], _: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        out.seal(CodecId::OWN, x.len(), x.len(), |body| {
            body.iter_mut().zip(x).for_each(|(byte, x)| *byte = ((x * 8.0).round() as i8).cast_unsigned());
            Ok(())
        })
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        out.iter_mut().zip(p.body()).for_each(|(x, byte)| *x = f32::from(byte.cast_signed()) / 8.0);
        Ok(())
    }

    fn max_payload(&self, len: usize) -> usize {
        28 + len
    }
}

/// Replaces values by the mean of their row.
#[derive(Debug)]
struct RowMeans {
    shape: MatrixShape,
    means: Vec<f32>,
    done: bool,
}

impl State for RowMeans {}

impl Protocol for RowMeans {
    fn exchanges(&self) -> Vec<usize> {
        vec![self.shape.rows]
    }

    fn begin(&mut self, x: &[f32]) -> Result<(), CompressError> {
        let columns = self.shape.columns;
        self.means = x.chunks(columns).map(|row| row.iter().sum::<f32>() / columns as f32).collect();
        self.done = false;
        Ok(())
    }

    fn outgoing(&self) -> Option<&[f32]> {
        (!self.done).then_some(&self.means)
    }

    fn incoming(&mut self, mean: &[f32]) -> Result<(), CompressError> {
        self.means.copy_from_slice(mean);
        self.done = true;
        Ok(())
    }

    fn end(&mut self, out: &mut [f32]) -> Result<(), CompressError> {
        out.chunks_mut(self.shape.columns).zip(&self.means).for_each(|(row, mean)| row.fill(*mean));
        Ok(())
    }
}

#[test]
fn a_codec_and_a_protocol_of_the_callers_own_average() {
    let layout = layout();
    let own = Coding::compressor(|| Box::new(Eighths));
    let rows = Coding::protocol(|shape, _| {
        (shape.rows > 3).then(|| Box::new(RowMeans { shape, means: Vec::new(), done: true }) as _)
    });
    on_ranks(2, |comm| {
        let rank = comm.rank().0 as f32;
        let mut average = Average::new(comm.clone(), &CPU, &layout, config(own.clone(), usize::MAX)).unwrap();
        let mut grads = tensor(&vec![1.0 + rank / 2.0; layout.len()]);
        let averaged = average.all(&mut grads).unwrap();
        average.commit();
        let seen = grads.to_vec::<f32>().unwrap();
        let of = |i: usize| &seen[layout.params()[i].range()];
        assert!((0..6).all(|i| of(i).iter().all(|v| *v == 1.25)));
        // Two shards, with one byte per value.
        assert_eq!(averaged.payload.0, 2 * 28 + layout.count() as u64);

        let mut average = Average::new(comm.clone(), &CPU, &layout, config(rows.clone(), 4096)).unwrap();
        let values: Vec<f32> = (0..layout.len()).map(|i| (i % 2) as f32 + rank).collect();
        let mut grads = tensor(&values);
        average.all(&mut grads).unwrap();
        average.commit();
        let seen = grads.to_vec::<f32>().unwrap();
        for (i, param) in layout.params().iter().enumerate() {
            let low_rank = i == 1 || i == 4;
            let want = |at: usize| if low_rank { 1.0 } else { (at % 2) as f32 + 0.5 };
            assert!(param.range().all(|at| seen[at] == want(at)), "{i}");
        }
    });
}
