//! Changes one bit on one replica: measures how soon it is found, which rank is named, and what the checks
//! cost.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;
use farflung::config::choice::{Resume, SyncKind};
use farflung::optim::sync::DILOCO;
use farflung::train::{
    Fault, FaultyValue, Job, Quiet, Report as Trained, Thoroughness, connections, run_job,
};
use farflung::{Checkpoint, Error, Existing, Packing, RunDir, RunSettings, TrainConfig};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "divergence",
    claim: "if a bit changes on one replica, the run ends before the next checkpoint is committed, and the \
            replica is named if the others are a majority",
    source: "ours",
    seed: 1337,
    run,
};

const STEPS: u64 = 12;
const EVERY: u64 = 4;
const ALL: [FaultyValue; 3] = [FaultyValue::Reduced, FaultyValue::Parameters, FaultyValue::Moments];

/// A kind of job, and the values in it whose change makes replicas differ.
struct Case {
    name: &'static str,
    config: fn(TrainConfig) -> TrainConfig,
    values: &'static [FaultyValue],
    /// Number of copies of each value.
    copies: usize,
}

const CASES: [Case; 4] = [
    Case { name: "ddp, 3 replicas", config: |c| TrainConfig { workers: 3, ..c }, values: &ALL, copies: 3 },
    Case { name: "ddp, 2 replicas", config: |c| TrainConfig { workers: 2, ..c }, values: &ALL, copies: 2 },
    Case {
        name: "2 stages, 3 replicas",
        config: |c| TrainConfig { workers: 6, stages: 2, microbatches: Some(2), ..c },
        values: &ALL,
        copies: 3,
    },
    // Between averages each replica has its own parameters and moments.
    Case {
        name: "diloco, 3 replicas",
        config: |c| TrainConfig { workers: 3, sync: SyncKind::of(&DILOCO), sync_every: 2, ..c },
        values: &[FaultyValue::Reduced],
        copies: 3,
    },
];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let seed = report.seed();
    let base = TrainConfig {
        layers: Some(2),
        heads: Some(2),
        dim: Some(16),
        context: Some(8),
        batch: 1,
        steps: STEPS,
        checkpoint_every: EVERY,
        check_every: 0,
        eval_every: 0,
        eval_batches: 1,
        sample_tokens: 0,
        ..config(seed, false)
    };
    let data = job(base.clone(), JobTransport::Memory)?;
    let tries = if options.quick { 4 } else { 24 };
    for (index, case) in (0..).zip(&CASES) {
        let job = again(&data, (case.config)(base.clone()), JobTransport::Memory);
        let clean = trained(&job, None)?.context("rank 0 has no report")?.hash;
        let random = Philox::new(seed, index);
        let (mut found, mut harmless, mut missed, mut named) = (0_u32, 0_u32, 0_u32, 0_u32);
        for (try_, &value) in (0..tries).flat_map(|t| case.values.iter().map(move |v| (t, v))) {
            let draw = |number: u64, below: u64| random.below((try_ * 3 + value as u64) * 8 + number, below);
            let step = 1 + draw(0, STEPS);
            let fault = Fault {
                rank: draw(1, job.world as u64) as u32,
                // `DiLoCo` receives averages in even steps.
                step: if job.averages_each_step() { step } else { step.next_multiple_of(2) },
                value,
                element: draw(2, 1 << 20) as usize,
                bit: draw(3, 32) as u32,
            };
            let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
            match trained(&Job { fault: Some(fault), ..job.clone() }, Some(folder.path())) {
                // The change was rounded away: the run has the same bits as one without it.
                Ok(Some(done)) if done.hash == clean => harmless += 1,
                Ok(_) => missed += 1,
                Err(error) => {
                    let saved = newest(folder.path());
                    let good = saved == (fault.step - 1) / EVERY * EVERY;
                    found += u32::from(good);
                    missed += u32::from(!good);
                    named += u32::from(match error {
                        Error::Diverged { ranks, .. } => {
                            ranks.iter().any(|rank| rank.0 == fault.rank)
                                && (ranks.len() == 1) == (case.copies > 2)
                        }
                        // A value that is not finite. The rank itself reports it.
                        _ => true,
                    });
                }
            }
        }
        let name = case.name;
        let placed = found + harmless + missed;
        report.row(&format!("{name}: bits changed"), f64::from(placed), "", Threshold::AtLeast(1.0))?;
        report.row(
            &format!("{name}: changes without effect on any bit"),
            f64::from(harmless),
            "",
            Threshold::None,
        )?;
        let metric = format!("{name}: changes not detected before the next checkpoint");
        report.row(&metric, f64::from(missed), "", Threshold::AtMost(0.0))?;
        report.row(
            &format!("{name}: changes detected without naming the replica"),
            f64::from(found - named),
            "",
            Threshold::AtMost(0.0),
        )?;
    }
    let job = again(&data, TrainConfig { workers: 3, codec: "none".parse()?, ..base }, JobTransport::Memory);
    in_checkpoints(report, &job, if options.quick { 4 } else { 20 })?;
    cost(report, &data, options)
}

/// Trains a job in a folder.
fn trained(job: &Job, out: Option<&Path>) -> farflung::Result<Option<Trained>> {
    let job = Job { out: out.map(Path::to_owned), ..job.clone() };
    run_job(&job, connections(&job, None)?, &mut Quiet)
}

