//! Runs that continue from checkpoints: with other settings, in another rank's folder, or without a folder.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::PathBuf;
use std::process::Output;

use crate::tiny::{Run, farflung};

/// Runs `farflung launch -n RANKS -- train ...` in the folder `run`.
fn train(run: &Run, ranks: usize, args: &str) -> Output {
    let args = format!("--out {} --deadline 20s {args}", run.at("run").display());
    let ranks = ranks.to_string();
    farflung().args(["launch", "-n", &ranks, "--"]).args(run.args(&args)).output().unwrap()
}

fn done(run: &Run, ranks: usize, args: &str) -> String {
    let output = train(run, ranks, args);
    assert!(output.status.success(), "{args}: {}", stderr(&output));
    stderr(&output)
}

/// Checks that each rank ends with exit code 2 and this message.
fn refused(run: &Run, ranks: usize, args: &str, said: &str) {
    let output = train(run, ranks, args);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{args}: {text}");
    assert_eq!(text.matches(said).count(), ranks, "{args}: {text}");
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn folder(run: &Run, rank: usize) -> PathBuf {
    if rank == 0 { run.at("run") } else { run.at(&format!("run/ranks/rank-{rank:05}")) }
}

/// Returns a rank's weights at a step.
fn weights(run: &Run, rank: usize, step: u64) -> Vec<u8> {
    std::fs::read(folder(run, rank).join(format!("step-{step:08}/model.safetensors"))).unwrap()
}

/// Removes everything that a rank wrote.
fn lose(run: &Run, rank: usize) {
    for entry in std::fs::read_dir(folder(run, rank)).unwrap() {
        let path = entry.unwrap().path();
        match path.file_name().unwrap().to_str().unwrap() {
            "ranks" => {}
            _ if path.is_dir() => std::fs::remove_dir_all(path).unwrap(),
            _ => std::fs::remove_file(path).unwrap(),
        }
    }
}

#[test]
fn what_changes_the_model_is_refused_and_what_changes_the_training_is_told() {
    let run = Run::new();
    done(&run, 2, "--steps 2");
    let resume = "--steps 4 --resume auto";
    let expected = "`heads` is 1, expected 2, as when the checkpoint was written";
    refused(&run, 2, &format!("{resume} --heads 1"), expected);
    refused(&run, 2, &format!("{resume} --dim 16"), "`dim` is 16, expected 8, as when");
    let said = done(&run, 2, &format!("{resume} --beta2 0.5 --eval-batches 2 --threads 2"));
    let warning = "warning: the training continues with settings that differ from the checkpoint's: `steps` \
                   is 4, was 2; `beta2` is 0.5, was 0.95";
    assert!(said.contains(warning), "{said}");
    assert!(
        said.contains("settings that differ from the checkpoint's: `eval-batches` is 2, was 1"),
        "{said}"
    );
    assert!(!said.contains("`threads`") && !said.contains("`lr`"), "{said}");
    // The current settings are those of the next checkpoint.
    let said = done(&run, 2, "--steps 5 --resume auto --beta2 0.5 --eval-batches 2");
    assert!(said.contains("`steps` is 5, was 4") && !said.contains("`beta2`"), "{said}");
}

#[test]
fn a_step_behind_the_checkpoint_is_refused_with_the_checkpoint() {
    let run = Run::new();
    done(&run, 2, "--steps 4");
    let output = train(&run, 2, "--steps 3 --resume auto");
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    // Each rank finds the checkpoint in its own folder and names it, unless the other rank was faster with its
    // error.
    let said = (0..2).filter(|&rank| {
        let path = folder(&run, rank).join("step-00000004");
        assert!(path.is_dir());
        text.contains(&format!("at least 4: the checkpoint to resume from is of step 4, {}", path.display()))
    });
    assert!(said.count() > 0, "{text}");
}

#[test]
fn folders_of_two_ranks_that_are_swapped_are_refused() {
    for (ranks, args) in [(3, ""), (3, "--layers 3 --stages 3 --microbatches 3")] {
        let run = Run::new();
        done(&run, ranks, &format!("--steps 2 {args}"));
        let (one, two, aside) = (folder(&run, 1), folder(&run, 2), run.at("aside"));
        let swap = || {
            std::fs::rename(&one, &aside).unwrap();
            std::fs::rename(&two, &one).unwrap();
            std::fs::rename(&aside, &two).unwrap();
        };
        swap();
        for rank in [1, 2] {
            let other = 3 - rank;
            let said = format!("is a checkpoint of rank {other}, expected one of rank {rank}");
            let output = train(&run, ranks, &format!("--steps 4 --resume auto {args}"));
            assert_eq!(output.status.code(), Some(2), "{args}: {}", stderr(&output));
            assert!(stderr(&output).contains(&said), "{args}: {}", stderr(&output));
        }
        let path = folder(&run, 0).join("step-00000002");
        let by_path = format!("--steps 4 --resume {} {args}", path.display());
        let output = train(&run, ranks, &by_path);
        assert_eq!(output.status.code(), Some(2), "{args}: {}", stderr(&output));
        swap();
        done(&run, ranks, &format!("--steps 4 --resume auto {args}"));
    }
}

#[test]
fn a_rank_whose_folder_is_lost_takes_its_state_from_another() {
    for (ranks, lost, args) in [
        (3, &[1][..], "--codec none"),
        (3, &[0], "--codec none"),
        (3, &[0, 2], "--codec none"),
        (4, &[1], "--codec none --stages 2 --microbatches 2"),
        (4, &[0, 3], "--codec none --stages 2 --microbatches 2"),
        (2, &[1], "--codec none --sync diloco --sync-every 2"),
    ] {
        let (whole, run) = (Run::new(), Run::new());
        let saves = "--checkpoint-every 2 --lr-schedule constant";
        done(&whole, ranks, &format!("--steps 4 {saves} {args}"));
        done(&whole, ranks, &format!("--steps 6 {saves} --resume auto {args}"));
        done(&run, ranks, &format!("--steps 4 {saves} {args}"));
        for &rank in lost {
            lose(&run, rank);
        }
        let said = done(&run, ranks, &format!("--steps 6 {saves} --resume auto {args}"));
        for rank in lost {
            let note = format!(
                "rank {rank} has no good checkpoint of step 4: it received the weights and optimizer state"
            );
            assert_eq!(said.matches(&note).count(), 1, "{args}: {said}");
        }
        if args.contains("diloco") {
            // Under DiLoCo each rank has its own moments. The lost ones are replaced by another rank's, so
            // weights differ.
            continue;
        }
        for rank in 0..ranks {
            assert_eq!(weights(&run, rank, 6), weights(&whole, rank, 6), "{args}: rank {rank}");
        }
    }
}

#[test]
fn a_lost_folder_with_residuals_and_masks_trains_on() {
    let run = Run::new();
    let args = "--codec random:4/int8 --checkpoint-every 2";
    done(&run, 3, &format!("--steps 4 {args}"));
    lose(&run, 1);
    done(&run, 3, &format!("--steps 6 --resume auto {args}"));
    assert_eq!(weights(&run, 0, 6), weights(&run, 1, 6));
    // A folder with only damaged checkpoints counts as lost.
    for step in [4, 6] {
        let file = folder(&run, 2).join(format!("step-{step:08}/optimizer.safetensors"));
        if file.exists() {
            std::fs::write(file, "nothing").unwrap();
        }
    }
    let said = done(&run, 3, &format!("--steps 8 --resume auto {args}"));
    assert!(
        said.contains("rank 2 has no good checkpoint of step 6") && said.contains("resumed at step 6"),
        "{said}"
    );
}

#[test]
fn a_part_of_the_model_that_nobody_else_has_is_lost_for_good_and_said_so() {
    let run = Run::new();
    let args = "--stages 2 --microbatches 2";
    done(&run, 2, &format!("--steps 2 {args}"));
    lose(&run, 1);
    let said = "the folder of rank 1 has no good checkpoint of step 2, and no other rank holds the same part";
    refused(&run, 2, &format!("--steps 4 --resume auto {args}"), said);
}
