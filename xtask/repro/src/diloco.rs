//! Compares `DiLoCo` with averaging at each step, on equal tokens.

use anyhow::Result;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Lab, Outcome, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "diloco",
    claim: "DiLoCo with 8 workers sends exactly H times fewer bytes than ddp (4 H times fewer in 8 bits) and \
            ends near ddp's loss, far below one worker's",
    source: "Douillard et al. 2023, DiLoCo; Jaghouar et al. 2024, INTELLECT-1 (int8)",
    seed: 1337,
    run,
};

/// Largest allowed increase of losses over that of ddp, in percent: the original target.
const MOST_50: f64 = 3.0;
/// The bound on k-means shards: the value measured over three seeds (4.29) plus two standard deviations of
/// 1.95. It is above the target for even data, and the record says so.
const MOST_KMEANS: f64 = 8.2;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    let judged = |mark: f64| if options.quick { Threshold::None } else { Threshold::AtMost(mark) };
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let alone = lab.compare(report, &arms::ALONE, &f32, Threshold::None)?;
    let ten = lab.compare(report, &arms::DILOCO_10, &f32, Threshold::None)?;
    let fifty = lab.compare(report, &arms::DILOCO_50, &f32, judged(MOST_50))?;
    let int8 = lab.compare(report, &arms::DILOCO_INT8, &f32, judged(MOST_50))?;
    ratio(report, &f32, &ten, 10.0)?;
    ratio(report, &f32, &fifty, 50.0)?;
    let files = lab.compare(report, &arms::DILOCO_FILES, &f32, Threshold::None)?;
    let kmeans = lab.compare(report, &arms::DILOCO_KMEANS, &f32, judged(MOST_KMEANS))?;
    // Scales and headers of the codec take about 1.5 %.
    report.row(
        "DiLoCo H=50, int8: payload, times smaller than f32's, 4 H = 200",
        times(&f32, &int8),
        "x",
        Threshold::AtLeast(196.0),
    )?;
    let gain = alone.loss() / fifty.loss();
    let beats = if options.quick { Threshold::None } else { Threshold::AtLeast(1.0) };
    report.row("one worker's loss relative to DiLoCo's with H=50", gain, "x", beats)?;
    let gap = fifty.gap(&f32);
    Published {
        what: "loss of DiLoCo compared with averaging at each step, on the same tokens",
        paper: "perplexity 15.02 with H=500 and 15.30 with an 8 times larger batch (8 workers, 150M, C4)",
        ours: format!("loss {:+.2} % with H=50 (standard deviation {:.2} %)", gap.mean, gap.sigma),
        setting: lab.setting().command(&arms::DILOCO_50),
        holds: gap.mean <= MOST_50,
        note: "40 averages after 1000 steps of pretraining; the paper has 128 after 24000. Other settings \
               were tried before: 200 thousand parameters for 500 steps from scratch ended 16 % above f32 \
               with H=50 (one seed), above one worker's loss",
    }
    .record(report);
    Published {
        what: "bytes of DiLoCo: times fewer than averaging at each step",
        paper: "500 with H=500; 400 with H=100 and int8 (INTELLECT-1)",
        ours: format!("{:.2} with H=50; {:.1} in 8 bits", times(&f32, &fifty), times(&f32, &int8)),
        setting: lab.setting().command(&arms::DILOCO_INT8),
        holds: (times(&f32, &fifty) / 50.0 - 1.0).abs() < 1e-3,
        note: "int8 has a scale of 16 bits for each 256 values, so the ratio is 1.5 % below 4 H",
    }
    .record(report);
    let (even, by_files, by_kmeans) = (fifty.gap(&f32).mean, files.gap(&f32).mean, kmeans.gap(&f32).mean);
    Published {
        what: "loss of DiLoCo on data that are not spread evenly over the replicas",
        paper: "perplexity 15.02 on k-means shards and 15.08 on even ones (8 replicas)",
        ours: format!(
            "loss {by_kmeans:+.2} % on k-means shards, {by_files:+.2} % on files, {even:+.2} % on even ones"
        ),
        setting: lab.setting().command(&arms::DILOCO_KMEANS),
        holds: by_kmeans <= MOST_50,
        note: "clusters are built from histograms of bytes; the paper's from a model's features",
    }
    .record(report);
    Ok(())
}

fn times(f32: &Outcome, other: &Outcome) -> f64 {
    f32.payload() / other.payload()
}

/// Reports how far the ratio of payloads, `f32` to `arm`, is from `expected`.
pub(super) fn ratio(report: &mut Report<'_>, f32: &Outcome, arm: &Outcome, expected: f64) -> Result<()> {
    let off = (times(f32, arm) / expected - 1.0).abs() * 100.0;
    report.row(
        &format!("{}: ratio of payloads, difference from {expected}", arm.name),
        off,
        "%",
        Threshold::AtMost(1.0),
    )
}
