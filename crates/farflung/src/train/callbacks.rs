//! Callbacks that follow a run.

use super::observation::Observation;
use crate::StepMetrics;

/// Callbacks that follow a run. Each process calls them for its first rank.
pub trait RunObserver: Send {
    /// Called when training begins. `done` is the number of steps that are already done, `steps` the number of
    /// all steps.
    fn begin(&mut self, _done: u64, _steps: u64) {}

    /// Called after each step: on rank 0, and on every member of a run that machines join and leave. `link_use`
    /// is the fraction of the time so far for which this worker's bytes occupied its link; `None` if the speed
    /// of its link is not known.
    fn step(&mut self, metrics: &StepMetrics, link_use: Option<f64>);

    /// Called on the same ranks as `step`, when the row of a step was written, with its loss. After local
    /// steps, losses are known only when replicas synchronise, so this call may come later than `step`.
    fn step_row(&mut self, _row: &StepMetrics) {}

    /// Called after each step in every process, with the state of the process's first rank.
    fn observe(&mut self, _seen: &Observation<'_>) {}

    /// Called with a line of text for the user.
    fn note(&mut self, text: &str);
}

/// Ignores all calls.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl RunObserver for Quiet {
    fn step(&mut self, _: &StepMetrics, _: Option<f64>) {}
    fn note(&mut self, _: &str) {}
}

/// Logs a line of text and shows it to the user.
pub(in crate::train) fn tell(watch: Option<&mut (dyn RunObserver + '_)>, text: &str) {
    tracing::info!("{text}");
    if let Some(watch) = watch {
        watch.note(text);
    }
}
