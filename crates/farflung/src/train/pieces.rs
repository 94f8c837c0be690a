//! The state of a part of the model, as a list of its tensors. A checkpoint, the comparison of copies, what
//! members send each other (`run_state.rs`) and what a rank keeps to return to are filters over it.

use std::ops::Range;

use farflung_base::Rank;
use farflung_optim::{Shard, ShardPiece};
use farflung_tensor::{MemoryKind, Param, Tensor};
use farflung_zoo::weights::StoredLayout;
use farflung_zoo::{AxisShare, Cut, Stage, TensorSpec};

use super::disk_state::DiskState;
use super::part::Part;
use crate::Result;

/// Values of a chunk of a tensor that is sent to the rank that writes it.
pub(super) const CHUNK_LEN: usize = 1 << 16;
/// Chunks of a rank that are on their way at most.
pub(super) const CHUNK_WINDOW: usize = 8;

/// What a tensor of the state is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StateKind {
    /// The parameters; those common to all replicas where they differ.
    Parameters,
    /// A replica's own parameters, while the common ones are in their place.
    OwnParameters,
    /// A state of the optimizer's chain.
    Optimizer(String),
    /// A state of the method of synchronisation.
    Method(String),
    /// The averaged gradients of a step.
    Gradients,
    /// What replicas have averaged after local steps.
    Averaged(String),
}

/// Which ranks hold the same values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// All ranks that hold the part.
    Run,
    /// Those of one replica; of a shard, the rank alone.
    Replica,
}

/// The state of one kind of all tensors of a part, or of a shard of them, in the layout of its parameters.
#[derive(Debug, Clone)]
pub(super) struct FlatState<'a> {
    pub(super) kind: StateKind,
    pub(super) scope: Scope,
    pub(super) values: FlatValues<'a>,
    /// What `values` are of the layout; `None` if they are all of it.
    pub(super) shard: Option<Shard>,
}

/// Where the values of a flat buffer are.
#[derive(Debug, Clone, Copy)]
pub(super) enum FlatValues<'a> {
    Tensor(&'a Tensor),
    /// In an array of the state on disk, by its number.
    Disk(&'a DiskState, usize),
}

/// Values of a state on disk that are read at a time.
const DISK_CHUNK: usize = 1 << 20;

impl<'a> FlatValues<'a> {
    /// Returns the number of values.
    pub(super) fn len(self) -> usize {
        match self {
            Self::Tensor(tensor) => tensor.shape().len(),
            Self::Disk(disk, _) => disk.len(),
        }
    }

    /// Returns the tensor with the values, if they are in memory.
    pub(super) const fn tensor(self) -> Option<&'a Tensor> {
        match self {
            Self::Tensor(tensor) => Some(tensor),
            Self::Disk(..) => None,
        }
    }

    /// Returns the ranges in which a range should be read: one, unless it is on disk.
    pub(super) fn chunks(self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let most = match self {
            Self::Tensor(_) => range.len().max(1),
            Self::Disk(..) => DISK_CHUNK,
        };
        range.clone().step_by(most).map(move |start| start..(start + most).min(range.end))
    }
}

impl<'a> From<&'a Tensor> for FlatValues<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

/// A named tensor of a rank's state. Its values are read when they are needed.
#[derive(Debug)]
pub(super) struct Piece<'a> {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// Whether it is what a rank has of a tensor whose width ranks divide: files have it as memory has.
    pub(super) cut: bool,
    pub(super) values: PieceValues<'a>,
}

/// Where the values of a piece are.
#[derive(Debug)]
pub(super) enum PieceValues<'a> {
    /// In a flat buffer, from an index on.
    Flat(FlatValues<'a>, usize),
    Host(Vec<f32>),
    /// On another rank, which sends them in the order of the list.
    Elsewhere(Rank),
    /// On several ranks, each of which has a piece.
    Divided(DividedTensor<'a>),
}

/// A tensor of which several ranks have pieces.
#[derive(Debug)]
pub(super) struct DividedTensor<'a> {
    pub(super) spec: TensorSpec,
    pub(super) holders: Vec<PieceHolder<'a>>,
}

impl DividedTensor<'_> {
    /// Returns the shape of a holder's piece.
    pub(super) fn shape_of(&self, holder: &PieceHolder<'_>) -> Vec<usize> {
        match &holder.piece {
            HeldPiece::Width(share) => self.spec.shape_of(share),
            HeldPiece::Elements(range) => vec![range.len()],
        }
    }

    /// Puts the values of a holder's piece to their places in the tensor.
    pub(super) fn put(&self, holder: &PieceHolder<'_>, piece: &[f32], whole: &mut [f32]) {
        match &holder.piece {
            HeldPiece::Width(share) => self.spec.cut.put(&self.spec.shape, share, piece, whole),
            HeldPiece::Elements(range) => whole[range.clone()].copy_from_slice(piece),
        }
    }
}

