//! Compares arms on unequal machines with averaging at each step, by tokens per hour and loss.

use anyhow::Result;
use farflung::train::plan_of;
use serde_json::json;

use super::outcome::Gap;
use super::{Arm, Lab, Outcome};
use crate::harness::{Report, Threshold};

/// Unequal machines, and the reference for arms on them.
#[derive(Debug)]
pub(crate) struct Unequal<'a> {
    /// Description of the machines.
    pub machines: &'static str,
    /// Results of averaging at each step.
    pub reference: &'a Outcome,
    /// Microbatches of the reference per second of the virtual clock. All microbatches have as many tokens.
    pub rate: f64,
}

/// Results of an arm.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArmResult {
    /// Tokens per hour, relative to the reference.
    pub rate: f64,
    /// Loss above the reference's, in percent.
    pub gap: Gap,
    /// Bytes that a worker sends per step of the fastest worker, without frames.
    pub payload: f64,
}

/// Conditions on the results of an arm.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Thresholds {
    /// Condition on the tokens per hour.
    pub rate: Threshold,
    /// Condition on the increase of the loss over the reference's.
    pub gap: Threshold,
}

/// Returns the number of microbatches that an arm trains on in a second of the virtual clock.
///
/// Errors: the settings cannot be combined.
pub(crate) fn rate(lab: &Lab, arm: &Arm, outcome: &Outcome) -> Result<f64> {
    let config = lab.setting().config(arm, 0)?;
    let (steps, workers) = (config.steps, config.workers);
    let plan = plan_of(config, workers)?;
    Ok(plan.local_steps().all_microbatches(steps) as f64 / (outcome.seconds() * steps as f64))
}

impl Unequal<'_> {
    /// Adds the rows of an arm, and its entry in the bench's record.
    ///
    /// Errors: those of [`Lab::outcome`]; stdout is closed.
    pub(crate) fn compare(
        &self,
        report: &mut Report<'_>,
        lab: &Lab,
        arm: &Arm,
        marks: Thresholds,
    ) -> Result<ArmResult> {
        let outcome = lab.outcome(report, arm)?;
        let name = arm.name;
        let rate = rate(lab, arm, &outcome)? / self.rate;
        report.row(&format!("{name}: tokens per hour relative to f32's"), rate, "x", marks.rate)?;
        let seconds = outcome.seconds() * lab.setting().config(arm, 0)?.steps as f64;
        report.row(&format!("{name}: time on the virtual clock"), seconds, "s", Threshold::None)?;
        report.row(
            &format!("{name}: held-out loss after that time"),
            outcome.loss(),
            "nats",
            Threshold::None,
        )?;
        let (gap, payload) = (outcome.gap(self.reference), outcome.payload());
        report.row(&format!("{name}: loss above f32's after that time"), gap.mean, "%", marks.gap)?;
        report.row(
            &format!("{name}: standard deviation of the loss above f32's"),
            gap.sigma,
            "%",
            Threshold::None,
        )?;
        report.row(&format!("{name}: payload per step"), payload, "B", Threshold::None)?;
        let entry = json!({
            "name": name, "what": arm.what, "command": lab.setting().command(arm), "machines": self.machines,
            "rate": rate, "seconds": seconds, "gap": gap.mean, "gap_sigma": gap.sigma, "payload": payload,
        });
        report.add("unequal", entry);
        Ok(ArmResult { rate, gap, payload })
    }
}
