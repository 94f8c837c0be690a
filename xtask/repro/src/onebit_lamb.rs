//! Measures the bytes and the loss of 1-bit LAMB, which sends LAMB's momentum in one bit after a warm-up.

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Lab, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "onebit-lamb",
    claim: "1-bit LAMB ends near LAMB's loss with a fifth of the bytes, warm-up included",
    source: "Li et al. 2021, 1-bit LAMB",
    seed: 1337,
    run,
};

/// Largest increase of the loss over that of LAMB, in percent, with which the claim holds.
const MOST: f64 = 1.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let lamb = lab.compare(report, &arms::LAMB, &f32, Threshold::None)?;
    let onebit_lamb = lab.compare(report, &arms::ONEBIT_LAMB, &f32, Threshold::None)?;
    let above = onebit_lamb.gap(&lamb);
    report.row("1-bit LAMB: loss above LAMB's", above.mean, "%", Threshold::None)?;
    Published {
        what: "loss of 1-bit LAMB above LAMB's",
        paper: "LAMB's loss at up to 4.6 times less volume (BERT-Large)",
        ours: format!(
            "{:+.2} % (standard deviation {:.2} %) at {:.2} times fewer bytes than in f32",
            above.mean,
            above.sigma,
            f32.payload() / onebit_lamb.payload()
        ),
        setting: lab.setting().command(&arms::ONEBIT_LAMB),
        holds: above.mean <= MOST,
        note: "the model is small, and neither optimizer is tuned for it: the learning rate is AdamW's",
    }
    .record(report);
    Ok(())
}
