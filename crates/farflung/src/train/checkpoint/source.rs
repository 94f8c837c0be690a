//! The content of checkpoints: one rank's own, a copy of another rank's, or those of all ranks of a run that
//! divided the model differently.

mod parts_of_states;
mod pieces_of_tensors;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use farflung_optim::Shard;
use farflung_tensor::ParamLayout;
use farflung_zoo::weights::StoredLayout;
use farflung_zoo::{AxisShare, ModelSpec, Stage};

use super::tensor_sink::{StoredTensor, TensorSink};
use super::{AVERAGE, CheckpointRecord, LOSS_SCALE, MODEL, OPTIMIZER, SAMPLES, SETTINGS, TRAINER};
use crate::train::pieces::{TensorPart, tensor_name};
use crate::{Checkpoint, Error, Result, finite};
use parts_of_states::{Parts, PartsOfStates};
use pieces_of_tensors::PiecesOfTensors;

/// The files of one checkpoint.
#[derive(Debug)]
pub(super) struct Files {
    path: PathBuf,
    pub(super) record: CheckpointRecord,
    /// The run's settings; empty if the checkpoint has none.
    settings: String,
    tensors: TensorFiles,
}

/// Where the tensors of a checkpoint are.
#[derive(Debug)]
enum TensorFiles {
    Disk(Checkpoint),
    /// In memory: another rank has sent them.
    Sent {
        model: Vec<u8>,
        optimizer: Vec<u8>,
    },
}

impl Files {
    /// Reads the counters and the settings of a checkpoint.
    ///
    /// Errors: [`Error::Damaged`] with the file.
    pub(super) fn read(checkpoint: Checkpoint) -> Result<Self> {
        let settings = if checkpoint.names().contains(&SETTINGS) {
            String::from_utf8_lossy(&checkpoint.read(SETTINGS)?).into_owned()
        } else {
            String::new()
        };
        Ok(Self {
            path: checkpoint.path().to_owned(),
            record: record(&checkpoint)?,
            settings,
            tensors: TensorFiles::Disk(checkpoint),
        })
    }

    /// Reads the rank's samples of boundaries; empty if there are none.
    fn samples(&self) -> Result<Vec<u8>> {
        match &self.tensors {
            TensorFiles::Disk(checkpoint) if checkpoint.names().contains(&SAMPLES) => {
                checkpoint.read(SAMPLES)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Reads the `wanted` tensors of a file.
    ///
    /// Errors: [`Error::Damaged`]; [`Error::NotFinite`] with the tensor.
    fn tensors(&self, name: &str, wanted: impl FnMut(&str, usize) -> bool) -> Result<Vec<StoredTensor>> {
        let read = match &self.tensors {
            TensorFiles::Disk(checkpoint) => {
                let mut sink = TensorSink::new(checkpoint.bytes_of(name), wanted);
                checkpoint.copy(name, &mut sink)?;
                sink.finish()
            }
            TensorFiles::Sent { model, optimizer } => {
                let bytes = if name == MODEL { model } else { optimizer };
                let mut sink = TensorSink::new(bytes.len() as u64, wanted);
                sink.write_all(bytes).map_err(Error::io("read", &self.path))?;
                sink.finish()
            }
        };
        let read = read.map_err(|what| self.damaged(name, what))?;
        read.iter().try_for_each(|tensor| finite::check(&tensor.name, &tensor.values))?;
        Ok(read)
    }

    /// Encodes the files, except the samples, for another rank: each part preceded by its length.
    ///
    /// Errors: [`Error::Damaged`] with the file.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        let read = |name| match &self.tensors {
            TensorFiles::Disk(checkpoint) => checkpoint.read(name),
            TensorFiles::Sent { model, optimizer } => {
                Ok(if name == MODEL { model.clone() } else { optimizer.clone() })
            }
        };
        let (model, optimizer) = (read(MODEL)?, read(OPTIMIZER)?);
        let record = serde_json::to_vec(&self.record).expect("numbers and names can be written as JSON");
        let path = self.path.display().to_string();
        let mut bytes = Vec::new();
        for part in [path.as_bytes(), &record, self.settings.as_bytes(), &model, &optimizer] {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part);
        }
        Ok(bytes)
    }

