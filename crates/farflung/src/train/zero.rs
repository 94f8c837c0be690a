//! What replicas divide of the state that all of them would hold (Rajbhandari et al. 2020, "ZeRO"): each holder
//! of a part of the model keeps the optimizer's state of a shard of the part's parameters, updates it, and
//! sends it to the others.

use std::ops::Range;

use farflung_base::{Axis, Bytes, Operation, Rank};
use farflung_comm::{
    Communicator, gather_from_owners, owners_operation, scatter_to_owners, uneven_all_to_all_operation,
};
use farflung_compress::{CodecSpec, RoundKey};
use farflung_optim::{GatheredRange, OptimError, Shard, ShardCoder, ShardGroups, ShardReduction, Shards};
use farflung_parallel::{Coordinates, Plan};
use farflung_tensor::{Op, ParamLayout, Tensor};
use farflung_zoo::{AxisShare, Stage};

use super::bound_plan::BoundPlan;
use crate::Result;
use crate::config::zero::ZeroCodecs;

/// Shards begin at multiples of this many elements, unless they are of whole tensors: at those of the chunks in
/// which squares are added up, so that the norm of the gradients does not depend on who updates what.
const UNIT: usize = Op::SQUARES_CHUNK;

/// Returns the shards of a part's flat buffers, by replica: of the whole, or of each unit where gradients are
/// divided, a range in proportion to the replicas' weights, one after another; if the plan says so, between
/// the tensors next to these. Shards of each unit let all owners receive at the same time. `None` if replicas
/// divide nothing.
pub(super) fn shards(plan: &Plan, stage: &Stage) -> Result<Option<Shards>> {
    if !plan.divides_state() {
        return Ok(None);
    }
    let layout = stage.layout();
    let units: Vec<Range<usize>> = if plan.divides_gradients() {
        let units = stage.backward_ranges().into_iter().rev();
        let table = stage.shared_table().map_or(0, |table| table.end.next_multiple_of(UNIT));
        // Two stages have the same shards of the table that both have.
        let cut = |unit: Range<usize>| match unit.start {
            0 if table > 0 => [0..table.min(unit.end), table.min(unit.end)..unit.end],
            _ => [unit.clone(), unit.end..unit.end],
        };
        units.flat_map(cut).filter(|unit| !unit.is_empty()).collect()
    } else {
        std::iter::once(0..layout.len()).collect()
    };
    let share = AxisShare::new(0, plan.shares_of_state())?;
    let mut all = vec![Vec::new(); share.ranks()];
    let mut start = 0;
    for unit in &units {
        // The border between two units is that of the chunks next to it.
        let chunks = unit.start.div_ceil(UNIT)..unit.end.div_ceil(UNIT);
        for (ranges, share) in all.iter_mut().zip(share.all()) {
            // What of all chunks so far belongs to this replica and those before it, so that what is rounded in
            // one unit is made up for in the next.
            let up_to = |chunks: usize| share.of(chunks).end;
            let at = ((chunks.start + up_to(chunks.end) - up_to(chunks.start)) * UNIT).min(layout.len());
            let end = if plan.zero_tensors { border(layout, at) } else { at };
            let end = end.max(start);
            ranges.push(start..end);
            start = end;
        }
    }
    Ok(Some(Shards::of_all(all.into_iter().map(Shard::new).collect())))
}

/// Returns the border between tensors next to an element.
fn border(layout: &ParamLayout, at: usize) -> usize {
    let starts = layout.params().iter().map(|param| param.start).chain([layout.len()]);
    starts.min_by_key(|start| start.abs_diff(at)).unwrap_or(0)
}

/// Returns what the rank of a replica updates of a part's flat buffers: all, if replicas divide nothing.
pub(super) fn own_shard(shards: Option<&Shards>, stage: &Stage, at: Coordinates) -> Shard {
    shards.map_or_else(|| (0..stage.layout().len()).into(), |shards| shards.of(at.data as usize).clone())
}

/// The shards of a part, among the ranks that hold it.
#[derive(Debug, Clone)]
pub(super) struct PartShards {
    pub(super) shards: Shards,
    /// The holders, by replica.
    holders: Communicator,
    /// The holders of the own group, if the plan has groups.
    group: Option<GroupHolders>,
    codecs: ZeroCodecs,
    /// Whether gradients are on their way while others are computed.
    overlap: bool,
    /// Number of elements that a holder sends at a time.
    most: usize,
}

/// The holders of a part in a group, which divide its weights once more.
#[derive(Debug, Clone)]
struct GroupHolders {
    groups: ShardGroups,
    shards: Shards,
    holders: Communicator,
}

