//! Lowering: adds communication, data movement and optimizer steps to each rank's list of computations.

use std::collections::BTreeMap;

use farflung_base::Rank;

use super::{Action, ComputeKind, ComputeOrder, Lowered, LoweredKind, Message, Op, Updates};

/// Options of lowering, which adds communication, data movement and optimizer steps to an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lowering {
    /// A receive is posted this number of computations before its message is used, so that the message can
    /// arrive in time.
    pub ahead: u32,
    /// Whether stages have replicas whose gradients are averaged. Gradients are always averaged if the pipeline
    /// has several copies of the model.
    pub replicas: bool,
    /// Whether the first and the last stage share weights.
    pub tied: bool,
    /// Whether each stage's weights are gathered before use and freed after.
    pub sharded: bool,
    /// Minimum distance, in computations, from a forward to its backward at which the activations are moved to
    /// slower memory meanwhile; 0 and 1 count as 2. `None`: never.
    pub offload: Option<u32>,
}

impl Default for Lowering {
    /// Returns options without replicas, shared weights, sharding and offloading. Receives are posted one
    /// computation ahead.
    fn default() -> Self {
        Self { ahead: 1, replicas: false, tied: false, sharded: false, offload: None }
    }
}

/// Returns the lowered lists of all ranks.
///
/// A message is sent right after the computation that produces it. Receives between two ranks are in the order
/// of the sends, so one ordered channel per direction is enough. Each receive is posted as late as this order
/// allows, minus [`Lowering::ahead`] computations.
pub(super) fn lower(order: &ComputeOrder, lowering: &Lowering) -> Vec<Vec<Lowered>> {
    let mut before: Vec<Vec<Vec<Lowered>>> =
        order.lists().iter().map(|list| vec![Vec::new(); list.len()]).collect();
    place_receives(order, lowering.ahead as usize, &mut before);
    let ranks = (0..).map(Rank).zip(order.lists()).zip(before);
    ranks.map(|((rank, list), before)| List::new(order, rank, list, lowering).fill(before)).collect()
}

/// Places the receive of each message before a computation of the receiving rank.
fn place_receives(order: &ComputeOrder, ahead: usize, before: &mut [Vec<Vec<Lowered>>]) {
    let placement = order.placement();
    // For each message, the index of the computation that uses it.
    let mut taken = vec![0; 2 * order.cells()];
    for list in order.lists() {
        for (at, op) in list.iter().enumerate() {
            for message in op.actions().filter_map(|a| Message::taken_by(a, placement)) {
                taken[order.slot(message)] = at;
            }
        }
    }
    let mut wires: BTreeMap<(Rank, Rank), Vec<(Message, usize)>> = BTreeMap::new();
    for message in order.actions().filter_map(|(_, action)| Message::made_by(action, placement)) {
        if let Some(wire) = message.wire(placement) {
            wires.entry(wire).or_default().push((message, taken[order.slot(message)]));
        }
    }
    for ((_, to), messages) in wires {
        // A receive must not come after the receive of a message that is sent later but used earlier.
        let mut latest = usize::MAX;
        let mut places = Vec::with_capacity(messages.len());
        for &(message, at) in messages.iter().rev() {
            latest = latest.min(at);
            places.push((message, latest.saturating_sub(ahead)));
        }
        for (message, at) in places.into_iter().rev() {
            before[to.index()][at].push(message.receive());
        }
    }
}

/// One rank's lowered list while it is built.
struct List<'a> {
    order: &'a ComputeOrder,
    rank: Rank,
    ops: &'a [Op],
    lowering: &'a Lowering,
    out: Vec<Lowered>,
}

impl<'a> List<'a> {
    fn new(order: &'a ComputeOrder, rank: Rank, ops: &'a [Op], lowering: &'a Lowering) -> Self {
        Self { order, rank, ops, lowering, out: Vec::with_capacity(3 * ops.len()) }
    }

