//! `--document-mask true`: attention, positions and targets stop at the borders of documents.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::{Value, json};

use crate::tiny::{Run, farflung, losses_and_last, losses_of, near, stderr as said};

/// A run with a folder of documents of very different lengths.
fn documents() -> Run {
    let run = Run::new();
    fs::create_dir(run.at("docs")).unwrap();
    let words = ["fox ", "lazy dogs ", "jugs of ", "seven wizards ", "quartz"];
    for i in 0..120_usize {
        let text: String =
            (0..[1, 2, 4, 9][i % 4]).map(|at| words[(i * 7 + at * at) % words.len()]).collect();
        fs::write(run.at("docs").join(format!("{i:03}.txt")), text).unwrap();
    }
    run
}

fn train(run: &Run, out: &str, more: &str) -> Output {
    let docs = run.at("docs").display().to_string();
    let more = format!("--data {docs} --context 24 --steps 4 --codec none {more}");
    farflung().args(run.args(&more)).arg("--out").arg(run.at(out)).output().unwrap()
}

/// Returns the training losses and the validation losses of a run.
fn losses(run: &Run, more: &str) -> Vec<f64> {
    let _ = fs::remove_dir_all(run.at("out"));
    let done = train(run, "out", more);
    assert!(done.status.success(), "{more}: {}", said(&done));
    let losses = losses_of(&run.at("out"));
    assert_eq!(losses.len(), 8);
    losses
}

/// The numbers of targets differ between microbatches, replicas and steps, and means are by targets.
#[test]
fn every_plan_gives_the_losses_of_one_worker() {
    let run = documents();
    let want = losses(&run, "--workers 1 --batch 4 --document-mask true");
    for more in [
        "--workers 2 --batch 2",
        "--workers 4 --batch 1",
        "--workers 1 --batch 1 --accumulate 4",
        "--workers 2 --batch 1 --accumulate 2",
        "--workers 2 --stages 2 --batch 1 --microbatches 4",
        "--workers 4 --stages 2 --batch 1 --microbatches 2",
        "--workers 2 --stages 2 --batch 1 --microbatches 4 --schedule zb-h1",
        "--workers 2 --stages 2 --batch 1 --microbatches 4 --schedule chimera",
        "--workers 2 --stages 2 --batch 2 --microbatches 2 --schedule terapipe --slice-grain 4",
        "--workers 2 --stages 2 --batch 2 --microbatches 2 --recompute full",
        "--workers 3 --stages 2 --pools 1,2 --batch 1 --microbatches 4",
        "--workers 2 --context-parallel 2 --batch 4",
        "--workers 4 --context-parallel 4 --context-order striped --batch 4 --zero 1",
        "--workers 8 --context-parallel 4 --ulysses 2 --batch 2",
        "--workers 4 --stages 2 --context-parallel 2 --batch 1 --microbatches 4",
        "--workers 1 --batch 4 --recompute 1",
    ] {
        near(&losses(&run, &format!("{more} --document-mask true")), &want, 1e-6, more);
    }
    let joined = losses(&run, "--workers 1 --batch 4");
    let far = joined.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(far > 1e-4, "{joined:?}");
}

/// Processes draw the same windows and borders, and must have the same setting.
#[test]
fn processes_keep_the_same_documents_apart() {
    let run = documents();
    let want = losses(&run, "--workers 1 --batch 4 --document-mask true");
    let docs = run.at("docs").display().to_string();
    let launched = |out: &str, more: &str| {
        let mut command = farflung();
        let args = format!("launch -n 2 -- train --data {docs} --context 24 --steps 4 --codec none {more}");
        command.args(run.flags(&args)).arg("--out").arg(run.at(out)).output().unwrap()
    };
    let done = launched("two", "--document-mask true --stages 2 --batch 1 --microbatches 4");
    assert!(done.status.success(), "{}", said(&done));
    let text = fs::read_to_string(run.at("two").join("metrics.jsonl")).unwrap();
    let got = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let got: Vec<f64> = got.map(|row| row["train_loss"].as_f64().unwrap()).collect();
    near(&got, &want[..4], 1e-6, "two processes");
}

/// With plain steps of gradients, replicas that meet after each step and weigh their changes by targets do the
/// same as those that average gradients.
#[test]
fn replicas_that_meet_are_weighted_by_their_targets() {
    let run = documents();
    let plain = "--workers 3 --batch 1 --optimizer sgd --momentum 0 --weight-decay 0 --clip 0 --lr 0.5 \
                 --document-mask true";
    let want = losses(&run, plain);
    for local in [
        "--sync diloco --sync-every 1 --outer-lr 1 --outer-momentum 0",
        "--sync des-loc --sync-every 1",
        "--sync streaming --sync-every 1 --fragments 1 --sync-delay 0 --outer-lr 1 --outer-momentum 0",
    ] {
        near(&losses(&run, &format!("{plain} {local}")), &want, 1e-5, local);
    }
}

/// Replicas that train on their own documents count the targets of the others.
#[test]
fn replicas_with_documents_of_their_own_are_weighted_by_their_targets() {
    let run = documents();
    let shared = "--workers 2 --context 8 --shards files --document-mask true";
    let two = losses(&run, &format!("{shared} --batch 2"));
    near(&losses(&run, &format!("{shared} --batch 1 --accumulate 2")), &two, 1e-6, "accumulated");
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../zoo/tests/fixtures/families").join(name)
}