/// Returns the groups of the holders of a part; `None` if the plan has none.
pub(super) fn groups(plan: &Plan) -> Option<ShardGroups> {
    let members = |group: &Vec<u32>| group.iter().map(|&replica| replica as usize).collect();
    let all: Vec<Vec<usize>> = plan.zero_groups.iter().map(members).collect();
    (!all.is_empty()).then(|| ShardGroups::new(all))
}

/// Returns what each replica of the group of the rank at some coordinates has of a part's weights once more: of
/// each unit equally much. `None` if the plan has no groups.
pub(super) fn shards_in_group(plan: &Plan, stage: &Stage, at: Coordinates) -> Result<Option<Shards>> {
    let Some(groups) = groups(plan) else { return Ok(None) };
    let count = groups.members()[groups.of(at.data as usize)].len();
    let share = AxisShare::new(0, vec![1; count])?;
    let mut all = vec![Vec::new(); count];
    for unit in stage.backward_ranges().into_iter().rev() {
        for (ranges, share) in all.iter_mut().zip(share.all()) {
            let own = share.of(unit.len());
            ranges.push(unit.start + own.start..unit.start + own.end);
        }
    }
    Ok(Some(Shards::of_all(all.into_iter().map(Shard::new).collect())))
}

/// Returns the number of a rank in its group.
pub(super) fn number_in_group(plan: &Plan, at: Coordinates) -> usize {
    groups(plan).map_or(0, |groups| {
        let members = &groups.members()[groups.of(at.data as usize)];
        members.iter().position(|&member| member == at.data as usize).unwrap_or(0)
    })
}

/// Returns the number of elements that a holder sends at a time: those of a bucket.
fn window(plan: &BoundPlan) -> usize {
    plan.outermost().averages().bucket_bytes / size_of::<f32>()
}

/// Returns a coder of what is divided.
fn coder(codec: Option<CodecSpec>, rank: usize) -> ShardCoder {
    ShardCoder::new(codec, RoundKey { rank: Rank(rank as u32), ..RoundKey::default() })
}

/// Returns the transfer of a range of weights from the holders that have it, for predictions.
pub(super) fn weights(shards: &Shards, range: &Range<usize>, codec: Option<CodecSpec>) -> Operation {
    let (coder, lengths) = (coder(codec, 0), shards.within(range).lengths());
    let bytes: Vec<usize> = lengths.iter().map(|&len| coder.bytes_of(len)).collect();
    owners_operation(gather_from_owners, &bytes, 1)
}

/// Returns the transfers of a range of weights where holders are in groups: between them, and by group inside
/// it.
pub(super) fn weights_by_groups(
    shards: &Shards,
    groups: &ShardGroups,
    range: &Range<usize>,
    codec: Option<CodecSpec>,
) -> [Vec<Operation>; 2] {
    let (coder, lengths) = (coder(codec, 0), shards.within(range).lengths());
    let bytes = |len: usize| coder.bytes_of(len);
    let between = |from, to| Bytes(groups.entering((from, to), &lengths, bytes) as u64);
    let inside = |(group, members): (usize, &Vec<usize>)| {
        let ranks: Vec<Rank> = members.iter().map(|&member| Rank(member as u32)).collect();
        owners_operation(gather_from_owners, &groups.passed_on(group, &lengths, bytes), 1).among(&ranks)
    };
    let inside = groups.members().iter().enumerate().map(inside).collect();
    [vec![uneven_all_to_all_operation(lengths.len(), between)], inside]
}

/// The transfers of a window of gradients, for predictions.
#[derive(Debug)]
pub(super) struct WindowOperations {
    /// To the owners, or, by group, to those that add up.
    pub(super) starts: Vec<Operation>,
    /// From those that add up to the owners; `None` without groups.
    pub(super) passes_on: Option<Operation>,
}

/// Returns the transfers of the windows in which holders gather their shards, for predictions.
pub(super) fn gathers(plan: &BoundPlan, shards: &Shards) -> Vec<Operation> {
    let of = |window: Shards| owners_operation(gather_from_owners, &window.lengths(), size_of::<f32>());
    shards.windows(window(plan)).into_iter().map(of).collect()
}

impl WindowOperations {
    /// Returns them between other ranks.
    pub(super) fn among(self, ranks: &[Rank]) -> Self {
        Self {
            starts: self.starts.into_iter().map(|op| op.among(ranks)).collect(),
            passes_on: self.passes_on.map(|op| op.among(ranks)),
        }
    }
}

