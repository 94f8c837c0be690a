//! Parameters of a part of the model that are averaged over other ranks than the rest: the experts that
//! replicas divide, the modules that paths share, and what ranks have whole of layers that they divide.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::{Axis, Rank};
use farflung_comm::Communicator;
use farflung_optim::ApartHolders;
use farflung_parallel::{Coordinates, PathLevel, Plan};
use farflung_tensor::{Device, Param};
use farflung_zoo::{Cut, ModelSpec, Stage};

use super::division::Division;
use crate::Result;

/// Parameters of a part that are averaged over a set of ranks of their own, to which this one belongs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ApartParams {
    /// Their ranges of the part's flat buffers, in order.
    pub(super) ranges: Vec<Range<usize>>,
    /// What they are; the same on all that hold them.
    pub(super) name: String,
    /// Tells them from those of the same kind that other replicas hold.
    pub(super) number: u32,
    /// The replicas that hold them, in order.
    pub(super) replicas: Vec<u32>,
    /// Whether all ranks along the tensor axis hold the same, and not each its piece.
    pub(super) along_tensor: bool,
    /// Factor of the mean over the replicas.
    factor: f64,
}

impl ApartParams {
    /// Returns what a replica holds apart in a part of the model, by kind: the same kinds on all holders of the
    /// part.
    pub(super) fn of(plan: &Plan, stage: &Stage, replica: u32) -> Vec<Self> {
        let mut apart = Vec::new();
        if plan.divides_experts() {
            let number = plan.expert_rank(replica);
            apart.push(Self {
                ranges: stage.expert_ranges(),
                name: format!("the experts of rank {number} of each group"),
                number,
                replicas: (0..plan.replicas()).filter(|&other| plan.expert_rank(other) == number).collect(),
                along_tensor: false,
                factor: 1.0 / f64::from(plan.expert_ranks()),
            });
        }
        apart.extend(modules(plan, stage, replica));
        apart.extend(shared_table(plan, stage));
        if plan.tensor_ranks() > 1 {
            apart = with_whole_tensors(plan, stage, &apart);
        }
        apart.retain(|apart| !apart.ranges.is_empty());
        apart
    }

    /// Returns those of the holders of a part that hold these parameters.
    pub(super) fn holders(&self, plan: &Plan, all: &[Rank]) -> Vec<Rank> {
        let holds = |rank: &Rank| self.replicas.binary_search(&plan.at(*rank).data).is_ok();
        let along = |rank| if self.along_tensor { plan.group(rank, Axis::Tensor) } else { vec![rank] };
        all.iter().copied().filter(holds).flat_map(along).collect()
    }
}

/// Divides what is held apart into pieces of tensors and whole tensors, and adds the whole tensors of the rest:
/// all ranks along the tensor axis hold the same of them. They are averaged over all of these, so that they
/// stay the same whatever codec and devices there are.
fn with_whole_tensors(plan: &Plan, stage: &Stage, apart: &[ApartParams]) -> Vec<ApartParams> {
    let of_kind = |kind: Option<usize>, whole: bool| {
        stage.ranges_of(|param, spec| kind_of(apart, param) == kind && (spec.cut == Cut::Whole) == whole)
    };
    // Where ranks divide sequences, each has a part of the gradient, and the sum counts instead of the mean.
    let factor = if plan.sequence_parallel { f64::from(plan.tensor_ranks()) } else { 1.0 };
    let divided = |(kind, all): (usize, &ApartParams)| {
        let pieces = ApartParams { ranges: of_kind(Some(kind), false), ..all.clone() };
        let (name, factor) = (format!("whole tensors of {}", all.name), all.factor * factor);
        let ranges = of_kind(Some(kind), true);
        [pieces, ApartParams { ranges, name, along_tensor: true, factor, ..all.clone() }]
    };
    let rest = ApartParams {
        ranges: of_kind(None, true),
        name: "the tensors that no ranks divide".to_owned(),
        number: 0,
        replicas: (0..plan.replicas()).collect(),
        along_tensor: true,
        factor,
    };
    apart.iter().enumerate().flat_map(divided).chain([rest]).collect()
}

/// Returns the token table that two stages have, where replicas update shards of whole gradients: the stages
/// have it in different shards, so that each rank needs the whole mean to add up both gradients.
fn shared_table(plan: &Plan, stage: &Stage) -> Option<ApartParams> {
    let whole = plan.divides_state() && !plan.divides_gradients();
    let table = stage.shared_table().filter(|_| whole)?;
    Some(ApartParams {
        ranges: vec![table],
        name: "the token table".to_owned(),
        number: 0,
        replicas: (0..plan.replicas()).collect(),
        along_tensor: false,
        factor: 1.0,
    })
}

/// Returns the modules of a replica's path that not all paths have.
///
/// Differs from the paper, which multiplies the mean of a module by the square root of the number of its paths:
/// what many paths have in common would then take steps many times as long.
fn modules(plan: &Plan, stage: &Stage, replica: u32) -> Vec<ApartParams> {
    let own = plan.modules(plan.path(replica));
    let of = |(number, level): (usize, &PathLevel)| ApartParams {
        ranges: {
            let blocks = level.layers.start as usize..level.layers.end as usize;
            Some(stage.range_of_blocks(blocks)).filter(|range| !range.is_empty()).into_iter().collect()
        },
        name: format!("module {} of level {number}", own[number]),
        number: own[number],
        replicas: plan.replicas_of_module(replica, number),
        along_tensor: false,
        factor: 1.0,
    };
    plan.paths.iter().enumerate().map(of).collect()
}

