//! Measures a whole training step on the cpu backend: speed and memory, compared with the machine's limits and
//! with other systems.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use farflung::measure::{Trial, measure};
use farflung::tensor::Device;
use farflung::zoo::{ModelSpec, gpt2};
use serde_json::{Value, json};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{bandwidth, fma_peak, median, resident};
use crate::peers::Peers;

pub(crate) const BENCH: Bench = Bench {
    name: "gpt-step",
    claim: "a training step (forward, loss, backward, clip, AdamW) is faster than PyTorch's, burn's and \
            candle's, and needs less memory than PyTorch's",
    source: "Karpathy, nanoGPT; Vaswani et al. 2017",
    seed: 1337,
    run,
};

/// First argument of this program when it trains one setting. Each setting has its own process, so that their
/// peaks of memory are separate.
pub(crate) const CHILD: &str = "--one-gpt-step";

/// A model and its batch, the same as in the scripts of the other systems.
struct Case {
    name: &'static str,
    /// Shape of the model: layers, heads, width, context, vocabulary.
    shape: [usize; 5],
    batch: usize,
    /// The least ratio of our tokens/s to PyTorch's.
    mark: f64,
}

const CASES: [Case; 3] = [
    Case { name: "nano", shape: [4, 4, 128, 64, 256], batch: 12, mark: 1.5 },
    Case { name: "baby", shape: [6, 6, 384, 256, 256], batch: 8, mark: 1.05 },
    Case { name: "gpt2-124M", shape: [12, 12, 768, 256, 50257], batch: 1, mark: 1.15 },
];

impl Case {
    fn model(&self) -> Result<ModelSpec> {
        let [layers, heads, dim, context, vocab] = self.shape;
        Ok(gpt2(layers, heads, dim, context, vocab)?)
    }
}

/// Least number of bytes that a step moves for each parameter: 11 f32. Forward and backward read the parameter;
/// clipping reads the gradient; AdamW reads the parameter, the gradient and both moments; the gradient, both
/// moments and the parameter are written.
const BYTES_PER_PARAMETER: f64 = 44.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    // A shared machine is fast in one minute and slow in the next, so every setting is measured several times,
    // minutes apart.
    let (rounds, seconds) = if options.quick { (1, 0.7) } else { (3, 5.0) };
    let bandwidths = [bandwidth(1), bandwidth(2)];
    // A step of GPT-2 takes seconds, so quick runs skip it.
    let cases = if options.quick { &CASES[..2] } else { &CASES[..] };
    let settings: Vec<(&Case, usize)> = cases.iter().flat_map(|case| [(case, 1), (case, 2)]).collect();
    let mut turns = vec![Vec::new(); settings.len()];
    let mut peers = options.peers.clone();
    for _ in 0..rounds {
        for (&(case, threads), turns) in settings.iter().zip(&mut turns) {
            if let Some(command) = &options.beside {
                peers.measure(command, &[("CONFIG", case.name), ("THREADS", &threads.to_string())])?;
            }
            // The peak is the better of one measurement before and one after.
            let peak = fma_peak(threads);
            let found = in_child(case, threads, seconds, report.seed())?;
            turns.push((found, peak.max(fma_peak(threads))));
        }
    }
    for ((case, threads), turns) in settings.into_iter().zip(turns) {
        let model = case.model()?;
        let peak = median(turns.iter().map(|(_, peak)| *peak).collect());
        let figures = |name: &str| -> Option<Vec<f64>> {
            turns.iter().map(|(found, _)| found[name].as_f64()).collect()
        };

        let name = format!("{}, {threads} thread{}", case.name, if threads == 1 { "" } else { "s" });
        let tokens_per_s = median(figures("tok_s").context("the figures have no tok_s")?);
        let flops = model.flops_per_token(model.context) as f64;
        let gflops = tokens_per_s * flops / 1e9;
        let tokens = (case.batch * model.context) as f64;
        let least = tokens * flops / (peak * 1e9)
            + BYTES_PER_PARAMETER * model.parameters() as f64 / (bandwidths[threads - 1] * 1e9);
        report.row(&format!("{name}: speed"), tokens_per_s, "tok/s", Threshold::None)?;
        report.row(&format!("{name}: arithmetic"), gflops, "GFLOP/s", Threshold::None)?;
        report.row(
            &format!("{name}: arithmetic, share of the FMA peak"),
            gflops / peak,
            "",
            Threshold::None,
        )?;
        let of_roofline = least * tokens_per_s / tokens;
        report.row(&format!("{name}: speed, share of the roofline"), of_roofline, "", Threshold::None)?;
        let memory = figures("memory").map(|bytes| median(bytes) / f64::from(1 << 20));
        if let Some(memory) = memory {
            report.row(&format!("{name}: memory for the model"), memory, "MiB", Threshold::None)?;
        }
        against(report, &peers, case, threads, &name, (tokens_per_s, memory), model.parameters())?;
    }
    for (threads, bandwidth) in [1, 2].into_iter().zip(bandwidths) {
        report.row(&format!("FMA peak, {threads} threads"), fma_peak(threads), "GFLOP/s", Threshold::None)?;
        report.row(&format!("memory bandwidth, {threads} threads"), bandwidth, "GB/s", Threshold::None)?;
    }
    Ok(())
}

