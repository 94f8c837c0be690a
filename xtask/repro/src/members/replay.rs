//! Repeats a run of processes whose members came, left and were lost, without any such change: as many workers
//! as there were members take the same steps, in one ordinary job after the other. All of them end normally, so
//! each loss is compared with a member that left normally after the same step. This assumes that each member
//! has one microbatch in a step, so that shares do not follow speed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use farflung::config::choice::{Resume, TransportKind};
use farflung::train::{Job, Quiet, connections, run_job};
use farflung::transports::MEMORY;
use farflung::{
    Checkpoint, Event, EventKind, Existing, Packing, RunDir, StepMetrics, Stop, TrainArgs, TrainConfig,
};

use super::records::{events, metrics};
use crate::harness::{Report, Threshold};

/// Steps that have the same members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    /// Number of steps done before the first and after the last of these steps.
    from: u64,
    to: u64,
    members: usize,
}

/// A view of the members, as one of them reported it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ReportedView {
    /// Number of steps done when it began.
    step: u64,
    members: usize,
}

/// The views of a run by their numbers, as all members together reported them.
#[derive(Debug, Default)]
pub(super) struct Views {
    by_epoch: BTreeMap<u64, ReportedView>,
    /// Reports of a view that differ from another report of a view with the same number.
    pub(super) differing: u32,
}

impl Views {
    /// Adds the views in a member's events.
    pub(super) fn add(&mut self, events: &[Event]) {
        for event in events {
            let EventKind::Members { epoch, members, .. } = event.what else { continue };
            let view = ReportedView { step: event.step, members };
            let known = self.by_epoch.entry(epoch).or_insert(view);
            self.differing += u32::from(*known != view);
        }
    }

    /// Creates views from their numbers, the steps done before, and the numbers of members.
    #[cfg(test)]
    pub(super) fn of(views: &[(u64, u64, usize)]) -> Self {
        let view = |&(epoch, step, members): &(u64, u64, usize)| (epoch, ReportedView { step, members });
        Self { by_epoch: views.iter().map(view).collect(), differing: 0 }
    }

    /// Returns the stretches of a run that one member began, up to a step.
    fn stretches(&self, end: u64) -> Vec<Stretch> {
        let mut all = Vec::new();
        let mut now = Stretch { from: 0, to: 0, members: 1 };
        for view in self.by_epoch.values().filter(|view| view.step < end) {
            all.push(Stretch { to: view.step, ..now });
            now = Stretch { from: view.step, to: view.step, members: view.members };
        }
        all.push(Stretch { to: end, ..now });
        all.retain(|stretch| stretch.from < stretch.to);
        all
    }

    /// Returns the number of the newest view that began before a step.
    pub(super) fn newest_before(&self, step: u64) -> Option<u64> {
        self.by_epoch.iter().rev().find(|(_, view)| view.step < step).map(|(&epoch, _)| epoch)
    }

    /// Returns the number of the newest view that began after `step` steps and has more members than the one
    /// before it.
    pub(super) fn joined_after(&self, step: u64) -> Option<u64> {
        let views: Vec<(u64, ReportedView)> =
            self.by_epoch.iter().map(|(&epoch, &view)| (epoch, view)).collect();
        let before = |n: usize| if n == 0 { 1 } else { views[n - 1].1.members };
        let joins = |n: &usize| views[*n].1.step == step && views[*n].1.members > before(*n);
        (0..views.len()).rev().find(joins).map(|n| views[n].0)
    }

    /// Returns the numbers of steps after which members left or were lost.
    pub(super) fn losses(&self) -> Vec<u64> {
        let views: Vec<ReportedView> = self.by_epoch.values().copied().collect();
        let fewer = |pair: &[ReportedView]| (pair[1].members < pair[0].members).then_some(pair[1].step);
        views.windows(2).filter_map(fewer).collect()
    }
}

/// The digest of the weights after a member's last step before it was lost. The others may have dropped this
/// step.
#[derive(Debug)]
struct LastDigest {
    step: u64,
    digest: String,
}

/// The digests of the weights after the steps of a run, as its members reported them.
#[derive(Debug, Default)]
struct Digests {
    by_step: BTreeMap<u64, Vec<String>>,
    last: Vec<LastDigest>,
}

