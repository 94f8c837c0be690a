//! Checkpoints that an earlier version wrote are read under any plan. The folders in `fixtures/c678fed2` were
//! written by the version of that commit after two steps, on the text and with the settings of `tiny`.

use std::path::PathBuf;

use crate::tiny::{Run, farflung};
use farflung::metrics;

/// The losses of the third and fourth step, as that version went on from its own checkpoints.
const LOSSES: [f64; 2] = [5.514_547_676, 5.506_544_188];

fn checkpoint(run: &str) -> PathBuf {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/c678fed2");
    fixtures.join(run).join("step-00000002")
}

#[test]
fn they_are_continued_under_any_plan() {
    let plans = [
        "--workers 1 --microbatches 4",
        "--workers 2 --microbatches 2",
        "--workers 2 --stages 2 --microbatches 4",
        "--workers 2 --stages 2 --microbatches 4 --schedule zbv",
        "--workers 4 --stages 2 --microbatches 2",
    ];
    for written in ["replicas", "stages"] {
        for (number, plan) in plans.iter().enumerate() {
            let run = Run::new();
            let (from, out) = (checkpoint(written), run.at("run"));
            let args = format!(
                "--steps 4 --lr-schedule constant --eval-every 0 --transport memory \
                 --codec none --resume {} --out {} {plan}",
                from.display(),
                out.display()
            );
            let done = farflung().args(run.args(&args)).output().unwrap();
            assert!(done.status.success(), "{written}, {plan}: {}", String::from_utf8_lossy(&done.stderr));
            let rows = metrics::read(&out.join("metrics.jsonl")).unwrap();
            let losses: Vec<f64> = rows.iter().map(|row| row.train_loss).collect();
            assert_eq!(losses.len(), 2, "{written}, plan {number}");
            for (loss, expected) in losses.iter().zip(LOSSES) {
                assert!((loss - expected).abs() < 1e-6, "{written}, {plan}: {losses:?}");
            }
        }
    }
}
