//! The record of each step: its row in the metrics, and the calls of the run's observer. Rank 0 keeps it, and
//! each member of a run that machines join and leave.

use std::time::Instant;

use farflung_base::{Link, Nanos};
use farflung_comm::{Communicator, Stats};

use super::callbacks::RunObserver;
use super::checkpoint::Totals;
use super::finished;
use super::job::Job;
use super::trainer::StepDone;
use crate::{CountedMemory, MetricsWriter, PeerCounters, RunDir, StepMetrics};

/// The start of this part of the run, and the resources used before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    before: Totals,
    start: Nanos,
    /// Bytes that trials sent and received before this part began.
    trials: Stats,
    wall: Instant,
}

impl Clock {
    pub(super) fn new(comm: &Communicator, before: Totals, trials: Stats) -> Self {
        #[expect(clippy::disallowed_methods, reason = "the run reports how long it really took")]
        let wall = Instant::now();
        Self { before, start: comm.now(), trials, wall }
    }

    pub(super) fn totals(&self, comm: &Communicator) -> Totals {
        let stats = comm.stats();
        Totals {
            time_s: self.before.time_s + comm.now().saturating_sub(self.start).as_secs_f64(),
            wall_s: self.before.wall_s + self.wall.elapsed().as_secs_f64(),
            bytes_sent: self.before.bytes_sent + stats.sent.wire.0 - self.trials.sent.wire.0,
            bytes_received: self.before.bytes_received + stats.received.wire.0 - self.trials.received.wire.0,
        }
    }
}

/// The rows of the run's steps, the file to which they are written, and the observer that is told. A row that
/// has been written is not kept in memory, except the last one.
pub(super) struct RunRecorder<'a, 'w> {
    pub(super) link: Option<Link>,
    pub(super) metrics: Option<MetricsWriter>,
    pub(super) watch: Option<&'a mut (dyn RunObserver + 'w)>,
    /// The rows of all steps, or if there is a file, the last row that was written and those that are not yet.
    pub(super) rows: Vec<StepMetrics>,
    /// Number of rows, from the first, whose losses are known.
    pub(super) told: usize,
    /// The run's clock in seconds, after the last step.
    pub(super) time_s: f64,
}

/// What was found after a step, besides its loss.
#[derive(Debug, Default)]
pub(super) struct AfterStepFindings {
    pub(super) val_loss: Option<f64>,
    pub(super) digest: Option<String>,
    pub(super) memory: Option<CountedMemory>,
    pub(super) peers: Vec<PeerCounters>,
}

impl RunRecorder<'_, '_> {
    /// Records a step. After local steps of replicas, the row is written once the losses of all replicas are
    /// known: `train_loss` is the mean over all tokens of the step, of all replicas, for every method.
    pub(super) fn step(&mut self, job: &Job, done: &StepDone, found: AfterStepFindings, totals: &Totals) {
        let tokens = job.tokens_after(done.step);
        let new = tokens - job.tokens_after(done.step - 1);
        let row = StepMetrics {
            step: done.step,
            time_s: totals.time_s,
            wall_s: totals.wall_s,
            tokens,
            train_loss: done.loss,
            val_loss: found.val_loss,
            bytes_sent: totals.bytes_sent,
            bytes_received: totals.bytes_received,
            tokens_per_s: new as f64 / (totals.time_s - self.time_s).max(1e-9),
            drift: done.drift.map(|d| d.distance),
            digest: found.digest,
            experts: done.experts.clone(),
            memory: found.memory,
            peers: found.peers,
        };
        self.time_s = totals.time_s;
        if let Some(watch) = &mut self.watch {
            if let Some(drift) = done.drift.filter(|d| d.distance > 0.0) {
                watch.note(&format!(
                    "step {}: copies of parameters were up to {:.1e} apart and are equal again (rank 0 sent \
                     {})",
                    done.step,
                    drift.distance,
                    farflung_base::Bytes(drift.bytes)
                ));
            }
            watch.step(&row, link_use(self.link, totals));
        }
        self.rows.push(row);
        self.record_losses(&done.losses);
    }

    /// Adds losses to the oldest rows that lack them, and writes those rows.
    pub(super) fn record_losses(&mut self, losses: &[f64]) {
        for (row, &loss) in self.rows[self.told..].iter_mut().zip(losses) {
            row.train_loss = loss;
            if let Some(metrics) = &mut self.metrics {
                metrics.write(row);
            }
            if let Some(watch) = &mut self.watch {
                watch.step_row(row);
            }
            self.told += 1;
        }
        if self.metrics.is_some() {
            let unused = self.told.saturating_sub(1);
            self.rows.drain(..unused);
            self.told -= unused;
        }
    }

    /// Returns the rows of all steps after `begun`, with which this process has begun. If the file cannot be
    /// read, these are the rows in memory.
    pub(super) fn into_rows(self, run: Option<&RunDir>, begun: u64) -> Vec<StepMetrics> {
        if self.metrics.is_none() {
            return self.rows;
        }
        let mut rows = finished::rows(run);
        rows.retain(|row| row.step > begun);
        if rows.is_empty() { self.rows } else { rows }
    }
}

/// Returns the fraction of the elapsed time that the sent bytes take on the link.
fn link_use(link: Option<Link>, totals: &Totals) -> Option<f64> {
    let link = link.filter(|l| l.bandwidth.0 != u64::MAX)?;
    let sending = totals.bytes_sent as f64 * 8.0 / link.bandwidth.0 as f64;
    (totals.time_s > 0.0).then(|| (sending / totals.time_s).min(1.0))
}