/// Returns what is in none of some ranges in order, up to `end`.
fn between(ranges: Vec<Range<usize>>, end: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let mut rest = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()).chain(std::iter::once(end..end)) {
        rest.push(start..range.start);
        start = range.end;
    }
    rest.retain(|range| !range.is_empty());
    rest
}

/// Returns the ranges of each kind, as averages take them.
pub(super) fn ranges(apart: &[ApartParams]) -> Vec<Vec<Range<usize>>> {
    apart.iter().map(|apart| apart.ranges.clone()).collect()
}

/// Returns the number of elements that one replica alone holds: they are not averaged.
pub(super) fn alone(apart: &[ApartParams]) -> usize {
    let alone = apart.iter().filter(|apart| apart.replicas.len() == 1 && !apart.along_tensor);
    alone.flat_map(|apart| &apart.ranges).map(ExactSizeIterator::len).sum()
}

/// Returns the number of elements that all ranks along the tensor axis have.
pub(super) fn whole(apart: &[ApartParams]) -> usize {
    let whole = apart.iter().filter(|apart| apart.along_tensor);
    whole.flat_map(|apart| &apart.ranges).map(ExactSizeIterator::len).sum()
}

/// Returns the kind of a tensor of a layout, if it is held apart.
pub(super) fn kind_of(apart: &[ApartParams], param: &Param) -> Option<usize> {
    apart.iter().position(|apart| is_in(&apart.ranges, param))
}

/// Returns whether a tensor of a layout is in one of some ranges.
pub(super) fn is_in(ranges: &[Range<usize>], param: &Param) -> bool {
    ranges.iter().any(|range| range.contains(&param.start))
}

/// What a rank holds apart in a part, with the ranks that hold the same.
#[derive(Debug, Clone)]
pub(super) struct HeldApart {
    pub(super) params: Vec<ApartParams>,
    /// A communicator for each of `params`.
    pub(super) holders: Vec<Communicator>,
}

impl HeldApart {
    /// Makes the communicators. A collective of all holders of the part.
    pub(super) fn new(params: Vec<ApartParams>, all: &Holders) -> Result<Self> {
        let among = |apart: &ApartParams| {
            let all = if apart.along_tensor { &all.along_tensor } else { &all.same };
            all.split(apart.number, all.rank().0)
        };
        let holders = params.iter().map(among).collect::<std::result::Result<_, _>>()?;
        Ok(Self { params, holders })
    }

    /// Returns the holders as averages take them.
    pub(super) fn of_average(&self) -> Vec<ApartHolders> {
        let held = self.holders.iter().zip(&self.params);
        held.map(|(comm, apart)| ApartHolders { comm: comm.clone(), factor: apart.factor }).collect()
    }

    /// Returns the ranges of a buffer of `len` elements with the ranks that hold each. `all` hold the rest.
    pub(super) fn pieces<'a>(
        held: Option<&'a Self>,
        all: &'a Communicator,
        len: usize,
    ) -> Vec<(&'a Communicator, Range<usize>)> {
        let kinds = held.into_iter().flat_map(|held| held.params.iter().zip(&held.holders));
        let mut pieces: Vec<_> =
            kinds.flat_map(|(apart, comm)| apart.ranges.iter().map(move |r| (comm, r.clone()))).collect();
        pieces.sort_by_key(|(_, range)| range.start);
        let rest = between(pieces.iter().map(|(_, range)| range.clone()).collect(), len);
        pieces.extend(rest.into_iter().map(|range| (all, range)));
        pieces.sort_by_key(|(_, range)| range.start);
        pieces
    }
}

/// The ranks that hold a part of the model.
#[derive(Debug, Clone)]
pub(super) struct Holders {
    /// Those with the same number along the tensor axis, which hold the same.
    pub(super) same: Communicator,
    /// All of them: those that divide the width of the part's layers, too.
    pub(super) along_tensor: Communicator,
}

/// Returns what a rank holds apart in each of its parts, by the part's number. `layers` are those of
/// all parts, and `holders` the holders of this rank's. A collective of all holders of the parts.
pub(super) fn by_part(
    (plan, model, at): (&Plan, &ModelSpec, Coordinates),
    layers: &[Range<usize>],
    holders: &BTreeMap<u32, Holders>,
) -> Result<BTreeMap<u32, HeldApart>> {
    let mut held = BTreeMap::new();
    if plan.shares() == 1 && plan.tensor_ranks() == 1 && !plan.divides_state() {
        return Ok(held);
    }
    let (divided, device) = (Division::of(plan), Device::cpu(1)?);
    for (&part, holders) in holders {
        let layers = (model, layers[part as usize].clone());
        let params = ApartParams::of(plan, &divided.counted_stage(layers, at, &device)?, at.data);
        if !params.is_empty() {
            held.insert(part, HeldApart::new(params, holders)?);
        }
    }
    Ok(held)
}
