//! Results of an arm over all seeds, and its rows compared with the reference.

use anyhow::Result;
use serde_json::{Value, json};

use super::{Arm, Setting, Shared};
use crate::harness::{Report, Threshold};

/// The runs of an arm, by seed.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    /// The arm's name.
    pub name: &'static str,
    /// One run for each seed.
    pub runs: Vec<Shared>,
}

/// Mean and standard deviation of a sample, such as the differences between two losses, in percent of the
/// second, over pairs of runs with the same seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Gap {
    /// Mean of the sample.
    pub mean: f64,
    /// Standard deviation of the sample; 0 for a single seed.
    pub sigma: f64,
}

/// Returns the mean and the standard deviation of a sample.
pub(crate) fn spread(values: &[f64]) -> Gap {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let square = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>();
    Gap { mean, sigma: if n > 1.0 { (square / (n - 1.0)).sqrt() } else { 0.0 } }
}

impl Outcome {
    /// Returns the held-out losses at the end, by seed.
    pub(crate) fn losses(&self) -> Vec<f64> {
        self.runs.iter().map(|run| run.last().loss).collect()
    }

    /// Returns the mean of the held-out losses.
    pub(crate) fn loss(&self) -> f64 {
        spread(&self.losses()).mean
    }

    /// Returns how far its losses are above the reference's, in percent.
    pub(crate) fn gap(&self, reference: &Self) -> Gap {
        let pairs = self.losses().into_iter().zip(reference.losses());
        spread(&pairs.map(|(ours, theirs)| (ours / theirs - 1.0) * 100.0).collect::<Vec<_>>())
    }

    /// Returns the payload that a rank sends per step, in bytes.
    pub(crate) fn payload(&self) -> f64 {
        spread(&self.runs.iter().map(|run| run.payload).collect::<Vec<_>>()).mean
    }

    /// Returns the bytes that a rank sends per step, with frames and votes.
    pub(crate) fn sent(&self) -> f64 {
        spread(&self.runs.iter().map(|run| run.last().sent / run.steps as f64).collect::<Vec<_>>()).mean
    }

    /// Returns the seconds of a step on the virtual clock.
    pub(crate) fn seconds(&self) -> f64 {
        spread(&self.runs.iter().map(|run| run.last().seconds / run.steps as f64).collect::<Vec<_>>()).mean
    }

    /// Adds rows for the loss, its spread and gap, bytes, ratios and time. `gap` is the condition on the gap in
    /// percent.
    ///
    /// Errors: stdout is closed.
    pub(crate) fn rows(&self, report: &mut Report<'_>, reference: &Self, gap: Threshold) -> Result<()> {
        let name = self.name;
        let mut row = |what: &str, value: f64, unit: &str, mark| {
            report.row(&format!("{name}: {what}"), value, unit, mark)
        };
        row("held-out loss", self.loss(), "nats", Threshold::None)?;
        row("standard deviation over seeds", spread(&self.losses()).sigma, "nats", Threshold::None)?;
        if self.name != reference.name {
            let found = self.gap(reference);
            row("loss above f32's", found.mean, "%", gap)?;
            row("standard deviation of the loss above f32's", found.sigma, "%", Threshold::None)?;
        }
        row("payload per step", self.payload(), "B", Threshold::None)?;
        row("sent per step, with frames and votes", self.sent(), "B", Threshold::None)?;
        if self.name != reference.name && self.payload() > 0.0 {
            let ratio = reference.payload() / self.payload();
            row("payload, times smaller than f32's", ratio, "x", Threshold::None)?;
            row("payload, times smaller than in 16 bits", ratio / 2.0, "x", Threshold::None)?;
        }
        row("step on the virtual clock", self.seconds() * 1e3, "ms", Threshold::None)?;
        row("speed-up over f32", reference.seconds() / self.seconds(), "x", Threshold::None)
    }

    /// Returns the arm's entry in a bench's record. `step_times` has a time for each of [`super::LINKS`], in
    /// seconds.
    pub(super) fn record(&self, setting: &Setting, arm: &Arm, reference: &Self, step_times: &[f64]) -> Value {
        let gap = self.gap(reference);
        let curve: Vec<_> =
            self.curve().into_iter().map(|p| json!([p.step, p.sent, p.seconds, p.loss])).collect();
        json!({
            "name": arm.name, "what": arm.what, "command": setting.command(arm), "seeds": self.runs.len(),
            "loss": self.loss(), "sigma": spread(&self.losses()).sigma,
            "gap": gap.mean, "gap_sigma": gap.sigma,
            "payload": self.payload(), "sent": self.sent(), "step_times": step_times, "curve": curve,
        })
    }

    /// Returns the points of the first seed, with each loss replaced by the mean over all seeds.
    fn curve(&self) -> Vec<super::Point> {
        let Some(first) = self.runs.first() else { return Vec::new() };
        let mean = |i: usize| {
            spread(&self.runs.iter().filter_map(|run| Some(run.points.get(i)?.loss)).collect::<Vec<_>>()).mean
        };
        first.points.iter().enumerate().map(|(i, &p)| super::Point { loss: mean(i), ..p }).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::lab::{Point, Run};

    fn outcome(losses: &[f64]) -> Outcome {
        let run = |&loss: &f64| {
            let points = vec![Point { step: 10, sent: 500.0, seconds: 2.0, loss }];
            Arc::new(Run { points, payload: 40.0, steps: 10 })
        };
        Outcome { name: "x", runs: losses.iter().map(run).collect() }
    }

    #[test]
    fn gaps_are_of_runs_of_one_seed() {
        let gap = outcome(&[2.02, 4.12]).gap(&outcome(&[2.0, 4.0]));
        // The gaps are one percent and three percent.
        assert!((gap.mean - 2.0).abs() < 1e-9 && (gap.sigma - 2.0_f64.sqrt()).abs() < 1e-9, "{gap:?}");
        assert_eq!(outcome(&[2.0]).gap(&outcome(&[2.0])), Gap { mean: 0.0, sigma: 0.0 });
    }

    #[test]
    fn figures_are_those_of_a_step() {
        let it = outcome(&[1.0, 2.0]);
        assert_eq!((it.payload(), it.sent(), it.seconds(), it.loss()), (40.0, 50.0, 0.2, 1.5));
    }
}
