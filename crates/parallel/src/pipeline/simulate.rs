//! Simulates a pipeline: computes the start and end of every computation from an order and its costs. All times
//! are integers, so they are the same on every machine.

use std::collections::BTreeMap;

use farflung_base::{Bytes, Nanos, Rank, StageId};

use super::cost::CostTable;
use super::order::flow::{Clock, flow};
use super::{Action, ComputeKind, ComputeOrder, Op, PipelineCost};
use crate::{Kind, Lane, ParallelError, Span, Timeline};

/// Start and end of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slot {
    /// Start.
    pub start: Nanos,
    /// End.
    pub end: Nanos,
}

/// A message between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Transfer {
    from: Rank,
    to: Rank,
    action: Action,
    /// Time in which the message occupies the wire.
    slot: Slot,
    bytes: Bytes,
}

/// Result of [`simulate`].
#[derive(Debug)]
pub struct Simulation<'a> {
    order: &'a ComputeOrder,
    /// Slot of each op, by rank, in the order of its list.
    slots: Vec<Vec<Slot>>,
    /// Only messages with at least one byte.
    transfers: Vec<Transfer>,
    makespan: Nanos,
}

/// Simulates `order` with the times and sizes in `cost`.
///
/// A rank runs its list in order, each op as soon as the rank is free and the op's inputs have arrived. A
/// message starts at the end of its computation, or later when the wire between the two ranks is free. It
/// occupies the wire for its bytes divided by the bandwidth, and arrives the latency later. Sending and
/// receiving take no computing time.
///
/// With the costs of a run under virtual time, the result equals the time of that run.
///
/// Errors: as [`PipelineCost::check`].
///
/// ```
/// use farflung_parallel::pipeline::{Boundary, Method, PipelineCost, Settings, StageCost, simulate};
/// use farflung_base::{Nanos, Rank};
///
/// let order = Method::OneFOneB.order(&Settings::new(4, 8))?;
/// let slow = Boundary::latency(Nanos::from_millis(2));
/// let simulation = simulate(&order, &PipelineCost::uniform(&order, StageCost::UNIT, slow))?;
/// assert_eq!(simulation.makespan(), Nanos::from_millis(65));
/// assert_eq!(simulation.bubble(Rank(0)), Nanos::from_millis(65 - 8 * 3));
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
pub fn simulate<'a>(order: &'a ComputeOrder, cost: &PipelineCost) -> Result<Simulation<'a>, ParallelError> {
    cost.check(order)?;
    Ok(Simulator::new(order, cost).run()?.0)
}

pub(super) struct Simulator<'a, 'c> {
    order: &'a ComputeOrder,
    cost: &'c PipelineCost,
    table: CostTable,
    free: Vec<Nanos>,
    slots: Vec<Vec<Slot>>,
    transfers: Vec<Transfer>,
    /// Wire of each stage's messages: to the next stage, to the previous stage.
    wire_of: Vec<[usize; 2]>,
    /// Time at which each wire between two ranks is free.
    wires: Vec<Nanos>,
    /// Pauses of each rank, by the index of the op after the pause; the list's length stands for the pause
    /// after the last op. Empty: no pauses.
    pub(super) pauses: Vec<BTreeMap<usize, Nanos>>,
}

impl<'a, 'c> Simulator<'a, 'c> {
    pub(super) fn new(order: &'a ComputeOrder, cost: &'c PipelineCost) -> Self {
        let placement = order.placement();
        let mut numbers: BTreeMap<(Rank, Rank), usize> = BTreeMap::new();
        let mut wire = |from: StageId, to: Option<StageId>| {
            let pair = to.map(|to| (placement.rank(from), placement.rank(to)));
            let next = numbers.len();
            pair.map_or(0, |pair| *numbers.entry(pair).or_insert(next))
        };
        let wire_of = (0..placement.stages())
            .map(StageId)
            .map(|stage| [wire(stage, placement.next(stage)), wire(stage, placement.previous(stage))])
            .collect();
        Self {
            order,
            cost,
            table: cost.table(order),
            free: vec![Nanos::ZERO; placement.ranks() as usize],
            slots: order.lists().iter().map(|list| Vec::with_capacity(list.len())).collect(),
            transfers: Vec::new(),
            wire_of,
            wires: vec![Nanos::ZERO; numbers.len().max(1)],
            pauses: Vec::new(),
        }
    }

    /// Runs the order to its end. Also returns the time at which each rank is free again.
    pub(super) fn run(mut self) -> Result<(Simulation<'a>, Vec<Nanos>), ParallelError> {
        let order = self.order;
        flow(order, &mut self)?;
        let makespan = self.free.iter().copied().max().unwrap_or_default();
        for (rank, list) in order.lists().iter().enumerate() {
            self.free[rank] = self.free[rank].saturating_add(self.pause(rank, list.len()));
        }
        let Self { slots, transfers, free, .. } = self;
        Ok((Simulation { order, slots, transfers, makespan }, free))
    }

    fn pause(&self, rank: usize, index: usize) -> Nanos {
        self.pauses.get(rank).and_then(|pauses| pauses.get(&index)).copied().unwrap_or_default()
    }
}

impl Clock for Simulator<'_, '_> {
    fn run(&mut self, rank: Rank, index: usize, op: Op, ready: Nanos) -> Nanos {
        let pause = self.pause(rank.index(), index);
        let free = &mut self.free[rank.index()];
        let start = ready.max(free.saturating_add(pause));
        let end = start.saturating_add(self.table.time(op));
        *free = end;
        self.slots[rank.index()].push(Slot { start, end });
        end
    }

