//! What replicas divide of the state that all of them would hold (Rajbhandari et al. 2020, "ZeRO"): each holder
//! of a part of the model keeps the optimizer's state of a shard of the part's parameters, updates it, and
//! sends it to the others.

use std::ops::Range;

use farflung_base::{Axis, Operation};
use farflung_comm::{Communicator, gather_from_owners, owners_operation, scatter_to_owners};
use farflung_optim::{GatheredRange, OptimError, Shard, ShardReduction, Shards};
use farflung_parallel::{Coordinates, Plan};
use farflung_tensor::{Op, ParamLayout, Tensor};
use farflung_zoo::{AxisShare, Stage};

use super::bound_plan::BoundPlan;
use crate::Result;

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
        stage.backward_ranges().into_iter().rev().collect()
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
    /// Number of elements that a holder sends at a time.
    most: usize,
}

/// Returns the number of elements that a holder sends at a time: those of a bucket.
fn window(plan: &BoundPlan) -> usize {
    plan.outermost().averages().bucket_bytes / size_of::<f32>()
}

/// Returns the transfer of a range of weights from the holders that have it, for predictions.
pub(super) fn weights(shards: &Shards, range: &Range<usize>) -> Operation {
    owners_operation(gather_from_owners, &shards.within(range).lengths())
}

/// Returns the transfers of the windows in which holders gather their shards, for predictions.
pub(super) fn gathers(plan: &BoundPlan, shards: &Shards) -> Vec<Operation> {
    let of = |window: Shards| owners_operation(gather_from_owners, &window.lengths());
    shards.windows(window(plan)).into_iter().map(of).collect()
}

/// Returns the transfers of the windows in which the gradients of a range reach their owners, for predictions.
pub(super) fn reductions(plan: &BoundPlan, shards: &Shards, range: &Range<usize>) -> Vec<Operation> {
    let of = |window: Shards| owners_operation(scatter_to_owners, &window.lengths());
    shards.within(range).windows(window(plan)).into_iter().map(of).collect()
}

impl PartShards {
    pub(super) fn new(shards: Shards, holders: Communicator, plan: &BoundPlan) -> Self {
        Self { shards, holders, most: window(plan) }
    }

    /// Fills a flat buffer with the shards of all holders. A collective of them, which may be repeated.
    pub(super) fn gather(&self, flat: &mut Tensor) -> Result<()> {
        Ok(self.shards.gather(&self.holders, flat, self.most)?)
    }

    /// Starts to gather a range of the flat buffers, of which `own` has this rank's shard alone. A collective.
    pub(super) fn start_gather(
        &self,
        range: &Range<usize>,
        own: &Tensor,
    ) -> Result<GatheredRange, OptimError> {
        self.shards.start_gather(&self.holders, range, own)
    }

    /// Returns the reduction of gradients into the shards.
    pub(super) fn reduction(&self) -> ShardReduction {
        ShardReduction::new(self.holders.clone(), self.shards.clone(), self.most)
    }

    /// Returns the shards among other ranks; `None` unless these are all that hold the part.
    pub(super) fn among(&self, holders: Communicator) -> Option<Self> {
        (holders.size() == self.shards.ranks()).then(|| Self { holders, ..self.clone() })
    }
}

/// Returns the number of the ranks that hold the same part of the model as a rank: all along the data axis.
pub(super) fn group_of(plan: &Plan, at: Coordinates) -> u32 {
    plan.group(plan.rank(at), Axis::Data)[0].0
}
