//! Runs that continue from the path of a run's folder: from its newest good checkpoint, in a new folder.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use crate::tiny::{Run, farflung};

/// Runs `farflung launch -n RANKS -- train ...`.
fn train(run: &Run, ranks: usize, args: &str) -> Output {
    let ranks = ranks.to_string();
    let mut command = farflung();
    command.current_dir(run.at("")).args(["launch", "-n", &ranks, "--"]);
    command.args(run.args(&format!("{args} --deadline 20s"))).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn done(run: &Run, ranks: usize, args: &str) -> String {
    let output = train(run, ranks, args);
    assert!(output.status.success(), "{args}: {}", stderr(&output));
    stderr(&output)
}

fn checkpoint(run: &Run, folder: &str, rank: usize, step: u64) -> PathBuf {
    let rank = if rank == 0 { String::new() } else { format!("ranks/rank-{rank:05}/") };
    run.at(&format!("{folder}/{rank}step-{step:08}"))
}

fn weights(run: &Run, folder: &str, rank: usize, step: u64) -> Vec<u8> {
    fs::read(checkpoint(run, folder, rank, step).join("model.safetensors")).unwrap()
}

/// Damages a checkpoint of a rank.
fn damage(run: &Run, folder: &str, rank: usize, step: u64) {
    let file = checkpoint(run, folder, rank, step).join("optimizer.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[end - 1] ^= 1;
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_runs_folder_is_its_newest_good_checkpoint() {
    for (ranks, args) in [
        (2, "--codec none --lr-schedule constant"),
        (2, "--stages 2 --microbatches 2 --lr-schedule constant"),
    ] {
        let run = Run::new();
        done(&run, ranks, &format!("--steps 8 --out whole {args}"));
        done(&run, ranks, &format!("--steps 4 --checkpoint-every 2 --out run {args}"));
        let said = done(&run, ranks, &format!("--steps 8 --out next --resume run {args}"));
        assert!(said.contains("resumed at step 4"), "{args}: {said}");
        for rank in 0..ranks {
            assert!(weights(&run, "next", rank, 8) == weights(&run, "whole", rank, 8), "{args}: rank {rank}");
        }
        // Without rank 1's newest checkpoint, both go back to the one before, which both have.
        damage(&run, "run", 1, 4);
        let said = done(&run, ranks, &format!("--steps 8 --out after --resume run {args}"));
        assert!(said.contains("resumed at step 2"), "{args}: {said}");
        for rank in 0..ranks {
            assert!(
                weights(&run, "after", rank, 8) == weights(&run, "whole", rank, 8),
                "{args}: rank {rank}"
            );
        }
    }
}

#[test]
fn another_number_of_ranks_continues_from_a_runs_folder() {
    let run = Run::new();
    let args = "--stages 2 --microbatches 2";
    done(&run, 2, &format!("--steps 4 --out run {args}"));
    // One rank, which takes the same sequences, reads both parts.
    let said = done(&run, 1, "--steps 6 --out alone --resume run --workers 1 --microbatches 2");
    assert!(said.contains("resumed at step 4"), "{said}");
    let said = done(&run, 2, &format!("--steps 8 --out parts --resume alone {args}"));
    assert!(said.contains("resumed at step 6"), "{said}");
}

#[test]
fn what_is_no_checkpoint_is_refused_on_all_ranks_with_what_to_do() {
    let run = Run::new();
    done(&run, 2, "--steps 2 --out run");
    for name in ["config.json", "model.safetensors"] {
        fs::create_dir_all(run.at("weights")).unwrap();
        fs::copy(checkpoint(&run, "run", 0, 2).join(name), run.at("weights").join(name)).unwrap();
    }
    fs::create_dir(run.at("empty")).unwrap();
    fs::create_dir(run.at("begun")).unwrap();
    fs::write(run.at("begun/config.toml"), "").unwrap();
    for (path, words) in [
        ("weights", "has weights, but no state of an optimizer"),
        ("weights", "to start from its weights, at step 0: `--init-from weights`"),
        ("run/step-00000009", "the newest checkpoint there is run/step-00000002"),
        ("run/step-00000002/manifest.json", "give its folder, run/step-00000002"),
        ("nowhere", "`resume` is nowhere, which does not exist; expected auto, no, a checkpoint such as"),
        ("empty", "which has no checkpoint"),
        ("begun", "is the folder of a run that has no checkpoint"),
        ("text.txt", "`resume` is text.txt, which is a file"),
    ] {
        let output = train(&run, 2, &format!("--steps 4 --out next --resume {path}"));
        let said = stderr(&output);
        assert_eq!((output.status.code(), said.matches(words).count()), (Some(2), 2), "{path}: {said}");
    }
    // A run without a good checkpoint has the error of its newest.
    damage(&run, "run", 0, 2);
    let output = train(&run, 2, "--steps 4 --out next --resume run");
    let said = stderr(&output);
    assert!(!output.status.success() && said.contains("optimizer.safetensors is damaged"), "{said}");
}
