//! Measures what matrix products in 16 bits cost in loss.

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Lab, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "precision",
    claim: "training with matrix products of bf16 or f16 operands ends within 1% of f32's loss",
    source: "Micikevicius et al. 2018, Mixed Precision Training",
    seed: 1337,
    run,
};

/// Largest allowed increase of losses over that of the f32 arm, in percent.
const MOST: f64 = 1.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    let judged = if options.quick { Threshold::None } else { Threshold::AtMost(MOST) };
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let bf16 = lab.compare(report, &arms::BF16, &f32, judged)?.gap(&f32);
    let f16 = lab.compare(report, &arms::F16_PRODUCTS, &f32, judged)?.gap(&f32);
    Published {
        what: "loss with matrix products in 16 bits above f32's",
        paper: "the same accuracy as f32 in all models, with f32 copies of the weights and scaled losses",
        ours: format!("bf16 {:+.3} %, f16 {:+.3} %", bf16.mean, f16.mean),
        setting: lab.setting().command(&arms::BF16),
        holds: bf16.mean.max(f16.mean) <= MOST,
        note: "",
    }
    .record(report);
    Ok(())
}