    fn deliver(&mut self, action: Action, to: StageId, at: Nanos) -> Nanos {
        let boundary = self.cost.boundary(action.stage, action.kind);
        let bytes = boundary.bytes(action.kind);
        if bytes.0 == 0 {
            return at.saturating_add(boundary.link.latency);
        }
        let bytes = self.table.message(action, bytes);
        let way = usize::from(action.kind != ComputeKind::Forward);
        let wire = &mut self.wires[self.wire_of[action.stage.index()][way]];
        let start = at.max(*wire);
        let end = start.saturating_add(boundary.link.bandwidth.transfer(bytes));
        *wire = end;
        let placement = self.order.placement();
        self.transfers.push(Transfer {
            from: placement.rank(action.stage),
            to: placement.rank(to),
            action,
            slot: Slot { start, end },
            bytes,
        });
        end.saturating_add(boundary.link.latency)
    }
}

impl Simulation<'_> {
    /// Returns the order that was simulated.
    #[must_use]
    pub const fn order(&self) -> &ComputeOrder {
        self.order
    }

    /// Returns the slot of each op of a rank, in the order of its list.
    #[must_use]
    pub fn slots(&self, rank: Rank) -> &[Slot] {
        &self.slots[rank.index()]
    }

    /// Returns the time at which the last rank is done.
    #[must_use]
    pub const fn makespan(&self) -> Nanos {
        self.makespan
    }

    /// Returns the time for which a rank computes.
    #[must_use]
    pub fn busy(&self, rank: Rank) -> Nanos {
        self.slots(rank).iter().map(|s| s.end - s.start).sum()
    }

    /// Returns the idle time of a rank within the makespan.
    #[must_use]
    pub fn bubble(&self, rank: Rank) -> Nanos {
        self.makespan - self.busy(rank)
    }

    /// Returns the idle time of a rank between its first op and its last: the bubble that remains if the next
    /// step starts as soon as the rank is done. Source: Qi et al. 2023.
    #[must_use]
    pub fn span_bubble(&self, rank: Rank) -> Nanos {
        let slots = self.slots(rank);
        match (slots.first(), slots.last()) {
            (Some(first), Some(last)) => last.end - first.start - self.busy(rank),
            _ => Nanos::ZERO,
        }
    }

    /// Returns the longest time from a rank's first op to its last: the time of a step if steps directly follow
    /// each other.
    #[must_use]
    pub fn span(&self) -> Nanos {
        let span = |rank: &Vec<Slot>| Some(rank.last()?.end - rank.first()?.start);
        self.slots.iter().filter_map(span).max().unwrap_or_default()
    }

    /// Returns the fraction of all ranks' time within the makespan in which they were idle, from 0 to 1.
    #[must_use]
    pub fn bubble_fraction(&self) -> f64 {
        let ranks = self.slots.len() as u64;
        let bubble: u64 = (0..ranks as u32).map(|rank| self.bubble(Rank(rank)).0).sum();
        bubble as f64 / (self.makespan.0 * ranks).max(1) as f64
    }

    /// Returns for how long the wire between each pair of ranks is busy. Pairs without bytes are left out.
    #[must_use]
    pub fn wires(&self) -> BTreeMap<(Rank, Rank), Nanos> {
        let mut busy = BTreeMap::new();
        for transfer in &self.transfers {
            *busy.entry((transfer.from, transfer.to)).or_default() += transfer.slot.end - transfer.slot.start;
        }
        busy
    }

    /// Returns the fraction of the makespan in which the busiest wire was busy, from 0 to 1.
    #[must_use]
    pub fn link_use(&self) -> f64 {
        let busiest = self.wires().into_values().max().unwrap_or_default();
        busiest.0 as f64 / self.makespan.0.max(1) as f64
    }

    /// Returns the spans, for drawing.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        let mut spans = Vec::new();
        for (rank, (list, slots)) in (0..).map(Rank).zip(self.order.lists().iter().zip(&self.slots)) {
            for (op, slot) in list.iter().zip(slots) {
                let action = op.actions().next().expect("an op has an action");
                let kind =
                    if matches!(op, Op::Overlap { .. }) { Kind::Overlapped } else { action.kind.into() };
                let Slot { start, end } = *slot;
                let (lane, part, sent) = (Lane::Compute, action.microbatch, Bytes(0));
                spans.push(Span { rank, lane, kind, step: 0, part, op: Some(*op), start, end, sent });
            }
        }
        for t in &self.transfers {
            let forward = t.action.kind == ComputeKind::Forward;
            let ranks = self.slots.len() as u32;
            let after = |rank: Rank| if rank.0 + 1 == ranks { Rank(0) } else { Rank(rank.0 + 1) };
            let lane = if t.to == after(t.from) {
                Lane::Next
            } else if t.from == after(t.to) {
                Lane::Previous
            } else {
                Lane::To(t.to)
            };
            spans.push(Span {
                rank: t.from,
                lane,
                kind: if forward { Kind::SendActivation } else { Kind::SendGradient },
                step: 0,
                part: t.action.microbatch,
                op: Some(Op::Run(t.action)),
                start: t.slot.start,
                end: t.slot.end,
                sent: t.bytes,
            });
        }
        spans.retain(|s| s.end > s.start);
        spans.sort_by_key(|s| (s.rank, s.lane, s.start));
        Timeline { ranks: self.slots.len() as u32, steps: 1, spans }
    }
}
