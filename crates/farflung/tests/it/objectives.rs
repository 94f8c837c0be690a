//! `--objective`: prefixes that are read in both directions, and what was taken out of a text.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::Value;

use crate::tiny::{Run, farflung, losses_and_last, losses_of, near, stderr as said};

/// A run with a text of which windows differ.
fn text() -> Run {
    let run = Run::new();
    let text: Vec<u8> = (0..6000_u32).map(|i| b'a' + (i * i / 11 % 26) as u8).collect();
    fs::write(run.at("text.txt"), text).unwrap();
    run
}

fn train(run: &Run, out: &str, more: &str) -> Output {
    let data = run.at("text.txt").display().to_string();
    let more = format!("--data {data} --context 24 --steps 4 --codec none {more}");
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

/// The numbers of targets differ between sequences, and means are by targets.
#[test]
fn every_plan_gives_the_losses_of_one_worker() {
    let run = text();
    for objective in ["prefix-lm", "ul2"] {
        let want = losses(&run, &format!("--workers 1 --batch 4 --objective {objective}"));
        for more in [
            "--workers 2 --batch 2",
            "--workers 4 --batch 1",
            "--workers 1 --batch 1 --accumulate 4",
            "--workers 2 --stages 2 --batch 1 --microbatches 4",
            "--workers 4 --stages 2 --batch 1 --microbatches 2",
            "--workers 2 --stages 2 --batch 1 --microbatches 4 --schedule zb-h1",
            "--workers 2 --stages 2 --batch 1 --microbatches 4 --schedule chimera",
            "--workers 2 --stages 2 --batch 2 --microbatches 2 --recompute full",
            "--workers 3 --stages 2 --pools 1,2 --batch 1 --microbatches 4",
            "--workers 2 --context-parallel 2 --batch 4",
            "--workers 4 --context-parallel 4 --context-order striped --batch 4 --zero 1",
            "--workers 8 --context-parallel 4 --ulysses 2 --batch 2",
            "--workers 4 --stages 2 --context-parallel 2 --batch 1 --microbatches 4",
            "--workers 1 --batch 4 --recompute 1",
        ] {
            let more = format!("{more} --objective {objective}");
            near(&losses(&run, &more), &want, 1e-6, &more);
        }
    }
}

/// With plain steps of gradients, replicas that meet after each step and weigh their changes by targets do the
/// same as those that average gradients.
#[test]
fn replicas_that_meet_are_weighted_by_their_targets() {
    let run = text();
    let plain = "--workers 3 --batch 1 --optimizer sgd --momentum 0 --weight-decay 0 --clip 0 --lr 0.5 \
                 --objective ul2";
    let want = losses(&run, plain);
    for local in [
        "--sync diloco --sync-every 1 --outer-lr 1 --outer-momentum 0",
        "--sync streaming --sync-every 1 --fragments 1 --sync-delay 0 --outer-lr 1 --outer-momentum 0",
    ] {
        near(&losses(&run, &format!("{plain} {local}")), &want, 1e-5, local);
    }
    // What is one step late in CocktailSGD is not late any more where the run ends.
    let done = train(&run, "late", &format!("{plain} --sync cocktail --lr 0.001"));
    assert!(done.status.success(), "{}", said(&done));
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../zoo/tests/fixtures/families").join(name)
}

/// The trajectory of `transformers` on rows with prompts that are read in both directions.
#[test]
fn rows_with_prefixes_train_as_in_transformers() {
    let run = Run::new();
    let rows = fixture("prefix").join("expected.json");
    let expected: Value = serde_json::from_slice(&fs::read(&rows).unwrap()).unwrap();
    let want: Vec<f64> = serde_json::from_value(expected["losses"].clone()).unwrap();
    let losses = |more: &str| -> Vec<f64> {
        let _ = fs::remove_dir_all(run.at("out"));
        let mut command = farflung();
        command.arg("train").arg("--init-from").arg(fixture("gptj")).arg("--tokens").arg(&rows);
        let same = "--threads 1 --sample-tokens 0 --warmup 0 --lr-schedule constant --clip 0 --lr 0.01 \
                    --weight-decay 0.1 --codec none";
        command.args(same.split_whitespace()).args(more.split_whitespace());
        let done = command.arg("--out").arg(run.at("out")).output().unwrap();
        assert!(done.status.success(), "{more}: {}", said(&done));
        losses_and_last(&run.at("out"))
    };
    for more in ["--workers 1", "--workers 2", "--workers 2 --stages 2 --microbatches 2 --batch 1"] {
        near(&losses(&format!("--steps 5 --objective prefix-lm {more}")), &want, 1e-3, more);
    }
    // Without the setting, `prefixes` is ignored.
    assert!((losses("--steps 1 --workers 1")[0] - want[0]).abs() > 1e-3);
    for (objective, close) in [("prefix-lm", true), ("causal", false)] {
        let mut eval = farflung();
        eval.arg("eval").arg(fixture("gptj")).arg("--tokens").arg(&rows);
        let done = eval.args(["--json", "--objective", objective]).output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        let got: Value = serde_json::from_slice(&done.stdout).unwrap();
        assert_eq!(got["targets"], 12);
        assert_eq!((got["loss"].as_f64().unwrap() - want[0]).abs() < 1e-5, close, "{got}");
    }
}

#[test]
fn what_does_not_go_with_an_objective_is_said_and_ends_with_code_2() {
    let run = text();
    for (more, expected) in [
        ("--objective ul3", "expected causal, prefix-lm or ul2"),
        ("--objective ul2 --sync d-psgd", "expected causal with d-psgd"),
        ("--objective ul2 --sync eager", "expected causal with eager"),
        ("--objective ul2 --own-data true", "expected causal with `own-data`"),
        ("--objective prefix-lm --document-mask true", "expected false with the objective prefix-lm"),
        ("--objective ul2 --stages 2 --schedule terapipe --microbatches 2", "expected causal with terapipe"),
        ("--objective ul2 --context 7", "at least 8 with the objective ul2"),
        ("--objective ul2 --vocab 300", "a vocabulary of at least 359"),
        ("--objective prefix-lm --sync diloco --paths 1,2", "expected causal with `paths`"),
    ] {
        let done = train(&run, "refused", &format!("--workers 2 {more}"));
        assert_eq!(done.status.code(), Some(2), "{more}: {}", said(&done));
        assert!(said(&done).contains(expected), "{more}: {}", said(&done));
    }
    let rows = fixture("prefix").join("expected.json").display().to_string();
    let no_prefixes = fixture("packing").join("expected.json").display().to_string();
    for (rows, more, expected) in [
        (&rows, "--objective ul2", "expected causal or prefix-lm with `tokens`"),
        (&rows, "--objective prefix-lm --document-mask true", "expected false with the objective prefix-lm"),
        (&no_prefixes, "--objective prefix-lm", "it has no `prefixes`"),
    ] {
        let mut command = farflung();
        command.arg("train").arg("--init-from").arg(fixture("gptj")).args(["--tokens", rows]);
        command.args(more.split_whitespace()).args(["--steps", "1", "--out"]).arg(run.at("rows"));
        let done = command.output().unwrap();
        assert_eq!(done.status.code(), Some(2), "{more}: {}", said(&done));
        assert!(said(&done).contains(expected), "{more}: {}", said(&done));
    }
    // A run continues as it was begun.
    assert!(train(&run, "begun", "--objective prefix-lm").status.success());
    let begun = run.at("begun").display().to_string();
    let done = train(&run, "other", &format!("--resume {begun} --objective causal"));
    assert_eq!(done.status.code(), Some(2), "{}", said(&done));
    assert!(said(&done).contains("`objective` is causal, expected prefix-lm"), "{}", said(&done));
    let mut host = farflung();
    host.arg("host").args(run.flags("--objective ul2 --sync diloco --steps 1"));
    let done = host.arg("--out").arg(run.at("host")).output().unwrap();
    assert_eq!(done.status.code(), Some(2), "{}", said(&done));
    assert!(said(&done).contains("`sync` is diloco, expected ddp with `objective`"), "{}", said(&done));
}

/// Prompts are read, and text is measured, as in the model's run.
#[test]
fn a_model_reads_as_its_run_did_unless_told() {
    let run = text();
    let done = train(&run, "ul2", "--objective ul2 --workers 1 --batch 4 --lr 0.01 --sample-tokens 12");
    assert!(done.status.success(), "{}", said(&done));
    let read = |command: &str, more: &str| {
        let mut program = farflung();
        program.arg(command).arg(run.at("ul2")).args(more.split_whitespace());
        if command == "eval" {
            program.arg("--data").arg(run.at("text.txt"));
        }
        let done = program.output().unwrap();
        assert!(done.status.success(), "{more}: {}", said(&done));
        String::from_utf8_lossy(&done.stdout).into_owned()
    };
    let own = read("eval", "");
    assert!(own.contains("objective ul2"), "{own}");
    assert_eq!(own, read("eval", "--objective ul2"));
    assert_ne!(own, read("eval", "--objective causal"));
    let prompt = "--prompt abcdefgh --tokens 40 --temperature 1";
    let own = read("generate", prompt);
    assert_eq!(own, read("generate", &format!("{prompt} --objective ul2")));
    assert_eq!(own, read("generate", &format!("{prompt} --stages 2")));
    assert_ne!(own, read("generate", &format!("{prompt} --objective causal")));
    // A model whose vocabulary has no room for the objective's own ids.
    assert!(train(&run, "causal", "").status.success());
    for more in ["", "--stages 2"] {
        let mut command = farflung();
        command
            .arg("generate")
            .arg(run.at("causal"))
            .args(["--objective", "ul2"])
            .args(more.split_whitespace());
        let done = command.output().unwrap();
        assert_eq!(done.status.code(), Some(2), "{}", said(&done));
        assert!(said(&done).contains("`objective` is ul2"), "{}", said(&done));
    }
}
