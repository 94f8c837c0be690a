//! A rank's whole state on disk. Each rank keeps its own folder, so that optimizer states cross no slow link and no machine
//! needs a shared disk; a checkpoint counts once every rank has it.
//!
//! A rank's `step-N/` holds `config.json` and `model.safetensors` (Hugging Face's layout; of a pipeline, rank 0 has all of
//! the model and the others their parts), `optimizer.safetensors` (moments, outer state, residuals), `samples.safetensors` where
//! boundaries hold samples in memory, and `trainer.json`. A run that cuts the model in another way reads the folders of all ranks, which it must be able to reach.

mod samples;
mod source;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use farflung_base::Rank;
use farflung_comm::Communicator;
use farflung_zoo::weights::{Dtype, TensorData, TensorView, config_text, write_tensors_to};
use serde::{Deserialize, Serialize};

use super::job::Job;
use super::trainer::Trainer;
use crate::config::choice::Resume;
use crate::{Checkpoint, Error, Packing, Result, RunDir, run_dir};
pub(super) use source::Source;

/// What a run has used up to a step, summed over its resumes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Totals {
    pub(super) time_s: f64,
    pub(super) wall_s: f64,
    pub(super) bytes_sent: u64,
    pub(super) bytes_received: u64,
}

/// `trainer.json`: what must be the same for the rest of the run to mean anything, and the counters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    rank: u32,
    world: usize,
    /// First layer of each part that the rank holds, and the one behind its last.
    parts: Vec<(usize, usize)>,
    /// Ranks of a pipeline.
    stages: usize,
    /// Sequences of a step, over all replicas.
    sequences: u64,
    seed: u64,
    sync: String,
    codec: String,
    data_hash: String,
    step: u64,
    outer_step: u64,
    rounds: u64,
    totals: Totals,
}

/// Where a rank keeps its checkpoints, given the run's folder.
pub(super) fn folder(out: &Path, rank: Rank) -> PathBuf {
    if rank.0 == 0 { out.to_owned() } else { out.join(run_dir::RANKS).join(format!("rank-{:05}", rank.0)) }
}

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const TRAINER: &str = "trainer.json";

/// A named tensor to be written.
pub(super) struct Named {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f32>,
}

/// Steps done, and those of what has a pace of its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counters {
    pub(super) step: u64,
    pub(super) outer_step: u64,
    pub(super) rounds: u64,
}

fn write(
    named: &[Named],
    metadata: &BTreeMap<String, String>,
    out: &mut dyn std::io::Write,
) -> std::io::Result<()> {
    let views: Vec<_> = named
        .iter()
        .map(|n| TensorView { name: &n.name, shape: &n.shape, data: TensorData::F32(&n.values) })
        .collect();
    write_tensors_to(out, &views, metadata)
}

/// Writes this rank's checkpoint; all ranks must call it after the same step, with replicas the same. It becomes the
/// newest on any rank only after all have written theirs.
pub(super) fn save(trainer: &mut Trainer, job: &Job, run: &RunDir, totals: Totals) -> Result<()> {
    trainer.gather_whole()?;
    let packing = if job.config.compress_checkpoints { Packing::Zstd } else { Packing::Plain };
    let Counters { step, outer_step, rounds } = trainer.counters();
    let mut writer = run.begin_checkpoint(step, packing)?;
    writer.write("config.json", config_text(&job.model, Dtype::F32).as_bytes())?;
    let weights = trainer.weights()?;
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    writer.write_with(MODEL, |out| write(&weights, &metadata, out))?;
    let states = trainer.states()?;
    writer.write_with(OPTIMIZER, |out| write(&states, &BTreeMap::new(), out))?;
    samples::save(trainer, &mut writer)?;

    let level = job.plan.outermost();
    let record = Record {
        rank: trainer.comm().rank().0,
        world: job.world,
        parts: trainer.layers(),
        stages: job.plan.stages() as usize,
        sequences: job.plan.sequences(),
        seed: job.config.seed,
        sync: level.method.clone(),
        codec: level.codec.clone(),
        data_hash: job.hash.clone(),
        step,
        outer_step,
        rounds,
        totals,
    };
    let text = serde_json::to_vec_pretty(&record).expect("numbers and names have no way to fail");
    writer.write(TRAINER, &text)?;

    trainer.comm().barrier()?;
    run.commit(writer)?;
    trainer.comm().barrier()?;
    // The one before is kept even when only one is wanted: another rank may have died between the two lines above.
    run.prune(if job.config.keep_last == 0 { 0 } else { job.config.keep_last.max(2) })
}

