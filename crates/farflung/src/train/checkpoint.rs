//! A rank's whole state on disk. Each rank has its own folder, so that optimizer states cross no slow link and
//! no shared disk is needed. A checkpoint is valid once every rank has written its own.
//!
//! A rank's `step-N/` contains `config.json` and `model.safetensors` (Hugging Face's layout; in a pipeline,
//! rank 0 has the whole model and the others have their parts), `optimizer.safetensors` (moments, outer state,
//! residuals), `samples.safetensors` if boundaries store samples in memory, `trainer.json`, and the run's
//! settings and plan at that time. A run that divides the model differently reads the folders of all ranks,
//! which it must be able to access. A rank whose folder is lost gets its state from a rank that holds the same
//! parts. Members that join and leave have their own folders; checkpoints that were saved in the same view
//! belong together.

mod by_path;
mod choose;
mod compare;
mod contents;
mod lost;
mod members;
mod neighbours;
mod pieces;
mod room;
mod samples;
mod source;
mod state_on_disk;
mod tensor_sink;
mod whole;

use std::collections::BTreeMap;
use std::path::PathBuf;

use farflung_base::Rank;
use farflung_comm::Communicator;
use farflung_parallel::membership::ViewId;
use farflung_zoo::{AxisShare, Objective};
use serde::{Deserialize, Serialize};

use super::all_succeed::all_succeed;
use super::job::Job;
use super::plan_start::PlanStart;

pub(super) use super::totals::Totals;
use super::trainer::Trainer;
use crate::config::shared::NamedValue;
use crate::model_source::{SETTINGS, TENSORS as MODEL};
pub(super) use crate::run_dir::rank_folder as folder;
use crate::{CheckpointWriter, Error, ModelSource, Packing, Result, RunDir};
use contents::Contents;
pub(super) use neighbours::{beside, saved_steps};
pub(super) use pieces::{Saved, saved};
pub use room::{NoRoom, Shortage};
pub(super) use room::{admit, admit_member, admit_newcomer};
pub(super) use source::{Needed, OwnTensors, Residuals, RestoredResiduals, Source};
pub(super) use state_on_disk::StepRecord;

/// Returns whether an objective is the one that is not written down.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_causal(objective: &Objective) -> bool {
    *objective == Objective::Causal
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
const fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// `trainer.json`: counters, and values that must be the same when the run is continued.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckpointRecord {
    rank: u32,
    world: usize,
    /// The model's shape.
    #[serde(default)]
    model: Vec<NamedValue>,
    /// Range of layers of each part that the rank holds: the first layer, and the one after the last.
    parts: Vec<(usize, usize)>,
    /// Ranks per pipeline.
    stages: usize,
    /// The weights of the replicas that divided the experts; empty if each had all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    experts: Vec<u32>,
    /// The weights of the ranks that divided the width of layers, and the rank's number among them; empty if
    /// each layer was on one rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tensor_weights: Vec<u32>,
    #[serde(default, skip_serializing_if = "is_zero")]
    tensor: u32,
    /// Whether they divided positions where layers are whole.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    sequence_parallel: bool,
    /// How replicas divided the positions of sequences; empty if each had whole ones.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    context: String,
    /// The weights of the replicas that divided the optimizer's state, of which the rank then has a shard;
    /// empty if each had all of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    zero_weights: Vec<u32>,
    /// Whether shards are of each unit of a part's parameters, and not of all together.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    zero_by_unit: bool,
    /// The levels of modules through which replicas trained paths; empty if they trained one model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    paths: Vec<String>,
    /// The settings that said which text took which path.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    routing: String,
    /// Sequences per step, over all replicas; in a run whose members join and leave, of one replica.
    sequences: u64,
    /// Microbatches of a replica in a step by the settings, in such a run. `None` if an earlier version wrote
    /// it: `sequences` are then those of one member, whose share may have followed its speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    microbatches: Option<u64>,
    seed: u64,
    sync: String,
    codec: String,
    data_hash: String,
    /// Whether documents were kept apart.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    document_mask: bool,
    /// What the model learnt to predict.
    #[serde(default, skip_serializing_if = "is_causal")]
    objective: Objective,
    step: u64,
    outer_step: u64,
    rounds: u64,
    totals: Totals,
    /// Numbers of steps and microbatches done when it was saved, in a run whose members join and leave: the
    /// plan of the run that continues begins there.
    #[serde(rename = "base", default, skip_serializing_if = "Option::is_none")]
    plan_start: Option<PlanStart>,
    /// The view in which it was saved, in a run whose members form pipelines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    view: Option<ViewId>,
    /// Ranks that did not answer when it was saved: they may be behind, and then get their state from the
    /// others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    absent: Vec<u32>,
    /// What the residuals of each average belong to, as hashes: see [`Trainer::residual_layouts`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    residuals: BTreeMap<String, String>,
}

