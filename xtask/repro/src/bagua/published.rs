//! Compares BAGUA's published speed-ups by model and link with those on the virtual clock.
//!
//! Sixteen machines average a thousandth of the model's values over a thousandth of the bandwidth. A machine
//! computes at the f32 peak of a V100, which no real step reaches. This is an assumption, since the paper does
//! not publish step times.

use std::sync::Arc;

use anyhow::Result;
use farflung::base::{Bandwidth, Link, Nanos, Topology};
use farflung::comm::{CommError, Communicator};
use farflung::compress::CodecSpec;
use farflung::optim::{Average, AverageConfig, OptimError};
use farflung::tensor::{Device, ParamLayout, Shape};

use crate::harness::{Report, Threshold};
use crate::lab::Published;
use crate::ranks::{on_ranks, over_links};

const MACHINES: usize = 16;
const SCALE: u64 = 1000;
/// FLOP/s of a V100 in f32.
const PEAK: f64 = 15.7e12;
/// Number of parts of the model. Their gradients become final one after the other.
const PARTS: usize = 10;

struct Model {
    name: &'static str,
    params: usize,
    /// FLOP of a step on one GPU, forward and backward.
    flops: f64,
    codec: &'static str,
    bits: &'static str,
    /// Published speed-up for each link of [`LINKS`], over the best of DDP, Horovod in 32 and in 16 bits, and
    /// `BytePS`.
    published: [f64; 3],
}

/// Rates of the links in Gbit/s.
const LINKS: [u64; 3] = [100, 25, 10];

const MODELS: [Model; 2] = [
    // 32 images, each with 15.5 G multiply-adds in the forward pass.
    Model {
        name: "VGG16",
        params: 138_357_544,
        flops: 32.0 * 15.5e9 * 2.0 * 3.0,
        codec: "minmax8:4096",
        bits: "8 bits",
        published: [1.1, 1.1, 1.94],
    },
    // 6 sequences of 384 tokens, with 6 FLOP per parameter and token.
    Model {
        name: "BERT-Large",
        params: 340_000_000,
        flops: 6.0 * 384.0 * 6.0 * 340e6,
        codec: "sign",
        bits: "1 bit",
        published: [1.05, 1.05, 1.95],
    },
];

/// Reports rows without conditions: the speed-up on the virtual clock with and without overlap, and the
/// published one. Adds a record for each model and link.
pub(super) fn rows(report: &mut Report<'_>) -> Result<()> {
    for model in &MODELS {
        for (gbit, published) in LINKS.into_iter().zip(model.published) {
            let mut gains = [0.0; 2];
            for (gain, overlap) in gains.iter_mut().zip([false, true]) {
                let time = |codec: &str| step(model, codec, gbit, overlap);
                *gain = time("none")?.min(time("f16")?) / time(model.codec)?;
                let with = if overlap { "overlapped" } else { "no overlap" };
                let metric =
                    format!("{}, {gbit} Gbit/s, {with}: speed-up of {} over 16 bits", model.name, model.bits);
                report.row(&metric, *gain, "x", Threshold::None)?;
            }
            let metric =
                format!("{}, {gbit} Gbit/s: published speed-up over the best other system", model.name);
            report.row(&metric, published, "x", Threshold::None)?;
            let [plain, overlapped] = gains;
            let bits = model.bits;
            Published {
                what: &format!(
                    "{}, {gbit} Gbit/s: speed-up of {bits} over the best other system",
                    model.name
                ),
                paper: &format!("{published} on 128 V100"),
                ours: format!("{overlapped:.2} overlapped, {plain:.2} without overlap, over 16 bits"),
                setting: "16 machines on the virtual clock, computing at a V100's f32 peak".to_owned(),
                holds: (overlapped.min(plain) * 0.9..=overlapped.max(plain) * 1.1).contains(&published),
                note: "the claim holds if the published figure is between our two or within 10 % of one of \
                       them, because the paper does not say how long the computation of a step takes",
            }
            .record(report);
        }
    }
    Ok(())
}

/// Returns the seconds of a step: computation, a third of it forward and two thirds backward, and averaging.
/// With `overlap`, each part's gradients are sent during the backward pass, as soon as they are final.
fn step(model: &Model, codec: &str, gbit: u64, overlap: bool) -> Result<f64> {
    let bandwidth = Bandwidth(gbit * 1_000_000_000 / SCALE);
    let topology = Topology::uniform(MACHINES, Link { bandwidth, latency: Nanos::ZERO });
    let len = model.params / SCALE as usize / PARTS;
    let layout = ParamLayout::new((0..PARTS).map(|part| (format!("part{part}"), Shape::from(len))));
    let codec: CodecSpec = codec.parse()?;
    let config =
        AverageConfig { codec: codec.into(), overlap, bucket_bytes: 4 * len, ..AverageConfig::default() };
    let compute = |share: f64| Nanos::from_secs_f64(model.flops / PEAK * share);
    let round = |comm: &Communicator| -> Result<(), OptimError> {
        let cpu = Device::cpu(1)?;
        let mut grads = cpu.tensor(&vec![1.0_f32; layout.len()], layout.len())?;
        let mut average = Average::new(comm.clone(), &cpu, &layout, config.clone())?;
        comm.advance(compute(1.0 / 3.0));
        let mut averaging = average.begin();
        for param in layout.params().iter().rev() {
            comm.advance(compute(2.0 / 3.0 / PARTS as f64));
            averaging.ready(param.range(), &grads)?;
        }
        averaging.finish(&mut grads)?;
        average.commit();
        Ok(())
    };
    let times = on_ranks(over_links(&topology), |comm| {
        let comm = comm.with_deadline(Nanos::from_millis(600_000));
        match round(&comm) {
            Ok(()) => Ok(comm.now()),
            Err(OptimError::Comm(error)) => Err(error),
            Err(error) => Err(CommError::Coder { op: "average", source: Arc::new(error) }),
        }
    })?;
    Ok(times.into_iter().max().unwrap_or_default().as_secs_f64())
}
