//! Chooses the checkpoint from which each rank of a job continues.

use farflung_base::Rank;
use farflung_comm::Communicator;
use farflung_parallel::Plan;

use super::super::all_succeed::all_succeed;
use super::super::job::Job;
use super::super::trainer::Trainer;
use super::source::{self, Files, Residuals};
use super::whole::{Chosen, all_of, all_of_each, checked_owner, of_rank};
use super::{Source, all_gather_u64, by_path, lost, members};
use crate::config::choice::Resume;
use crate::{Checkpoint, Error, Result, RunDir};

/// A rank's newest checkpoint of the parts that it holds now.
enum OwnCheckpoint {
    There(Checkpoint),
    /// The run has begun in the rank's folder, but its newest checkpoint, of this step, is not of its current
    /// parts. `None`: there is no checkpoint.
    NotYet(Option<u64>),
    /// The rank has no folder, or no valid checkpoint in it.
    Lost(Option<Error>),
}

/// Returns the checkpoint from which this rank continues; `None` if the run starts at step 0. A collective.
///
/// Errors: the same on all ranks.
pub(super) fn source(trainer: &Trainer, job: &Job, run: &RunDir) -> Result<Option<Chosen>> {
    let (rank, comm, parts) = (trainer.comm().rank(), trainer.comm(), trainer.layers());
    let (levels, width) = (job.plan.recorded_paths(), job.plan.recorded_width());
    let (state, context) = (job.plan.recorded_state(), job.plan.recorded_context());
    let by_unit = job.plan.divides_gradients();
    let fits = |checkpoint: &Checkpoint| {
        source::record(checkpoint).is_ok_and(|t| {
            let width_of_each = (&t.tensor_weights, t.sequence_parallel);
            let held = (t.world, &t.parts, &t.experts, &t.paths, width_of_each);
            held == (job.world, &parts, &job.plan.experts, &levels, (&width, job.plan.sequence_parallel))
                && (&t.zero_weights, t.zero_by_unit, &t.context) == (&state, by_unit, &context)
        })
    };
    let needed = trainer.needed();
    let read = |checkpoints: Vec<Checkpoint>, residuals| {
        let files = checkpoints.into_iter().map(Files::read).collect::<Result<_>>()?;
        Source::new(&job.model, files, residuals, needed.clone())
    };
    let chosen = |source| Chosen { source, notes: Vec::new() };
    match &job.config.resume {
        Resume::No => Ok(None),
        Resume::Path(path) => {
            let path = match by_path::kind(path, comm)? {
                by_path::Kind::Checkpoint => path.clone(),
                by_path::Kind::Run if job.elastic && comm.size() == 1 => {
                    let newest = members::newest(path, job, &needed)?;
                    return newest.ok_or_else(|| by_path::not_a_checkpoint(path)).map(Some);
                }
                by_path::Kind::Run => by_path::newest(path, job, comm)?,
            };
            let path = &path;
            // A checkpoint that cannot be opened is not needed if those of all ranks with parts of the model
            // are read.
            let own = match Checkpoint::open(&of_rank(path, rank)) {
                Ok(own) => checked_owner(own, rank).map(|own| Some(own).filter(fits)),
                Err(_) => Ok(None),
            };
            let own = all_succeed(comm, own)?;
            let all_have = all_gather_u64(comm, u64::from(own.is_some()))?.iter().all(|&has| has == 1);
            let source = match own.filter(|_| all_have) {
                Some(own) => read(vec![own], Residuals::Own),
                None => all_of(path, job, own_path(job, rank)).and_then(|all| read(all, Residuals::None)),
            };
            all_succeed(comm, source.map_err(Error::of_input)).map(|source| Some(chosen(source)))
        }
        Resume::Auto if job.elastic && comm.size() == 1 => members::newest(run.path(), job, &needed),
        Resume::Auto => {
            let own = all_succeed(comm, own(run, rank, &fits))?;
            let others = if let OwnCheckpoint::NotYet(Some(step)) = own { step } else { 0 };
            let newest_of_others = all_gather_u64(comm, others)?.into_iter().max().unwrap_or(0);
            let (agreed, own) = agree(comm, run, own, &job.plan)?;
            if agreed == 0 || newest_of_others > agreed {
                match all_succeed(comm, cut_otherwise(comm, run, job))? {
                    None if agreed == 0 => return Ok(None),
                    None => {}
                    Some(all) => {
                        return all_succeed(comm, read(all, Residuals::None))
                            .map(|source| Some(chosen(source)));
                    }
                }
            }
            let not_yet = matches!(own, OwnCheckpoint::NotYet(_));
            let files = match own {
                OwnCheckpoint::There(own) => Files::read(own).map(Some),
                _ => Ok(None),
            };
            let files = all_succeed(comm, files)?;
            let place = |rank| job.plan.place(rank);
            let shared = lost::share(comm, agreed, place, files, not_yet)?;
            let lost::Shared { files, notes, residuals } = match shared {
                lost::Found::All(shared) => *shared,
                lost::Found::NotYet(lacking) => {
                    let all = before_first(comm, run, job, (lacking, agreed))?;
                    let source = all.map(|all| read(all, Residuals::None)).transpose();
                    return Ok(all_succeed(comm, source)?.map(chosen));
                }
            };
            let source = all_succeed(comm, Source::new(&job.model, vec![files], residuals, needed))?;
            Ok(Some(Chosen { source, notes }))
        }
    }
}

