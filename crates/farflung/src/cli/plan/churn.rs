//! `farflung plan churn`: simulates how much training is done while machines are lost and return, for each
//! recovery method.

use std::fmt::Write as _;
use std::path::PathBuf;

use farflung::Result;
use farflung::base::{Bandwidth, Nanos};
use farflung::model_shape;
use farflung::parallel::churn::{
    CheckpointedJob, POLICIES, PolicyRow, Recovery, Replay, StepTimes, Trace, alive, best_shape, copies_for,
    daly, recorded, replay,
};
use farflung::terminal::print;
use farflung::train::{PipelineSizes, fleet, read_or_shipped, read_topology};

use super::file::write;

/// An hour in nanoseconds.
const HOUR: u64 = 3_600_000_000_000;

/// Compare recovery methods while machines are lost and return: restarting from checkpoints, Varuna's morphing,
/// Oobleck's templates, ReCycle's re-routing, Parcae's liveput, all with the same trace.
///
/// All machines of the file are treated as equal: as slow as the slowest, with the least memory, joined by the
/// slowest link. `train` restarts from checkpoints with the remaining machines, and `host` re-routes as
/// ReCycle does; the other methods are only simulated, to show what they would gain.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung plan churn spot --model gpt2-xl --mtbf 4h --absence 20min
  farflung plan churn lan --model gpt2 --mtbf 24h --hours 48 --seed 3 --json
  farflung plan churn spot --model gpt2-xl --trace ec2-p3
  farflung plan churn spot --model gpt2-xl --trace preemptions.txt")]
pub(crate) struct ChurnCommand {
    /// TOML file with devices, links and regions, or the name of a shipped one.
    #[arg(value_name = "FILE")]
    topology: PathBuf,
    /// Model preset.
    #[arg(long, value_name = "NAME", default_value = "gpt2")]
    model: String,
    /// Sequences per microbatch.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    batch: u32,
    /// Microbatches per step, over all machines.
    #[arg(
        long,
        short = 'm',
        value_name = "N",
        default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..=4096)
    )]
    microbatches: u32,
    /// Mean time until a machine is lost; 24h, or with --trace that of the trace.
    #[arg(long, value_name = "TIME", value_parser = positive)]
    mtbf: Option<Nanos>,
    #[command(flatten)]
    costs: SavingCosts,
    /// Mean time until a lost machine returns.
    #[arg(long, value_name = "TIME", default_value = "10min", value_parser = positive)]
    absence: Nanos,
    /// Time to continue without a restart: the loss is detected and the other machines form a new group.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = positive)]
    regroup: Nanos,
    /// Hours to simulate.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 24,
        value_parser = clap::value_parser!(u64).range(1..=8760)
    )]
    hours: u64,
    /// Seed of the random losses.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// File with losses and returns, instead of random ones: a line `machines N time TIME`, then lines
    /// `TIME lost M` and `TIME back M`. Or the name of a recorded trace of spot machines: ec2-p3, ec2-g4dn.
    /// There are as many machines as in the trace.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hours", "seed"])]
    trace: Option<PathBuf>,
    /// Write the random losses to this file.
    #[arg(long, value_name = "FILE", conflicts_with = "trace")]
    trace_out: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Disk rate and restart time, from which the times of saving and restarting are computed.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct SavingCosts {
    /// Rate at which a machine writes and reads checkpoints.
    #[arg(long, value_name = "RATE", default_value = "4gbit")]
    disk: Bandwidth,
    /// Time to restart a job's processes, without reading the checkpoint.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = positive)]
    restart: Nanos,
}

impl SavingCosts {
    /// Returns the times for a state of this size.
    pub(super) fn times(&self, state: farflung::base::Bytes) -> SavingTimes {
        let save = self.disk.transfer(state);
        SavingTimes { save, restart: self.restart.saturating_add(save) }
    }
}

/// Times of saving a state and of restarting from it.
pub(super) struct SavingTimes {
    pub(super) save: Nanos,
    pub(super) restart: Nanos,
}

/// Parses a time that is not 0.
pub(super) fn positive(text: &str) -> std::result::Result<Nanos, String> {
    let time: Nanos = text.parse().map_err(|error: farflung::base::ParseUnitError| error.to_string())?;
    if time == Nanos::ZERO { Err("expected a time above 0".to_owned()) } else { Ok(time) }
}

/// The results that are printed.
struct ChurnResults<'a> {
    trace: &'a Trace,
    every: CheckpointedJob,
    stages: u32,
    absence: Nanos,
    mtbf: Nanos,
    /// Tokens per step.
    tokens: u64,
    policies: Vec<(&'static PolicyRow, Replay)>,
}

