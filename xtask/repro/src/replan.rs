//! Checks that a run that begins under one plan and ends under another gives the results of one process.

use anyhow::{Context, Result};
use farflung::config::choice::Resume;
use farflung::parallel::Plan;
use farflung::parallel::pipeline::Method;
use farflung::train::{Job, Quiet, connections, run_job};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::plan_exact::{alone, plan, trace};
use crate::workers::{farthest, relative_l2};

pub(crate) const BENCH: Bench = Bench {
    name: "replan",
    claim: "weights and optimizer states are stored by tensor name, so a run continues under any other plan \
            with the losses of one process",
    source: "ours",
    seed: 1337,
    run,
};

const ALL: u32 = 8;

/// Number of steps in the first half.
const HALF: u64 = 4;

fn plans(base: &Plan) -> Result<Vec<(&'static str, Plan)>> {
    Ok(vec![
        ("one process", plan(base, &[8], 1, &[], Method::OneFOneB)?),
        ("shares 5 2 1", plan(base, &[5, 2, 1], 1, &[], Method::OneFOneB)?),
        ("layers 1 3, zb-h1", plan(base, &[8], 2, &[1], Method::ZbH1)?),
        ("2 x layers 2 1 1, shares 6 2", plan(base, &[6, 2], 3, &[2, 3], Method::OneFOneB)?),
    ])
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let whole = alone(report.seed(), ALL)?;
    let (losses, params) = trace(&whole, 2 * HALF)?;
    let plans = plans(&whole.plan)?;
    let pairs = (0..plans.len()).flat_map(|a| (0..plans.len()).map(move |b| (a, b))).filter(|(a, b)| a != b);
    for (from, to) in pairs.take(if options.quick { 3 } else { usize::MAX }) {
        let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
        let part = |which: &Plan, steps: u64, resume: Resume| -> Result<Vec<f64>> {
            let mut job = whole.with_plan(which.clone())?;
            (job.config.steps, job.config.resume) = (steps, resume);
            (job.config.eval_batches, job.config.sample_tokens) = (2, 0);
            job.out = Some(folder.path().join("run"));
            finish(&job)
        };
        let mut seen = part(&plans[from].1, HALF, Resume::No)?;
        seen.extend(part(&plans[to].1, 2 * HALF, Resume::Auto)?);
        let name = format!("{} -> {}", plans[from].0, plans[to].0);
        let off = farthest(&seen, &losses);
        let missing = (seen.len() as f64 - losses.len() as f64).abs();
        report.row(
            &format!("{name}: missing or additional steps"),
            missing,
            "steps",
            Threshold::AtMost(0.0),
        )?;
        report.row(&format!("{name}: largest difference of losses"), off, "nats", Threshold::AtMost(1e-5))?;
        let ended = weights(&whole, &folder.path().join("run"), 2 * HALF)?;
        report.row(
            &format!("{name}: parameters, difference from those of one process"),
            relative_l2(&ended, &params),
            "",
            Threshold::AtMost(1e-5),
        )?;
    }
    Ok(())
}

/// Runs a job to its last step and returns its losses.
fn finish(job: &Job) -> Result<Vec<f64>> {
    let report = run_job(job, connections(job, None)?, &mut Quiet)?.context("rank 0 has no report")?;
    Ok(report.rows.iter().map(|row| row.train_loss).collect())
}

/// Returns the parameters of a checkpoint in the layout of the whole model.
fn weights(job: &Job, run: &std::path::Path, step: u64) -> Result<Vec<f32>> {
    let folder = run.join(format!("step-{step:08}"));
    let device = farflung::tensor::Device::cpu(1)?;
    let stage = farflung::zoo::Stage::whole(&job.model, &device)?;
    Ok(stage.load(&mut farflung::zoo::weights::Weights::open(&folder)?)?.to_vec()?)
}
