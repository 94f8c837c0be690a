//! Measures the bytes and the loss of training with gradients as products of low rank (`PowerSGD`).

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Lab, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "powersgd",
    claim: "training with gradients as products of rank 4 and error feedback ends near f32's loss",
    source: "Vogels et al. 2019, PowerSGD",
    seed: 1337,
    run,
};

/// Largest allowed increase of the loss with rank 4 over that of the f32 arm, in percent: the original target
/// for methods with feedback.
const MOST: f64 = 2.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    let judged = if options.quick { Threshold::None } else { Threshold::AtMost(MOST) };
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let four = lab.compare(report, &arms::POWER_SGD_4, &f32, judged)?;
    let one = lab.compare(report, &arms::POWER_SGD_1, &f32, Threshold::None)?;
    let (gap, ratio) = (four.gap(&f32), f32.payload() / four.payload());
    Published {
        what: "loss and bytes with rank 4",
        paper: "perplexity 91, the same as without compression, at 64 MB instead of 7730 MB per epoch (LSTM \
                on WikiText-2)",
        ours: format!(
            "{:+.2} % (standard deviation {:.2} %) at {ratio:.1} times fewer bytes; rank 1 {:+.2} %",
            gap.mean,
            gap.sigma,
            one.gap(&f32).mean
        ),
        setting: lab.setting().command(&arms::POWER_SGD_4),
        holds: gap.mean <= MOST,
        note: "matrices of 32 rows leave little to gain; the optimizer is AdamW, in the paper SGD with \
               momentum",
    }
    .record(report);
    Ok(())
}