/// Finds the newest step that every rank has, and restores it. `None` starts at step 0.
pub(super) fn resume(trainer: &mut Trainer, job: &Job, run: &RunDir) -> Result<Option<Totals>> {
    let rank = trainer.comm().rank();
    let parts = trainer.layers();
    let fits = |checkpoint: &Checkpoint| {
        source::record(checkpoint).is_ok_and(|t| t.world == job.world && t.parts == parts)
    };
    let found = match &job.config.resume {
        Resume::No => None,
        Resume::Path(path) => Some(match Checkpoint::open(&of_rank(path, rank)) {
            Ok(own) if fits(&own) => (vec![own], true),
            _ => (all_of(path)?, false),
        }),
        Resume::Auto => {
            let own = run.latest()?.filter(fits);
            // A rank that was cut off while it committed may be one checkpoint behind the others.
            let mine = own.as_ref().map_or(0, Checkpoint::step);
            let steps = tell(trainer.comm(), mine)?;
            match (steps.iter().copied().min().unwrap_or(0), own) {
                (0, _) => cut_otherwise(trainer.comm(), run, job)?.map(|all| (all, false)),
                (agreed, Some(own)) if own.step() == agreed => Some((vec![own], true)),
                (agreed, _) => {
                    Some((vec![Checkpoint::open(&run.path().join(run_dir::folder(agreed)))?], true))
                }
            }
        }
    };
    let Some((checkpoints, own)) = found else { return Ok(None) };
    let source = Source::read(job.model, checkpoints, own)?;
    check(&source.record, job)?;
    trainer.restore(&source)?;
    samples::restore(trainer, &source)?;
    Ok(Some(source.record.totals))
}

/// Everyone's number, by rank.
pub(super) fn tell(comm: &Communicator, mine: u64) -> Result<Vec<u64>> {
    let all = comm.all_gather_bytes(mine.to_le_bytes().to_vec())?;
    let word = |(rank, bytes): (usize, &Vec<u8>)| {
        let word = bytes.as_slice().try_into().map(u64::from_le_bytes);
        word.map_err(|_| Error::Message { message: format!("rank {rank}'s number"), problem: "is not one" })
    };
    all.iter().enumerate().map(word).collect()
}

/// Checkpoints of all ranks of a run whose ranks held other parts than they do now: of the newest step that all have, as
/// rank 0 sees it. `None` if there is no such run, or if it never got as far as one on all ranks.
fn cut_otherwise(comm: &Communicator, run: &RunDir, job: &Job) -> Result<Option<Vec<Checkpoint>>> {
    let root = job.out.as_deref().unwrap_or(run.path());
    let mut step = 0;
    let mut missing = None;
    if comm.rank().0 == 0 {
        for at in run.checkpoints()?.into_iter().rev() {
            let path = root.join(run_dir::folder(at));
            match all_of(&path) {
                Ok(_) => {
                    step = at;
                    break;
                }
                // The same ranks as now: they never all had it. Others must be somewhere else.
                Err(error) => {
                    let same = Checkpoint::open(&path).and_then(|c| source::record(&c));
                    let same =
                        same.is_ok_and(|t| t.world == job.world && t.stages == job.plan.stages() as usize);
                    missing = missing.or(Some(error).filter(|_| !same));
                }
            }
        }
    }
    let agreed = tell(comm, step)?.into_iter().max().unwrap_or(0);
    match (agreed, missing) {
        (0, Some(error)) => Err(error),
        (0, None) => Ok(None),
        (step, _) => all_of(&root.join(run_dir::folder(step))).map(Some),
    }
}

/// The checkpoints that together hold a model and its states: rank 0's at `path`, and those of the other ranks of its
/// first pipeline beside it.
fn all_of(path: &Path) -> Result<Vec<Checkpoint>> {
    let first = Checkpoint::open(path)?;
    let ranks = source::record(&first)?.stages as u32;
    let others = (1..ranks).map(|rank| Checkpoint::open(&of_rank(path, Rank(rank))));
    std::iter::once(Ok(first)).chain(others).collect()
}

/// The checkpoint of another rank beside rank 0's.
fn of_rank(path: &Path, rank: Rank) -> PathBuf {
    match (rank.0, path.parent(), path.file_name()) {
        (1.., Some(run), Some(step)) => folder(run, rank).join(step),
        _ => path.to_owned(),
    }
}

/// Whether the rest of the run would mean anything. However the model and the batch are shared out, a step takes the same
/// sequences.
fn check(record: &Record, job: &Job) -> Result<()> {
    let same = |field, found: String, expected: String| {
        if found == expected {
            Ok(())
        } else {
            let expected = format!("{expected}, as when the checkpoint was written");
            Err(Error::Setting { field, value: found, expected })
        }
    };
    let words = |sequences| format!("such that a step takes {sequences} sequences");
    let (world, level) = (job.world, job.plan.outermost());
    let field = if record.world == world { "microbatches" } else { "workers" };
    same(field, words(job.plan.sequences()), words(record.sequences))?;
    same("seed", job.config.seed.to_string(), record.seed.to_string())?;
    same("sync", level.method.clone(), record.sync.clone())?;
    if record.world == world {
        same("codec", level.codec.clone(), record.codec.clone())?;
    }
    same("data", job.hash.clone(), record.data_hash.clone())
}