    fn fill(mut self, before: Vec<Vec<Lowered>>) -> Vec<Lowered> {
        let placement = self.order.placement();
        let (offloads, loads) = self.moves();
        // If the order contains optimizer steps, lowering adds neither steps nor reductions.
        let own_steps = self.order.actions().any(|(_, a)| a.kind == ComputeKind::Step);
        let trains = !own_steps && !self.order.is_forward_only();
        let mut unfinished: BTreeMap<_, u32> = BTreeMap::new();
        for action in self.ops.iter().flat_map(Op::actions).filter(|a| a.releases()) {
            *unfinished.entry(placement.storage_stage(action.stage)).or_default() += 1;
        }
        for (at, (op, before)) in self.ops.iter().zip(before).enumerate() {
            self.out.extend(before);
            self.out.extend(loads.get(&at).into_iter().flatten());
            self.gather(at, *op);
            self.out.push(Lowered::Compute(*op));
            for action in op.actions() {
                let message = Message::made_by(action, placement).filter(|m| m.wire(placement).is_some());
                self.out.extend(message.map(|m| m.send()));
                if trains && action.releases() {
                    let stage = placement.storage_stage(action.stage);
                    let left = unfinished.entry(stage).or_default();
                    *left -= 1;
                    let last = *left == 0;
                    self.after_backward(Action { stage, ..action }, last);
                }
            }
            self.out.extend(offloads.get(&at));
            self.free(at, *op);
        }
        if trains && self.order.updates() == Updates::Flush {
            let last = self.order.microbatches() - 1;
            for stage in placement.homes_of(self.rank) {
                // A copy of the model that processed no microbatch also updates, with the gradients of the
                // other copies.
                let step = Action::new(ComputeKind::Step, stage.0, last);
                self.out.push(Lowered::Compute(step.into()));
            }
        }
        self.out
    }

    /// Starts reductions when a stage's gradients for an update are complete, and adds the optimizer step if
    /// the order does not flush.
    fn after_backward(&mut self, action: Action, last: bool) {
        if action.slice > 0 {
            return;
        }
        let placement = self.order.placement();
        let flush = self.order.updates() == Updates::Flush;
        let complete = if flush {
            last
        } else {
            self.order.updates().steps_after(action.microbatch, self.order.microbatches()) || last
        };
        if !complete {
            return;
        }
        let Action { stage, microbatch, .. } = action;
        if self.lowering.replicas || placement.copies() > 1 {
            self.out.push(Lowered::of_stage(LoweredKind::Reduce, stage));
        }
        if self.lowering.tied && (placement.is_first(stage) != placement.is_last(stage)) {
            self.out.push(Lowered::of_stage(LoweredKind::ReduceTied, stage));
        }
        if !flush {
            let step = Action::new(ComputeKind::Step, stage.0, microbatch);
            self.out.push(Lowered::Compute(step.into()));
        }
    }

    fn uses(&self, at: Option<usize>, stage: farflung_base::StageId) -> bool {
        at.and_then(|at| self.ops.get(at)).is_some_and(|op| op.actions().any(|a| a.stage == stage))
    }

    /// Gathers the weights of the op's stages, except those that the previous op used.
    fn gather(&mut self, at: usize, op: Op) {
        for action in op.actions().filter(|_| self.lowering.sharded) {
            if !self.uses(at.checked_sub(1), action.stage) {
                self.out.push(Lowered::of_stage(LoweredKind::Gather, action.stage));
            }
        }
    }

    /// Frees the weights of the op's stages, except those that the next op uses.
    fn free(&mut self, at: usize, op: Op) {
        for action in op.actions().filter(|_| self.lowering.sharded) {
            if !self.uses(at.checked_add(1), action.stage) {
                self.out.push(Lowered::of_stage(LoweredKind::Free, action.stage));
            }
        }
    }

    /// Returns the offloads, by the index of the op after which they start, and the loads, by the index of the
    /// op before which they start.
    fn moves(&self) -> (BTreeMap<usize, Lowered>, BTreeMap<usize, Vec<Lowered>>) {
        let (mut offloads, mut loads) = (BTreeMap::new(), BTreeMap::<_, Vec<_>>::new());
        let Some(distance) = self.lowering.offload else { return (offloads, loads) };
        let mut forwards = BTreeMap::new();
        for (at, op) in self.ops.iter().enumerate() {
            for action in op.actions() {
                let cell = self.order.cell(action);
                match action.kind {
                    ComputeKind::Forward => {
                        forwards.insert(cell, at);
                    }
                    // A stage that recomputes does not keep these activations, so there is nothing to offload.
                    ComputeKind::Recompute => {
                        forwards.remove(&cell);
                    }
                    _ if action.yields_gradient() => {
                        let Some(forward) = forwards.remove(&cell) else { continue };
                        if at - forward >= distance.max(2) as usize {
                            offloads.insert(forward, Lowered::of_action(LoweredKind::Offload, action));
                            let back = at.saturating_sub(self.lowering.ahead as usize).max(forward + 1);
                            loads
                                .entry(back)
                                .or_default()
                                .push(Lowered::of_action(LoweredKind::Load, action));
                        }
                    }
                    _ => {}
                }
            }
        }
        (offloads, loads)
    }
}
