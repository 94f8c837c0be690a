//! Tests of `Average` on ranks with different kinds of devices: the bits are the same as on CPUs alone.
#![cfg(all(feature = "sync", feature = "wgpu"))]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::thread;

use farflung_base::{Nanos, Philox};
use farflung_comm::{Communicator, memory};
use farflung_optim::{Average, AverageConfig, agree, global_norm};
use farflung_tensor::{Device, ParamLayout, Shape};

/// Codecs with kernels, without kernels, and with a lossless last stage.
const CODECS: [&str; 7] = [
    "int8:16+ef",
    "sign:64+ef",
    "topk:0.1/int8:64+ef:0.9",
    "dct:8/topk:4of64/sign+ef",
    "int4+lz4",
    "quantile8+ef",
    "none",
];

fn layout() -> ParamLayout {
    let shapes = [vec![7, 11], vec![7], vec![40, 50], vec![50], vec![1], vec![64], vec![3, 3]];
    ParamLayout::new(shapes.iter().enumerate().map(|(i, s)| (format!("p{i}"), Shape::new(s).unwrap())))
}

/// Means that a rank has after each round, and the state of its codecs, in bits.
type Seen = (Vec<Vec<u32>>, Vec<(String, Vec<u32>)>);

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Runs four rounds. One has a value that is not finite and is rolled back; the last one continues from saved
/// state.
fn rounds(comm: &Communicator, device: &Device, codec: &str) -> Seen {
    let layout = layout();
    let config = AverageConfig {
        codec: codec.parse().unwrap(),
        bucket_bytes: 4096,
        seed: 5,
        ..AverageConfig::default()
    };
    let new = || Average::new(comm.clone(), device, &layout, config.clone()).unwrap();
    let (mut average, mut seen) = (new(), Vec::new());
    for round in 0..4 {
        let mut values = vec![0.0; layout.len()];
        Philox::new(round, comm.rank().0.into()).fill_normal(1.0, &mut values);
        if round == 1 && comm.rank().0 == 2 {
            values[300] = f32::NAN;
        }
        // Only parameters have values; padding is zero, since it is not sent.
        let params = layout.params().iter().map(farflung_tensor::Param::range);
        let mut held = vec![0.0; values.len()];
        params.for_each(|range| held[range.clone()].copy_from_slice(&values[range]));
        let mut grads = device.tensor(&held, held.len()).unwrap();
        average.all(&mut grads).unwrap();
        let fine = global_norm(&grads).unwrap().is_finite();
        assert_eq!(fine, round != 1, "{codec}");
        if agree(comm, fine).unwrap() {
            average.commit();
        } else {
            average.rollback();
        }
        if fine {
            seen.push(bits(&grads.to_vec::<f32>().unwrap()));
        }
        if round == 2 {
            let saved = average.save("a.").unwrap();
            average = new();
            let get = |name: &str| saved.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_slice());
            average.restore("a.", 2, get).unwrap();
        }
    }
    let saved = average.save("a.").unwrap();
    (seen, saved.iter().map(|(name, values)| (name.clone(), bits(values))).collect())
}

fn on(devices: [&Device; 3], codec: &str) -> Vec<Seen> {
    thread::scope(|scope| {
        let ranks: Vec<_> = memory::cluster(3)
            .into_iter()
            .zip(devices)
            .map(|(endpoint, device)| {
                let comm = Communicator::new(endpoint).with_deadline(Nanos::from_millis(100_000));
                scope.spawn(move || rounds(&comm, device, codec))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn means_and_residuals_have_the_same_bits_wherever_the_ranks_are() {
    let (cpu, gpu) = (Device::cpu(1).unwrap(), Device::wgpu(0).unwrap());
    for codec in CODECS {
        let wanted = on([&cpu; 3], codec);
        assert!(wanted[1..].iter().all(|(seen, _)| *seen == wanted[0].0), "{codec}");
        let found = on([&gpu, &cpu, &gpu], codec);
        for (rank, ((means, residuals), wanted)) in found.iter().zip(&wanted).enumerate() {
            for (round, (mean, wanted)) in means.iter().zip(&wanted.0).enumerate() {
                let differ = mean.iter().zip(wanted).position(|(a, b)| a != b);
                assert_eq!(differ, None, "{codec}: mean of round {round} on rank {rank}");
            }
            for ((name, residual), wanted) in residuals.iter().zip(&wanted.1) {
                assert!(*name == wanted.0 && *residual == wanted.1, "{codec}: {name} on rank {rank}");
            }
        }
    }
}
