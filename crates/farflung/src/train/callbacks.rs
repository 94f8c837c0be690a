//! Callbacks that follow a run.

use super::observation::Observation;
use crate::StepMetrics;

/// Callbacks that follow a run; called on rank 0 unless stated otherwise.
pub trait RunObserver: Send {
    /// Training begins after `done` of `steps` steps.
    fn begin(&mut self, _done: u64, _steps: u64) {}

    /// A step is done. `link_use` is the fraction of the time so far for which this worker's bytes occupied its
    /// link.
    fn step(&mut self, metrics: &StepMetrics, link_use: Option<f64>);

    /// The row of a step was written, with its loss. If replicas train apart, losses are known only when they
    /// meet, so it may be called later than `step`.
    fn told(&mut self, _row: &StepMetrics) {}

    /// State of this process's first rank after a step. Called in every process.
    fn observe(&mut self, _seen: &Observation<'_>) {}

    /// A line of text for the user.
    fn note(&mut self, text: &str);
}

/// Ignores all calls.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl RunObserver for Quiet {
    fn step(&mut self, _: &StepMetrics, _: Option<f64>) {}
    fn note(&mut self, _: &str) {}
}
