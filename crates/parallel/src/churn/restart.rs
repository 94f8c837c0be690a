//! Restart from checkpoints: the loss of any machine in use stops the job.

use farflung_base::Nanos;

use super::best_shape::best_shape;
use super::policy::{ChangeContext, CheckpointInterval, Policy, PolicyRow, Reaction};
use super::{Shape, StepTimes};
use crate::mesh::whole_pipelines;

/// This policy's entry in the table [`POLICIES`](super::POLICIES).
pub(super) const ROW: PolicyRow = PolicyRow {
    name: "restart",
    summary: "restarts from the newest checkpoint, with the same stages and as many pipelines as the machines \
              allow",
    saves: CheckpointInterval::Daly,
    begin: || Box::new(Restart::new(same_stages)),
};

/// Chooses a shape for a number of machines, given the job's first shape if there was one.
type Choose = fn(&mut StepTimes<'_>, u32, Option<Shape>) -> Option<Shape>;

/// The policy's state: a job that restarts from a checkpoint after each loss.
pub(super) struct Restart {
    choose: Choose,
    /// First shape that the job had.
    first: Option<Shape>,
    shape: Option<Shape>,
    used: Vec<u32>,
}

fn same_stages(prices: &mut StepTimes<'_>, machines: u32, first: Option<Shape>) -> Option<Shape> {
    let Some(first) = first else { return best_shape(prices, machines, 1) };
    let pipelines = whole_pipelines(machines, first.stages).min(prices.fleet().microbatches);
    (pipelines > 0).then_some(Shape { pipelines, ..first })
}

impl Restart {
    pub(super) const fn new(choose: Choose) -> Self {
        Self { choose, first: None, shape: None, used: Vec::new() }
    }

    fn step(&self, prices: &mut StepTimes<'_>) -> Option<Nanos> {
        prices.step(self.shape?)
    }

    fn take(&mut self, shape: Option<Shape>, live: &[u32]) {
        self.shape = shape;
        self.first = self.first.or(shape);
        self.used = live.iter().copied().take(shape.map_or(0, |shape| shape.machines() as usize)).collect();
    }
}

impl Policy for Restart {
    fn change(&mut self, now: ChangeContext<'_>, prices: &mut StepTimes<'_>) -> Reaction {
        let live = now.live();
        let shape = (self.choose)(prices, live.len() as u32, self.first);
        if now.lost.iter().any(|machine| self.used.contains(machine)) || self.shape.is_none() {
            self.take(shape, &live);
            return Reaction::restarted(self.step(prices), now.recovery.restart);
        }
        let before = self.step(prices);
        let after = shape.and_then(|shape| prices.step(shape));
        let pause = now.recovery.save.saturating_add(now.recovery.restart);
        let is_better = before.zip(after).is_some_and(|(before, after)| {
            now.is_worth(pause, before, after, shape.map_or(0, Shape::machines))
        });
        if shape == self.shape || !is_better {
            return Reaction::same(before);
        }
        self.take(shape, &live);
        Reaction { has_saved: true, ..Reaction::regrouped(after, pause) }
    }
}
