//! Controls for `DeMo`: training without its transform, and without its momentum.

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Lab, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "demo-parts",
    claim: "DeMo ends at a lower loss than without its transform, and at a far lower loss than without its \
            momentum",
    source: "Peng et al. 2024, DeMo",
    seed: 1337,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let many = lab.compare(report, &arms::DEMO, &f32, Threshold::None)?;
    let plain = lab.compare(report, &arms::DEMO_PLAIN, &f32, Threshold::None)?;
    let alone = lab.compare(report, &arms::DEMO_ALONE, &f32, Threshold::None)?;
    let better = plain.gap(&f32).mean - many.gap(&f32).mean;
    report.row(
        "DeMo k=32: how much better than without the transform",
        better,
        "%",
        judged_above(options),
    )?;
    let better = alone.gap(&f32).mean - many.gap(&f32).mean;
    report.row("DeMo k=32: how much better than without momentum", better, "%", judged_above(options))?;
    Ok(())
}

fn judged_above(options: &Options) -> Threshold {
    if options.quick { Threshold::None } else { Threshold::AtLeast(0.0) }
}
