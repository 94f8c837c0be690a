//! What a job does when machines are lost or come back: the table of ways, and what a way answers.

use farflung_base::Nanos;

use super::{Prices, oobleck, parcae, recycle, restart, varuna};

/// What changes of a job take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recovery {
    /// A checkpoint; the job stands still.
    pub save: Nanos,
    /// Starting again from a checkpoint: processes, data, weights from disk.
    pub restart: Nanos,
    /// Going on without starting again: the loss is noticed and the others meet anew.
    pub regroup: Nanos,
    /// Mean time until a machine is lost.
    pub lifetime: Nanos,
}

/// What there is, and what has changed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now<'a> {
    /// By machine: whether it is there.
    pub(super) there: &'a [bool],
    /// Lost just now.
    pub(super) lost: &'a [u32],
    pub(super) at: Nanos,
    pub(super) recovery: &'a Recovery,
}

impl Now<'_> {
    /// The machines that are there.
    pub(super) fn live(&self) -> Vec<u32> {
        (0..).zip(self.there).filter(|(_, there)| **there).map(|(machine, _)| machine).collect()
    }

    /// Whether a step that is shorter from now on is worth a pause: before the next loss of one of so many
    /// machines, in the mean.
    pub(super) fn is_worth(&self, pause: Nanos, before: Nanos, after: Nanos, machines: u32) -> bool {
        let time = self.recovery.lifetime.as_secs_f64() / f64::from(machines.max(1));
        let gain = 1.0 - after.as_secs_f64() / before.as_secs_f64().max(1e-12);
        gain * time > pause.as_secs_f64()
    }
}

/// What is gone with a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gone {
    Nothing,
    /// The step that was under way.
    Step,
    /// Everything since the newest checkpoint.
    SinceSaved,
}

/// What a way does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reaction {
    /// A step from now on; `None`: the job stands still.
    pub(super) step: Option<Nanos>,
    /// Before the first step.
    pub(super) pause: Nanos,
    pub(super) gone: Gone,
    /// Whether the pause contains a checkpoint.
    pub(super) has_saved: bool,
    /// The way is asked again at this time, if nothing changes before.
    pub(super) wake: Option<Nanos>,
}

impl Reaction {
    /// It goes on as it was.
    pub(super) const fn same(step: Option<Nanos>) -> Self {
        Self { step, pause: Nanos::ZERO, gone: Gone::Nothing, has_saved: false, wake: None }
    }

    /// It goes on with other machines; the step under way is lost.
    pub(super) const fn regrouped(step: Option<Nanos>, pause: Nanos) -> Self {
        Self { pause, gone: Gone::Step, ..Self::same(step) }
    }

    /// It begins again at the newest checkpoint.
    pub(super) const fn restarted(step: Option<Nanos>, pause: Nanos) -> Self {
        Self { pause, gone: Gone::SinceSaved, ..Self::same(step) }
    }
}

/// A way to go on.
pub(super) trait Policy {
    /// Called at the start, and after each change. Machines that come back hold nothing.
    fn change(&mut self, now: Now<'_>, prices: &mut Prices<'_>) -> Reaction;
}

/// How often a way saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saves {
    /// At Daly's interval for the loss of any machine.
    Daly,
    /// Every hour: only the loss of all copies of a layer goes back to a checkpoint.
    Hourly,
}

/// A way to go on, by name.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// What it does, in a line.
    pub summary: &'static str,
    /// How often it saves.
    pub saves: Saves,
    pub(super) begin: fn() -> Box<dyn Policy>,
}

/// All ways, the plain one first.
pub const POLICIES: [Row; 5] = [restart::ROW, varuna::ROW, oobleck::ROW, recycle::ROW, parcae::ROW];
