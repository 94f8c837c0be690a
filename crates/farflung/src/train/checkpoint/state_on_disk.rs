//! Decides whether a run continues from the state on disk (`--state disk`), which has its last step, or from a
//! checkpoint.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use farflung_comm::{Communicator, secure};
use farflung_store::Generation;
use serde::{Deserialize, Serialize};

use super::super::all_succeed::all_succeed;
use super::super::disk_state::{RecordedStep, StepRecords, newest_in};
use super::super::job::Job;
use super::super::trainer::Trainer;
use super::contents::record;
use super::{CheckpointRecord, Resumed, Source, Totals, all_gather_u64, compare};
use crate::config::choice::{Resume, StatePlace};
use crate::{Error, Result, RunDir, StateError, run_dir};

/// What the state on disk has of a step, besides its arrays: what `trainer.json` of a checkpoint has.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in super::super) struct StepRecord {
    /// The identity of the run on this rank: see [`StateLabel`].
    run: String,
    trainer: CheckpointRecord,
    pub(in super::super) loss_scale: Vec<f32>,
    /// The run's settings, as TOML.
    settings: String,
}

/// What a rank's folder says of its state on disk: where that is, and a random name that the state has, too. It
/// is a new one whenever the state begins anew, so that no run takes the state of another, or of another rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateLabel {
    run: String,
    folder: PathBuf,
}

/// The name of the file with the label.
const LABEL: &str = "state.json";

impl StateLabel {
    /// Makes the label of a state that begins.
    fn draw(folder: PathBuf) -> Result<Self> {
        Ok(Self { run: blake3::hash(&secure::random()?[..]).to_hex()[..32].to_owned(), folder })
    }

    /// Reads the label of a rank's folder; `None` if there is none.
    fn read(run: &RunDir) -> Result<Option<Self>> {
        let path = run.path().join(LABEL);
        match fs::read(&path) {
            Ok(bytes) => {
                let damaged = |_| Error::Damaged { path: path.clone(), what: "it is not a label of a state" };
                serde_json::from_slice(&bytes).map(Some).map_err(damaged)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { action: "read", path, source }),
        }
    }

    fn write(&self, run: &RunDir) -> Result<()> {
        let bytes = serde_json::to_vec(self).expect("names can be written as JSON");
        run_dir::replace(&run.path().join(LABEL), &bytes)
    }
}

impl StepRecord {
    /// Makes the record of the step at which a run begins or continues.
    pub(in super::super) fn of(trainer: &Trainer, job: &Job, totals: Totals, run: String) -> Self {
        let loss_scale = trainer.loss_scale().save().to_vec();
        let settings = job.settings().to_toml();
        Self { run, trainer: record(trainer, job, totals, &[]), loss_scale, settings }
    }

    pub(in super::super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and names can be written as JSON")
    }

    fn of_bytes(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    pub(in super::super) const fn outer_step(&self) -> u64 {
        self.trainer.outer_step
    }

    pub(in super::super) const fn rounds(&self) -> u64 {
        self.trainer.rounds
    }
}

impl StepRecords for StepRecord {
    fn set_totals(&mut self, totals: Totals) {
        self.trainer.totals = totals;
    }

    fn of(&mut self, recorded: RecordedStep<'_>) -> Vec<u8> {
        let RecordedStep { step, outer_step, rounds, loss_scale } = recorded;
        (self.trainer.step, self.trainer.outer_step, self.trainer.rounds) = (step, outer_step, rounds);
        self.loss_scale = loss_scale.to_vec();
        self.to_bytes()
    }
}

/// What a rank tells the others of its state on disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct StoredSteps {
    /// The two steps that it has, 0 for none.
    steps: [u64; 2],
    /// The step of its newest checkpoint, 0 for none.
    saved: u64,
    /// The steps that its folder has rows of, if the run has had a state on disk.
    rows: u64,
    /// Whether its state is on disk at all.
    is_there: bool,
}