    /// Decodes the bytes of [`Files::to_bytes`]; `None` for other bytes.
    pub(super) fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let mut next = || {
            let (len, rest) = bytes.split_first_chunk::<8>()?;
            let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
            let part = rest.get(..len)?;
            bytes = &rest[len..];
            Some(part)
        };
        let files = Self {
            path: String::from_utf8_lossy(next()?).into_owned().into(),
            record: serde_json::from_slice(next()?).ok()?,
            settings: String::from_utf8_lossy(next()?).into_owned(),
            tensors: TensorFiles::Sent { model: next()?.to_vec(), optimizer: next()?.to_vec() },
        };
        bytes.is_empty().then_some(files)
    }

    fn damaged(&self, name: &str, what: &'static str) -> Error {
        Error::Damaged { path: self.path.join(name), what }
    }
}

/// A state of a tensor, or of a part of it, by its name in a file.
pub(super) struct StoredState {
    name: String,
    values: Vec<f32>,
}

/// The rank whose codec residuals a checkpoint contains. Each rank has its own residuals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Residuals {
    /// This rank wrote the checkpoint with its current parts.
    Own,
    /// Another rank wrote the checkpoint: this rank starts without residuals, in the same round.
    Others,
    /// The model was divided differently: all ranks start without residuals.
    None,
}

/// What became of the residuals that a checkpoint contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum RestoredResiduals {
    /// They were restored, or there are none that are this rank's own.
    Kept,
    /// Some belong to other ranges of values, or were saved by a version that did not write to which: they are
    /// not used.
    Dropped,
}

/// Weights and states by their names.
pub(in super::super) struct Source {
    /// The counters of the first checkpoint.
    pub(super) record: CheckpointRecord,
    pub(in super::super) residuals: Residuals,
    path: PathBuf,
    settings: String,
    pub(super) samples: Vec<u8>,
    weights: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    states: BTreeMap<String, Vec<f32>>,
    /// States of which only some elements were read.
    parts: BTreeMap<String, Parts>,
    /// Names of residuals that are not empty. They are read only if they are this rank's.
    averages: BTreeSet<String>,
    /// Whether there are weights that the model does not have.
    foreign: bool,
    /// Layout of the whole model: the position of each tensor in a flat buffer of a rank without stages.
    whole: ParamLayout,
    needed: Needed,
}

/// The tensors of a model that a rank needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Needed {
    All,
    /// Those of its parts.
    Parts(OwnTensors),
}

/// The tensors of a rank's parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct OwnTensors {
    /// The number of parts that have each.
    pub(in super::super) parts: BTreeMap<String, usize>,
    /// What the rank has of the width of layers.
    pub(in super::super) width: AxisShare,
}

impl Needed {
    fn has(&self, tensor: &str) -> bool {
        match self {
            Self::All => true,
            Self::Parts(own) => own.parts.contains_key(tensor),
        }
    }

    /// Returns whether exactly one part has the tensor.
    fn has_once(&self, tensor: &str) -> bool {
        matches!(self, Self::Parts(own) if own.parts.get(tensor) == Some(&1))
    }

    fn width(&self) -> AxisShare {
        match self {
            Self::All => AxisShare::whole(),
            Self::Parts(own) => own.width.clone(),
        }
    }
}

/// Reads the counters of a checkpoint.
pub(super) fn record(checkpoint: &Checkpoint) -> Result<CheckpointRecord> {
    serde_json::from_slice(&checkpoint.read(TRAINER)?).map_err(|_| Error::Damaged {
        path: checkpoint.path().join(TRAINER),
        what: "it does not contain the trainer's counters",
    })
}

