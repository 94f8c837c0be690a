//! `--tokens FILE`: training and evaluation on rows of ids, of which only the targets count.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../../../zoo/tests/it/families/folders.rs"]
mod folders;

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::tiny::{Run, farflung, losses_and_last, near, stderr as said};
use folders::FAMILIES;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../zoo/tests/fixtures/families").join(name)
}

fn read(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The settings with which `transformers` made the trajectories.
const REFERENCE: &str =
    "--warmup 0 --lr-schedule constant --clip 0 --lr 0.01 --weight-decay 0.1 --codec none";

/// Trains on rows from a model's fixture. Returns the training losses, and the loss after the last step.
fn losses(run: &Run, model: &str, rows: &str, more: &str) -> Vec<f64> {
    let out = run.at("out");
    let _ = fs::remove_dir_all(&out);
    let mut command = farflung();
    command.arg("train").arg("--init-from").arg(fixture(model)).arg("--tokens").arg(run.at(rows));
    command.arg("--out").arg(&out).args(["--threads", "1", "--sample-tokens", "0"]);
    let done = command.args(format!("{REFERENCE} {more}").split_whitespace()).output().unwrap();
    assert!(done.status.success(), "{more}: {}", said(&done));
    losses_and_last(&out)
}

#[test]
fn trajectories_are_those_of_transformers_however_the_rows_are_divided() {
    let run = Run::new();
    for model in FAMILIES {
        let expected = read(fixture(model).join("expected.json"));
        fs::write(run.at("rows.json"), expected.to_string()).unwrap();
        let want: Vec<f64> = serde_json::from_value(expected["losses"].clone()).unwrap();
        // `transformers` balances Mixtral over all rows together, so they are one microbatch, and `train_loss`
        // is with the losses of routers. The rows of the other model with experts are shorter than its table of
        // positions: what fills them counts in the losses of its routers.
        match model {
            "mixtral" => {
                for more in ["--workers 1", "--workers 2 --stages 2 --microbatches 1 --batch 2"] {
                    let got = losses(&run, model, "rows.json", &format!("--steps 6 {more}"));
                    near(&got[..6], &want, 1e-4, &format!("{model} {more}"));
                }
                continue;
            }
            "switch-gpt2" => continue,
            _ => {}
        }
        for more in [
            "--workers 1",
            "--workers 2",
            "--workers 3",
            "--workers 1 --accumulate 2",
            "--workers 2 --stages 2 --schedule zb-h1",
            "--workers 4 --stages 2 --microbatches 1",
            "--workers 2 --stages 2 --schedule terapipe --slice-grain 4",
        ] {
            let what = format!("{model} {more}");
            near(&losses(&run, model, "rows.json", &format!("--steps 5 {more}")), &want, 1e-4, &what);
        }
    }
}

/// Microbatches with 2, 14, 9 and no targets, on two ranks with two each: the mean is over all targets, and not
/// a mean of means.
#[test]
fn the_mean_is_over_all_targets_of_all_microbatches() {
    let expected = read(fixture("accumulation").join("expected.json"));
    let column = |name: &str| -> Vec<Value> {
        expected["microbatches"].as_array().unwrap().iter().map(|m| m[name].clone()).collect()
    };
    let run = Run::new();
    let rows = json!({ "input_ids": column("input_ids"), "labels": column("labels") });
    fs::write(run.at("rows.json"), rows.to_string()).unwrap();
    let want: Vec<f64> = serde_json::from_value(expected["losses"].clone()).unwrap();
    for more in [
        "--workers 2 --accumulate 2 --batch 1",
        "--workers 1",
        "--workers 4",
        "--workers 2 --stages 2 --microbatches 4 --batch 1",
        "--workers 2 --stages 2 --schedule gpipe --microbatches 2",
        // More sequences than rows: the others have no targets.
        "--workers 3 --batch 2",
    ] {
        near(&losses(&run, "llama-gqa-tied", "rows.json", &format!("--steps 5 {more}")), &want, 1e-4, more);
    }
    // With plain steps of gradients, replicas that average their parameters after each step, weighted by the
    // targets, do the same as those that average gradients.
    let plain =
        "--steps 3 --workers 2 --accumulate 2 --batch 1 --optimizer sgd --momentum 0 --weight-decay 0";
    let gradients = losses(&run, "llama-gqa-tied", "rows.json", plain);
    let local = format!("{plain} --sync diloco --sync-every 1 --outer-lr 1 --outer-momentum 0");
    near(&losses(&run, "llama-gqa-tied", "rows.json", &local), &gradients, 1e-5, &local);
}

#[test]
fn an_evaluation_has_a_number_for_each_target() {
    let run = Run::new();
    for model in ["llama-mha", "llama-gqa-tied", "gptj", "neox-parallel", "qwen2", "qwen3", "mistral-window"]
    {
        let path = fixture(model).join("expected.json");
        let expected = read(path.clone());
        for batch in ["1", "2", "12"] {
            let mut eval = farflung();
            eval.arg("eval")
                .arg(fixture(model))
                .arg("--tokens")
                .arg(&path)
                .args(["--json", "--batch", batch]);
            let done = eval.output().unwrap();
            assert!(done.status.success(), "{}", said(&done));
            let got: Value = serde_json::from_slice(&done.stdout).unwrap();
            let (loss, want) = (got["loss"].as_f64().unwrap(), expected["loss"].as_f64().unwrap());
            assert!((loss - want).abs() < 1e-5, "{model}: {loss} {want}");
            assert_eq!(got["targets"], expected["targets_after_shift"]);
            let logprobs: Vec<Vec<f64>> = serde_json::from_value(got["logprobs"].clone()).unwrap();
            let labels: Vec<Vec<i64>> = serde_json::from_value(expected["labels"].clone()).unwrap();
            let counts = |row: &Vec<i64>| row[1..].iter().filter(|label| **label >= 0).count();
            assert_eq!(
                logprobs.iter().map(Vec::len).collect::<Vec<_>>(),
                labels.iter().map(counts).collect::<Vec<_>>()
            );
            let (sum, count) = (logprobs.iter().flatten().sum::<f64>(), logprobs.iter().flatten().count());
            assert!((sum / count as f64 + loss).abs() < 1e-9);
        }
    }
    // Without labels, every token after the first is a target.
    fs::write(run.at("plain.json"), r#"{"input_ids": [[1, 2, 3], [4, 5, 6]]}"#).unwrap();
    let mut eval = farflung();
    eval.arg("eval").arg(fixture("llama-mha")).arg("--tokens").arg(run.at("plain.json")).arg("--json");
    let got: Value = serde_json::from_slice(&eval.output().unwrap().stdout).unwrap();
    assert_eq!(got["targets"], 4);
}

#[test]
fn what_does_not_fit_is_said_and_ends_with_code_2() {
    let run = Run::new();
    fs::write(run.at("rows.json"), r#"{"input_ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]}"#).unwrap();
    fs::write(run.at("large.json"), r#"{"input_ids": [[1, 96]]}"#).unwrap();
    fs::write(run.at("uneven.json"), r#"{"input_ids": [[1, 2], [3]]}"#).unwrap();
    for (command, rows, more, expected) in [
        ("train", "none.json", "", "none.json"),
        ("train", "large.json", "", "token 96"),
        ("train", "uneven.json", "", "row 1 of `input_ids` has 1 tokens, expected 2"),
        (
            "train",
            "rows.json",
            "--workers 1 --batch 2",
            "`batch` is 2, expected at least 3: a step must have all 3 rows",
        ),
        ("train", "rows.json", "--data text.txt", "`data`"),
        ("train", "rows.json", "--context 2", "expected at most 2, the model's context"),
        ("host", "rows.json", "", "`tokens`"),
        ("eval", "large.json", "", "token 96"),
        ("eval", "none.json", "", "none.json"),
        ("eval", "rows.json", "--data text.txt", "cannot be used with"),
    ] {
        let mut done = farflung();
        done.arg(command).current_dir(run.at(""));
        if command == "eval" {
            done.arg(fixture("llama-mha"))
        } else {
            done.arg("--init-from").arg(fixture("llama-mha"))
        };
        done.args(["--tokens", rows, "--threads", "1"]).args(more.split_whitespace());
        if command != "eval" {
            done.args(["--steps", "1", "--out", "out"]);
        }
        let done = done.output().unwrap();
        assert_eq!(done.status.code(), Some(2), "{command} {rows} {more}: {}", said(&done));
        assert!(said(&done).contains(expected), "{command} {rows} {more}: {}", said(&done));
    }
}