impl Digests {
    fn add(&mut self, rows: Vec<StepMetrics>) {
        let steps: Vec<u64> = rows.iter().map(|row| row.step).collect();
        for (n, row) in rows.into_iter().enumerate() {
            let Some(digest) = row.digest else { continue };
            if steps.get(n + 1) == Some(&(row.step + 1)) {
                self.by_step.entry(row.step).or_default().push(digest);
            } else {
                self.last.push(LastDigest { step: row.step, digest });
            }
        }
    }
}

/// Returns a copy of a checkpoint for a job in which each step takes this number of sequences.
fn for_workers(path: &Path, workers: usize, sequences: u64, folder: &Path) -> Result<PathBuf> {
    let from = Checkpoint::open(path)?;
    let run = RunDir::open(folder, Existing::Refuse)?;
    let mut to = run.begin_checkpoint(from.step(), Packing::Plain)?;
    for name in from.names() {
        let bytes = from.read(name)?;
        if name == "trainer.json" {
            let mut record: serde_json::Value = serde_json::from_slice(&bytes)?;
            (record["world"], record["sequences"]) = (workers.into(), sequences.into());
            to.write(name, &serde_json::to_vec(&record)?)?;
        } else {
            to.write(name, &bytes)?;
        }
    }
    Ok(run.commit(to)?)
}

/// A sequence of ordinary jobs, each of which continues from the checkpoint of the one before.
struct Replay<'a> {
    config: TrainConfig,
    folder: &'a Path,
    /// Number of jobs done.
    jobs: u32,
    /// Checkpoint of the last job.
    checkpoint: Option<PathBuf>,
    /// Microbatches that all jobs so far have trained on.
    microbatches: u64,
}

impl Replay<'_> {
    /// Takes the steps of a stretch. Returns their metrics.
    fn take(&mut self, stretch: Stretch) -> Result<Vec<StepMetrics>> {
        let Stretch { from, to, members } = stretch;
        let out = self.folder.join(format!("job-{}", self.jobs));
        let mut config = TrainConfig { workers: members, steps: to, ..self.config.clone() };
        if let Some(path) = self.checkpoint.take() {
            let copy = self.folder.join(format!("for-{}", self.jobs));
            let sequences = members as u64 * config.batch as u64;
            config.resume = Resume::Path(for_workers(&path, members, sequences, &copy)?);
        }
        let mut job = Job::new(config, members, Stop::manual())?;
        (job.plan_start.step, job.plan_start.microbatches) = (from, self.microbatches);
        job.out = Some(out.clone());
        let report =
            run_job(&job, connections(&job, None)?, &mut Quiet)?.context("a job without a report")?;
        self.jobs += 1;
        self.microbatches = job.microbatches_after(to);
        let saved =
            RunDir::open(&out, Existing::Continue)?.latest()?.context("a job without a checkpoint")?;
        self.checkpoint = Some(saved.path().to_owned());
        Ok(report.rows)
    }
}

/// Returns the settings of the run in a folder, for a job in this process.
fn settings(folder: &Path) -> Result<TrainConfig> {
    let path = folder.join("config.toml");
    let args = TrainArgs::from_toml(&fs::read_to_string(&path)?, &path)?;
    let config = TrainConfig::merge(TrainArgs::default(), args)?;
    Ok(TrainConfig {
        transport: TransportKind::of(&MEMORY),
        out: None,
        resume: Resume::No,
        data: config.data.map(|data| folder.with_file_name(data)),
        ..config
    })
}

/// Returns the held-out losses after step `end` of repetitions of a run with different seeds, the first of
/// which is that of the run.
pub(super) fn held_out_losses(
    run: EndedRun<'_>,
    end: u64,
    seeds: u64,
    report: &mut Report<'_>,
) -> Result<Vec<f64>> {
    let mut views = Views::default();
    (0..run.started).try_for_each(|number| {
        views.add(&events(&run.folder.join(number.to_string()))?);
        anyhow::Ok(())
    })?;
    let config = settings(&run.folder.join("0"))?;
    let mut losses = Vec::new();
    for seed in config.seed..config.seed + seeds {
        let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
        let config = TrainConfig { seed, ..config.clone() };
        let mut replay = Replay { config, folder: folder.path(), jobs: 0, checkpoint: None, microbatches: 0 };
        let mut last = Vec::new();
        for stretch in views.stretches(end) {
            report.progress(&format!("seed {seed}: again up to step {} of {end}", stretch.to))?;
            last = replay.take(stretch)?;
        }
        let loss = last.last().filter(|row| row.step == end).and_then(|row| row.val_loss);
        losses.push(loss.with_context(|| format!("no held-out loss after step {end}"))?);
    }
    Ok(losses)
}