impl CheckpointRecord {
    /// Returns what the rank had of the width of layers.
    ///
    /// Errors: it has no number among the ranks that divided it.
    fn width(&self) -> Result<AxisShare> {
        match &self.tensor_weights[..] {
            [] => Ok(AxisShare::whole()),
            weights => Ok(AxisShare::new(self.tensor as usize, weights.to_vec())?),
        }
    }
}

const OPTIMIZER: &str = "optimizer.safetensors";
const SAMPLES: &str = "samples.safetensors";
/// Prefix of the names of the residuals of averages.
pub(super) const AVERAGE: &str = "average.";
/// The name of the loss scale among a rank's states.
pub(super) const LOSS_SCALE: &str = "loss_scale";
const TRAINER: &str = "trainer.json";
const PLAN: &str = "plan.toml";

/// Numbers of steps, outer steps and rounds of averages done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counters {
    pub(super) step: u64,
    pub(super) outer_step: u64,
    pub(super) rounds: u64,
}

/// Saves this rank's checkpoint and returns its path. All ranks must call it after the same step. No rank makes
/// its checkpoint the newest before all have written theirs.
///
/// Errors: [`Error::NoRoom`] if this rank's disk is too full, [`Error::NoRoomOn`] if another's is. Nothing has
/// changed then on any rank, and all can go on. Members that each have the whole model do not depend on the
/// disks of others.
pub(super) fn save(trainer: &mut Trainer, job: &Job, run: &RunDir, totals: Totals) -> Result<PathBuf> {
    trainer.wait_in_flight()?;
    save_without(trainer, job, run, totals, &[])
}

/// Like [`save`], on the ranks that remain after [`Trainer::retreat`], while `absent` do not answer.
pub(super) fn save_without(
    trainer: &mut Trainer,
    job: &Job,
    run: &RunDir,
    totals: Totals,
    absent: &[Rank],
) -> Result<PathBuf> {
    trainer.with_common(|trainer| save_common(trainer, job, run, totals, absent))
}

/// Saves the parts of the model that this rank holds, after the last step that counts on all ranks, without the
/// other ranks: those that cannot continue save theirs in the same way. They may be one step apart, so that no
/// older checkpoint is deleted.
pub(super) fn save_parts(trainer: &mut Trainer, job: &Job, run: &RunDir, totals: Totals) -> Result<PathBuf> {
    trainer.back_to_common()?;
    let contents = Contents::of(trainer, job, totals, &[], false)?;
    admitted(&contents, job, run)?;
    let path = written(&contents, job, run)?.commit(run)?;
    job.stop.note_saved(&path);
    Ok(path)
}

/// Deletes old checkpoints. The previous one is kept even if only one is wanted: another rank may have failed
/// before it made its newest checkpoint valid.
fn prune(job: &Job, run: &RunDir) -> Result<()> {
    run.prune(if job.config.keep_last == 0 { 0 } else { job.config.keep_last.max(2) })
}

/// Like [`save_without`], called while the parameters common to all replicas are in place.
fn save_common(
    trainer: &mut Trainer,
    job: &Job,
    run: &RunDir,
    totals: Totals,
    absent: &[Rank],
) -> Result<PathBuf> {
    let comm = trainer.comm();
    let contents = Contents::of(trainer, job, totals, absent, true);
    let fits = contents.and_then(|contents| admitted(&contents, job, run).map(|()| contents));
    let path = if job.elastic && job.plan.stages() == 1 {
        let written = fits.and_then(|contents| written(&contents, job, run));
        comm.barrier()?;
        let committed = written.and_then(|written| written.commit(run));
        comm.barrier()?;
        committed?
    } else {
        // Rank 0 receives weights only if it has room for them.
        let contents = all_succeed(comm, fits)?;
        let sent = contents.send_weights();
        let written = all_succeed(comm, sent.and_then(|()| written(&contents, job, run)))?;
        all_succeed(comm, written.commit(run))?
    };
    if trainer.rank().0 == 0 || job.elastic || job.processes > 1 {
        job.stop.note_saved(&path);
    }
    prune(job, run)?;
    Ok(path)
}

/// A checkpoint that is written but not valid yet.
struct Written {
    writer: CheckpointWriter,
    step: u64,
    size: contents::Size,
}

impl Written {
    /// Makes the checkpoint valid and the newest.
    fn commit(self, run: &RunDir) -> Result<PathBuf> {
        let Self { writer, step, size } = self;
        run.commit(writer).map_err(|error| room::failed(error, run.path(), size, step))
    }
}

/// Checks that a checkpoint fits on the disk.
fn admitted(contents: &Contents<'_>, job: &Job, run: &RunDir) -> Result<()> {
    room::check(contents.size(), packing(job), run.path(), contents.step())
}

