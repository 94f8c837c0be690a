//! What a recovery policy is: what a job does when machines fail or come back.

use farflung_base::Nanos;

use super::StepTimes;

/// Times that recovery steps of a job take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recovery {
    /// Time to save a checkpoint. The job does not work meanwhile.
    pub save: Nanos,
    /// Time to restart from a checkpoint: start processes, load data, read weights from disk.
    pub restart: Nanos,
    /// Time to continue without a restart: detect the loss and connect the remaining machines again.
    pub regroup: Nanos,
    /// Mean time until a machine fails.
    pub lifetime: Nanos,
}

/// The machines that are present, and the change that a policy must react to.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChangeContext<'a> {
    /// Whether each machine is present.
    pub(super) there: &'a [bool],
    /// Machines that failed in this change.
    pub(super) lost: &'a [u32],
    pub(super) at: Nanos,
    pub(super) recovery: &'a Recovery,
}

impl ChangeContext<'_> {
    /// Returns the machines that are present.
    pub(super) fn live(&self) -> Vec<u32> {
        (0..).zip(self.there).filter(|(_, there)| **there).map(|(machine, _)| machine).collect()
    }

    /// Returns whether a change to shorter steps saves more time than its pause takes. The saved time is
    /// counted until the next loss is expected: the mean time until one of `machines` machines fails.
    pub(super) fn is_worth(&self, pause: Nanos, before: Nanos, after: Nanos, machines: u32) -> bool {
        let time = self.recovery.lifetime.as_secs_f64() / f64::from(machines.max(1));
        let gain = 1.0 - after.as_secs_f64() / before.as_secs_f64().max(1e-12);
        gain * time > pause.as_secs_f64()
    }
}

/// Work that a change loses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LostWork {
    Nothing,
    /// The current step.
    Step,
    /// All work since the newest checkpoint.
    SinceSaved,
}

/// A policy's reaction to a change.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reaction {
    /// Time of a step from now on. `None`: the job does not work.
    pub(super) step: Option<Nanos>,
    /// Pause before the next step.
    pub(super) pause: Nanos,
    pub(super) gone: LostWork,
    /// Whether the pause contains a checkpoint.
    pub(super) has_saved: bool,
    /// Time at which the policy is called again if nothing changes before.
    pub(super) wake: Option<Nanos>,
}

impl Reaction {
    /// The job continues unchanged.
    pub(super) const fn same(step: Option<Nanos>) -> Self {
        Self { step, pause: Nanos::ZERO, gone: LostWork::Nothing, has_saved: false, wake: None }
    }

    /// The job continues with other machines. The current step is lost.
    pub(super) const fn regrouped(step: Option<Nanos>, pause: Nanos) -> Self {
        Self { pause, gone: LostWork::Step, ..Self::same(step) }
    }

    /// The job restarts from the newest checkpoint.
    pub(super) const fn restarted(step: Option<Nanos>, pause: Nanos) -> Self {
        Self { pause, gone: LostWork::SinceSaved, ..Self::same(step) }
    }
}

/// A recovery policy.
pub(super) trait Policy {
    /// Reacts to the start of the job, to a change, or to a requested wake-up. Machines that come back hold no
    /// state.
    fn change(&mut self, now: ChangeContext<'_>, prices: &mut StepTimes<'_>) -> Reaction;
}

/// How often a policy saves checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointInterval {
    /// At Daly's interval, computed as if the loss of any machine were a failure of the job.
    Daly,
    /// Every hour. Only the loss of all copies of a layer requires a checkpoint.
    Hourly,
}

/// A recovery policy, by name.
#[derive(Debug, Clone, Copy)]
pub struct PolicyRow {
    /// Name of the policy.
    pub name: &'static str,
    /// What the policy does, in one line.
    pub summary: &'static str,
    /// How often the policy saves checkpoints.
    pub saves: CheckpointInterval,
    pub(super) begin: fn() -> Box<dyn Policy>,
}