/// Returns the path that a rank trains.
fn own_path(job: &Job, rank: Rank) -> u32 {
    job.plan.path(job.plan.at(rank).data)
}

/// Returns the checkpoints from which all continue where a rank has never saved its parts, as far as its folder
/// tells, and no other has them: an earlier one of the whole model; `None` if the step that the others have is
/// their first, so that the run was interrupted while it was saved. A collective.
///
/// Errors: [`Error::NoCopy`] if the rank's checkpoints must have been removed.
fn before_first(
    comm: &Communicator,
    run: &RunDir,
    job: &Job,
    (lacking, agreed): (Rank, u64),
) -> Result<Option<Vec<Checkpoint>>> {
    let others = run.checkpoints()?.into_iter().filter(|&step| step != agreed).count();
    let is_first = all_gather_u64(comm, others as u64)?.iter().all(|&others| others == 0);
    match all_succeed(comm, cut_otherwise(comm, run, job))? {
        Some(all) => Ok(Some(all)),
        None if is_first => {
            let rank = lacking.0;
            tracing::warn!(
                rank,
                step = agreed,
                "this rank's first checkpoint is missing: the run begins again"
            );
            Ok(None)
        }
        None => Err(Error::NoCopy { rank: lacking, step: agreed }),
    }
}

/// Returns the newest checkpoint in a rank's folder.
///
/// Errors: [`Error::ForeignFolder`] if another rank wrote it.
fn own(run: &RunDir, rank: Rank, fits: &dyn Fn(&Checkpoint) -> bool) -> Result<OwnCheckpoint> {
    let begun = run.has_begun();
    let newest = match run.latest() {
        Ok(Some(newest)) => Ok(Some(checked_owner(newest, rank)?)),
        other => other,
    };
    match newest {
        Ok(Some(own)) if fits(&own) => Ok(OwnCheckpoint::There(own)),
        // A checkpoint of other parts counts as none.
        Ok(Some(other)) => Ok(OwnCheckpoint::NotYet(Some(other.step()))),
        Ok(None) if begun => Ok(OwnCheckpoint::NotYet(None)),
        Ok(None) => Ok(OwnCheckpoint::Lost(None)),
        Err(error) => Ok(OwnCheckpoint::Lost(Some(error))),
    }
}