impl Source {
    /// Reads checkpoints of one step; the first one is rank 0's or this rank's own. Of tensors only those that
    /// are `needed`.
    ///
    /// Errors: [`Error::Damaged`] with the file; [`Error::NotFinite`] with the tensor.
    pub(super) fn new(
        model: &ModelSpec,
        checkpoints: Vec<Files>,
        residuals: Residuals,
        needed: Needed,
    ) -> Result<Self> {
        let device = farflung_tensor::Device::cpu(1)?;
        let whole = Stage::whole(model, &device)?.layout().clone();
        let stored = StoredLayout::of(model);
        let (mut weights, mut states) = (BTreeMap::new(), BTreeMap::new());
        let (mut foreign, mut averages) = (false, BTreeSet::new());
        let [mut of_weights, mut of_states] = [(); 2].map(|()| PiecesOfTensors::new(model, needed.width()));
        let mut parts = PartsOfStates::new(model);
        let first = checkpoints.first().expect("at least one checkpoint is read");
        for files in &checkpoints {
            if files.record.step != first.record.step {
                return Err(files.damaged(TRAINER, "it is of another step than the checkpoint beside it"));
            }
            let read = files.tensors(MODEL, |name, _| {
                let tensor = TensorPart::of(name).map_or(name, |part| part.tensor);
                foreign |= whole.find(tensor).is_err();
                needed.has(tensor)
            });
            let width = files.record.width()?;
            for StoredTensor { name, mut shape, mut values } in read? {
                if let Some(part) = TensorPart::of(&name) {
                    // Rank 0 has the whole tensor.
                    if weights.contains_key(part.tensor) {
                        continue;
                    }
                    let tensor = part.tensor.to_owned();
                    if let Some(joined) = parts.take(StoredState { name, values }, &width) {
                        let at = whole.find(&tensor).ok();
                        let shape = at.map(|at| whole.params()[at].shape.dims().to_vec());
                        weights.insert(tensor, (shape.unwrap_or_default(), joined.values));
                    }
                    continue;
                }
                if !of_weights.is_piece(&name, values.len(), &width) {
                    stored.from_file(&name, &mut shape, &mut values);
                }
                let len = values.len();
                let Some(own) = of_weights.take(&name, &name, &width, values) else { continue };
                if own.len() != len {
                    shape = of_weights.shape(&name);
                }
                weights.insert(name, (shape, own));
            }
            let read = files.tensors(OPTIMIZER, |name, bytes| match name.split_once('/') {
                _ if name.starts_with(AVERAGE) => {
                    if bytes > 0 {
                        averages.insert(name.to_owned());
                    }
                    residuals == Residuals::Own
                }
                Some((_, tensor)) => needed.has(TensorPart::of(tensor).map_or(tensor, |part| part.tensor)),
                None => true,
            });
            for StoredTensor { name, values, .. } in read? {
                let Some(StoredState { name, values }) = parts.take(StoredState { name, values }, &width)
                else {
                    continue;
                };
                let tensor = name.split_once('/').map_or("", |(_, tensor)| tensor);
                if let Some(own) = of_states.take(&name, tensor, &width, values) {
                    states.insert(name, own);
                }
            }
        }
        let parts = parts.finish(&needed.width()).collect();
        for (name, shape, values) in of_weights.finish() {
            weights.entry(name).or_insert((shape, values));
        }
        for (name, _, values) in of_states.finish() {
            states.entry(name).or_insert(values);
        }
        let samples = first.samples()?;
        let Files { path, record, settings, .. } =
            checkpoints.into_iter().next().expect("at least one checkpoint is read");
        Ok(Self {
            record,
            residuals,
            path,
            settings,
            samples,
            weights,
            states,
            parts,
            averages,
            foreign,
            whole,
            needed,
        })
    }

    /// Returns the first checkpoint's folder.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the settings of the run that wrote it, as TOML.
    pub(super) fn settings(&self) -> Option<&str> {
        Some(self.settings.as_str()).filter(|text| !text.is_empty())
    }

    fn damaged(&self, what: &'static str) -> Error {
        Error::Damaged { path: self.path.join(MODEL), what }
    }

    /// Returns the number of steps done.
    pub(in super::super) const fn step(&self) -> u64 {
        self.record.step
    }

    /// Returns the number of outer steps done.
    pub(in super::super) const fn outer_step(&self) -> u64 {
        self.record.outer_step
    }

    /// Returns the number of averaging rounds done.
    pub(in super::super) const fn rounds(&self) -> u64 {
        self.record.rounds
    }