/// The processes of a run that has ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct EndedRun<'a> {
    /// Contains a folder for each process, named by its number.
    pub(super) folder: &'a Path,
    /// Number of processes that were started.
    pub(super) started: usize,
    /// Number of members that were lost.
    pub(super) losses: u64,
}

/// What the processes of a run have reported.
pub(super) struct Reported<'a> {
    run: EndedRun<'a>,
    views: Views,
    digests: Digests,
}

/// Compares what the members of a run have reported of its views, and of the weights after its steps.
pub(super) fn agree<'a>(name: &str, run: EndedRun<'a>, report: &mut Report<'_>) -> Result<Reported<'a>> {
    let (mut views, mut digests) = (Views::default(), Digests::default());
    for number in 0..run.started {
        let member = run.folder.join(number.to_string());
        views.add(&events(&member)?);
        digests.add(metrics(&member)?);
    }
    let differs = |found: &&Vec<String>| found.iter().any(|digest| *digest != found[0]);
    let differing = digests.by_step.values().filter(differs).count();
    let none = Threshold::AtMost(0.0);
    let metric = format!("{name}, processes: reports of a view that differ from another report of it");
    report.row(&metric, f64::from(views.differing), "1", none)?;
    let metric = format!("{name}, processes: steps whose weights were compared");
    report.row(&metric, digests.by_step.len() as f64, "1", Threshold::AtLeast(100.0))?;
    let metric = format!("{name}, processes: steps after which members have different weights");
    report.row(&metric, differing as f64, "1", none)?;
    Ok(Reported { run, views, digests })
}

/// Compares the weights after each step of some processes with those of the same steps without losses.
pub(super) fn compare(name: &str, told: &Reported<'_>, report: &mut Report<'_>) -> Result<()> {
    let Reported { run, views, digests } = told;
    let end = digests.by_step.keys().next_back().copied().context("the run has no digests")?;
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let config = settings(&run.folder.join("0"))?;
    let mut replay = Replay { config, folder: folder.path(), jobs: 0, checkpoint: None, microbatches: 0 };
    let mut expected = BTreeMap::new();
    for stretch in views.stretches(end) {
        let Stretch { from, to, members } = stretch;
        report.progress(&format!("{name}: again the steps {} to {to}, with {members} members", from + 1))?;
        let rows = replay.take(stretch)?.into_iter();
        expected.extend(rows.filter_map(|row| Some((row.step, row.digest?))));
    }
    let mut other = 0_u32;
    for (step, found) in &digests.by_step {
        let expected = expected.get(step).context("a step was not repeated")?;
        other += u32::from(found.iter().any(|found| found != expected));
    }
    let is_other = |last: &&LastDigest| expected.get(&last.step).is_some_and(|it| *it != last.digest);
    let dropped = digests.last.iter().filter(is_other).count();
    // Steps that the survivors took right after a loss.
    let after_losses = views.losses().into_iter().filter(|step| digests.by_step.contains_key(&(step + 1)));
    let metric = format!("{name}, processes: of the steps compared, those right after a loss");
    let losses = Threshold::AtLeast(run.losses as f64);
    report.row(&metric, after_losses.count() as f64, "1", losses)?;
    let metric = format!("{name}, processes: steps with other weights than if all lost members had left");
    report.row(&metric, f64::from(other), "1", Threshold::AtMost(0.0))?;
    let metric = format!("{name}, processes: lost members' last steps that the others dropped");
    report.row(&metric, dropped as f64, "1", Threshold::None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_between_two_views_have_the_same_members() {
        let views = Views::of(&[(2, 4, 2), (3, 4, 3), (4, 9, 2), (5, 12, 3)]);
        let stretch = |from, to, members| Stretch { from, to, members };
        assert_eq!(views.stretches(11), [stretch(0, 4, 1), stretch(4, 9, 3), stretch(9, 11, 2)]);
        assert_eq!(views.losses(), [9]);
    }

    #[test]
    fn the_last_step_before_a_gap_is_set_aside() {
        let row = |step| StepMetrics { step, digest: Some(step.to_string()), ..StepMetrics::default() };
        let mut digests = Digests::default();
        digests.add([1, 2, 5, 6].map(row).to_vec());
        assert_eq!(digests.by_step.keys().copied().collect::<Vec<u64>>(), [1, 5]);
        assert_eq!(digests.last.iter().map(|last| last.step).collect::<Vec<u64>>(), [2, 6]);
    }
}
