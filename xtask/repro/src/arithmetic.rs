//! Checks figures that talks and papers on training over slow links quote, by closed forms.

use anyhow::Result;
use farflung::parallel::memory::{ActivationMethod, BytesPerParameter, StateBytes, Transformer, ZeroStage};
use farflung::parallel::{Axis, Mesh};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "arithmetic",
    claim: "sizes that papers and talks quote: 350 GB for GPT-3, 16 TB for a trillion parameters with Adam, \
            24 MB for a thousand tokens at a boundary of GPT-3, 915 TB sent while 6 billion parameters are \
            fine-tuned, 64 ranks as 4 x 4 x 4, 76% of linear scaling for Megatron",
    source: "Narayanan et al. 2021; Rajbhandari et al. 2020; Wang et al. 2023; Shoeybi et al. 2019",
    seed: 0,
    run,
};

/// A computed figure, the quoted one, and the allowed difference.
struct Figure {
    metric: &'static str,
    seen: f64,
    quoted: f64,
    off: f64,
    unit: &'static str,
}

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    let gpt3 = Transformer { layers: 96, hidden: 12_288, heads: 96, sequence: 2048, vocabulary: 50_257 };
    let each = BytesPerParameter::DEEPSPEED;
    let parameters = gpt3.parameters() as f64;
    let trillion = StateBytes::new(1e12, each, ZeroStage::None, 1, false).total();
    let mesh = Mesh::new(&[(Axis::Data, 4), (Axis::Pipeline, 4), (Axis::Tensor, 4)])?;
    let rows = [
        Figure {
            metric: "GPT-3 in 16 bits",
            seen: 2.0 * parameters / 1e9,
            quoted: 350.0,
            off: 1.0,
            unit: "GB",
        },
        Figure {
            metric: "a trillion parameters with Adam",
            seen: trillion / 1e12,
            quoted: 16.0,
            off: 0.0,
            unit: "TB",
        },
        Figure {
            metric: "a thousand tokens at a boundary of GPT-3, in 16 bits",
            seen: 1000.0 * gpt3.hidden as f64 * 2.0 / 1e6,
            quoted: 24.0,
            off: 0.6,
            unit: "MB",
        },
        Figure {
            metric: "sent by each machine while GPT-J trains on 10 billion tokens, in 16 bits",
            seen: fine_tuned() / 1e12,
            quoted: 915.0,
            off: 1.0,
            unit: "TB",
        },
        Figure {
            metric: "4 replicas of 4 stages of 4 tensor ranks",
            seen: f64::from(mesh.size()),
            quoted: 64.0,
            off: 0.0,
            unit: "ranks",
        },
        Figure {
            metric: "Megatron, 15.1 PFLOP/s on 512 devices of 39 TFLOP/s: share of linear scaling",
            seen: 100.0 * 15.1e15 / (512.0 * 39e12),
            quoted: 76.0,
            off: 0.5,
            unit: "%",
        },
        Figure {
            metric: "Megatron, 8 tensor ranks over links fitted to the quoted figure: share of linear scaling",
            seen: 100.0 * megatron(),
            quoted: 77.0,
            off: 1.0,
            unit: "%",
        },
        Figure {
            metric: "full recompute: share of a step's operations",
            seen: 100.0 * ActivationMethod::Full.repeated(&gpt3),
            quoted: 33.3,
            off: 0.5,
            unit: "%",
        },
    ];
    for Figure { metric, seen, quoted, off, unit } in rows {
        report.row(metric, seen, unit, Threshold::None)?;
        report.row(
            &format!("{metric}: difference from the quoted {quoted}"),
            (seen - quoted).abs(),
            unit,
            Threshold::AtMost(off + 1e-9),
        )?;
    }
    Ok(())
}

/// Returns the bytes that each machine sends while it trains on 10 billion tokens: steps of 262,144 tokens,
/// each with an average over a ring, which sends two times the gradients of 6 billion parameters in 16 bits.
fn fine_tuned() -> f64 {
    let steps = 10e9 / 262_144.0;
    steps * 2.0 * 6e9 * 2.0
}

/// Returns the fraction of linear speed-up: 8.3 billion parameters on 8 V100, 72 layers of 3,072, 8 sequences
/// of 1,024 tokens, 39 TFLOP/s each. Each layer has two all-reduces forward and two backward, over links of
/// 61.5 GB/s. That rate was fitted to the published figure.
fn megatron() -> f64 {
    let model = Transformer { layers: 72, hidden: 3072, heads: 32, sequence: 1024, vocabulary: 51_200 };
    let (ranks, batch) = (8.0, 8);
    let compute = model.operations(batch) as f64 / (ranks * 39e12);
    let message = (batch * model.sequence * model.hidden * 2) as f64;
    let exchanged = 4.0 * model.layers as f64 * 2.0 * (ranks - 1.0) / ranks * message / 61.5e9;
    compute / (compute + exchanged)
}
