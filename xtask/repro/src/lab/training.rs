//! Trains one run of one arm, and records held-out losses, bytes and virtual time.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use farflung::base::Nanos;
use farflung::comm::ReduceOp;
use farflung::train::{Job, StepDone, Synced, Trainer};

use crate::workers::on_all;

/// Largest number of evaluations of a run. They are evenly spread, except that a run is only evaluated at its
/// end and where all replicas have synchronised.
const EVALUATIONS: u64 = 10;

/// State of a run after some steps. Bytes and time count only the steps, not the evaluations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    /// Steps done.
    pub step: u64,
    /// Bytes sent by the rank that has sent most, frames included.
    pub sent: f64,
    /// Seconds on the virtual clock of the slowest rank.
    pub seconds: f64,
    /// Held-out loss in nats per token.
    pub loss: f64,
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Run {
    /// Points from the first evaluation to the end.
    pub points: Vec<Point>,
    /// Payload that a rank sends per step, in bytes: the mean over ranks and steps, without votes.
    pub payload: f64,
    /// Number of steps.
    pub steps: u64,
}

impl Run {
    /// Returns the last point of the run.
    ///
    /// # Panics
    /// Never: a run has at least one step, and is evaluated after its last.
    pub(crate) fn last(&self) -> Point {
        *self.points.last().expect("a run is evaluated at its end")
    }
}

/// Results of one rank.
struct RankResult {
    points: Vec<Point>,
    payload: f64,
}

/// Trains all ranks of a job. Returns the losses of the first rank, at each point the most bytes and the
/// longest time of any rank, and the mean payload per step.
///
/// Errors: a rank fails.
pub(super) fn run(job: &Job) -> Result<Run> {
    let seen = on_all(job, |rank| watch(rank, job.config.steps))?;
    let mut points = seen.first().context("the job has no ranks")?.points.clone();
    for other in &seen[1..] {
        for (point, theirs) in points.iter_mut().zip(&other.points) {
            point.sent = point.sent.max(theirs.sent);
            point.seconds = point.seconds.max(theirs.seconds);
        }
    }
    let steps = job.config.steps;
    let payload = seen.iter().map(|rank| rank.payload).sum::<f64>() / seen.len() as f64 / steps as f64;
    Ok(Run { points, payload, steps })
}

fn watch(rank: &mut Trainer, steps: u64) -> Result<RankResult> {
    let (mut points, mut payload, mut wire) = (Vec::new(), 0_u64, 0_u64);
    let (mut clock, mut evaluated) = (Nanos::ZERO, 0);
    let mut votes = BTreeMap::<usize, u64>::new();
    let mut evaluating = Vec::new();
    for step in 1..=steps {
        let (begun, before) = (rank.comm().now(), rank.comm().stats().sent);
        let done = rank.step(false)?;
        let after = rank.comm().stats().sent;
        payload += after.payload.0 - before.payload.0;
        wire += after.wire.0 - before.wire.0;
        clock = clock.saturating_add(rank.comm().now().saturating_sub(begun));
        if voted(&done) {
            *votes.entry(done.losses.len()).or_default() += 1;
        }
        let due = (step - evaluated) * EVALUATIONS >= steps && done.synced == Synced::Yes;
        if due || step == steps {
            evaluated = step;
            let before = rank.comm().stats().sent.payload.0;
            let loss = rank.evaluate()?;
            evaluating.push(rank.comm().stats().sent.payload.0 - before);
            points.push(Point { step, sent: wire as f64, seconds: clock.as_secs_f64(), loss });
        }
    }
    payload += left_meanwhile(&evaluating);
    let mut voting = 0;
    for (losses, times) in votes {
        voting += times * vote_bytes(rank, losses)?;
    }
    rank.comm().barrier()?;
    Ok(RankResult { points, payload: payload.saturating_sub(voting) as f64 })
}

/// Returns the bytes of steps that were sent during evaluations, from the bytes sent in each evaluation. After
/// the last step nothing is in flight, so the last evaluation sends only its own bytes.
fn left_meanwhile(evaluating: &[u64]) -> u64 {
    let own = evaluating.last().copied().unwrap_or(0);
    evaluating.iter().map(|sent| sent.saturating_sub(own)).sum()
}

/// Returns whether ranks exchanged their losses in this step.
fn voted(done: &StepDone) -> bool {
    done.synced == Synced::Yes
}

/// Measures the bytes of a vote on `losses` losses by holding one. It carries each loss and the request to
/// stop, as f64.
fn vote_bytes(rank: &Trainer, losses: usize) -> Result<u64> {
    let before = rank.comm().stats().sent.payload.0;
    rank.comm().all_reduce(&mut vec![0.0_f64; losses + 1], ReduceOp::Sum)?;
    Ok(rank.comm().stats().sent.payload.0 - before)
}
