//! Measures the largest memory that ranks of a run hold in a step, as their allocators count it, and compares
//! it with the prediction for their plan.

use std::sync::Mutex;

use anyhow::{Context, Result};
use farflung::train::{Job, Trainer, step_memory};
use farflung::{CountedMemory, TrainConfig};

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
    let mut held: Vec<_> = (0..runs).map(|_| rank_peaks(&job)).collect::<Result<_>>()?;
    let mut found = StepPeaks { most: 0.0, spread: 0.0, runs, predicted_off: 0.0 };
    for (rank, predicted) in step_memory(&job)?.iter().enumerate() {
        held.sort_unstable_by_key(|run| run[rank].total());
        let [least, largest] = [0, runs - 1].map(|run| held[run][rank].total() as f64);
        let mean = held.iter().map(|run| run[rank].total() as f64).sum::<f64>() / runs as f64;
        let off = predicted.total().0 as f64 / mean - 1.0;
        if off.abs() > found.predicted_off.abs() {
            found.predicted_off = off;
        }
        (found.most, found.spread) = (found.most.max(mean), found.spread.max((largest - least) / mean));
    }
    Ok(found)
}

/// The largest memory that a rank held.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RankPeak {
    /// What the rank itself counted in the last step.
    pub(crate) counted: CountedMemory,
    /// Bytes that it allocated in all steps, without its device's buffers.
    pub(crate) allocated: usize,
    /// Lengths of the files of its state.
    pub(crate) files: u64,
}

impl RankPeak {
    /// Returns the bytes of memory: its device's buffers plus its own allocations.
    pub(crate) fn total(&self) -> u64 {
        self.counted.step.device.total().0 + self.allocated as u64
    }
}

/// Runs some steps of a job, and returns the largest memory of each rank.
pub(crate) fn rank_peaks(job: &Job) -> Result<Vec<RankPeak>> {
    let found = Mutex::new(vec![(CountedMemory::default(), 0); job.world]);
    let (ran, counts) = by_rank(job.world, || {
        on_connections(job, |connection| {
            let rank = connection.comm.rank().index();
            this_is_rank(rank);
            let mut trainer = Trainer::new(job, connection.comm, job.config.threads)?;
            let folder = tempfile::tempdir()?;
            trainer.keep_state_in(job, folder.path())?;
            // The peak is reset, since the memory to make a trainer is not measured.
            this_is_rank(rank);
            for _ in 0..STEPS {
                trainer.begin_memory();
                trainer.step(false)?;
            }
            let files = std::fs::read_dir(folder.path())?;
            let files = files.map(|file| Ok(file?.metadata()?.len())).sum::<std::io::Result<u64>>()?;
            found.lock().map_err(|_| anyhow::anyhow!("another rank failed"))?[rank] =
                (trainer.memory(), files);
            Ok(())
        })
    });
    ran?;
    let found = found.into_inner().ok().context("a rank failed")?;
    let peaks = counts.iter().zip(found);
    Ok(peaks.map(|(count, (counted, files))| RankPeak { counted, allocated: count.peak, files }).collect())
}