/// Writes a checkpoint that is not valid yet.
fn written(contents: &Contents<'_>, job: &Job, run: &RunDir) -> Result<Written> {
    let (size, step) = (contents.size(), contents.step());
    let write = || {
        let mut writer = contents.write(run.begin_checkpoint(step, packing(job)))?;
        writer.prepare()?;
        Ok(Written { writer, step, size })
    };
    write().map_err(|error| room::failed(error, run.path(), size, step))
}

const fn packing(job: &Job) -> Packing {
    if job.config.compress_checkpoints { Packing::Zstd } else { Packing::Plain }
}

/// Note for the user about residuals that are not used.
const DROPPED_RESIDUALS: &str = "the checkpoint has residuals of the codec for another division of the values \
                                 among ranks: they start from zero";

/// The point at which a run continues.
#[derive(Debug)]
pub(super) struct Resumed {
    /// Resources that the run had used.
    pub(super) totals: Totals,
    /// Notes for the user: settings that differ, ranks that had lost their folder.
    pub(super) notes: Vec<String>,
    /// The checkpoint: this rank's, or that of the rank from which the state was taken.
    pub(super) from: PathBuf,
    /// Numbers of steps and microbatches at which the plan of the continued run begins.
    pub(super) plan_start: PlanStart,
}

/// Finds the checkpoint that `--resume` selects (for `auto`, the newest step that every rank has), and restores
/// it. `None` if the run starts at step 0. A collective.
///
/// Errors: the same on all ranks.
pub(super) fn resume(trainer: &mut Trainer, job: &Job, run: Option<&RunDir>) -> Result<Option<Resumed>> {
    if job.elastic {
        // Members keep their state in memory.
        let restored = run.map(|run| from_checkpoint(trainer, job, run)).transpose()?.flatten();
        return Ok(restored.map(|(resumed, _)| resumed));
    }
    let on_disk = state_on_disk::resume(trainer, job, run)?;
    let (resumed, source) = match (on_disk, run) {
        (Some(resumed), _) => (Some(resumed), None),
        (None, Some(run)) => from_checkpoint(trainer, job, run)?.unzip(),
        (None, None) => (None, None),
    };
    let totals = resumed.as_ref().map_or_else(Totals::default, |resumed| resumed.totals);
    state_on_disk::start(trainer, (job, run), source.as_ref(), totals)?;
    Ok(resumed)
}

/// Restores the checkpoint that `--resume` selects, and returns it with what it contains.
fn from_checkpoint(trainer: &mut Trainer, job: &Job, run: &RunDir) -> Result<Option<(Resumed, Source)>> {
    let Some(whole::Chosen { mut source, mut notes }) = choose::source(trainer, job, run)? else {
        // There is no checkpoint that has the weights, so the run needs those of `init-from`.
        if let (Some(path), None) = (&job.config.init_from, &job.initial) {
            ModelSource::find(path)?;
        }
        return Ok(None);
    };
    let checked = compare::check(&source.record, job)
        .and_then(|()| trainer.restore(&mut source, job.plan.outermost().codec_name()));
    let checked = checked.and_then(|restored| samples::restore(trainer, &source).map(|()| restored));
    if all_succeed(trainer.comm(), checked)? == RestoredResiduals::Dropped {
        notes.push(DROPPED_RESIDUALS.to_owned());
    }
    samples::agree(trainer)?;
    compare::same_step(&source.record, trainer.comm())?;
    notes.extend(compare::differing_settings(source.settings(), job));
    let plan_start = source.record.plan_start.unwrap_or(job.plan_start);
    let (totals, from) = (source.record.totals, source.path().to_owned());
    Ok(Some((Resumed { totals, notes, from, plan_start }, source)))
}

/// Sends this rank's number to all others; returns all numbers, by rank.
pub(super) fn all_gather_u64(comm: &Communicator, mine: u64) -> Result<Vec<u64>> {
    let all = comm.all_gather_bytes(mine.to_le_bytes().to_vec())?;
    let word = |(rank, bytes): (usize, &Vec<u8>)| {
        let word = bytes.as_slice().try_into().map(u64::from_le_bytes);
        word.map_err(|_| Error::Message {
            message: format!("the number of rank {rank}"),
            problem: "cannot be parsed",
        })
    };
    all.iter().enumerate().map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_keeps_the_names_of_its_file() {
        let text = r#"{"rank":0,"world":1,"model":[],"parts":[[0,4]],"stages":1,"sequences":8,"seed":1,
            "sync":"ddp","codec":"none","data_hash":"","step":3,"outer_step":0,"rounds":3,
            "totals":{"time_s":1.0,"wall_s":1.0,"bytes_sent":0,"bytes_received":0},
            "base":{"step":3,"microbatches":12}}"#;
        let record: CheckpointRecord = serde_json::from_str(text).unwrap();
        assert_eq!(record.plan_start, Some(PlanStart { step: 3, microbatches: 12 }));
        let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(parse(&serde_json::to_string(&record).unwrap()), parse(text));
    }
}
