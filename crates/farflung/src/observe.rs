//! Sends a run's metrics to other programs: Prometheus, TensorBoard, OpenTelemetry. Each needs a feature
//! (`prometheus`, `tensorboard`, `otlp`); a build without the feature rejects the flag.

#[cfg(feature = "otlp")]
pub mod otlp;
#[cfg(feature = "prometheus")]
pub mod prometheus;
#[cfg(feature = "tensorboard")]
pub mod tensorboard;

use std::fmt::Debug;
use std::path::PathBuf;

use crate::train::{Observation, RunObserver};
use crate::{Error, LaunchEnv, Result, StepMetrics};

/// Where this process's metrics are sent.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ObserveArgs {
    /// Serve this process's metrics for Prometheus at `http://ADDR/metrics`. ADDR is `HOST:PORT`, or a port of
    /// the loopback. If several processes run on a machine, each takes the next port. Needs the feature
    /// `prometheus`.
    #[arg(long = "prometheus", value_name = "ADDR", num_args = 0..=1, default_missing_value = "9464",
          help_heading = HEADING)]
    prometheus: Option<String>,
    /// Write event files for TensorBoard into this folder; ranks above 0 of a launched job write to `rank-N` in
    /// it. Needs the feature `tensorboard`.
    #[arg(long = "tensorboard", value_name = "DIR", help_heading = HEADING)]
    tensorboard: Option<PathBuf>,
}

const HEADING: &str = "Observing";

/// Receives metrics after each step. An observer must not delay or end a run.
pub trait Observer: Debug + Send {
    /// Receives a step's row, with its loss. Called only where rows are written: on rank 0, and on every member
    /// of `farflung host`.
    fn step_row(&mut self, row: &StepMetrics);
    /// Receives the state of this process's first rank after a step.
    fn observe(&mut self, seen: &Observation<'_>);
}

impl ObserveArgs {
    /// Returns the observers of this process, whose place in a launched job is `env`. Calls `told` with lines
    /// to show to the user.
    ///
    /// Errors: [`Error::Setting`] if this build lacks the feature, or for an invalid address; [`Error::Io`] for
    /// an address that cannot be bound or a folder that cannot be made.
    pub fn observers(
        &self,
        env: Option<&LaunchEnv>,
        told: &mut dyn FnMut(&str),
    ) -> Result<Vec<Box<dyn Observer>>> {
        let mut observers = Vec::new();
        if let Some(address) = &self.prometheus {
            observers.push(serve(address, env.map_or(0, |env| env.local_rank), told)?);
        }
        if let Some(folder) = &self.tensorboard {
            let rank = env.map(|env| env.rank.0).filter(|&rank| rank > 0);
            let own = rank.map_or_else(|| folder.clone(), |rank| folder.join(format!("rank-{rank:05}")));
            observers.push(write_events(&own)?);
        }
        Ok(observers)
    }
}

#[cfg(feature = "prometheus")]
fn serve(address: &str, local_rank: usize, told: &mut dyn FnMut(&str)) -> Result<Box<dyn Observer>> {
    let served = prometheus::Served::start(address, local_rank)?;
    let at = served.address();
    told(&format!("metrics for Prometheus: http://{at}/metrics"));
    if !at.ip().is_loopback() {
        tracing::warn!(
            "anyone who can reach {at} can see this run's metrics, without encryption and without a password"
        );
    }
    Ok(Box::new(served))
}

#[cfg(not(feature = "prometheus"))]
fn serve(address: &str, _: usize, _: &mut dyn FnMut(&str)) -> Result<Box<dyn Observer>> {
    Err(lacks("prometheus", address.to_owned()))
}

#[cfg(feature = "tensorboard")]
fn write_events(folder: &std::path::Path) -> Result<Box<dyn Observer>> {
    Ok(Box::new(tensorboard::EventFiles::new(folder)?))
}

#[cfg(not(feature = "tensorboard"))]
fn write_events(folder: &std::path::Path) -> Result<Box<dyn Observer>> {
    Err(lacks("tensorboard", folder.display().to_string()))
}

/// Returns the error of a flag whose feature this build lacks.
#[must_use]
pub fn lacks(feature: &'static str, value: String) -> Error {
    let expected = format!(
        "a build with the feature `{feature}`, which this one lacks: build it with `--features {feature}`"
    );
    Error::Setting { field: feature, value, expected }
}

/// Passes all calls on to another [`RunObserver`], and rows and observations also to observers.
#[derive(Debug)]
pub struct Observed<'a, W> {
    inner: &'a mut W,
    observers: Vec<Box<dyn Observer>>,
}

impl<'a, W: RunObserver> Observed<'a, W> {
    /// Adds observers to `inner`.
    pub fn new(inner: &'a mut W, observers: Vec<Box<dyn Observer>>) -> Self {
        Self { inner, observers }
    }
}

impl<W: RunObserver> RunObserver for Observed<'_, W> {
    fn begin(&mut self, done: u64, steps: u64) {
        self.inner.begin(done, steps);
    }
    fn step(&mut self, metrics: &StepMetrics, link_use: Option<f64>) {
        self.inner.step(metrics, link_use);
    }
    fn step_row(&mut self, row: &StepMetrics) {
        self.inner.step_row(row);
        self.observers.iter_mut().for_each(|observer| observer.step_row(row));
    }
    fn observe(&mut self, seen: &Observation<'_>) {
        self.inner.observe(seen);
        self.observers.iter_mut().for_each(|observer| observer.observe(seen));
    }
    fn note(&mut self, text: &str) {
        self.inner.note(text);
    }
}