impl ChurnCommand {
    pub(crate) fn run(self) -> Result<()> {
        let cluster = read_topology(&self.topology)?;
        let model = model_shape(&self.model)?;
        let sizes = PipelineSizes { batch: self.batch, microbatches: self.microbatches };
        let fleet = fleet(&model, &cluster, sizes)?;
        let mut prices = StepTimes::new(&fleet)?;
        let mut mtbf = self.mtbf.unwrap_or(Nanos(24 * HOUR));
        let trace = if let Some(path) = &self.trace {
            let trace = read_or_shipped(path, recorded)?;
            mtbf = self.mtbf.or_else(|| trace.lifetime()).unwrap_or(mtbf);
            trace
        } else {
            let (lifetime, absence) = (mtbf.as_secs_f64(), self.absence.as_secs_f64());
            Trace::drawn(cluster.size() as u32, lifetime, absence, Nanos(self.hours * HOUR), self.seed)
        };
        let machines = trace.machines;
        if let Some(path) = &self.trace_out {
            write(path, "write the trace", &trace.to_string())?;
        }
        let stages = best_shape(&mut prices, machines, 1).map_or(1, |shape| shape.stages);
        let state = prices.state(stages).unwrap_or_default();
        let SavingTimes { save, restart } = self.costs.times(state);
        let recovery = Recovery { save, restart, regroup: self.regroup, lifetime: mtbf };
        let mut policies = Vec::new();
        for row in &POLICIES {
            policies.push((row, replay(row, &trace, &recovery, &mut prices)?));
        }
        let found = ChurnResults {
            trace: &trace,
            every: checkpoints(mtbf, machines, save, restart),
            stages,
            absence: self.absence,
            mtbf,
            tokens: u64::from(self.batch) * u64::from(self.microbatches) * model.context as u64,
            policies,
        };
        print(&if self.json { format!("{}\n", found.json()) } else { found.text() })
    }
}

/// Returns a job that saves at Daly's interval, and that the loss of any machine ends.
pub(super) fn checkpoints(mtbf: Nanos, machines: u32, save: Nanos, restart: Nanos) -> CheckpointedJob {
    let between = mtbf.as_secs_f64() / f64::from(machines.max(1));
    let (save, restart) = (save.as_secs_f64(), restart.as_secs_f64());
    CheckpointedJob { every: daly(save, between), save, restart, mtbf: between }
}

impl ChurnResults<'_> {
    fn rate(&self, done: &Replay) -> f64 {
        (done.steps * self.tokens) as f64 / self.trace.time.as_secs_f64()
    }

    fn json(&self) -> serde_json::Value {
        let lost = self.every.expected();
        let policies = self.policies.iter().map(|(row, done)| {
            serde_json::json!({
                "name": row.name, "steps": done.steps, "tokens_per_s": self.rate(done), "share": done.share,
                "steps_lost": done.lost, "restarts": done.restarts, "regroups": done.regroups,
                "saving_s": done.saving.as_secs_f64(), "paused_s": done.paused.as_secs_f64(),
                "idle_s": done.idle.as_secs_f64(),
            })
        });
        serde_json::json!({
            "machines": self.trace.machines, "mean_machines": self.trace.mean(),
            "losses": self.trace.losses(), "time_s": self.trace.time.as_secs_f64(),
            "interval_s": self.every.every, "checkpoint_s": self.every.save, "goodput": lost.work,
            "policies": policies.collect::<Vec<_>>(),
        })
    }

    fn text(&self) -> String {
        let trace = self.trace;
        let mut text = format!(
            "{} machines, {:.1} of them present on average; {} losses in {:.0} h.\n",
            trace.machines,
            trace.mean(),
            trace.losses(),
            trace.time.as_secs_f64() / 3600.0
        );
        text.push_str(&interval(&self.every));
        let (lifetime, absence) = (self.mtbf.as_secs_f64(), self.absence.as_secs_f64());
        if let Some(copies) = copies_for(0.999, self.stages, lifetime, absence) {
            let _ = writeln!(
                text,
                "{copies} copies of each of {} stages keep the model complete for {:.3}% of the time.",
                self.stages,
                100.0 * alive(self.stages, copies, lifetime, absence)
            );
        }
        let _ = writeln!(
            text,
            "\n  {:<10} {:>10} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "", "tokens/s", "share", "restarts", "regroups", "lost", "saving", "paused", "idle"
        );
        let best = self.policies.iter().map(|(_, done)| done.steps).max().unwrap_or(0);
        for (row, done) in &self.policies {
            let mark = if done.steps == best { '>' } else { ' ' };
            let part = |time: Nanos| 100.0 * time.as_secs_f64() / trace.time.as_secs_f64();
            let all = (done.steps + done.lost).max(1);
            let _ = writeln!(
                text,
                "{mark} {:<10} {:>10.0} {:>7.1}% {:>9} {:>9} {:>8.1}% {:>8.1}% {:>8.1}% {:>8.1}%",
                row.name,
                self.rate(done),
                100.0 * done.share,
                done.restarts,
                done.regroups,
                100.0 * done.lost as f64 / all as f64,
                part(done.saving),
                part(done.paused),
                part(done.idle)
            );
        }
        text.push_str(
            "\n`share`: relative to a job that always has the best plan and changes it in no time. `lost`: \
             steps whose work was lost.\n\n",
        );
        for (row, _) in &self.policies {
            let _ = writeln!(text, "{:<10} {}", row.name, row.summary);
        }
        text
    }
}

/// Returns a text on the interval between checkpoints, and the time that saving and losses take.
pub(super) fn interval(every: &CheckpointedJob) -> String {
    let lost = every.expected();
    let time = |seconds: f64| Nanos::from_secs_f64(seconds).to_string();
    format!(
        "A machine is lost every {}: with a checkpoint that takes {} every {} (Daly's formula), {:.1}% of \
         the time is useful work, {:.1}% saving, {:.1}% lost work and restarts.\n",
        time(every.mtbf),
        time(every.save),
        time(every.every),
        100.0 * lost.work,
        100.0 * lost.saving,
        100.0 * lost.failures
    )
}
