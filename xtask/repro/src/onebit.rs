//! Measures the bytes and the loss of 1-bit Adam and its relatives, which send momentum in few bits after a
//! warm-up.

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Lab, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "onebit",
    claim: "1-bit Adam ends near Adam's loss with a fifth of the bytes, warm-up included",
    source: "Tang et al. 2021, 1-bit Adam",
    seed: 1337,
    run,
};

/// Largest allowed increase of the loss over that of the f32 arm, in percent: the original target.
const MOST: f64 = 1.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    let judged = if options.quick { Threshold::None } else { Threshold::AtMost(MOST) };
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let onebit = lab.compare(report, &arms::ONEBIT_ADAM, &f32, judged)?;
    let qadam = lab.compare(report, &arms::QADAM, &f32, judged)?;
    let zero_one = lab.compare(report, &arms::ZERO_ONE_ADAM, &f32, Threshold::None)?;
    let control = lab.compare(report, &arms::SIGN, &f32, Threshold::None)?;
    let fewer = 100.0 * (1.0 - zero_one.payload() / onebit.payload());
    report.row("0/1 Adam: fewer bytes than 1-bit Adam", fewer, "%", Threshold::None)?;
    let (gap, ratio) = (onebit.gap(&f32), f32.payload() / onebit.payload());
    Published {
        what: "loss and volume of 1-bit Adam with a warm-up of 15 %",
        paper: "the loss of Adam at 5 times less volume than in 16 bits (BERT, up to 256 GPUs)",
        ours: format!(
            "{:+.2} % (standard deviation {:.2} %) at {ratio:.2} times fewer bytes than in f32; QAdam {:+.2} \
             %; 1-bit gradients into AdamW {:+.2} %",
            gap.mean,
            gap.sigma,
            qadam.gap(&f32).mean,
            control.gap(&f32).mean
        ),
        setting: lab.setting().command(&arms::ONEBIT_ADAM),
        holds: gap.mean <= MOST,
        note: "the warm-up is sent as f32 here and in 16 bits in the paper: 1 / (0.15 + 0.85 / 32) = 5.66 \
               against 1 / (0.15 + 0.85 / 16) = 4.92",
    }
    .record(report);
    Published {
        what: "volume of 0/1 Adam compared with 1-bit Adam",
        paper: "up to 87 % less volume than 1-bit Adam, and up to 54 % fewer rounds (BERT, GPT-2)",
        ours: format!("{fewer:.1} % less at a loss {:+.2} % above f32's", zero_one.gap(&f32).mean),
        setting: lab.setting().command(&arms::ZERO_ONE_ADAM),
        holds: fewer > 0.0 && zero_one.gap(&f32).mean <= MOST,
        note: "most of the saving is in the warm-up, which 1-bit Adam sends as f32; in 0/1 Adam the variance \
               changes in few of these steps",
    }
    .record(report);
    Ok(())
}
