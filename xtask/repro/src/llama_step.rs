//! Compares a training step of a LLaMA model with one of a GPT-2 of the same size, and with PyTorch.

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::training_step::{Case, Measured, measured};

pub(crate) const BENCH: Bench = Bench {
    name: "llama-step",
    claim: "a training step of a LLaMA model is ahead of PyTorch's by at least 0.9 of the lead that one of \
            gpt2-124M has, and needs less memory than PyTorch's",
    source: "Touvron et al. 2023; the script training_step/torch_step.py",
    seed: 1337,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let cases = [Case::named("gpt2-124M")?, Case::named("llama-124m")?];
    let (all, peers) = measured(report, options, &cases)?;
    let (gpts, llamas) = all.split_at(all.len() / 2);
    for (gpt, llama) in gpts.iter().zip(llamas) {
        let name = &llama.name;
        let metric = format!("{name}: arithmetic relative to gpt2-124M's");
        report.row(&metric, llama.gflops / gpt.gflops, "x", Threshold::None)?;
        let lead = |of: &Measured| Some(of.tokens_per_s / of.torch(&peers)?);
        for of in [gpt, llama] {
            let metric = format!("{}: speed relative to PyTorch's", of.name);
            report.ratio(&metric, of.tokens_per_s, of.torch(&peers), Threshold::None)?;
            of.memory_row(report, &peers)?;
        }
        let metric = format!("{name}: speed relative to PyTorch's, relative to gpt2-124M's");
        // `ratio` takes our figure and, where they were measured, theirs: the speed that keeps GPT-2's lead.
        let equal = lead(gpt).zip(llama.torch(&peers)).map(|(lead, torch)| lead * torch);
        report.ratio(&metric, llama.tokens_per_s, equal, Threshold::AtLeast(0.9))?;
    }
    Ok(())
}
