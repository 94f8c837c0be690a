//! Momentum in one bit after a warm-up: bytes and loss.

use anyhow::Result;

use crate::harness::{Bench, Mark, Options, Report};
use crate::lab::{Lab, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "onebit",
    claim: "1-bit Adam ends near Adam's loss with a fifth of the bytes, warm-up included",
    source: "Tang et al. 2021, 1-bit Adam",
    seed: 1337,
    run,
};

/// The most that the loss may be above f32's, in percent: the mark of the issue.
const MOST: f64 = 1.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    let judged = if options.quick { Mark::None } else { Mark::AtMost(MOST) };
    lab.compare(report, &arms::F32, &f32, Mark::None)?;
    let onebit = lab.compare(report, &arms::ONEBIT_ADAM, &f32, judged)?;
    let qadam = lab.compare(report, &arms::QADAM, &f32, judged)?;
    let zero_one = lab.compare(report, &arms::ZERO_ONE_ADAM, &f32, Mark::None)?;
    let control = lab.compare(report, &arms::SIGN, &f32, Mark::None)?;
    let (gap, ratio) = (onebit.gap(&f32), f32.payload() / onebit.payload());
    Published {
        what: "loss and volume of 1-bit Adam with a warm-up of 15 %",
        paper: "the loss of Adam at 5 times less volume than in 16 bits (BERT, up to 256 GPUs)",
        ours: format!(
            "{:+.2} % (standard deviation {:.2} %) at {ratio:.2} times less than in f32; QAdam {:+.2} %; 1-bit \
             gradients into AdamW {:+.2} %",
            gap.mean,
            gap.sigma,
            qadam.gap(&f32).mean,
            control.gap(&f32).mean
        ),
        setting: lab.setting().command(&arms::ONEBIT_ADAM),
        holds: gap.mean <= MOST,
        note: "the warm-up travels as f32 here and in 16 bits there: 1 / (0.15 + 0.85 / 32) = 5.66 against \
               1 / (0.15 + 0.85 / 16) = 4.92",
    }
    .record(report);
    Ok(())
}