/// Returns the transfers of the windows in which the gradients of a range reach their owners, for predictions.
pub(super) fn reductions(plan: &BoundPlan, shards: &Shards, range: &Range<usize>) -> Vec<WindowOperations> {
    let (codec, groups) = (plan.zero_codecs().gradients, groups(plan));
    let coder = coder(codec, 0);
    let bytes = |len: usize| coder.bytes_of(len);
    let of = |window: Shards| {
        let lengths = window.lengths();
        let Some(groups) = &groups else {
            let starts = match codec {
                None => owners_operation(scatter_to_owners, &lengths, size_of::<f32>()),
                Some(_) => {
                    uneven_all_to_all_operation(lengths.len(), |_, to| Bytes(bytes(lengths[to]) as u64))
                }
            };
            return WindowOperations { starts: vec![starts], passes_on: None };
        };
        let inside = |(group, members): (usize, &Vec<usize>)| {
            let sent = groups.inside(group, &lengths, |len| len * size_of::<f32>());
            let ranks: Vec<Rank> = members.iter().map(|&member| Rank(member as u32)).collect();
            uneven_all_to_all_operation(members.len(), |_, to| Bytes(sent[to] as u64)).among(&ranks)
        };
        let between = |from, to| Bytes(groups.between((from, to), &lengths, bytes) as u64);
        WindowOperations {
            starts: groups.members().iter().enumerate().map(inside).collect(),
            passes_on: Some(uneven_all_to_all_operation(lengths.len(), between)),
        }
    };
    shards.within(range).windows(window(plan)).into_iter().map(of).collect()
}

impl PartShards {
    /// Returns those of a stage at some coordinates. A collective, if the plan has groups.
    pub(super) fn new(
        shards: Shards,
        holders: Communicator,
        plan: &BoundPlan,
        (stage, at): (&Stage, Coordinates),
    ) -> Result<Self> {
        let group = match (groups(plan), shards_in_group(plan, stage, at)?) {
            (Some(groups), Some(shards)) => {
                let color = groups.of(at.data as usize) as u32;
                Some(GroupHolders { groups, shards, holders: holders.split(color, at.data)? })
            }
            _ => None,
        };
        let (codecs, overlap) = (plan.zero_codecs(), plan.outermost().overlap);
        Ok(Self { shards, holders, group, codecs, overlap, most: window(plan) })
    }

    /// Fills a flat buffer with the shards of all holders. A collective of them, which may be repeated.
    pub(super) fn gather(&self, flat: &mut Tensor) -> Result<()> {
        Ok(self.shards.gather(&self.holders, flat, self.most)?)
    }

    /// Starts to gather a range of weights, of which `own` has this rank's shard alone. A collective.
    pub(super) fn start_gather(
        &self,
        range: &Range<usize>,
        own: &Tensor,
    ) -> Result<GatheredRange, OptimError> {
        let coder = coder(self.codecs.weights, self.holders.rank().index());
        match &self.group {
            Some(GroupHolders { groups, holders, .. }) => {
                let comms = (&self.holders, holders);
                self.shards.start_gather_by_groups(comms, groups, range, own, coder)
            }
            None => self.shards.start_gather(&self.holders, range, own, coder),
        }
    }

    /// Starts to gather a range of weights inside the group, of which `own` has what this rank has there. A
    /// collective of the group; `None` without groups.
    pub(super) fn start_gather_in_group(
        &self,
        range: &Range<usize>,
        own: &Tensor,
    ) -> Result<Option<GatheredRange>, OptimError> {
        let group = self.group.as_ref();
        let start = |GroupHolders { shards, holders, .. }: &GroupHolders| {
            shards.start_gather(holders, range, own, ShardCoder::plain())
        };
        group.map(start).transpose()
    }

    /// Returns the reduction of gradients into the shards.
    pub(super) fn reduction(&self) -> ShardReduction {
        let coder = coder(self.codecs.gradients, self.holders.rank().index());
        let reduction = ShardReduction::new(self.holders.clone(), self.shards.clone(), self.most);
        let reduction = reduction.with_coder(coder);
        match &self.group {
            Some(GroupHolders { groups, holders, .. }) => {
                reduction.in_groups(groups.clone(), holders.clone())
            }
            None => reduction,
        }
    }

    /// Returns whether gradients are on their way while others are computed.
    pub(super) const fn overlap(&self) -> bool {
        self.overlap
    }

    /// Returns whether a codec encodes gradients.
    pub(super) const fn encodes_gradients(&self) -> bool {
        self.codecs.gradients.is_some()
    }

    /// Returns the shards among other ranks; `None` unless these are all that hold the part.
    pub(super) fn among(&self, holders: Communicator) -> Option<Self> {
        let fits = holders.size() == self.shards.ranks() && self.group.is_none();
        fits.then(|| Self { holders, ..self.clone() })
    }
}

/// Returns the number of the ranks that hold the same part of the model as a rank: all along the data axis.
pub(super) fn group_of(plan: &Plan, at: Coordinates) -> u32 {
    plan.group(plan.rank(at), Axis::Data)[0].0
}
