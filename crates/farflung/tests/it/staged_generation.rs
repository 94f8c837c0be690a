//! `farflung generate --stages`: several ranks continue a text, each with its own layers.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

use crate::tiny::{Run, farflung};

/// Returns a run of two stages whose sample has 30 tokens.
fn trained() -> Run {
    let run = Run::new();
    let out = run.at("run").display().to_string();
    let args = format!(
        "--out {out} --steps 3 --layers 4 --stages 2 --prompt the --sample-tokens 30 --temperature 0.8 \
         --top-k 40 --top-p 0.9 --seed 7"
    );
    let done = farflung().args(run.args(&args)).output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    run
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const TEXT: &str = "--prompt the --tokens 30 --seed 7";

fn generate(before: &[&str], path: &Path, more: &str) -> Output {
    let mut command = farflung();
    command.args(before).arg("generate").arg(path).args(TEXT.split(' ')).args(more.split_whitespace());
    command.output().unwrap()
}

/// Starts one process for each path, which must be the rank of this number.
fn each(paths: &[PathBuf]) -> Vec<Output> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let size = paths.len().to_string();
    let start = |(rank, path): (usize, &PathBuf)| -> Child {
        let mut command = farflung();
        command.arg("generate").arg(path).args(TEXT.split(' ')).args([
            "--stages",
            &size,
            "--deadline",
            "20s",
        ]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", &size).env("LOCAL_RANK", rank.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let started: Vec<_> = paths.iter().enumerate().map(start).collect();
    started.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

#[test]
fn any_number_of_stages_gives_the_text_of_one_process() {
    let run = trained();
    let path = run.at("run");
    let alone = generate(&[], &path, "");
    assert!(alone.status.success() && alone.stdout.len() > 20, "{}", said(&alone));
    // More stages than layers leave some without any.
    for stages in [2, 3, 6] {
        let staged = generate(&[], &path, &format!("--stages {stages}"));
        assert!(staged.status.success(), "{}", said(&staged));
        assert_eq!(staged.stdout, alone.stdout, "{stages} stages");
        assert!(said(&staged).contains(&format!("30 tokens over {stages} stages")), "{}", said(&staged));
    }
    let launched = generate(&["launch", "-n", "2", "--"], &path, "--stages 2");
    assert!(launched.status.success(), "{}", said(&launched));
    assert!(String::from_utf8_lossy(&launched.stdout).contains(&*String::from_utf8_lossy(&alone.stdout)));
}

#[test]
fn the_sample_of_a_pipeline_is_the_text_that_its_model_generates() {
    let run = trained();
    let report = fs::read(run.at("run/report.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let json = generate(&[], &run.at("run"), "--json --top-k 40 --top-p 0.9 --stages 4");
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(report["sample"]["text"], json["text"], "{report}");
}

#[test]
fn machines_need_only_the_part_that_they_trained() {
    let run = trained();
    let whole = generate(&[], &run.at("run"), "");
    let there = run.at("there");
    fs::create_dir_all(there.join("ranks")).unwrap();
    fs::rename(run.at("run/ranks/rank-00001"), there.join("ranks/rank-00001")).unwrap();
    let outputs = each(&[run.at("run"), there.clone()]);
    assert!(outputs.iter().all(|output| output.status.success()), "{}", said(&outputs[1]));
    assert_eq!((&outputs[0].stdout, outputs[1].stdout.is_empty()), (&whole.stdout, true));
    // The second of three stages has a layer that this rank has not trained. All ranks say so.
    let outputs = each(&[run.at("run"), there, run.at("run")]);
    for output in &outputs {
        assert!(!output.status.success() && said(output).contains("h.1."), "{}", said(output));
    }
}

#[test]
fn models_and_numbers_that_do_not_fit_are_refused_on_all_ranks() {
    let (run, other) = (trained(), Run::new());
    let args = format!("--out {} --steps 1 --layers 3 --workers 1", other.at("run").display());
    assert!(farflung().args(other.args(&args)).output().unwrap().status.success());
    for output in each(&[run.at("run"), other.at("run")]) {
        assert!(!output.status.success() && said(&output).contains("config.json"), "{}", said(&output));
    }
    let path = run.at("run");
    let refused = generate(&["launch", "-n", "2", "--"], &path, "--stages 3");
    assert!(said(&refused).contains("`stages` is 3, expected 2"), "{}", said(&refused));
    for (flags, reason) in [("--stages 0", "--stages"), ("--stages 2 --temperature -1", "temperature")] {
        let refused = generate(&[], &path, flags);
        assert_eq!(refused.status.code(), Some(2), "{flags}");
        assert!(said(&refused).contains(reason), "{}", said(&refused));
    }
}
