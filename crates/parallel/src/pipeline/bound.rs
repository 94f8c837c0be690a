//! What no order of a pipeline's work can beat.

use std::collections::BTreeMap;

use farflung_base::{Nanos, Rank, StageId};

use super::{ComputeKind, ComputeOrder, Content, Message, PipelineCost};

/// The least makespan of any order with the placement and sizes of `order`: the most that some rank or wire
/// needs.
///
/// A rank starts when the first microbatch can have reached one of its stages, has all its work to do, and is
/// followed by the way of the last gradient from it to the model's input. A wire likewise: the first message
/// can be there at a certain time, all take their time, and after the last one its microbatch has its way to
/// go. Overlapped pairs are taken to be free in the part that the cost says. Orders that reach the bound are
/// optimal.
#[must_use]
pub fn lower_bound(order: &ComputeOrder, cost: &PipelineCost) -> Nanos {
    let ways = Ways::new(order, cost);
    let ranks = (0..).map(Rank).zip(order.lists()).map(|(rank, _)| ways.rank(rank)).max();
    ranks.unwrap_or_default().max(ways.wires())
}

/// When a microbatch that nothing holds up is where.
struct Ways<'a> {
    order: &'a ComputeOrder,
    cost: &'a PipelineCost,
    /// By part of the model: from the step's start to the part's forward.
    head: Vec<Nanos>,
    /// By part of the model: from the end of the part's backward to that of the first part's.
    tail: Vec<Nanos>,
    /// From the step's start to the gradient of the last part's input.
    turn: Nanos,
}

impl<'a> Ways<'a> {
    fn new(order: &'a ComputeOrder, cost: &'a PipelineCost) -> Self {
        let placement = order.placement();
        let depth = placement.depth();
        let mut ways = Self { order, cost, head: Vec::new(), tail: Vec::new(), turn: Nanos::ZERO };
        let (mut head, mut tail) = (Nanos::ZERO, Nanos::ZERO);
        for part in 0..depth {
            ways.head.push(head);
            ways.tail.push(tail);
            let stage = cost.least(part);
            if part + 1 == depth {
                ways.turn = head + stage.forward + stage.input;
            } else if order.slices() == 1 {
                // A slice is through sooner than its microbatch: then only whole work counts.
                head = head + stage.forward + ways.hop(part, ComputeKind::Forward);
                tail = tail + stage.input + ways.hop(part, ComputeKind::Backward);
            }
        }
        if order.slices() > 1 {
            ways.turn = Nanos::ZERO;
        }
        ways
    }

    /// From part to the next, or back; copies of the model may cross ranks at different parts, the least
    /// counts.
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
        // At best all is paired, and of each pair the shorter half is free in that part.
        let paired = |time: Nanos| Nanos((u128::from(time.0) * (200 - free) / 200) as u64);
        let tail = if self.order.is_forward_only() { Nanos::ZERO } else { least(&self.tail) };
        least(&self.head) + paired(needed + weights).max(paired(needed) + tail)
    }

    fn wires(&self) -> Nanos {
        let placement = self.order.placement();
        // By wire: the least before its first message, its time under way, the least after its last.
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

    /// The least time before a message can leave, and from its arrival to the end of its microbatch.
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
