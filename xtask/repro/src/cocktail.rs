//! Compares `CocktailSGD` with averages in f32: it applies a rolling mask, then top-k within the mask, sends
//! 4 bits per value, and applies the mean one step late.

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{LINKS, Lab, Outcome, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "cocktail",
    claim: "CocktailSGD continues from trained weights with 117 times fewer bytes, and its communication \
            takes no additional time",
    source: "Wang et al. 2023, CocktailSGD",
    seed: 1337,
    run,
};

/// The original targets: the largest allowed increase of the loss over that of the f32 arm, in percent, and the
/// least ratio of bytes.
const MOST: f64 = 2.0;
const LEAST: f64 = 117.0;
/// The bounds used instead of the targets, measured over three seeds: a loss 9.47 % higher, plus two standard
/// deviations of 0.28, and a ratio of 100.8, because a third of each message is headers and scales. The bench
/// `cocktail-ratio` has the ratio for large models. The record says that the claim does not hold here.
const MEASURED: f64 = 10.1;
const MEASURED_RATIO: f64 = 100.0;
/// The longest step, relative to one without communication: the paper's slowdown at 500 Mbit/s.
const SLOWDOWN: f64 = 1.2;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    let judged = |mark| if options.quick { Threshold::None } else { mark };
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let cocktail = lab.compare(report, &arms::COCKTAIL, &f32, judged(Threshold::AtMost(MEASURED)))?;
    let int4 = lab.compare(report, &arms::COCKTAIL_INT4, &f32, Threshold::None)?;
    let late = lab.compare(report, &arms::COCKTAIL_F32, &f32, Threshold::None)?;
    let top = lab.compare(report, &arms::TOP_TWO, &f32, Threshold::None)?;
    let mask = lab.compare(report, &arms::MASK, &f32, Threshold::None)?;
    let ratio = f32.payload() / cocktail.payload();
    report.row(
        "CocktailSGD: payload, times smaller than f32's",
        ratio,
        "x",
        judged(Threshold::AtLeast(MEASURED_RATIO)),
    )?;
    let link = LINKS[0];
    let alone = lab.step_time(report, &arms::ALONE, link.parse()?)?;
    let slowdown = lab.step_time(report, &arms::COCKTAIL, link.parse()?)? / alone;
    report.row(
        "CocktailSGD: step time relative to a step without communication, at 100 Mbit/s",
        slowdown,
        "x",
        Threshold::AtMost(SLOWDOWN),
    )?;
    let gap = |outcome: &Outcome| outcome.gap(&f32).mean;
    Published {
        what: "loss of fine-tuning with CocktailSGD compared with averaging gradients at each step",
        paper: "no higher loss at 117 times fewer bytes (up to 20B parameters)",
        ours: format!(
            "{:+.2} % at {ratio:.0} times fewer bytes; {:+.2} % in 4 bits without selections, {:+.2} % \
             without compression, {:+.2} % with the largest elements only, {:+.2} % with elements in turn \
             only",
            gap(&cocktail),
            gap(&int4),
            gap(&late),
            gap(&top),
            gap(&mask)
        ),
        setting: lab.setting().command(&arms::COCKTAIL),
        holds: gap(&cocktail) <= MOST && ratio >= LEAST,
        note: "even without compression, averages that arrive one step late cost 4 % here, because each \
               worker's AdamW gets the gradient of its own 256 tokens per step, not the mean gradient. With \
               34 thousand parameters, a third of each message is headers and scales. What is not sent stays \
               in residuals here, and in the worker's parameters in the paper",
    }
    .record(report);
    Published {
        what: "slowdown at 100 Mbit/s compared with no communication",
        paper: "at most 1.2 at 500 Mbit/s",
        ours: format!("{slowdown:.3}"),
        setting: lab.setting().command(&arms::COCKTAIL),
        holds: slowdown <= SLOWDOWN,
        note: "on the virtual clock, with the ratio of bytes to operations of 256 thousand tokens per step \
               at 50 TFLOP/s",
    }
    .record(report);
    Ok(())
}
