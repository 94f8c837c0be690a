//! Runs that are resumed after they have finished: nothing changes, and a note says so.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::Output;

use crate::tiny::{Run, farflung};
use serde_json::Value;

/// Runs `farflung BEFORE train ... ARGS` in the folder `run`.
fn train(run: &Run, before: &[&str], steps: u64, args: &str) -> Output {
    let args = format!("--steps {steps} --out {} {args}", run.at("run").display());
    farflung().args(before).args(run.args(&args)).output().unwrap()
}

fn done(run: &Run, before: &[&str], steps: u64, args: &str) -> Output {
    let output = train(run, before, steps, args);
    assert!(output.status.success(), "{args}: {}", stderr(&output));
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the contents of the files that a run writes about itself.
fn told(run: &Run) -> Vec<Vec<u8>> {
    let names = ["report.json", "metrics.jsonl", "loss.svg", "config.toml", "latest"];
    names.iter().map(|name| std::fs::read(run.at("run").join(name)).unwrap()).collect()
}

fn report(run: &Run) -> Value {
    serde_json::from_slice(&told(run)[0]).unwrap()
}

#[test]
fn a_finished_run_is_left_alone_and_its_report_is_printed() {
    let run = Run::new();
    let first = done(&run, &[], 3, "");
    let before = told(&run);
    // Other settings do not change the outcome.
    let again = done(&run, &[], 3, "--resume auto --sample-tokens 5 --link lan");
    assert_eq!(told(&run), before);
    assert!(
        stderr(&again).contains("run has already finished at step 3: there is nothing to do"),
        "{}",
        stderr(&again)
    );
    assert!(!stderr(&again).contains("resumed"), "{}", stderr(&again));
    let (first, again) = (stdout(&first), stdout(&again));
    for line in ["gpt-2x8: ", "validation loss ", "sent per worker ", "memory ", "plain all-reduce "] {
        let found = |text: &str| text.lines().find(|l| l.starts_with(line)).map(str::to_owned).unwrap();
        assert_eq!(found(&again), found(&first));
    }
    let json = done(&run, &[], 3, "--resume auto --json true");
    assert_eq!(serde_json::from_slice::<Value>(&json.stdout).unwrap(), report(&run));
    assert!(report(&run)["train_loss"].is_number() && report(&run)["val_loss_before"].is_number());
    assert_eq!(told(&run), before);
}

#[test]
fn all_ranks_of_a_finished_job_leave_it_alone() {
    for args in ["", "--stages 2 --microbatches 2 --sync ddp"] {
        let (run, launch) = (Run::new(), ["launch", "-n", "2", "--"]);
        done(&run, &launch, 2, args);
        let before = told(&run);
        let again = done(&run, &launch, 2, &format!("{args} --resume auto"));
        assert_eq!(told(&run), before);
        assert_eq!(stderr(&again).matches("finished at step 2: there is nothing to do").count(), 1);
        assert!(stdout(&again).contains("validation loss"), "{}", stdout(&again));
    }
}

#[test]
fn fewer_steps_than_are_done_are_refused_and_nothing_changes() {
    let run = Run::new();
    done(&run, &[], 4, "");
    let before = told(&run);
    let fewer = train(&run, &[], 3, "--resume auto");
    assert_eq!(fewer.status.code(), Some(2), "{}", stderr(&fewer));
    let message = "`steps` is 3, expected at least 4: the checkpoint to resume from is of step 4";
    assert!(stderr(&fewer).contains(message), "{}", stderr(&fewer));
    assert_eq!(told(&run), before);
    // If a resume is rejected for another reason, the run's settings also stay unchanged.
    let other = train(&run, &[], 5, "--resume auto --seed 3");
    assert_eq!(other.status.code(), Some(2), "{}", stderr(&other));
    assert_eq!(told(&run), before);
}

#[test]
fn what_was_cut_off_before_its_report_gets_one_with_its_losses() {
    for damage in [None, Some("{\"model\": ")] {
        let run = Run::new();
        done(&run, &[], 20, "");
        let (before, whole) = (told(&run), report(&run));
        let path = run.at("run/report.json");
        damage.map_or_else(|| std::fs::remove_file(&path), |text| std::fs::write(&path, text)).unwrap();
        let again = done(&run, &[], 20, "--resume auto");
        assert!(stdout(&again).contains("validation loss"), "{}", stdout(&again));
        let found = report(&run);
        for field in ["val_loss", "train_loss", "hash", "tokens"] {
            assert!(found[field] == whole[field] && !found[field].is_null(), "{field}: {found} {whole}");
        }
        assert_eq!(told(&run)[1..2], before[1..2]);
    }
}

#[test]
fn a_report_of_fewer_steps_is_not_taken_for_that_of_the_run() {
    let run = Run::new();
    done(&run, &[], 2, "");
    let old = std::fs::read(run.at("run/report.json")).unwrap();
    done(&run, &[], 4, "--resume auto");
    // This restores the old report, as if the second part had been interrupted before its report.
    std::fs::write(run.at("run/report.json"), old).unwrap();
    let again = done(&run, &[], 4, "--resume auto");
    assert!(!stderr(&again).contains("there is nothing to do"), "{}", stderr(&again));
    assert!(report(&run)["steps"] == 4 && report(&run)["val_loss"].is_number(), "{}", report(&run));
}