/// What a rank has of a tensor.
#[derive(Debug, Clone)]
pub(super) enum HeldPiece {
    /// Its share of the width of layers; all of a tensor that is not cut.
    Width(AxisShare),
    /// Some of the elements.
    Elements(Range<usize>),
}

/// A rank that has a piece of a tensor.
#[derive(Debug)]
pub(super) struct PieceHolder<'a> {
    pub(super) rank: Rank,
    pub(super) piece: HeldPiece,
    /// The flat buffer with this piece and its place there, if it is this rank's.
    pub(super) own: Option<(FlatValues<'a>, usize)>,
}

/// Prefix of the names of an optimizer's states.
const OPTIMIZER: &str = "chain.";
/// Prefix of the names of a method's states.
const METHOD: &str = "outer.";
/// Prefix of the names of what replicas have averaged.
const AVERAGED: &str = "averaged.";

impl StateKind {
    /// Returns what its memory is used for.
    pub(super) const fn memory_kind(&self) -> MemoryKind {
        match self {
            Self::Parameters | Self::OwnParameters => MemoryKind::Weights,
            Self::Optimizer(_) | Self::Method(_) | Self::Averaged(_) => MemoryKind::Optimizer,
            Self::Gradients => MemoryKind::Gradients,
        }
    }

    /// Returns its name in checkpoints; empty for parameters, whose tensors have their plain names.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Parameters => String::new(),
            Self::OwnParameters => "own".to_owned(),
            Self::Optimizer(name) => format!("{OPTIMIZER}{name}"),
            Self::Method(name) => format!("{METHOD}{name}"),
            Self::Gradients => "grads".to_owned(),
            Self::Averaged(name) => format!("{AVERAGED}{name}"),
        }
    }

    /// Returns the name of this state of a tensor.
    pub(super) fn of(&self, tensor: &str) -> String {
        tensor_name(&self.name(), tensor)
    }

    /// Returns the kind of what replicas have averaged, from the name of a tensor.
    pub(super) fn averaged_of(name: &str) -> Option<Self> {
        let (kind, _) = name.strip_prefix(AVERAGED)?.split_once('/')?;
        Some(Self::Averaged(kind.to_owned()))
    }

    /// Returns whether a tensor with this name belongs to one replica's optimizer.
    pub(super) fn is_optimizer(name: &str) -> bool {
        name.starts_with(OPTIMIZER)
    }
}

/// Returns the name of a tensor's state of this kind, given by [`StateKind::name`].
pub(super) fn tensor_name(kind: &str, tensor: &str) -> String {
    if kind.is_empty() { tensor.to_owned() } else { format!("{kind}/{tensor}") }
}

/// Calls `work` with values of a flat buffer. They are copied only if they are not on the host.
pub(super) fn with_values<'a, T>(
    flat: impl Into<FlatValues<'a>>,
    start: usize,
    len: usize,
    work: impl FnOnce(&[f32]) -> T,
) -> Result<T> {
    Ok(match flat.into() {
        FlatValues::Tensor(flat) => match flat.host::<f32>() {
            Some(values) => work(&values[start..start + len]),
            None => work(&flat.view().part(start, len)?.to_vec::<f32>()?),
        },
        FlatValues::Disk(disk, array) => work(&disk.read(array, start..start + len)?),
    })
}

impl Piece<'_> {
    /// Returns what this rank has of it, in the order in which the pieces are joined: all, or its pieces of it,
    /// or nothing.
    pub(super) fn here(&self) -> Vec<Self> {
        let (name, shape) = (self.name.clone(), self.shape.clone());
        match &self.values {
            PieceValues::Flat(flat, start) => {
                vec![Self { name, shape, cut: self.cut, values: PieceValues::Flat(*flat, *start) }]
            }
            PieceValues::Divided(divided) => {
                let own = divided.holders.iter().filter_map(|holder| {
                    let (flat, start) = holder.own?;
                    let (shape, values) = (divided.shape_of(holder), PieceValues::Flat(flat, start));
                    Some(Self { name: name.clone(), shape, cut: true, values })
                });
                own.collect()
            }
            PieceValues::Host(_) | PieceValues::Elsewhere(_) => Vec::new(),
        }
    }

    /// Returns the number of its values.
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Calls `work` with the values as the model's files have them. They are copied only if they are not on the
    /// host, or are transposed. Of a piece that is on other ranks, there are none.
    pub(super) fn stored_values<T>(
        &self,
        stored: &StoredLayout,
        work: impl FnOnce(&[f32]) -> T,
    ) -> Result<T> {
        let work = |values: &[f32]| {
            if self.cut { work(values) } else { work(&stored.values(&self.name, values)) }
        };
        match &self.values {
            PieceValues::Host(values) => Ok(work(values)),
            PieceValues::Elsewhere(_) | PieceValues::Divided(_) => Ok(work(&[])),
            PieceValues::Flat(flat, start) => with_values(*flat, *start, self.len(), work),
        }
    }
}

