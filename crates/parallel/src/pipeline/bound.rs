//! A lower bound on the makespan of any order of a pipeline's work.

use std::collections::BTreeMap;

use farflung_base::{Nanos, Rank, StageId};

use super::{ComputeKind, ComputeOrder, Content, Message, PipelineCost};

/// Returns a lower bound on the makespan of any order with the placement and sizes of `order`: the maximum over
/// all ranks and wires of the time that each needs at least. A wire carries the messages from one rank to
/// another.
///
/// A rank starts no earlier than the first microbatch can reach one of its stages. It then does all its work,
/// and the last gradient still has to go from it to the model's input. A wire needs at least the earliest time
/// of its first message, the time of all its messages, and the remaining time of the last message's microbatch.
/// All work is assumed to overlap in pairs to the full `overlap_percent` of the cost. Orders that reach the
/// bound are optimal.
#[must_use]
pub fn lower_bound(order: &ComputeOrder, cost: &PipelineCost) -> Nanos {
    let times = SingleMicrobatchTimes::new(order, cost);
    let ranks = (0..).map(Rank).zip(order.lists()).map(|(rank, _)| times.rank(rank)).max();
    ranks.unwrap_or_default().max(times.wires())
}

/// Times of a single microbatch that passes the pipeline without ever waiting.
struct SingleMicrobatchTimes<'a> {
    order: &'a ComputeOrder,
    cost: &'a PipelineCost,
    /// For each part of the model: time from the start of the step to the part's forward.
    head: Vec<Nanos>,
    /// For each part of the model: time from the end of the part's backward to the end of the first part's.
    tail: Vec<Nanos>,
    /// Time from the start of the step to the gradient of the last part's input.
    turn: Nanos,
}

impl<'a> SingleMicrobatchTimes<'a> {
    fn new(order: &'a ComputeOrder, cost: &'a PipelineCost) -> Self {
        let placement = order.placement();
        let depth = placement.depth();
        let mut times = Self { order, cost, head: Vec::new(), tail: Vec::new(), turn: Nanos::ZERO };
        let (mut head, mut tail) = (Nanos::ZERO, Nanos::ZERO);
        for part in 0..depth {
            times.head.push(head);
            times.tail.push(tail);
            let stage = cost.least(part);
            if part + 1 == depth {
                times.turn = head + stage.forward + stage.input;
            } else if order.slices() == 1 {
                // A slice can arrive earlier than its whole microbatch, so with slices these times stay zero.
                head = head + stage.forward + times.hop(part, ComputeKind::Forward);
                tail = tail + stage.input + times.hop(part, ComputeKind::Backward);
            }
        }
        if order.slices() > 1 {
            times.turn = Nanos::ZERO;
        }
        times
    }

    /// Returns the least time from a part to the next, or back. It is zero if any copy of the model has both
    /// parts on one rank.
    fn hop(&self, part: u32, kind: ComputeKind) -> Nanos {
        let placement = self.order.placement();
        let depth = placement.depth();
        let crosses = (0..placement.copies()).all(|copy| {
            let stage = copy * depth + part;
            placement.rank(StageId(stage)) != placement.rank(StageId(stage + 1))
        });
        let boundary = &self.cost.boundaries[part as usize];
        if crosses { boundary.link.time(boundary.bytes(kind)) } else { Nanos::ZERO }
    }

    fn part(&self, stage: StageId) -> usize {
        self.order.placement().part(stage) as usize
    }

    fn rank(&self, rank: Rank) -> Nanos {
        let placement = self.order.placement();
        let slices = u64::from(self.order.slices());
        let (mut needed, mut weights) = (Nanos::ZERO, Nanos::ZERO);
        for action in self.order.lists()[rank.index()].iter().flat_map(super::Op::actions) {
            let stage = self.cost.stage(action.stage);
            let part = |time: Nanos| Nanos(time.0 / slices);
            match action.kind {
                ComputeKind::BackwardWeight => weights += part(stage.weight),
                ComputeKind::Backward => {
                    needed += part(stage.input);
                    weights += part(stage.weight);
                }
                kind => needed += part(stage.time(kind)),
            }
        }
        let least =
            |of: &[Nanos]| placement.stages_of(rank).map(|g| of[self.part(g)]).min().unwrap_or_default();
        let free = u128::from(self.cost.overlap_percent.min(100));
        // The best case: all work is in pairs, and of each pair this percentage of the shorter half is free.
        let paired = |time: Nanos| Nanos((u128::from(time.0) * (200 - free) / 200) as u64);
        let tail = if self.order.is_forward_only() { Nanos::ZERO } else { least(&self.tail) };
        least(&self.head) + paired(needed + weights).max(paired(needed) + tail)
    }

    fn wires(&self) -> Nanos {
        let placement = self.order.placement();
        // For each wire: least time before its first message, total transfer time, least time after its last
        // message.
        let mut wires: BTreeMap<(Rank, Rank), (Nanos, Nanos, Nanos)> = BTreeMap::new();
        for message in self.order.actions().filter_map(|(_, action)| Message::made_by(action, placement)) {
            let Some(wire) = message.wire(placement) else { continue };
            let (before, after) = self.around(message);
            let kind = match message.content {
                Content::Activation => ComputeKind::Forward,
                Content::Gradient => ComputeKind::Backward,
            };
            let boundary = self.cost.boundary(message.from, kind);
            let time = boundary.link.bandwidth.transfer(boundary.bytes(kind));
            let busy = wires.entry(wire).or_insert((Nanos::MAX, Nanos::ZERO, Nanos::MAX));
            busy.0 = busy.0.min(before);
            busy.1 += Nanos(time.0 / u64::from(self.order.slices()));
            busy.2 = busy.2.min(after);
        }
        wires.into_values().map(|(before, time, after)| before + time + after).max().unwrap_or_default()
    }

    /// Returns the least time before a message can leave, and the least time from the end of its transfer to
    /// the end of its microbatch.
    fn around(&self, message: Message) -> (Nanos, Nanos) {
        if self.order.slices() > 1 {
            return (Nanos::ZERO, Nanos::ZERO);
        }
        let (from, to) = (self.part(message.from), self.part(message.to()));
        let last = self.head.len() - 1;
        let latency = self.cost.boundaries[from.min(to)].link.latency;
        let back = if self.order.is_forward_only() {
            Nanos::ZERO
        } else {
            self.cost.least(last as u32).input + self.tail[last]
        };
        match message.content {
            Content::Activation => {
                let onward = self.head[last] + self.cost.least(last as u32).forward - self.head[to];
                (self.head[from] + self.cost.least(from as u32).forward, latency + onward + back)
            }
            Content::Gradient => {
                let before = self.turn + (self.tail[last] - self.tail[from]);
                (before, latency + self.cost.least(to as u32).input + self.tail[to])
            }
        }
    }
}
