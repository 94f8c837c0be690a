//! A worker's whole state on disk. Each rank keeps its own folder, so that no state crosses a slow link and no machine
//! needs a shared disk; a checkpoint counts once every rank has it.
//!
//! A rank's `step-N/` holds `config.json` and `model.safetensors` (Hugging Face's layout), `optimizer.safetensors` (flat
//! moments, outer state, residuals) and `trainer.json`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use farflung_base::Rank;
use farflung_comm::ReduceOp;
use farflung_zoo::weights::{Dtype, TensorData, TensorView, config_text, write_tensors_to};
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};

use super::job::Job;
use super::worker::Worker;
use crate::config::choice::Resume;
use crate::{Checkpoint, Error, Packing, Result, RunDir, run_dir};

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
struct Trainer {
    rank: u32,
    world: usize,
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
    if rank.0 == 0 { out.to_owned() } else { out.join("ranks").join(format!("rank-{:05}", rank.0)) }
}

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const TRAINER: &str = "trainer.json";

/// Writes this rank's checkpoint; all ranks must call it after the same step, with replicas the same. It becomes the
/// newest on any rank only after all have written theirs.
pub(super) fn save(worker: &Worker, job: &Job, run: &RunDir, totals: Totals) -> Result<()> {
    let packing = if job.config.compress_checkpoints { Packing::Zstd } else { Packing::Plain };
    let mut writer = run.begin_checkpoint(worker.step, packing)?;
    writer.write("config.json", config_text(worker.stage.config(), Dtype::F32).as_bytes())?;

    let params = worker.params.to_vec::<f32>()?;
    let shapes: Vec<_> = worker.stage.layout().params().to_vec();
    let views: Vec<_> = shapes
        .iter()
        .map(|p| TensorView {
            name: &p.name,
            shape: p.shape.dims(),
            data: TensorData::F32(&params[p.range()]),
        })
        .collect();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    writer.write_with(MODEL, |out| write_tensors_to(out, &views, &metadata))?;

    let mut states = Vec::new();
    for (name, state) in worker.chain.states() {
        states.push((format!("chain.{name}"), state.to_vec::<f32>()?));
    }
    if let Some(outer) = worker.sync.outer() {
        for (name, state) in outer.states() {
            states.push((format!("outer.{name}"), state.to_vec::<f32>()?));
        }
    }
    states.extend(worker.sync.average().save("average.")?);
    let lens: Vec<[usize; 1]> = states.iter().map(|(_, v)| [v.len()]).collect();
    let views: Vec<_> = states
        .iter()
        .zip(&lens)
        .map(|((name, v), len)| TensorView { name, shape: len, data: TensorData::F32(v) })
        .collect();
    writer.write_with(OPTIMIZER, |out| write_tensors_to(out, &views, &BTreeMap::new()))?;

    let trainer = Trainer {
        rank: worker.comm.rank().0,
        world: job.world,
        seed: job.config.seed,
        sync: job.config.sync.to_string(),
        codec: job.config.codec.to_string(),
        data_hash: job.hash.clone(),
        step: worker.step,
        outer_step: worker.sync.outer().map_or(0, farflung_optim::OuterOptimizer::step),
        rounds: worker.sync.average().round(),
        totals,
    };
    let text = serde_json::to_vec_pretty(&trainer).expect("numbers and names have no way to fail");
    writer.write(TRAINER, &text)?;

    worker.comm.barrier()?;
    run.commit(writer)?;
    worker.comm.barrier()?;
    // The one before is kept even when only one is wanted: another rank may have died between the two lines above.
    run.prune(if job.config.keep_last == 0 { 0 } else { job.config.keep_last.max(2) })
}