impl StoredSteps {
    fn to_bytes(self) -> Vec<u8> {
        let Self { steps: [newest, older], saved, rows, is_there } = self;
        [newest, older, saved, rows, is_there.into()].into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, []) = bytes.as_chunks::<8>() else { return None };
        let words = <[[u8; 8]; 5]>::try_from(words).ok()?;
        let [newest, older, saved, rows, is_there] = words.map(u64::from_le_bytes);
        Some(Self { steps: [newest, older], saved, rows, is_there: is_there == 1 })
    }
}

/// Where ranks continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Continues {
    /// From this step of the state on disk.
    States(u64),
    /// From checkpoints, or at step 0.
    Checkpoints,
    /// Nowhere: a rank lacks a step that others have.
    Behind { rank: usize, step: u64, newest: u64 },
}

/// Decides where ranks continue: at the newest step that the states of all have, unless all have a checkpoint
/// of a later one. A rank that was interrupted while it committed may be one step behind, and the row of a step
/// may have been written before its state. If more than that would be lost, the state of a rank was lost or is
/// an older copy.
fn decide(all: &[StoredSteps]) -> Continues {
    let newest = all.iter().map(|rank| rank.steps[0]).max().unwrap_or(0);
    let rows = all.iter().map(|rank| rank.rows).max().unwrap_or(0);
    let has = |step: u64| all.iter().all(|rank| rank.is_there && rank.steps.contains(&step));
    let common = all.iter().flat_map(|rank| rank.steps).filter(|&step| step > 0 && has(step)).max();
    let saved = all.iter().map(|rank| rank.saved).min().unwrap_or(0);
    let common = common.filter(|&step| step >= saved);
    let newest = newest.max(rows);
    if newest > common.unwrap_or(saved) + 1 {
        let lacks = |rank: &StoredSteps| !rank.steps.contains(&(newest - 1)) && rank.steps[0] < newest;
        let rank = all.iter().position(lacks).unwrap_or(0);
        return Continues::Behind { rank, step: all[rank].steps[0], newest };
    }
    common.map_or(Continues::Checkpoints, Continues::States)
}

/// Opens the state on disk of the ranks that have one, and continues from it, if that has the newest step.
/// `None` if a checkpoint decides. A collective.
///
/// Errors: those of the files; [`StateError::Exists`] if a new run would overwrite one;
/// [`StateError::Behind`].
pub(in super::super) fn resume(
    trainer: &mut Trainer,
    job: &Job,
    run: Option<&RunDir>,
) -> Result<Option<Resumed>> {
    let comm = trainer.comm().clone();
    let opened = all_succeed(&comm, open(trainer, job, run))?;
    if job.config.resume != Resume::Auto {
        return Ok(None);
    }
    let is_there = trainer.has_state_on_disk();
    if all_gather_u64(&comm, is_there.into())?.iter().all(|&is_there| is_there == 0) {
        return Ok(None);
    }
    let mut steps = opened.generations.iter().map(|generation| generation.number);
    let own = StoredSteps {
        steps: [steps.next().unwrap_or(0), steps.next().unwrap_or(0)],
        saved: saved(run),
        rows: opened.rows,
        is_there,
    };
    let all = comm.all_gather_bytes(own.to_bytes())?;
    let all = all.iter().map(|bytes| StoredSteps::of_bytes(bytes).unwrap_or_default()).collect::<Vec<_>>();
    match decide(&all) {
        Continues::Checkpoints => Ok(None),
        Continues::Behind { rank, step, newest } => Err(StateError::Behind { rank, step, newest }.into()),
        Continues::States(step) => continue_from(trainer, job, step, opened, &comm).map(Some),
    }
}

/// The state on disk of this rank.
#[derive(Default)]
struct Opened {
    folder: PathBuf,
    generations: Vec<Generation>,
    /// The steps that the rank's folder has rows of, if the run has had a state on disk.
    rows: u64,
}

/// Returns the step of the newest checkpoint in a rank's folder, which is read to its end; 0 if there is none.
fn saved(run: Option<&RunDir>) -> u64 {
    run.and_then(|run| run.latest().ok().flatten()).map_or(0, |newest| newest.step())
}

