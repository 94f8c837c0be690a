//! An optimizer whose state is on disk: memory and time of GPT-2 with it, runs that are killed at any moment,
//! and disks that are too small or fail within a step.

mod failures;
mod kills;
mod large;

use anyhow::Result;

use crate::harness::{Bench, Options, Report};

pub(crate) const BENCH: Bench = Bench {
    name: "infinity",
    claim: "with the optimizer's state on disk, GPT-2 124M with AdamW trains in 1.2 GiB, a run that is killed \
            at any moment continues from a whole step with the same bits, a disk without room for two generations is \
            refused before the first step, and one that fails within a step costs that step alone",
    source: "Rajbhandari et al. 2021, ZeRO-Infinity; shared/facts/larger-than-a-machine.md 4",
    seed: 1337,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    kills::run(report, if options.quick { 5 } else { 20 })?;
    failures::run(report, options.quick)?;
    if options.quick { Ok(()) } else { large::run(report) }
}
