//! Measures whole training steps of a model on the cpu backend: speed and memory. Each setting has its own
//! process, so that their peaks of memory are separate. Other systems are measured in turn with ours
//! (`--beside`): `training_step/torch_step.py` does that for PyTorch.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use farflung::measure::{Trial, measure};
use farflung::tensor::Device;
use farflung::zoo::{ModelSpec, gpt2};
use serde_json::{Value, json};

use crate::harness::{Options, Report, Threshold};
use crate::machine::{fma_peak, median, resident};
use crate::peers::Peers;

/// First argument of this program when it trains one case.
pub(crate) const CHILD: &str = "--one-training-step";

/// A model and its batch, the same as in the scripts of the other systems.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) model: fn() -> Result<ModelSpec>,
    pub(crate) batch: usize,
    /// The name under which PyTorch's script reports its figures.
    torch: &'static str,
}

/// The cases, by name.
const CASES: [Case; 4] = [
    Case { name: "nano", model: || Ok(gpt2(4, 4, 128, 64, 256)?), batch: 12, torch: "gpt_step" },
    Case { name: "baby", model: || Ok(gpt2(6, 6, 384, 256, 256)?), batch: 8, torch: "gpt_step" },
    Case { name: "gpt2-124M", model: || Ok(gpt2(12, 12, 768, 256, 50257)?), batch: 1, torch: "gpt_step" },
    Case { name: "llama-124m", model: llama, batch: 1, torch: "llama_step" },
];

/// The preset with the context of the other cases.
fn llama() -> Result<ModelSpec> {
    Ok(ModelSpec { context: 256, ..ModelSpec::preset("llama-124m").context("there is no such preset")? })
}

impl Case {
    /// Returns the case with this name.
    pub(crate) fn named(name: &str) -> Result<&'static Self> {
        CASES.iter().find(|case| case.name == name).with_context(|| format!("there is no case {name}"))
    }
}

/// Figures of a case with some threads.
pub(crate) struct Measured {
    pub(crate) case: &'static Case,
    pub(crate) threads: usize,
    /// Case and threads, for rows.
    pub(crate) name: String,
    pub(crate) model: ModelSpec,
    pub(crate) tokens_per_s: f64,
    /// Operations per second, in GFLOP/s.
    pub(crate) gflops: f64,
    /// Rate of fused multiply-adds that the threads reached in the same minutes, in GFLOP/s.
    pub(crate) peak: f64,
    /// Memory for the model and its step, in MiB.
    pub(crate) memory: Option<f64>,
}

/// Measures each case with one thread and with two, in turn with the command of `--beside`, and adds rows with
/// the figures. Returns them, and those of other systems.
pub(crate) fn measured(
    report: &mut Report<'_>,
    options: &Options,
    cases: &[&'static Case],
) -> Result<(Vec<Measured>, Peers)> {
    // A shared machine is fast in one minute and slow in the next, so every setting is measured several times,
    // minutes apart.
    let (rounds, seconds) = if options.quick { (1, 0.7) } else { (3, 5.0) };
    let settings: Vec<_> = cases.iter().flat_map(|&case| [(case, 1), (case, 2)]).collect();
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
    let mut all = Vec::new();
    for ((case, threads), turns) in settings.into_iter().zip(turns) {
        let found = Measured::of(case, threads, &turns)?;
        let Measured { name, tokens_per_s, gflops, peak, memory, .. } = &found;
        report.row(&format!("{name}: speed"), *tokens_per_s, "tok/s", Threshold::None)?;
        report.row(&format!("{name}: arithmetic"), *gflops, "GFLOP/s", Threshold::None)?;
        let share = format!("{name}: arithmetic, share of the FMA peak");
        report.row(&share, gflops / peak, "", Threshold::None)?;
        if let Some(memory) = memory {
            report.row(&format!("{name}: memory for the model"), *memory, "MiB", Threshold::None)?;
        }
        all.push(found);
    }
    Ok((all, peers))
}

impl Measured {
    fn of(case: &'static Case, threads: usize, turns: &[(Value, f64)]) -> Result<Self> {
        let model = (case.model)()?;
        let figures = |name: &str| -> Option<Vec<f64>> {
            turns.iter().map(|(found, _)| found[name].as_f64()).collect()
        };
        let tokens_per_s = median(figures("tok_s").context("the figures have no tok_s")?);
        Ok(Self {
            case,
            threads,
            name: format!("{}, {threads} thread{}", case.name, if threads == 1 { "" } else { "s" }),
            tokens_per_s,
            gflops: tokens_per_s * model.flops_per_token(model.context) as f64 / 1e9,
            peak: median(turns.iter().map(|(_, peak)| *peak).collect()),
            memory: figures("memory").map(|bytes| median(bytes) / f64::from(1 << 20)),
            model,
        })
    }

    /// Returns another system's tokens per second, in the best of its modes.
    pub(crate) fn theirs(&self, peers: &Peers, bench: &str) -> Option<f64> {
        let threads = self.threads.to_string();
        peers.best(bench, &[("config", self.case.name), ("threads", &threads)], "tok_s")
    }

    /// Returns PyTorch's tokens per second.
    pub(crate) fn torch(&self, peers: &Peers) -> Option<f64> {
        self.theirs(peers, self.case.torch)
    }

    /// Adds a row that compares our memory with PyTorch's, in the better of its modes. Theirs is the peak minus
    /// the memory after the model was made, plus the model's parameters, which that memory includes.
    pub(crate) fn memory_row(&self, report: &mut Report<'_>, peers: &Peers) -> Result<()> {
        let threads = self.threads.to_string();
        let own = |mode| {
            let keys = [("config", self.case.name), ("threads", &threads), ("mode", mode)];
            let figure = |field| peers.least(self.case.torch, &keys, field);
            let parameters = self.model.parameters() as f64 * 4.0 / f64::from(1 << 20);
            Some(figure("peak_rss_mb")? - figure("rss_after_init_mb")? + parameters)
        };
        let theirs = ["eager", "compile"].into_iter().filter_map(own).min_by(f64::total_cmp);
        let Some(memory) = self.memory else { return Ok(()) };
        let metric = format!("{}: memory relative to PyTorch's", self.name);
        report.ratio(&metric, memory, theirs, Threshold::AtMost(1.0))
    }
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
    let case = Case::named(name)?;
    let (threads, seconds, seed): (usize, f64, u64) = (threads.parse()?, seconds.parse()?, seed.parse()?);
    let model = (case.model)()?;
    let before = resident();
    let time = Duration::from_secs_f64(seconds);
    let trial = Trial { name: case.name, model, batch: case.batch, time, seed };
    let measured = measure(&Device::cpu(threads)?, &trial)?;
    let memory = before.zip(resident()).map(|((before, _), (_, peak))| peak.saturating_sub(before));
    let figures = json!({ "tok_s": measured.tokens_per_s, "memory": memory, "loss": measured.loss });
    writeln!(out, "{figures}").context("failed to print")
}
