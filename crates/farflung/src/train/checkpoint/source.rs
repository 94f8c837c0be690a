//! What a checkpoint holds, read back: one rank's own, or those of all ranks of a run that was cut in another way.

use std::collections::BTreeMap;

use farflung_tensor::ParamLayout;
use farflung_zoo::{GptConfig, Stage};
use safetensors::SafeTensors;

use super::{MODEL, OPTIMIZER, Record, TRAINER};
use crate::{Checkpoint, Error, Result};

/// Weights by their names and states by theirs.
pub(in super::super) struct Source {
    /// Rank 0's counters, or this rank's own.
    pub(super) record: Record,
    /// Whether it was written by a rank that held just what this one holds.
    pub(in super::super) own: bool,
    pub(super) from: Checkpoint,
    weights: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    states: BTreeMap<String, Vec<f32>>,
    /// Of the whole model: where a flat buffer of a rank without stages has each tensor.
    whole: ParamLayout,
}

/// The counters of a checkpoint.
pub(super) fn record(checkpoint: &Checkpoint) -> Result<Record> {
    serde_json::from_slice(&checkpoint.read(TRAINER)?)
        .map_err(|_| damaged(checkpoint, TRAINER, "it does not hold a trainer's counters"))
}

pub(super) fn damaged(checkpoint: &Checkpoint, name: &str, what: &'static str) -> Error {
    Error::Damaged { path: checkpoint.path().join(name), what }
}

impl Source {
    /// Reads checkpoints of one step, rank 0's or this rank's own first.
    pub(super) fn read(model: GptConfig, checkpoints: Vec<Checkpoint>, own: bool) -> Result<Self> {
        let device = farflung_tensor::Device::cpu(1)?;
        let whole = Stage::whole(model, &device)?.layout().clone();
        let (mut weights, mut states) = (BTreeMap::new(), BTreeMap::new());
        for checkpoint in &checkpoints {
            let bytes = checkpoint.read(MODEL)?;
            let file = SafeTensors::deserialize(&bytes)
                .map_err(|_| damaged(checkpoint, MODEL, "it is not safetensors"))?;
            for (name, tensor) in file.iter() {
                weights.insert(name.to_owned(), (tensor.shape().to_vec(), floats(tensor.data())));
            }
            let bytes = checkpoint.read(OPTIMIZER)?;
            let file = SafeTensors::deserialize(&bytes)
                .map_err(|_| damaged(checkpoint, OPTIMIZER, "it is not safetensors"))?;
            states.extend(file.iter().map(|(name, tensor)| (name.to_owned(), floats(tensor.data()))));
        }
        let from = checkpoints.into_iter().next().expect("at least one checkpoint is read");
        Ok(Self { record: record(&from)?, own, from, weights, states, whole })
    }

    /// Steps done.
    pub(in super::super) const fn step(&self) -> u64 {
        self.record.step
    }

    /// Outer steps done.
    pub(in super::super) const fn outer_step(&self) -> u64 {
        self.record.outer_step
    }

    /// Rounds of averaging done.
    pub(in super::super) const fn rounds(&self) -> u64 {
        self.record.rounds
    }

    /// The weights of a layout as a flat buffer.
    ///
    /// Errors: [`Error::Damaged`] for a tensor that is missing or of another shape.
    pub(in super::super) fn weights(&self, layout: &ParamLayout) -> Result<Vec<f32>> {
        let mut flat = vec![0.0; layout.len()];
        for p in layout.params() {
            let found = self.weights.get(&p.name);
            let (shape, values) = found.ok_or_else(|| damaged(&self.from, MODEL, "a tensor is missing"))?;
            if shape != p.shape.dims() {
                return Err(damaged(&self.from, MODEL, "it holds a model of another shape"));
            }
            flat[p.range()].copy_from_slice(values);
        }
        Ok(flat)
    }

    /// A state by its whole name.
    pub(in super::super) fn state(&self, name: &str) -> Option<&[f32]> {
        self.states.get(name).map(Vec::as_slice)
    }

    /// A state of an optimizer as a flat buffer of a layout, put together tensor by tensor: ranks with stages write each
    /// tensor's by its name, ranks with the whole model one flat buffer.
    pub(in super::super) fn flat(&self, name: &str, layout: &ParamLayout) -> Option<Vec<f32>> {
        let mut flat = vec![0.0; layout.len()];
        let all = self.state(name).filter(|all| all.len() == self.whole.len());
        for p in layout.params() {
            let values = match all {
                Some(all) => &all[self.whole.params()[self.whole.find(&p.name).ok()?].range()],
                None => self.state(&format!("{name}/{}", p.name)).filter(|v| v.len() == p.shape.len())?,
            };
            flat[p.range()].copy_from_slice(values);
        }
        Some(flat)
    }
}

/// Little-endian bytes as numbers.
fn floats(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| f32::from_le_bytes(word)).collect()
}
