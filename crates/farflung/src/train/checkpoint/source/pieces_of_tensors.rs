//! Joins the pieces of tensors that the ranks along a tensor axis saved, and cuts what this rank has of them.

use std::collections::{BTreeMap, BTreeSet};

use farflung_zoo::{AxisShare, Cut, ModelSpec, TensorSpec};

/// The tensors of checkpoints whose ranks may have divided the width of layers otherwise than this rank's run.
pub(super) struct PiecesOfTensors {
    specs: BTreeMap<String, TensorSpec>,
    /// What this rank has of the width of layers.
    own: AxisShare,
    /// The tensors of which some pieces were read.
    joined: BTreeMap<String, Joined>,
}

/// A tensor of which some pieces were read.
struct Joined {
    whole: Vec<f32>,
    /// The ranks whose pieces were read: of the token table, two stages have the same ones.
    ranks: BTreeSet<usize>,
    /// Number of elements that were read.
    read: usize,
}

impl PiecesOfTensors {
    pub(super) fn new(model: &ModelSpec, own: AxisShare) -> Self {
        let specs = model.tensors().into_iter().filter(|spec| spec.cut != Cut::Whole);
        let specs = specs.map(|spec| (spec.name.clone(), spec)).collect();
        Self { specs, own, joined: BTreeMap::new() }
    }

    /// Returns whether a tensor of `len` values is a piece, as memory has it, and not a whole tensor of a file.
    pub(super) fn is_piece(&self, tensor: &str, len: usize, of: &AxisShare) -> bool {
        self.specs.get(tensor).is_some_and(|spec| len != spec.count() && len == piece_len(spec, of))
    }

    /// Returns the shape of this rank's piece of a tensor; empty if the tensor is not cut.
    pub(super) fn shape(&self, tensor: &str) -> Vec<usize> {
        self.specs.get(tensor).map_or_else(Vec::new, |spec| spec.shape_of(&self.own))
    }

    /// Takes the values of a tensor, or of the piece of it that a rank with the share `of` has. Returns those
    /// of this rank, if the values are sufficient.
    pub(super) fn take(
        &mut self,
        name: &str,
        tensor: &str,
        of: &AxisShare,
        values: Vec<f32>,
    ) -> Option<Vec<f32>> {
        let Some(spec) = self.specs.get(tensor) else { return Some(values) };
        let is_piece = self.is_piece(tensor, values.len(), of);
        if is_piece && *of != self.own {
            let nothing = || Joined { whole: vec![0.0; spec.count()], ranks: BTreeSet::new(), read: 0 };
            let joined = self.joined.entry(name.to_owned()).or_insert_with(nothing);
            if joined.ranks.insert(of.rank()) {
                spec.cut.put(&spec.shape, of, &values, &mut joined.whole);
                joined.read += values.len();
            }
            return None;
        }
        if values.len() == spec.count() && self.own.ranks() > 1 {
            return Some(cut(spec, &self.own, &values));
        }
        Some(values)
    }

    /// Returns this rank's piece of each tensor of which all pieces were read.
    pub(super) fn finish(self) -> impl Iterator<Item = (String, Vec<usize>, Vec<f32>)> {
        let Self { specs, own, joined } = self;
        joined.into_iter().filter_map(move |(name, Joined { whole, read, .. })| {
            let spec = &specs[name.split_once('/').map_or(&*name, |(_, tensor)| tensor)];
            (read == spec.count()).then(|| (name, spec.shape_of(&own), cut(spec, &own, &whole)))
        })
    }
}

fn piece_len(spec: &TensorSpec, share: &AxisShare) -> usize {
    spec.shape_of(share).iter().product()
}

fn cut(spec: &TensorSpec, share: &AxisShare, whole: &[f32]) -> Vec<f32> {
    let mut piece = vec![0.0; piece_len(spec, share)];
    spec.cut.take(&spec.shape, share, whole, &mut piece);
    piece
}
