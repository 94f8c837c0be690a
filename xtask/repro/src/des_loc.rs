//! Measures the bytes and the loss of local Adam whose moments are averaged less often than its parameters.

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Lab, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "des-loc",
    claim: "DES-LOC sends half of what local Adam sends and ends near its loss",
    source: "Iacob et al. 2025, DES-LOC",
    seed: 1337,
    run,
};

/// Largest allowed increase of the loss over that of local Adam, in percent.
const MOST: f64 = 1.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    let judged = |mark| if options.quick { Threshold::None } else { mark };
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let params = lab.compare(report, &arms::LOCAL_10, &f32, Threshold::None)?;
    let local = lab.compare(report, &arms::LOCAL_ADAM, &f32, Threshold::None)?;
    let desynced = lab.compare(report, &arms::DES_LOC, &f32, Threshold::None)?;
    let above = desynced.gap(&local);
    report.row("DES-LOC: loss above local Adam's", above.mean, "%", judged(Threshold::AtMost(MOST)))?;
    let alone = params.gap(&local);
    report.row("moments that stay local: loss above local Adam's", alone.mean, "%", Threshold::None)?;
    let fewer = local.payload() / desynced.payload();
    report.row(
        "DES-LOC: payload, times smaller than local Adam's",
        fewer,
        "x",
        judged(Threshold::AtLeast(1.99)),
    )?;
    Published {
        what: "bytes and loss of DES-LOC compared with local Adam",
        paper: "2 times fewer bytes than local Adam at an equal perplexity (135M to 1.7B parameters)",
        ours: format!(
            "{fewer:.2} times fewer bytes at a loss {:+.2} % above (standard deviation {:.2} %); with \
             moments that stay local {:+.2} % at 3 times fewer",
            above.mean, above.sigma, alone.mean
        ),
        setting: lab.setting().command(&arms::DES_LOC),
        holds: above.mean <= MOST && fewer >= 1.99,
        note: "eight workers; for the loss compared with f32 see the table in docs/choosing.md",
    }
    .record(report);
    Published {
        what: "bytes of DES-LOC: times fewer than averaging gradients at each step",
        paper: "170 with parameters every 256 steps",
        ours: format!("{:.2} with parameters every 10 steps", f32.payload() / desynced.payload()),
        setting: lab.setting().command(&arms::DES_LOC),
        holds: (f32.payload() / desynced.payload() / (10.0 / 1.5) - 1.0).abs() <= 0.02,
        note: "both ratios are H / 1.5, and the mark is this formula",
    }
    .record(report);
    Ok(())
}
