//! Compares the memory of training with published figures on activations, state, parameters and operations.
//! Also compares the predicted memory of ranks in our own runs with what they hold.

mod runs;

use anyhow::Result;
use farflung::parallel::memory::{ActivationMethod, BytesPerParameter, StateBytes, Transformer, ZeroStage};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "memory-table",
    claim: "activations per method, state per ZeRO stage, parameters and operations equal those of the \
            published formulas, and the memory that a rank of our trainer holds is what was predicted for \
            its plan",
    source: "Korthikanti et al. 2022, table 2; Rajbhandari et al. 2020; Narayanan et al. 2021",
    seed: 0,
    run,
};

const GIB: f64 = (1_u64 << 30) as f64;

/// A model, and the published GiB of the activations of all its layers for one sequence. The five figures: all
/// kept on one rank; all kept on eight tensor ranks; with sequence parallelism; with that and selective
/// recomputation; with full recomputation.
struct Published {
    name: &'static str,
    model: Transformer,
    gib: [f64; 5],
}

const fn model(layers: u64, hidden: u64, heads: u64) -> Transformer {
    Transformer { layers, hidden, heads, sequence: 2048, vocabulary: 50_257 }
}

const PUBLISHED: [Published; 3] = [
    Published { name: "22B", model: model(48, 6144, 64), gib: [79.1, 14.8, 9.89, 2.39, 1.13] },
    Published { name: "175B", model: model(96, 12_288, 96), gib: [256.5, 51.8, 32.1, 9.56, 4.5] },
    Published { name: "XL", model: model(24, 2048, 24), gib: [14.4, 2.63, 1.81, 0.398, 0.188] },
];

const METHODS: [(ActivationMethod, u64); 5] = [
    (ActivationMethod::Tensor, 1),
    (ActivationMethod::Tensor, 8),
    (ActivationMethod::Sequence, 8),
    (ActivationMethod::SequenceSelective, 8),
    (ActivationMethod::Full, 8),
];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    for Published { name, model, gib } in PUBLISHED {
        for ((method, tensor), expected) in METHODS.into_iter().zip(gib) {
            let bytes = method.bytes_per_layer(&model, 1, tensor) * model.layers as f64;
            // The tolerance is half of the last printed digit, or 0.01.
            let close = if expected >= 10.0 { 0.0501 } else { 0.01 };
            let off = (bytes / GIB - expected).abs();
            let row =
                format!("{name}, {} on {tensor} tensor ranks: difference from {expected} GiB", method.name());
            report.row(&row, off, "GiB", Threshold::AtMost(close))?;
        }
    }
    let data = 64;
    let state = [
        ("DeepSpeed, none", BytesPerParameter::DEEPSPEED, ZeroStage::None, 16.0),
        ("DeepSpeed, ZeRO-1", BytesPerParameter::DEEPSPEED, ZeroStage::Optimizer, 4.0 + 12.0 / 64.0),
        ("DeepSpeed, ZeRO-2", BytesPerParameter::DEEPSPEED, ZeroStage::Gradients, 2.0 + 14.0 / 64.0),
        ("DeepSpeed, ZeRO-3", BytesPerParameter::DEEPSPEED, ZeroStage::Weights, 16.0 / 64.0),
        ("Megatron, none", BytesPerParameter::MEGATRON, ZeroStage::None, 18.0),
        (
            "Megatron, distributed optimizer",
            BytesPerParameter::MEGATRON,
            ZeroStage::Optimizer,
            6.0 + 12.0 / 64.0,
        ),
    ];
    for (name, each, stage, expected) in state {
        let seen = StateBytes::new(1.0, each, stage, data, false).total();
        let row = format!("{name}, 64 replicas: difference from {expected} B per parameter");
        report.row(&row, (seen - expected).abs(), "B", Threshold::AtMost(1e-9))?;
    }
    let gpt3 = model(96, 12_288, 96);
    let off = gpt3.parameters().abs_diff(174_604_259_328) as f64;
    report.row("GPT-3: difference from its number of parameters", off, "", Threshold::AtMost(0.0))?;
    let xl = model(24, 2048, 16);
    let off = (xl.operations(512) as f64 / 9.514e15 - 1.0).abs();
    report.row(
        "XL, 512 sequences: relative difference from 9.514e15 operations",
        off,
        "",
        Threshold::AtMost(1e-4),
    )?;
    let half = BytesPerParameter::DEEPSPEED.weights as f64 * 175e9;
    report.row("weights of 175e9 parameters in 16 bits", half / 1e9, "GB", Threshold::None)?;
    let adam = StateBytes::new(1e12, BytesPerParameter::DEEPSPEED, ZeroStage::None, 1, false).total();
    report.row("state of 1e12 parameters with Adam", adam / 1e12, "TB", Threshold::None)?;
    runs::run(report, options.quick)
}
