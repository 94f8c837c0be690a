//! Decides whether a run continues from the state on disk (`--state disk`), which has its last step, or from a
//! checkpoint.

use std::path::PathBuf;

use farflung_comm::Communicator;
use farflung_store::Generation;
use serde::{Deserialize, Serialize};

use super::super::all_succeed::all_succeed;
use super::super::disk_state::{RecordedStep, StepRecords};
use super::super::job::Job;
use super::super::trainer::Trainer;
use super::contents::record;
use super::{CheckpointRecord, Resumed, Source, Totals, compare};
use crate::config::choice::{Resume, StatePlace};
use crate::{Error, Result, RunDir};

/// What the state on disk has of a step, besides its arrays: what `trainer.json` of a checkpoint has.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in super::super) struct StepRecord {
    trainer: CheckpointRecord,
    pub(in super::super) loss_scale: Vec<f32>,
}

impl StepRecord {
    /// Makes the record of the step at which a run begins or continues.
    pub(in super::super) fn of(trainer: &Trainer, job: &Job, totals: Totals) -> Self {
        let loss_scale = trainer.loss_scale().save().to_vec();
        Self { trainer: record(trainer, job, totals, &[]), loss_scale }
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
    /// Whether its state is on disk at all.
    is_there: bool,
}

impl StoredSteps {
    fn to_bytes(self) -> Vec<u8> {
        let Self { steps: [newest, older], saved, is_there } = self;
        [newest, older, saved, is_there.into()].into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, []) = bytes.as_chunks::<8>() else { return None };
        let &[newest, older, saved, is_there] = words else { return None };
        let [newest, older, saved, is_there] = [newest, older, saved, is_there].map(u64::from_le_bytes);
        Some(Self { steps: [newest, older], saved, is_there: is_there == 1 })
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
/// of a later one. A rank that was interrupted while it committed may be one step behind. If one is further
/// behind, its state was lost or is an older copy: the steps since the last checkpoint would be lost.
fn decide(all: &[StoredSteps]) -> Continues {
    let newest = all.iter().map(|rank| rank.steps[0]).max().unwrap_or(0);
    let has = |step: u64| all.iter().all(|rank| rank.is_there && rank.steps.contains(&step));
    let common = all.iter().flat_map(|rank| rank.steps).filter(|&step| step > 0 && has(step)).max();
    let saved = all.iter().map(|rank| rank.saved).min().unwrap_or(0);
    match common {
        Some(step) if step >= saved => Continues::States(step),
        _ if newest > saved + 1 => {
            let behind =
                all.iter().position(|rank| !rank.steps.contains(&(newest - 1)) && rank.steps[0] < newest);
            let rank = behind.unwrap_or(0);
            Continues::Behind { rank, step: all[rank].steps[0], newest }
        }
        _ => Continues::Checkpoints,
    }
}

/// Opens the state on disk of the ranks that have one, and continues from it, if that has the newest step.
/// `None` if a checkpoint decides. A collective.
///
/// Errors: those of the files; [`Error::StateExists`] if a new run would overwrite one;
/// [`Error::StateBehind`].
pub(in super::super) fn resume(
    trainer: &mut Trainer,
    job: &Job,
    run: Option<&RunDir>,
) -> Result<Option<Resumed>> {
    let comm = trainer.comm().clone();
    let opened = all_succeed(&comm, open(trainer, job))?;
    if job.config.resume != Resume::Auto {
        return Ok(None);
    }
    let mut steps = opened.generations.iter().map(|generation| generation.number);
    let own = StoredSteps {
        steps: [steps.next().unwrap_or(0), steps.next().unwrap_or(0)],
        saved: run.and_then(|run| run.latest().ok().flatten()).map_or(0, |newest| newest.step()),
        is_there: trainer.has_state_on_disk(),
    };
    let all = comm.all_gather_bytes(own.to_bytes())?;
    let all = all.iter().map(|bytes| StoredSteps::of_bytes(bytes).unwrap_or_default()).collect::<Vec<_>>();
    if all.iter().all(|rank| !rank.is_there) {
        return Ok(None);
    }
    match decide(&all) {
        Continues::Checkpoints => Ok(None),
        Continues::Behind { rank, step, newest } => Err(Error::StateBehind { rank, step, newest }),
        Continues::States(step) => continue_from(trainer, job, step, opened, &comm).map(Some),
    }
}

/// The state on disk of this rank.
struct Opened {
    folder: PathBuf,
    generations: Vec<Generation>,
}

/// Opens the files.
fn open(trainer: &Trainer, job: &Job) -> Result<Opened> {
    if job.config.state == StatePlace::Device {
        return Ok(Opened { folder: PathBuf::new(), generations: Vec::new() });
    }
    let expected = "a folder: this run has none of its own".to_owned();
    let none = || Error::Setting { field: "state-dir", value: "none".to_owned(), expected };
    let folder = trainer.state_folder(job).ok_or_else(none)?;
    let generations = trainer.open_states(&folder)?;
    let is_new = match job.config.resume {
        Resume::No => true,
        // The run's own state is older than what the user asks for, or newer.
        Resume::Path(_) => job.config.state_dir.is_some(),
        Resume::Auto => false,
    };
    match generations.first() {
        Some(found) if is_new => Err(Error::StateExists { path: folder, step: found.number }),
        _ => Ok(Opened { folder, generations }),
    }
}

fn continue_from(
    trainer: &mut Trainer,
    job: &Job,
    step: u64,
    Opened { folder, generations }: Opened,
    comm: &Communicator,
) -> Result<Resumed> {
    let is_newest = generations.first().is_some_and(|newest| newest.number == step);
    let found = generations.into_iter().find(|generation| generation.number == step);
    let read = found.and_then(|generation| StepRecord::of_bytes(&generation.record)).ok_or_else(|| {
        Error::Damaged { path: folder.clone(), what: "it does not contain the trainer's counters" }
    });
    let read = read.and_then(|read| compare::check(&read.trainer, job).map(|()| read));
    let read = all_succeed(comm, read)?;
    let restored = trainer.resume_from_states((step, &read), !is_newest);
    all_succeed(comm, restored)?;
    compare::same_step(&read.trainer, comm)?;
    let totals = read.trainer.totals;
    Ok(Resumed { totals, notes: Vec::new(), from: folder, plan_start: job.plan_start })
}

/// Begins to use the state on disk, if the run does not continue from it. A collective.
///
/// Errors: those of the files.
pub(in super::super) fn start(
    trainer: &mut Trainer,
    job: &Job,
    from: Option<&Source>,
    totals: Totals,
) -> Result<()> {
    let record = StepRecord::of(trainer, job, totals);
    let started = trainer.start_states(from, record);
    all_succeed(&trainer.comm().clone(), started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_continue_at_the_newest_step_that_all_have() {
        let of = |newest, older, saved| StoredSteps { steps: [newest, older], saved, is_there: true };
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
        ] {
            assert_eq!(decide(&all), expected, "{all:?}");
        }
        for one in [of(7, 6, 5), none] {
            assert_eq!(StoredSteps::of_bytes(&one.to_bytes()), Some(one));
            assert_eq!(StoredSteps::of_bytes(&one.to_bytes()[1..]), None);
        }
    }
}