/// Checks that a run which does not use its state on disk has a checkpoint that is as new.
///
/// Errors: [`StateError::Ignored`].
fn check_ignored(label: Option<&StateLabel>, run: Option<&RunDir>) -> Result<()> {
    let Some(StateLabel { folder, .. }) = label else { return Ok(()) };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let files = entries.filter(|path| path.extension().is_some_and(|extension| extension == "state"));
    let newest = files.map(|path| newest_in(&path)).collect::<Result<Vec<_>>>()?;
    let Some(step) = newest.into_iter().flatten().max() else { return Ok(()) };
    let saved = saved(run);
    if step > saved { Err(StateError::Ignored { path: folder.clone(), step, saved }.into()) } else { Ok(()) }
}

/// Opens the files.
fn open(trainer: &Trainer, job: &Job, run: Option<&RunDir>) -> Result<Opened> {
    let label = run.map(StateLabel::read).transpose()?.flatten();
    let continues = job.config.resume == Resume::Auto;
    if job.config.state == StatePlace::Device {
        check_ignored(label.as_ref().filter(|_| continues), run)?;
        return Ok(Opened::default());
    }
    if trainer.has_unlike_copies() {
        let expected = "device where copies of parameters are on devices that round differently: they are made \
                        equal after the state was written";
        let (field, value) = ("state", "disk".to_owned());
        return Err(Error::Setting { field, value, expected: expected.to_owned() });
    }
    let expected = "a folder: this run has none of its own".to_owned();
    let none = || Error::Setting { field: "state-dir", value: "none".to_owned(), expected };
    let folder = trainer.state_folder(job).ok_or_else(none)?;
    let absolute = std::path::absolute(&folder).map_err(Error::io("find", &folder))?;
    if label.as_ref().is_some_and(|label| label.folder != absolute) {
        check_ignored(label.as_ref().filter(|_| continues), run)?;
    }
    let generations = trainer.open_states(&folder)?;
    let is_own = |generation: &Generation| {
        let record = StepRecord::of_bytes(&generation.record);
        let label = label.as_ref().map(|label| &label.run);
        record.is_some_and(|record| Some(&record.run) == label && record.trainer.rank == trainer.rank().0)
    };
    match generations.first() {
        Some(found) if !continues || !is_own(found) => {
            Err(StateError::Exists { path: folder, step: found.number }.into())
        }
        _ => {
            let rows = run.map(|run| run.path().join(run_dir::METRICS)).filter(|_| label.is_some());
            let rows = rows.and_then(|path| fs::read(path).ok());
            let rows = rows.map_or(0, |text| String::from_utf8_lossy(&text).lines().count() as u64);
            Ok(Opened { folder, generations, rows })
        }
    }
}

fn continue_from(
    trainer: &mut Trainer,
    job: &Job,
    step: u64,
    Opened { folder, generations, .. }: Opened,
    comm: &Communicator,
) -> Result<Resumed> {
    let found = generations.into_iter().find(|generation| generation.number == step);
    let read = found.and_then(|generation| StepRecord::of_bytes(&generation.record)).ok_or_else(|| {
        Error::Damaged { path: folder.clone(), what: "it does not contain the trainer's counters" }
    });
    let read = read.and_then(|read| compare::check(&read.trainer, job).map(|()| read));
    let read = all_succeed(comm, read)?;
    all_succeed(comm, trainer.load_states(step))?;
    trainer.continue_from_states(step, &read)?;
    compare::same_step(&read.trainer, comm)?;
    let (totals, notes) = (read.trainer.totals, compare::differing_settings(Some(&read.settings), job));
    Ok(Resumed { totals, notes, from: folder, plan_start: job.plan_start })
}

/// Begins to use the state on disk, if the run does not continue from it. A collective.
///
/// Errors: those of the files.
pub(in super::super) fn start(
    trainer: &mut Trainer,
    (job, run): (&Job, Option<&RunDir>),
    from: Option<&Source>,
    totals: Totals,
) -> Result<()> {
    let label = labelled(trainer, job, run);
    let label = label.and_then(|label| unlabelled(job, run).map(|()| label));
    let started = label.and_then(|label| {
        let record = StepRecord::of(trainer, job, totals, label.map_or_else(String::new, |label| label.run));
        trainer.start_states(from, record)
    });
    all_succeed(&trainer.comm().clone(), started)
}