impl<'a> FlatState<'a> {
    /// Returns its tensors, or what it has of them.
    pub(super) fn pieces(&self, stage: &Stage) -> Vec<Piece<'a>> {
        let divided = stage.share().ranks() > 1;
        let piece = |p: &Param, spec: &TensorSpec, ShardPiece { flat, at }: ShardPiece| {
            let whole = flat == p.range();
            let part = || flat.start - p.start..flat.end - p.start;
            Piece {
                name: self.kind.of(&if whole { p.name.clone() } else { TensorPart::name(&p.name, part()) }),
                shape: if whole { p.shape.dims().to_vec() } else { vec![flat.len()] },
                cut: !whole || (divided && spec.cut != Cut::Whole),
                values: PieceValues::Flat(self.values, at),
            }
        };
        let whole = |p: &Param| vec![ShardPiece { flat: p.range(), at: p.start }];
        let held = |p: &Param| match &self.shard {
            Some(shard) => shard.within(&p.range()).collect(),
            None => whole(p),
        };
        let pieces = |(p, spec)| held(p).into_iter().map(|held| piece(p, spec, held)).collect::<Vec<_>>();
        stage.tensors().flat_map(pieces).collect()
    }
}

/// A part of a tensor's elements, as files name it: `h.0.mlp.c_fc.weight[128..4096]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorPart<'a> {
    pub(super) tensor: &'a str,
    pub(super) elements: Range<usize>,
}

impl<'a> TensorPart<'a> {
    fn name(tensor: &str, elements: Range<usize>) -> String {
        format!("{tensor}[{}..{}]", elements.start, elements.end)
    }

    /// Reads a name; `None` for one of a whole tensor.
    pub(super) fn of(name: &'a str) -> Option<Self> {
        let (tensor, range) = name.strip_suffix(']')?.rsplit_once('[')?;
        let (start, end) = range.split_once("..")?;
        let elements: Range<usize> = start.parse().ok()?..end.parse().ok()?;
        (elements.start < elements.end).then_some(Self { tensor, elements })
    }
}

impl Part {
    /// Returns its state. `each_step` tells whether all replicas update their optimizers alike.
    pub(super) fn states(&self, each_step: bool) -> Vec<FlatState<'_>> {
        let differ = self.sync.as_ref().is_some_and(|sync| sync.replicas_differ());
        let of_run = |run: bool| if run { Scope::Run } else { Scope::Replica };
        let parameters = of_run(self.own.is_some() || !differ);
        let shard = self.chain.shard();
        let shard = (!shard.is_whole(self.stage.layout().len())).then(|| shard.clone());
        let mut all = vec![FlatState {
            kind: StateKind::Parameters,
            scope: parameters,
            values: (&self.params).into(),
            shard: self.weights.as_ref().and_then(|_| shard.clone()),
        }];
        let scope = of_run(each_step && self.shards.is_none());
        let optimizer = |name: &str, values| {
            let kind = StateKind::Optimizer(name.to_owned());
            FlatState { kind, scope, values, shard: shard.clone() }
        };
        all.extend(self.chain.states().map(|(name, values)| optimizer(name, values.into())));
        if let Some(disk) = &self.disk {
            let names = disk.names().iter().enumerate();
            all.extend(names.map(|(array, name)| optimizer(name, FlatValues::Disk(disk, array))));
        }
        if let Some(sync) = &self.sync {
            let shared = sync.states().into_iter().map(|(name, values)| (name, Scope::Run, values));
            let own = sync.own_states().into_iter().map(|(name, values)| (name, Scope::Replica, values));
            all.extend(shared.chain(own).map(|(name, scope, values)| FlatState {
                kind: StateKind::Method(name.to_owned()),
                scope,
                values: values.into(),
                shard: None,
            }));
        }
        all.extend(self.own.iter().map(|own| FlatState {
            kind: StateKind::OwnParameters,
            scope: Scope::Replica,
            values: own.into(),
            shard: None,
        }));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_tensors_have_names_that_read_back() {
        let name = TensorPart::name("h.0.w[a]", 128..4096);
        assert_eq!(TensorPart::of(&name), Some(TensorPart { tensor: "h.0.w[a]", elements: 128..4096 }));
        for whole in ["wte.weight", "w[3]", "w[3..]", "w[5..5]", "w[9..2]", "w[a..b]", "w]", ""] {
            assert_eq!(TensorPart::of(whole), None, "{whole}");
        }
    }
}
