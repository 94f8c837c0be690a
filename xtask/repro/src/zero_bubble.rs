//! Measures the gain of a split backward pass, and the memory of each schedule of this family.

use anyhow::{Context, Result};
use farflung::base::Nanos;
use farflung::parallel::pipeline::{Boundary, Method, PipelineCost, Settings, StageCost, peaks, simulate};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "zero-bubble",
    claim: "with equal F, I and W on 8 ranks and 24 microbatches, ZB-H2 trains 1.29 times as fast as 1F1B \
            over consecutive steps; the V schedules hold 1, a half and a third of the activations of 1F1B",
    source: "Qi et al. 2023, Zero Bubble Pipeline Parallelism; Qi et al. 2024, Pipeline Parallelism with \
             Controllable Memory",
    seed: 0,
    run,
};

/// Returns the longest span of a rank, and the most activations that a rank holds, in units of the activations
/// of a rank's whole share of the model.
fn figures(method: Method, p: u32, m: u32) -> Result<(f64, f64)> {
    let order = method.order(&Settings::new(p, m))?;
    let chunks = u64::from(order.placement().depth() / p);
    // One unit is divisible by two chunks, each of which does half of a rank's work.
    let time = Nanos(1_000_000 / chunks);
    let stage = StageCost { forward: time, input: time, weight: time, ..StageCost::UNIT };
    let cost = PipelineCost::uniform(&order, stage, Boundary::latency(Nanos::ZERO));
    let most = peaks(&order).into_iter().max().context("the order has no ranks")?;
    let span = simulate(&order, &cost)?.span();
    Ok((span.0 as f64 / 1e6, f64::from(most) / chunks as f64))
}

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    let (p, m) = (8, 24);
    let (plain, held) = figures(Method::OneFOneB, p, m)?;
    report.row("1f1b 8x24: span of a step", plain, "units", Threshold::None)?;
    report.row(
        "1f1b 8x24: difference from 3(m+p-1)",
        (plain - 93.0).abs(),
        "units",
        Threshold::AtMost(0.0),
    )?;
    let (h1, _) = figures(Method::ZbH1, p, m)?;
    report.row("zb-h1 8x24: speed relative to 1f1b", plain / h1, "x", Threshold::AtLeast(1.17))?;
    report.row(
        "zb-h1, the paper's best measured gain over 1f1b in equal memory",
        1.23,
        "x",
        Threshold::None,
    )?;
    let (h2, _) = figures(Method::ZbH2, p, m)?;
    report.row("zb-h2 8x24: speed relative to 1f1b", plain / h2, "x", Threshold::AtLeast(1.29))?;
    report.row(
        "zb-h2, the paper's best measured gain over 1f1b in twice the memory",
        1.31,
        "x",
        Threshold::None,
    )?;
    let (v, _) = figures(Method::ZbV, p, m)?;
    report.row("zbv 8x24: speed relative to 1f1b", plain / v, "x", Threshold::AtLeast(1.29))?;

    // Number of chunks of half a stage that the fullest rank holds, by closed form. The fractions in the paper
    // are the limits for many ranks.
    for p in [8_u32, 24] {
        let (_, whole) = figures(Method::OneFOneB, p, 4 * p)?;
        for (method, chunks) in [
            (Method::ZbH1, 2 * p),
            (Method::ZbH2, 2 * (2 * p - 1)),
            (Method::ZbV, 2 * p),
            (Method::VHalf, 2 * (p / 2) + 2),
            (Method::VOneFOneB, 2 * (2 * p / 3) + 2),
            (Method::VMin, 2 * ((p + 1) / 3) + 2),
        ] {
            let (_, held) = figures(method, p, 4 * p)?;
            let metric = format!("{method} on {p} ranks: memory relative to 1f1b");
            report.row(&metric, held / whole, "x", Threshold::None)?;
            let off = (held / whole - f64::from(chunks) / f64::from(2 * p)).abs();
            report.row(
                &format!("{metric}, difference from the closed form"),
                off,
                "x",
                Threshold::AtMost(1e-12),
            )?;
        }
    }
    report.row("1f1b 8x24: activations held", held, "", Threshold::AtMost(8.0))
}