/// The trajectory of `transformers` on four documents in one row.
#[test]
fn packed_rows_train_as_in_transformers() {
    let run = Run::new();
    let rows = fixture("packing").join("expected.json");
    let expected: Value = serde_json::from_slice(&fs::read(&rows).unwrap()).unwrap();
    let want: Vec<f64> = serde_json::from_value(expected["losses"].clone()).unwrap();
    let losses = |more: &str| -> Vec<f64> {
        let _ = fs::remove_dir_all(run.at("out"));
        let mut command = farflung();
        command.arg("train").arg("--init-from").arg(fixture("llama-gqa-tied")).arg("--tokens").arg(&rows);
        command.args([
            "--threads",
            "1",
            "--sample-tokens",
            "0",
            "--warmup",
            "0",
            "--lr-schedule",
            "constant",
        ]);
        command.args(["--clip", "0", "--lr", "0.01", "--weight-decay", "0.1", "--codec", "none"]);
        let done = command.arg("--out").arg(run.at("out")).args(more.split_whitespace()).output().unwrap();
        assert!(done.status.success(), "{more}: {}", said(&done));
        losses_and_last(&run.at("out"))
    };
    for more in [
        "--workers 1",
        "--workers 2",
        "--workers 2 --stages 2 --microbatches 2 --batch 1",
        "--workers 2 --stages 2 --schedule terapipe --slice-grain 6 --microbatches 1 --batch 1",
    ] {
        near(&losses(&format!("--steps 5 --document-mask true {more}")), &want, 1e-4, more);
    }
    // Without the setting, `position_ids` is ignored.
    assert!((losses("--steps 1 --workers 1")[0] - want[0]).abs() > 0.1);
    for (mask, close) in [("true", true), ("false", false)] {
        let mut eval = farflung();
        eval.arg("eval").arg(fixture("llama-gqa-tied")).arg("--tokens").arg(&rows);
        let done = eval.args(["--json", "--document-mask", mask]).output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        let got: Value = serde_json::from_slice(&done.stdout).unwrap();
        assert_eq!(got["targets"], 20);
        assert_eq!((got["loss"].as_f64().unwrap() - want[0]).abs() < 1e-5, close, "{got}");
    }
}

#[test]
fn what_does_not_go_with_documents_is_said_and_ends_with_code_2() {
    let run = documents();
    for (name, rows) in [
        ("none.json", json!({ "input_ids": [[1, 2, 3]] })),
        ("jump.json", json!({ "input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 3]] })),
        ("short.json", json!({ "input_ids": [[1, 2, 3]], "position_ids": [[0, 1]] })),
    ] {
        fs::write(run.at(name), rows.to_string()).unwrap();
        let mut command = farflung();
        command.arg("train").arg("--init-from").arg(fixture("llama-mha")).arg("--tokens").arg(run.at(name));
        command.args(["--document-mask", "true", "--steps", "1", "--out"]).arg(run.at("rows"));
        let done = command.output().unwrap();
        assert_eq!(done.status.code(), Some(2), "{name}: {}", said(&done));
        assert!(said(&done).contains("`position_ids`"), "{}", said(&done));
    }
    for (more, expected) in [
        ("--sync d-psgd", "expected false with d-psgd"),
        ("--sync eager", "expected false with eager"),
        ("--own-data true", "expected false with `own-data`"),
    ] {
        let done = train(&run, "refused", &format!("--document-mask true {more}"));
        assert_eq!(done.status.code(), Some(2), "{more}: {}", said(&done));
        assert!(said(&done).contains(expected), "{more}: {}", said(&done));
    }
    // A run continues as it was begun.
    assert!(train(&run, "begun", "--document-mask true").status.success());
    let begun = run.at("begun").display().to_string();
    let done = train(&run, "other", &format!("--resume {begun}"));
    assert_eq!(done.status.code(), Some(2), "{}", said(&done));
    assert!(said(&done).contains("`document-mask` is false, expected true"), "{}", said(&done));
    let mut host = farflung();
    host.arg("host").args(run.flags("--document-mask true --sync diloco --steps 1"));
    let done = host.arg("--out").arg(run.at("host")).output().unwrap();
    assert_eq!(done.status.code(), Some(2), "{}", said(&done));
    assert!(said(&done).contains("`sync` is diloco, expected ddp"), "{}", said(&done));
}

#[test]
fn a_text_without_targets_is_an_error_and_no_loss_of_zero() {
    let run = documents();
    for i in 0..400 {
        fs::write(run.at("docs").join(format!("{i:03}.txt")), "x").unwrap();
    }
    let done = train(&run, "none", "--document-mask true");
    assert!(!done.status.success() && said(&done).contains("has no target"), "{}", said(&done));
    // Only the held-out part has none.
    fs::write(run.at("docs").join("000.txt"), "the quick brown fox jumps over the lazy dog ".repeat(20))
        .unwrap();
    let done = train(&run, "held", "--document-mask true");
    assert!(said(&done).contains("the held-out text has no target"), "{}", said(&done));
    assert!(!said(&done).contains("changes nothing: the text is one document"), "{}", said(&done));
}

#[test]
fn a_model_is_evaluated_as_its_run_was_unless_told() {
    let run = documents();
    assert!(train(&run, "apart", "--document-mask true --workers 1 --batch 4").status.success());
    let evaluated = |more: &[&str]| {
        let (model, docs) = (run.at("apart"), run.at("docs"));
        let done = farflung().arg("eval").arg(model).arg("--data").arg(docs).args(more).output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        String::from_utf8(done.stdout).unwrap()
    };
    let own = evaluated(&[]);
    assert!(own.contains("documents kept apart"), "{own}");
    assert_eq!(own, evaluated(&["--document-mask", "true"]));
    let across = evaluated(&["--document-mask", "false"]);
    assert!(!across.contains("apart") && across != own, "{across}");
}