/// Returns the step of the newest checkpoint, or 0 if there is none.
fn newest(run: &Path) -> u64 {
    farflung::run_dir::latest(run).ok().flatten().map_or(0, |checkpoint| checkpoint.step())
}

/// Changes a bit in a replica's newest checkpoint, and updates its manifest so that the file's hash is right.
/// Checks that the resumed run finds the change.
fn in_checkpoints(report: &mut Report<'_>, job: &Job, tries: u64) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    trained(job, Some(folder.path()))?;
    let random = Philox::new(report.seed(), 99);
    let resumed = RunSettings { steps: STEPS + 2, resume: Resume::Auto, ..job.config.clone() };
    let job = Job { config: resumed, ..job.clone() };
    let mut missed = 0_u32;
    for i in 0..tries {
        let draw = |number: u64, below: u64| random.below(i * 8 + number, below);
        let rank = draw(0, job.world as u64) as u32;
        let own = match rank {
            0 => folder.path().to_owned(),
            rank => folder.path().join(format!("ranks/rank-{rank:05}")),
        };
        let name = ["model.safetensors", "optimizer.safetensors"][draw(1, 2) as usize];
        let good = rewrite(&own, name, |bytes| flip(bytes, draw(2, 1 << 40)))?;
        match trained(&job, Some(folder.path())) {
            Err(Error::Diverged { ranks, .. }) if ranks.len() == 1 && ranks[0].0 == rank => {}
            // The changed bit made a value infinite.
            Err(Error::NotFinite { .. }) => {}
            _ => missed += 1,
        }
        rewrite(&own, name, |bytes| *bytes = good)?;
        ensure!(newest(&own) == STEPS, "the run continued from a corrupted checkpoint");
    }
    report.row(
        "bits changed in a checkpoint, with its manifest updated to match",
        tries as f64,
        "",
        Threshold::AtLeast(1.0),
    )?;
    report.row(
        "bits changed in a checkpoint that are not detected before the first step",
        f64::from(missed),
        "",
        Threshold::AtMost(0.0),
    )
}

/// Changes a file of a rank's newest checkpoint and updates the manifest. Returns the file's old content.
fn rewrite(run: &Path, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> Result<Vec<u8>> {
    let folder = RunDir::open(run, Existing::Continue)?;
    let checkpoint = Checkpoint::open(&run.join(format!("step-{STEPS:08}")))?;
    let before = checkpoint.read(name)?;
    let mut changed = before.clone();
    change(&mut changed);
    let mut writer = folder.begin_checkpoint(STEPS, Packing::Plain)?;
    for file in checkpoint.names() {
        writer.write(file, &if file == name { changed.clone() } else { checkpoint.read(file)? })?;
    }
    folder.commit(writer)?;
    Ok(before)
}

/// Flips a bit in a tensor of parameters or moments of a safetensors file.
fn flip(bytes: &mut [u8], draw: u64) {
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("a file has a header")) as usize;
    let tensors: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..8 + header]).expect("the header is JSON");
    let is_value = |name: &str| name != "__metadata__" && name != "loss_scale";
    let offset =
        |tensor: &serde_json::Value, i: usize| tensor["data_offsets"][i].as_u64().unwrap_or(0) as usize;
    let ranges: Vec<_> = tensors
        .iter()
        .filter(|(name, _)| is_value(name))
        .map(|(_, tensor)| offset(tensor, 0)..offset(tensor, 1))
        .filter(|range| !range.is_empty())
        .collect();
    let range = &ranges[draw as usize % ranges.len()];
    let at = 8 + header + range.start + (draw >> 8) as usize % range.len();
    bytes[at] ^= 1 << (draw % 8);
}

/// Measures the cost of the comparisons, on nano with two workers of one thread each and otherwise the default
/// settings of `train`.
fn cost(report: &mut Report<'_>, data: &Job, options: &Options) -> Result<()> {
    let default = TrainConfig::default();
    let nano = TrainConfig { threads: 1, workers: 2, seed: data.config.seed, ..TrainConfig::default() };
    let job = job(crate::workers::with_transport(nano, JobTransport::Memory), JobTransport::Memory)?;
    let (steps, checks) = if options.quick { (2, 4) } else { (10, 20) };
    #[expect(clippy::disallowed_methods, reason = "a bench measures real time")]
    let measured = on_all(&job, |trainer| {
        trainer.step(false)?;
        let begun = Instant::now();
        for _ in 0..steps {
            trainer.step(false)?;
        }
        let step = begun.elapsed().as_secs_f64() / f64::from(steps);
        let begun = Instant::now();
        for _ in 0..checks {
            trainer.verify(Thoroughness::Usual)?;
        }
        Ok((step, begun.elapsed().as_secs_f64() / f64::from(checks)))
    })?;
    let (step, check) = measured[0];
    report.row("nano: a step", step * 1e3, "ms", Threshold::None)?;
    report.row("nano: a comparison", check * 1e3, "ms", Threshold::None)?;
    let share = 100.0 * check / default.check_every as f64 / step;
    report.row("nano: comparisons, share of a step's time", share, "%", Threshold::AtMost(0.5))
}