/// Finds the newest step that every rank has, and restores it. `None` starts at step 0.
pub(super) fn resume(worker: &mut Worker, job: &Job, run: &RunDir) -> Result<Option<Totals>> {
    let rank = worker.comm.rank();
    let checkpoint = match &job.config.resume {
        Resume::No => return Ok(None),
        Resume::Path(path) => Some(Checkpoint::open(&of_rank(path, rank))?),
        Resume::Auto => {
            let mut newest = run.latest()?;
            // A rank that was cut off while it committed may be one checkpoint behind the others.
            let mut agreed = [newest.as_ref().map_or(0, Checkpoint::step)];
            worker.comm.all_reduce(&mut agreed, ReduceOp::Min)?;
            if newest.as_ref().is_some_and(|c| c.step() != agreed[0]) {
                newest = match agreed[0] {
                    0 => None,
                    step => Some(Checkpoint::open(&run.path().join(run_dir::folder(step)))?),
                };
            }
            newest
        }
    };
    checkpoint.map(|c| restore(worker, job, &c)).transpose()
}

/// The checkpoint of another rank beside rank 0's.
fn of_rank(path: &Path, rank: Rank) -> PathBuf {
    match (rank.0, path.parent(), path.file_name()) {
        (1.., Some(run), Some(step)) => folder(run, rank).join(step),
        _ => path.to_owned(),
    }
}

fn restore(worker: &mut Worker, job: &Job, checkpoint: &Checkpoint) -> Result<Totals> {
    let damaged = |name: &str, what| Error::Damaged { path: checkpoint.path().join(name), what };
    let trainer: Trainer = serde_json::from_slice(&checkpoint.read(TRAINER)?)
        .map_err(|_| damaged(TRAINER, "it does not hold a trainer's counters"))?;
    let same = |field, found: String, expected: String| {
        if found == expected {
            Ok(())
        } else {
            let expected = format!("{expected}, as when the checkpoint was written");
            Err(Error::Setting { field, value: found, expected })
        }
    };
    same("workers", job.world.to_string(), trainer.world.to_string())?;
    same("seed", job.config.seed.to_string(), trainer.seed.to_string())?;
    same("sync", job.config.sync.to_string(), trainer.sync.clone())?;
    same("codec", job.config.codec.to_string(), trainer.codec.clone())?;
    same("data", job.hash.clone(), trainer.data_hash.clone())?;

    let bytes = checkpoint.read(MODEL)?;
    let model = SafeTensors::deserialize(&bytes).map_err(|_| damaged(MODEL, "it is not safetensors"))?;
    let mut flat = vec![0.0_f32; worker.stage.layout().len()];
    for p in worker.stage.layout().params() {
        let found = model.tensor(&p.name).map_err(|_| damaged(MODEL, "a tensor is missing"))?;
        if found.shape() != p.shape.dims() {
            return Err(damaged(MODEL, "it holds a model of another shape"));
        }
        floats(found.data(), &mut flat[p.range()]);
    }
    let bytes = checkpoint.read(OPTIMIZER)?;
    let states = SafeTensors::deserialize(&bytes).map_err(|_| damaged(OPTIMIZER, "it is not safetensors"))?;
    let states: BTreeMap<String, Vec<f32>> = states
        .iter()
        .map(|(name, t)| {
            let mut values = vec![0.0; t.data().len() / 4];
            floats(t.data(), &mut values);
            (name.to_owned(), values)
        })
        .collect();
    let get = |prefix: &'static str| {
        let states = &states;
        move |name: &str| states.get(&format!("{prefix}{name}")).map(Vec::as_slice)
    };
    worker.params.write(&flat)?;
    worker.chain.restore(trainer.step, get("chain."))?;
    if let Some(outer) = worker.sync.outer_mut() {
        outer.restore(trainer.outer_step, get("outer."))?;
    }
    worker.sync.average_mut().restore("average.", trainer.rounds, get(""))?;
    worker.step = trainer.step;
    Ok(trainer.totals)
}

/// Little-endian bytes as numbers.
fn floats(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
        *out = f32::from_le_bytes(bytes.try_into().expect("chunks of four"));
    }
}
