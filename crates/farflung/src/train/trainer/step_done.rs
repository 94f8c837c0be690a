//! Result of a training step.

use crate::metrics::MixtureMetrics;
use crate::train::resync::Drift;

/// Whether all replicas have the same parameters after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Synced {
    /// They have.
    Yes,
    /// They have trained apart since they last had.
    No,
}

/// Result of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepDone {
    /// Number of steps done, including this one.
    pub step: u64,
    /// Mean loss of the step's tokens in nats: of all replicas if they are equal now, else of this one.
    pub loss: f64,
    /// When replicas meet: mean losses over all replicas, of the oldest steps not reported yet. The last one is
    /// this step's, unless the method lets averages and votes take several steps.
    pub losses: Vec<f64>,
    /// Whether all replicas have the same parameters now.
    pub synced: Synced,
    /// Whether any rank requests a stop; valid if all ranks agreed.
    pub stop: bool,
    /// Whether any rank requests a change of members; valid if all ranks agreed.
    pub change: bool,
    /// The distance between copies of parameters, if they were compared.
    pub drift: Option<Drift>,
    /// Number of times that the step was computed again because its gradients were not finite.
    pub skipped: u32,
    /// What the routers of experts chose in this step: on all replicas if each step averages gradients, else on
    /// this one.
    pub experts: Vec<MixtureMetrics>,
}

impl StepDone {
    /// Returns the result of a local step after which replicas do not meet.
    pub(super) fn local(step: u64, loss: f64) -> Self {
        let (stop, change, losses, drift, skipped) = (false, false, Vec::new(), None, 0);
        Self { step, loss, losses, synced: Synced::No, stop, change, drift, skipped, experts: Vec::new() }
    }

    /// Returns the result of a step that all replicas have taken together, without requests.
    pub(super) fn of_all(step: u64, loss: f64) -> Self {
        Self {
            step,
            loss,
            losses: vec![loss],
            synced: Synced::Yes,
            stop: false,
            change: false,
            drift: None,
            skipped: 0,
            experts: Vec::new(),
        }
    }
}
