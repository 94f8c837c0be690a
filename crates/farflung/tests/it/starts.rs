//! Runs that start at the same time without a given folder, and runs that are rejected before they start.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::process::{Child, Output, Stdio};

use crate::tiny::{Run, farflung};

/// Starts `farflung BEFORE train ... ARGS` in this folder.
fn start(run: &Run, before: &[&str], args: &str) -> Child {
    let mut command = farflung();
    command.args(before).args(run.args(&format!("--steps 2 {args}"))).current_dir(run.at(""));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn ended(child: Child) -> Output {
    child.wait_with_output().unwrap()
}

/// Returns the names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[test]
fn runs_that_start_together_take_different_folders() {
    let run = Run::new();
    let children: Vec<_> = (0..6).map(|_| start(&run, &[], "")).collect();
    for output in children.into_iter().map(ended) {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let folders = names(&run.at("runs"));
    assert_eq!(folders, (1..=6).map(|n| format!("gpt-2x8-{n}")).collect::<Vec<_>>());
    assert!(folders.iter().all(|name| run.at("runs").join(name).join("report.json").exists()));
}

#[test]
fn jobs_of_several_processes_that_start_together_do_too() {
    let run = Run::new();
    let children: Vec<_> = (0..3).map(|_| start(&run, &["launch", "-n", "2", "--"], "")).collect();
    for output in children.into_iter().map(ended) {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let folders = names(&run.at("runs"));
    assert_eq!(folders, ["gpt-2x8-1", "gpt-2x8-2", "gpt-2x8-3"]);
    for folder in folders {
        let folder = run.at("runs").join(folder);
        assert_eq!(names(&folder.join("ranks")), ["rank-00001"]);
        for rank in [folder.clone(), folder.join("ranks/rank-00001")] {
            assert!(rank.join("step-00000002").is_dir(), "{}", rank.display());
        }
    }
}

#[test]
fn a_run_that_fails_before_it_wrote_anything_leaves_no_folder() {
    let run = Run::new();
    let output = ended(start(&run, &[], "--device wgpu:99"));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(!run.at("runs").exists());
    let output = ended(start(&run, &[], ""));
    assert!(output.status.success() && run.at("runs/gpt-2x8-1/report.json").exists(), "{output:?}");
}

/// Checks that a run ends with exit code 2 and this message, and leaves no folder.
fn refused(args: &str, expected: &[&str]) {
    let run = Run::new();
    let output = ended(start(&run, &[], args));
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(expected.iter().all(|text| message.contains(text)), "{message}");
    assert!(!run.at("runs").exists());
}

#[test]
fn tcp_in_one_process_says_how_to_start_several() {
    // This error comes before anything else is checked, such as the folder of weights.
    let expected =
        ["error: `transport` is tcp", "2 workers in one process", "`farflung launch -n 2 -- train`"];
    refused("--transport tcp --init-from no-such-folder", &expected);
    // A single worker needs no peers.
    let run = Run::new();
    let output = ended(start(&run, &[], "--transport tcp --workers 1"));
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_link_that_is_slower_than_the_deadline_is_refused_before_the_first_step() {
    let expected = [
        "error: `link` is 1kbit,10s, expected a link that is fast enough for the deadline",
        "`deadline` is 15s",
    ];
    refused("--link 1kbit,10s --deadline 15s", &expected);
    let run = Run::new();
    let output = ended(start(&run, &[], "--link 1kbit,10s --deadline 2min"));
    assert!(output.status.success(), "{output:?}");
}