/// Adds the rows that compare one setting with other systems.
fn against(
    report: &mut Report<'_>,
    peers: &Peers,
    case: &Case,
    threads: usize,
    name: &str,
    (tokens_per_s, memory): (f64, Option<f64>),
    parameters: u64,
) -> Result<()> {
    let threads = threads.to_string();
    let keys = [("config", case.name), ("threads", &threads)];
    let best = |bench: &str| peers.best(bench, &keys, "tok_s");
    let torch = best("gpt_step");
    report.ratio(
        &format!("{name}: speed relative to PyTorch's"),
        tokens_per_s,
        torch,
        Threshold::AtLeast(case.mark),
    )?;
    let burn = best("burn_flex_step");
    report.ratio(
        &format!("{name}: speed relative to burn's"),
        tokens_per_s,
        burn,
        Threshold::AtLeast(2.0),
    )?;
    let candle = best("candle_step");
    report.ratio(
        &format!("{name}: speed relative to candle's"),
        tokens_per_s,
        candle,
        Threshold::AtLeast(2.0),
    )?;
    let Some(memory) = memory else { return Ok(()) };
    let theirs = torch_memory(peers, &keys, parameters);
    report.ratio(&format!("{name}: memory relative to PyTorch's"), memory, theirs, Threshold::AtMost(1.0))
}

/// Returns PyTorch's memory for the model and a step in MiB, in the better of its modes. It is the peak minus
/// the memory after the model was made, plus the model's parameters, which that memory includes.
fn torch_memory(peers: &Peers, keys: &[(&str, &str)], parameters: u64) -> Option<f64> {
    let own = |mode| {
        let keys: Vec<_> = keys.iter().copied().chain([("mode", mode)]).collect();
        let figure = |field| peers.least("gpt_step", &keys, field);
        let model = parameters as f64 * 4.0 / f64::from(1 << 20);
        Some(figure("peak_rss_mb")? - figure("rss_after_init_mb")? + model)
    };
    ["eager", "compile"].into_iter().filter_map(own).min_by(f64::total_cmp)
}

/// Runs [`child`] in a separate process.
fn in_child(case: &Case, threads: usize, seconds: f64, seed: u64) -> Result<Value> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let mut command = Command::new(program);
    command.args([CHILD, case.name, &threads.to_string(), &seconds.to_string(), &seed.to_string()]);
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.context("failed to start this program again")?;
    ensure!(output.status.success(), "training {} failed: {}", case.name, output.status);
    serde_json::from_slice(&output.stdout).context("failed to parse a child's figures")
}

/// Trains one case for some seconds and prints its figures. The arguments are name, threads, seconds and seed.
pub(crate) fn child(args: &[String], out: &mut dyn Write) -> Result<()> {
    let [name, threads, seconds, seed] = args else { bail!("expected four arguments") };
    let case = CASES.iter().find(|c| c.name == name).context("no such model")?;
    let (threads, seconds, seed): (usize, f64, u64) = (threads.parse()?, seconds.parse()?, seed.parse()?);
    let model = case.model()?;
    let before = resident();
    let time = Duration::from_secs_f64(seconds);
    let trial = Trial { name: case.name, model, batch: case.batch, time, seed };
    let measured = measure(&Device::cpu(threads)?, &trial)?;
    let memory = before.zip(resident()).map(|((before, _), (_, peak))| peak.saturating_sub(before));
    let figures = json!({ "tok_s": measured.tokens_per_s, "memory": memory, "loss": measured.loss });
    writeln!(out, "{figures}").context("failed to print")
}
