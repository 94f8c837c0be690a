//! Compares the memory that is predicted for the ranks of real runs with what their allocators count: by kind,
//! and as a whole.
//!
//! In one process, a message belongs to the rank that allocated it, which sent it; the prediction gives it to
//! the rank that holds it until it can be added. So the ranks of a run are compared together, and one by one
//! only by kinds of tensors and in files.

mod settings;

use anyhow::Result;
use farflung::base::{MemoryByKind, MemoryKind};
use farflung::train::step_memory;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::step_peaks::{RankPeak, rank_peaks};
use crate::workers::{JobTransport, job};
use settings::Settings;

pub(crate) const BENCH: Bench = Bench {
    name: "memory-predicted",
    claim: "for 22 runs over all settings, the memory predicted before the run is within 5% of what the allocator \
            counted in it: of all ranks, and of each rank by kind of tensors and in files",
    source: "Ren et al. 2021, ZeRO-Offload (memory by kind); shared/facts/larger-than-a-machine.md",
    seed: 0,
    run,
};

/// Largest relative error of a prediction.
const WITHIN: Threshold = Threshold::AtMost(0.05);
/// Number of runs of a job with several ranks; each rank's mean is used. Which rank is ahead of the others
/// changes from run to run, and with it the number of messages that wait to be read.
const RUNS: usize = 3;

/// The kinds that are counted tensor by tensor, when they are made and dropped.
const TENSORS: [MemoryKind; 4] =
    [MemoryKind::Weights, MemoryKind::Gradients, MemoryKind::Optimizer, MemoryKind::Activations];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let mut unpaired = 0;
    for settings in settings::all(report.seed(), options.quick)? {
        unpaired += compared(report, settings, options.quick)?;
    }
    let metric = "kinds that were counted but not predicted, or predicted but not counted";
    report.row(metric, f64::from(unpaired), "", Threshold::AtMost(0.0))
}

/// The worst errors of a run's predictions, over its ranks.
#[derive(Debug, Default)]
struct Errors {
    rank: f64,
    by_kind: f64,
    files: f64,
    /// Number of kinds of which one side has nothing.
    unpaired: u32,
}

/// Returns the relative error of a prediction: none if both are 0, infinite if only the count is.
fn error(predicted: u64, counted: f64) -> f64 {
    if predicted == 0 && counted == 0.0 { 0.0 } else { (predicted as f64 / counted - 1.0).abs() }
}

/// Adds the rows of a run. Returns the number of kinds of which the prediction or the count has nothing.
fn compared(report: &mut Report<'_>, Settings { name, config }: Settings, quick: bool) -> Result<u32> {
    let job = job(config, JobTransport::Memory)?;
    let runs = if job.world == 1 || quick { 1 } else { RUNS };
    let held: Vec<Vec<RankPeak>> = (0..runs).map(|_| rank_peaks(&job)).collect::<Result<_>>()?;
    let mut worst = Errors::default();
    let (mut fullest, mut of_fullest) = (0.0_f64, MemoryByKind::default());
    let (mut predicted_all, mut counted_all) = (0, 0.0);
    for (rank, predicted) in step_memory(&job)?.iter().enumerate() {
        let mean = |bytes: &dyn Fn(&RankPeak) -> u64| {
            held.iter().map(|run| bytes(&run[rank]) as f64).sum::<f64>() / runs as f64
        };
        let total = mean(&RankPeak::total);
        (predicted_all, counted_all) = (predicted_all + predicted.total().0, counted_all + total);
        worst.rank = worst.rank.max(error(predicted.total().0, total));
        if total > fullest {
            (fullest, of_fullest) = (total, held[0][rank].counted.step.by_kind());
        }
        for kind in TENSORS {
            let counted = mean(&|peak| peak.counted.step.by_kind().of(kind).0);
            let predicted = predicted.by_kind().of(kind).0;
            worst.unpaired += u32::from((predicted == 0) != (counted == 0.0));
            worst.by_kind = worst.by_kind.max(error(predicted, counted));
        }
        // Messages are predicted with those on their way, which only the allocator of the process sees.
        let buffers = |of: MemoryByKind| of.operands + of.messages;
        let counted = mean(&|peak| peak.counted.step.device.messages.0 + peak.allocated as u64);
        worst.unpaired += u32::from((buffers(predicted.by_kind()).0 == 0) != (counted == 0.0));
        let files = mean(&|peak| peak.files);
        worst.unpaired += u32::from((predicted.disk.total().0 == 0) != (files == 0.0));
        worst.files = worst.files.max(error(predicted.disk.total().0, files));
        anyhow::ensure!(
            held.iter().all(|run| run[rank].counted.step.disk.total().0 == run[rank].files),
            "the run counted other bytes in files than there are"
        );
    }
    report.row(&format!("{name}: memory of the fullest rank"), fullest / 1e6, "MB", Threshold::None)?;
    for (kind, bytes) in of_fullest.each().filter(|(kind, _)| TENSORS.contains(kind)) {
        report.row(&format!("{name}: {} of it", kind.name()), bytes.0 as f64 / 1e6, "MB", Threshold::None)?;
    }
    let all = error(predicted_all, counted_all);
    report.row(&format!("{name}: error of the predicted memory, all ranks"), all, "", WITHIN)?;
    if job.world > 1 {
        let metric = format!("{name}: error of the predicted memory, worst rank");
        report.row(&metric, worst.rank, "", Threshold::None)?;
    }
    report.row(&format!("{name}: error of a kind of tensors, worst rank"), worst.by_kind, "", WITHIN)?;
    if held[0].iter().any(|peak| peak.files > 0) {
        report.row(&format!("{name}: error of the bytes in files, worst rank"), worst.files, "", WITHIN)?;
    }
    Ok(worst.unpaired)
}