/// Returns the step to continue from: the oldest of the newest steps of all ranks that have any; 0 if there is
/// none. A rank that was interrupted while it committed may be one checkpoint behind; the others then go back
/// to its step. A step that was saved while some ranks did not answer is used nevertheless if the whole model
/// was saved, each part by some rank: the other ranks get it from those that hold the same.
fn agree(comm: &Communicator, run: &RunDir, own: OwnCheckpoint, plan: &Plan) -> Result<(u64, OwnCheckpoint)> {
    let (mine, alone) = match &own {
        OwnCheckpoint::There(own) => (own.step(), !source::record(own)?.absent.is_empty()),
        _ => (0, false),
    };
    let steps = all_gather_u64(comm, mine)?;
    let saved_alone = all_gather_u64(comm, u64::from(alone))?;
    let newest = (0..steps.len()).filter(|&rank| saved_alone[rank] == 1).map(|rank| steps[rank]).max();
    let places: Vec<u32> = (0..plan.ranks()).map(|rank| plan.place(Rank(rank))).collect();
    let has =
        |wanted: &u32, step: u64| places.iter().zip(&steps).any(|(at, has)| at == wanted && *has == step);
    let has_all = |step: u64| places.iter().all(|place| has(place, step));
    let agreed = match newest.filter(|&step| has_all(step)) {
        Some(step) => step,
        None => steps.into_iter().filter(|&step| step > 0).min().unwrap_or(0),
    };
    let own = match own {
        OwnCheckpoint::There(newer) if newer.step() != agreed => {
            let path = run.path().join(crate::checkpoint::folder(agreed));
            Checkpoint::open(&path)
                .map_or_else(|error| OwnCheckpoint::Lost(Some(error)), OwnCheckpoint::There)
        }
        own => own,
    };
    // Damage is an error only if there is no other rank to get the state from.
    let damage = match own {
        OwnCheckpoint::Lost(Some(error)) if agreed == 0 => Err(error),
        own => Ok(own),
    };
    Ok((agreed, all_succeed(comm, damage)?))
}

/// Returns the checkpoints of a run whose ranks held other parts than now: those of all its ranks, of the
/// newest step that all of them have. Rank 0 looks for them. `None` if there is no such run, or if it never
/// saved a step on all ranks.
fn cut_otherwise(comm: &Communicator, run: &RunDir, job: &Job) -> Result<Option<Vec<Checkpoint>>> {
    let root = job.out.as_deref().unwrap_or(run.path());
    let mut step = 0;
    let mut missing = None;
    if comm.rank().0 == 0 {
        for at in run.checkpoints()?.into_iter().rev() {
            let path = root.join(crate::checkpoint::folder(at));
            match all_of_each(&path, job) {
                // A checkpoint from before the model was divided is not used, since it would lose steps that
                // others have.
                Ok(all) if all.len() == 1 && matches!(missing, Some(Error::PartsElsewhere { .. })) => break,
                Ok(_) => {
                    step = at;
                    break;
                }
                // Members that are interrupted while they save may be one checkpoint apart.
                Err(error @ Error::PartsElsewhere { .. }) => missing = missing.or(Some(error)),
                // If that run had the same ranks as now, the missing checkpoints were never written, so the
                // error is ignored. With other ranks, they may be on another disk, so the error is kept.
                Err(error) => {
                    let same = Checkpoint::open(&path).and_then(|c| source::record(&c));
                    let same = same.is_ok_and(|t| {
                        let state = (t.zero_weights, t.zero_by_unit);
                        let divided = (&t.experts, &t.tensor_weights, &state);
                        let state = (job.plan.recorded_state(), job.plan.divides_gradients());
                        let now = (&job.plan.experts, &job.plan.recorded_width(), &state);
                        (t.world, t.stages) == (job.world, job.plan.stages() as usize) && divided == now
                    });
                    missing = missing.or(Some(error).filter(|_| !same));
                }
            }
        }
    }
    let agreed = all_gather_u64(comm, step)?.into_iter().max().unwrap_or(0);
    match (agreed, missing) {
        (0, Some(error)) => Err(error),
        (0, None) => Ok(None),
        (step, _) => {
            all_of(&root.join(crate::checkpoint::folder(step)), job, own_path(job, comm.rank())).map(Some)
        }
    }
}