    /// Returns the weights of a shard of a part's layout, and forgets those that no other part needs.
    ///
    /// Errors: [`Error::Damaged`] for a tensor that is missing, has another shape, or is not the model's.
    pub(in super::super) fn take_weights(&mut self, layout: &ParamLayout, own: &Shard) -> Result<Vec<f32>> {
        if self.foreign {
            return Err(self.damaged("it has a tensor that the model does not have"));
        }
        let mut flat = vec![0.0; own.len()];
        for p in layout.params() {
            for piece in own.within(&p.range()) {
                let (part, into) =
                    (piece.flat.start - p.start..piece.flat.end - p.start, &mut flat[piece.own()]);
                match self.weights.get(&p.name) {
                    Some((shape, values)) if shape == p.shape.dims() => into.copy_from_slice(&values[part]),
                    Some(_) => return Err(self.damaged("it contains a model of another shape")),
                    None => {
                        let parts = self.parts.get(&p.name).filter(|parts| parts.len() == p.shape.len());
                        let copied = parts.and_then(|parts| parts.copy(&part, into));
                        copied.ok_or_else(|| self.damaged("a tensor is missing"))?;
                    }
                }
            }
            if self.needed.has_once(&p.name) {
                self.weights.remove(&p.name);
            }
        }
        Ok(flat)
    }

    /// Returns a state by its full name.
    pub(in super::super) fn state(&self, name: &str) -> Option<&[f32]> {
        self.states.get(name).map(Vec::as_slice)
    }

    /// Returns whether the residuals of an average, whose states begin with `prefix`, were saved with this
    /// layout.
    pub(in super::super) fn has_residuals_of(&self, prefix: &str, layout: Option<&String>) -> bool {
        self.record.residuals.get(prefix).is_some_and(|saved| Some(saved) == layout)
    }

    /// Returns whether there are residuals of other averages than those whose states begin with `prefixes`.
    pub(in super::super) fn has_other_residuals(&self, prefixes: &[String]) -> bool {
        let other = |name: &String| !prefixes.iter().any(|one| name.starts_with(one));
        self.averages.iter().any(other)
    }

    /// Returns the state of the loss scale; empty if the checkpoint has none.
    pub(super) fn loss_scale(&self) -> &[f32] {
        self.state(LOSS_SCALE).unwrap_or_default()
    }

    /// Returns the weights, and the states that were saved tensor by tensor under their own names: a kind, then
    /// the name of the tensor. Returns the kinds, too.
    pub(super) fn tensors(&self) -> (Vec<String>, BTreeMap<String, Vec<f32>>) {
        let weights = self.weights.iter().map(|(name, (_, values))| (name.clone(), values.clone()));
        let mut tensors: BTreeMap<String, Vec<f32>> = weights.collect();
        let mut kinds = BTreeSet::new();
        for (name, values) in &self.states {
            if let Some((kind, tensor)) = name.split_once('/')
                && self.weights.get(tensor).is_some_and(|(_, weights)| weights.len() == values.len())
            {
                kinds.insert(kind.to_owned());
                tensors.insert(name.clone(), values.clone());
            }
        }
        (kinds.into_iter().collect(), tensors)
    }

    /// Returns a shard of a state of an optimizer in the flat buffer of a layout, assembled tensor by tensor:
    /// ranks with stages save each tensor under its name, ranks with the whole model save one flat buffer.
    /// `None` if some of it is missing.
    pub(in super::super) fn flat(&self, name: &str, layout: &ParamLayout, own: &Shard) -> Option<Vec<f32>> {
        let mut flat = vec![0.0; own.len()];
        let all = self.state(name).filter(|all| all.len() == self.whole.len());
        let pieces = layout.params().iter().flat_map(|p| own.within(&p.range()).map(move |piece| (p, piece)));
        for (p, piece) in pieces {
            let part = piece.flat.start - p.start..piece.flat.end - p.start;
            let into = &mut flat[piece.own()];
            let state = tensor_name(name, &p.name);
            let values = match all {
                Some(all) => Some(&all[self.whole.params()[self.whole.find(&p.name).ok()?].range()]),
                None => self.state(&state),
            };
            if let Some(values) = values.filter(|values| values.len() == p.shape.len()) {
                into.copy_from_slice(&values[part]);
            } else {
                let parts = self.parts.get(&state).filter(|parts| parts.len() == p.shape.len())?;
                parts.copy(&part, into)?;
            }
        }
        Some(flat)
    }

    /// Like [`Source::flat`], and forgets the tensors that no other part needs.
    pub(in super::super) fn take_flat(
        &mut self,
        name: &str,
        layout: &ParamLayout,
        own: &Shard,
    ) -> Option<Vec<f32>> {
        let flat = self.flat(name, layout, own)?;
        for p in layout.params().iter().filter(|p| self.needed.has_once(&p.name)) {
            self.states.remove(&tensor_name(name, &p.name));
        }
        Some(flat)
    }
}

#[cfg(test)]
mod tests;
