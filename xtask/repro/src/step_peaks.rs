//! Measures the largest memory that ranks of a run hold in a step, as their allocators count it, and compares
//! it with the prediction for their plan.

use std::sync::Mutex;

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::train::{Job, Trainer, step_memory};

use crate::allocations::{by_rank, this_is_rank};
use crate::workers::{JobTransport, job, on_connections};

/// Optimizer steps of a run. The second step reuses all buffers of the first, so no third is needed.
pub(crate) const STEPS: u64 = 2;
/// Number of runs of a job with several ranks; each rank's mean is used. Which rank is ahead of the others
/// changes from run to run, and with it the number of messages that wait to be read.
const RUNS: usize = 5;

/// What [`step_peaks`] found.
pub(crate) struct StepPeaks {
    /// Bytes of the fullest rank.
    pub(crate) most: f64,
    /// Largest relative difference between runs.
    pub(crate) spread: f64,
    /// Number of runs.
    pub(crate) runs: usize,
    /// Relative error of the prediction for the rank that is predicted worst.
    pub(crate) predicted_off: f64,
}

/// Runs some steps with these settings, and compares the peaks with the prediction.
pub(crate) fn step_peaks(config: TrainConfig) -> Result<StepPeaks> {
    let job = job(config, JobTransport::Memory)?;
    let runs = if job.world == 1 { 1 } else { RUNS };
    let mut held: Vec<_> = (0..runs).map(|_| peak_memory(&job)).collect::<Result<_>>()?;
    let mut found = StepPeaks { most: 0.0, spread: 0.0, runs, predicted_off: 0.0 };
    for (rank, predicted) in step_memory(&job)?.iter().enumerate() {
        held.sort_unstable_by_key(|run| run[rank]);
        let [least, largest] = [0, runs - 1].map(|run| held[run][rank] as f64);
        let mean = held.iter().map(|run| run[rank] as f64).sum::<f64>() / runs as f64;
        let off = predicted.total().0 as f64 / mean - 1.0;
        if off.abs() > found.predicted_off.abs() {
            found.predicted_off = off;
        }
        (found.most, found.spread) = (found.most.max(mean), found.spread.max((largest - least) / mean));
    }
    Ok(found)
}

/// Returns the largest memory that each rank of a job held: its device's buffers plus its own allocations.
fn peak_memory(job: &Job) -> Result<Vec<usize>> {
    let cut = Mutex::new(vec![0; job.world]);
    let (ran, counts) = by_rank(job.world, || {
        on_connections(job, |connection| {
            let rank = connection.comm.rank().index();
            this_is_rank(rank);
            let mut trainer = Trainer::new(job, connection.comm, job.config.threads)?;
            // The peak is reset, since the memory to make a trainer is not measured.
            this_is_rank(rank);
            for _ in 0..STEPS {
                trainer.step(false)?;
            }
            let buffers = trainer.stage().device().memory().1;
            cut.lock().map_err(|_| anyhow::anyhow!("another rank failed"))?[rank] = buffers;
            Ok(())
        })
    });
    ran?;
    let cut = cut.into_inner().ok().context("a rank failed")?;
    Ok(counts.iter().zip(&cut).map(|(count, buffers)| count.peak + buffers).collect())
}