/// Removes the label of a state that the run goes on without.
fn unlabelled(job: &Job, run: Option<&RunDir>) -> Result<()> {
    let path = run.map(|run| run.path().join(LABEL)).filter(|_| job.config.state == StatePlace::Device);
    match path.map(|path| (fs::remove_file(&path), path)) {
        Some((Err(source), path)) if source.kind() != ErrorKind::NotFound => {
            Err(Error::Io { action: "remove", path, source })
        }
        _ => Ok(()),
    }
}

/// Begins the state anew, unless the run continues from it, and labels it. Returns the label.
fn labelled(trainer: &Trainer, job: &Job, run: Option<&RunDir>) -> Result<Option<StateLabel>> {
    let (Some(run), Some(folder)) = (run, trainer.state_folder(job)) else {
        return trainer.begin_states_anew().map(|_| None);
    };
    // The old states are forgotten before the label is another's.
    if !trainer.begin_states_anew()? {
        return StateLabel::read(run);
    }
    let folder = std::path::absolute(&folder).map_err(Error::io("find", &folder))?;
    let label = StateLabel::draw(folder)?;
    label.write(run)?;
    Ok(Some(label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_continue_at_the_newest_step_that_all_have() {
        let of =
            |newest, older, saved| StoredSteps { steps: [newest, older], saved, rows: 0, is_there: true };
        let rows = |rows| StoredSteps { rows, ..of(0, 0, 3) };
        let none = StoredSteps { is_there: false, ..StoredSteps::default() };
        for (all, expected) in [
            (vec![of(7, 6, 0), of(7, 6, 0)], Continues::States(7)),
            // One was killed while it committed, another after it.
            (vec![of(7, 6, 0), of(6, 5, 0), of(6, 0, 0)], Continues::States(6)),
            (vec![of(7, 6, 7), of(6, 5, 5)], Continues::States(6)),
            // The first step.
            (vec![of(1, 0, 0), of(0, 0, 0)], Continues::Checkpoints),
            (vec![of(0, 0, 0), of(0, 0, 0)], Continues::Checkpoints),
            // A later checkpoint, also where a rank has no state on disk.
            (vec![of(7, 6, 9), of(7, 6, 9)], Continues::Checkpoints),
            (vec![of(9, 8, 8), none], Continues::Behind { rank: 1, step: 0, newest: 9 }),
            (vec![of(9, 8, 8), StoredSteps { saved: 8, ..none }], Continues::Checkpoints),
            // An older copy, and a folder that was lost.
            (vec![of(9, 8, 0), of(5, 4, 0)], Continues::Behind { rank: 1, step: 5, newest: 9 }),
            (vec![of(0, 0, 3), of(9, 8, 3)], Continues::Behind { rank: 0, step: 0, newest: 9 }),
            // All of it was lost, after steps that no checkpoint has.
            (vec![rows(9), rows(0)], Continues::Behind { rank: 0, step: 0, newest: 9 }),
            (vec![rows(5)], Continues::Behind { rank: 0, step: 0, newest: 5 }),
            (vec![rows(4)], Continues::Checkpoints),
            // The only rank has an older copy; or a row was written before its state.
            (vec![StoredSteps { rows: 9, ..of(7, 6, 0) }], Continues::Behind { rank: 0, step: 7, newest: 9 }),
            (vec![StoredSteps { rows: 8, ..of(7, 6, 0) }], Continues::States(7)),
        ] {
            assert_eq!(decide(&all), expected, "{all:?}");
        }
        for one in [of(7, 6, 5), none] {
            assert_eq!(StoredSteps::of_bytes(&one.to_bytes()), Some(one));
            assert_eq!(StoredSteps::of_bytes(&one.to_bytes()[1..]), None);
        }
    }
}
