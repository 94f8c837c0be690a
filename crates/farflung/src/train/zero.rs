//! What replicas divide of the state that all of them would hold (Rajbhandari et al. 2020, "ZeRO"): each holder
//! of a part of the model keeps the optimizer's state of a shard of the part's parameters, updates it, and
//! sends it to the others.

use std::ops::Range;

use farflung_base::{Axis, Operation};
use farflung_comm::{Communicator, gather_from_owners, owners_operation};
use farflung_optim::Shards;
use farflung_parallel::{Coordinates, Plan};
use farflung_tensor::{Op, ParamLayout, Tensor};
use farflung_zoo::AxisShare;

use super::bound_plan::BoundPlan;
use crate::Result;

/// Shards begin at multiples of this many elements, unless they are of whole tensors: at those of the chunks in
/// which squares are added up, so that the norm of the gradients does not depend on who updates what.
const UNIT: usize = Op::SQUARES_CHUNK;

/// Returns the shards of a part's flat buffers, by replica: prefixes of their elements, in proportion to the
/// replicas' weights; if the plan says so, between the tensors next to these. `None` if replicas divide
/// nothing.
pub(super) fn shards(plan: &Plan, layout: &ParamLayout) -> Result<Option<Shards>> {
    if !plan.divides_state() {
        return Ok(None);
    }
    let units = layout.len().div_ceil(UNIT);
    let share = AxisShare::new(0, plan.shares_of_state())?;
    let ends = share.all().map(|share| (share.of(units).end * UNIT).min(layout.len()));
    let ends = ends.map(|end| if plan.zero_tensors { border(layout, end) } else { end });
    let mut start = 0;
    let lengths = ends.map(|end| end - std::mem::replace(&mut start, end));
    Ok(Some(Shards::new(lengths)))
}

/// Returns the border between tensors next to an element.
fn border(layout: &ParamLayout, at: usize) -> usize {
    let starts = layout.params().iter().map(|param| param.start).chain([layout.len()]);
    starts.min_by_key(|start| start.abs_diff(at)).unwrap_or(0)
}

/// Returns the range of a part's flat buffers that a rank updates.
pub(super) fn own_shard(plan: &Plan, layout: &ParamLayout, at: Coordinates) -> Result<Range<usize>> {
    let shards = shards(plan, layout)?;
    Ok(shards.map_or(0..layout.len(), |shards| shards.of(at.data as usize)))
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

/// Returns the transfers of the windows in which holders gather their shards, for predictions.
pub(super) fn gathers(plan: &BoundPlan, shards: &Shards) -> Vec<Operation> {
    let of = |window: Shards| owners_operation(gather_from_owners, &window.lengths());
    shards.windows(window(plan)).into_iter().map(of).collect()
}

impl PartShards {
    pub(super) fn new(shards: Shards, holders: Communicator, plan: &BoundPlan) -> Self {
        Self { shards, holders, most: window(plan) }
    }

    /// Fills a flat buffer with the shards of all holders. A collective of them, which may be repeated.
    pub(super) fn gather(&self, flat: &mut Tensor) -> Result<()> {
        Ok(self.shards.gather(&self.holders, flat, self.most)?)
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
