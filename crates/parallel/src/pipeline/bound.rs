//! What no order of a pipeline's work can beat.

use farflung_base::{Nanos, Rank, StageId};

use super::{ComputeKind, ComputeOrder, PipelineCost};

/// The least makespan of any order with the placement and sizes of `order`: the most that some rank or wire needs.
///
/// A rank starts when the first microbatch can have reached one of its stages, has all its work to do, and is followed
/// by the way of the last gradient from it to the model's input. A wire carries all its messages. Overlapped pairs are
/// taken to be free in the part that the cost says. What it knows is work, the latency of the first and the last
/// microbatch, and link occupancy; orders that reach it are optimal.
#[must_use]
pub fn lower_bound(order: &ComputeOrder, cost: &PipelineCost) -> Nanos {
    let placement = order.placement();
    let depth = placement.depth();
    let stage = |g: StageId| &cost.stages[placement.part(g) as usize];
    // From one stage to the next: what the last byte of a whole message takes, where it crosses ranks.
    let hop = |from: StageId, to: StageId, kind: ComputeKind| {
        if placement.rank(from) == placement.rank(to) || order.slices() > 1 {
            return Nanos::ZERO;
        }
        cost.boundary(from, kind).link.time(cost.boundary(from, kind).bytes(kind))
    };
    // A slice is through sooner than its microbatch: then only whole work counts.
    let whole = order.slices() == 1;
    let trained = !order.is_forward_only();
    let (mut heads, mut tails) = (Vec::new(), Vec::new());
    for copy in 0..placement.copies() {
        let (mut head, mut tail) = (Nanos::ZERO, Nanos::ZERO);
        for g in (copy * depth..(copy + 1) * depth).map(StageId) {
            heads.push(head);
            tails.push(tail);
            if let (Some(next), true) = (placement.next(g), whole) {
                head = head + stage(g).forward + hop(g, next, ComputeKind::Forward);
                tail = tail + stage(g).input + hop(next, g, ComputeKind::Backward);
            }
        }
    }
    let mut through = vec![[Nanos::ZERO; 2]; placement.ranks() as usize];
    for (rank, action) in order.actions() {
        let [needed, weights] = &mut through[rank.index()];
        let part = |time: Nanos| Nanos(time.0 / u64::from(order.slices()));
        match action.kind {
            ComputeKind::BackwardWeight => *weights += part(stage(action.stage).weight),
            ComputeKind::Backward => {
                *needed += part(stage(action.stage).input);
                *weights += part(stage(action.stage).weight);
            }
            kind => *needed += part(stage(action.stage).time(kind)),
        }
    }
    let free = u64::from(cost.overlap_percent.min(100));
    let rank_bound = |rank: Rank| {
        let least = |of: &[Nanos]| placement.stages_of(rank).map(|g| of[g.index()]).min().unwrap_or_default();
        let [needed, weights] = through[rank.index()];
        let overlapped = |time: Nanos| Nanos((u128::from(time.0) * u128::from(200 - free) / 200) as u64);
        let tail = if trained { least(&tails) } else { Nanos::ZERO };
        least(&heads) + overlapped(needed + weights).max(overlapped(needed) + tail)
    };
    let ranks = (0..placement.ranks()).map(Rank).map(rank_bound).max().unwrap_or_default();
    ranks.max(wire_bound(order, cost))
}

/// The longest that some wire is busy.
fn wire_bound(order: &ComputeOrder, cost: &PipelineCost) -> Nanos {
    let mut wires = std::collections::BTreeMap::<_, Nanos>::new();
    for (_, action) in order.actions() {
        let Some(message) = super::Message::made_by(action, order.placement()) else { continue };
        if let Some(wire) = message.wire(order.placement()) {
            let boundary = cost.boundary(action.stage, action.kind);
            let time = boundary.link.bandwidth.transfer(boundary.bytes(action.kind));
            *wires.entry(wire).or_default() += Nanos(time.0 / u64::from(order.slices()));
        }
    }
    wires.into_values().max().unwrap_or_default()
}
