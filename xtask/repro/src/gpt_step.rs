//! Compares a training step of GPT-2 models with the machine's limits and with other systems.

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{bandwidth, fma_peak};
use crate::peers::Peers;
use crate::training_step::{Case, Measured, measured};

pub(crate) const BENCH: Bench = Bench {
    name: "gpt-step",
    claim: "a training step (forward, loss, backward, clip, AdamW) is faster than PyTorch's, burn's and \
            candle's, and needs less memory than PyTorch's",
    source: "Karpathy, nanoGPT; Vaswani et al. 2017",
    seed: 1337,
    run,
};

/// Cases, with the least ratio of our tokens/s to PyTorch's.
const MARKS: [(&str, f64); 3] = [("nano", 1.5), ("baby", 1.05), ("gpt2-124M", 1.15)];

/// Least number of bytes that a step moves for each parameter: 11 f32. Forward and backward read the parameter;
/// clipping reads the gradient; AdamW reads the parameter, the gradient and both moments; the gradient, both
/// moments and the parameter are written.
const BYTES_PER_PARAMETER: f64 = 44.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let bandwidths = [bandwidth(1), bandwidth(2)];
    // A step of GPT-2 takes seconds, so quick runs skip it.
    let marks = if options.quick { &MARKS[..2] } else { &MARKS[..] };
    let cases: Vec<_> = marks.iter().map(|(name, _)| Case::named(name)).collect::<Result<_>>()?;
    let (all, peers) = measured(report, options, &cases)?;
    for found in all {
        let Measured { case, threads, name, model, tokens_per_s, peak, .. } = &found;
        let tokens = (case.batch * model.context) as f64;
        let least = tokens * model.flops_per_token(model.context) as f64 / (peak * 1e9)
            + BYTES_PER_PARAMETER * model.parameters() as f64 / (bandwidths[threads - 1] * 1e9);
        let of_roofline = least * tokens_per_s / tokens;
        report.row(&format!("{name}: speed, share of the roofline"), of_roofline, "", Threshold::None)?;
        let mark = MARKS
            .iter()
            .find(|(name, _)| *name == case.name)
            .map_or(Threshold::None, |m| Threshold::AtLeast(m.1));
        against(report, &peers, &found, mark)?;
    }
    for (threads, bandwidth) in [1, 2].into_iter().zip(bandwidths) {
        report.row(&format!("FMA peak, {threads} threads"), fma_peak(threads), "GFLOP/s", Threshold::None)?;
        report.row(&format!("memory bandwidth, {threads} threads"), bandwidth, "GB/s", Threshold::None)?;
    }
    Ok(())
}

/// Adds the rows that compare one setting with other systems.
fn against(report: &mut Report<'_>, peers: &Peers, found: &Measured, torch: Threshold) -> Result<()> {
    for (system, theirs, mark) in [
        ("PyTorch", found.torch(peers), torch),
        ("burn", found.theirs(peers, "burn_flex_step"), Threshold::AtLeast(2.0)),
        ("candle", found.theirs(peers, "candle_step"), Threshold::AtLeast(2.0)),
    ] {
        let metric = format!("{}: speed relative to {system}'s", found.name);
        report.ratio(&metric, found.tokens_per_s, theirs, mark)?;
    }
    found.memory_row(report, peers)
}
