//! Runs whose optimizer keeps its state on disk: the bits of runs with state in memory, and the step from which
//! a run continues that was killed, has lost a folder, or finds another run's.

#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use crate::child::{Guarded, wait_until};
#[cfg(target_os = "linux")]
use crate::disks::limit;
use crate::families::{done, llama, train};
use crate::tiny::{Run, farflung, output, refused, stderr};

fn file(run: &Run, out: &str, steps: u64, name: &str) -> Vec<u8> {
    fs::read(run.at(out).join(format!("step-{steps:08}/{name}"))).unwrap()
}

/// Checks that two runs have saved the same weights and states.
#[track_caller]
fn same(run: &Run, one: &str, other: &str, steps: u64) {
    for name in ["model.safetensors", "optimizer.safetensors"] {
        assert!(file(run, one, steps, name) == file(run, other, steps, name), "{one} {other}: {name}");
    }
}

/// Removes the checkpoints of a run of `ranks` ranks, so that only its state on disk is left.
fn without_checkpoints(run: &Run, out: &str, ranks: usize) {
    for folder in (0..ranks).map(|rank| rank_folder(&run.at(out), rank)) {
        let _ = fs::remove_file(folder.join("latest"));
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_str().unwrap().starts_with("step-") {
                fs::remove_dir_all(path).unwrap();
            }
        }
    }
    let _ = fs::remove_file(run.at(out).join("report.json"));
}

fn rank_folder(out: &Path, rank: usize) -> PathBuf {
    if rank == 0 { out.to_owned() } else { out.join(format!("ranks/rank-{rank:05}")) }
}

#[test]
fn state_on_disk_changes_no_bit_and_is_continued_from() {
    let run = llama();
    for (name, args, ranks) in [
        ("one", "--clip 0.1", 1),
        ("f16", "--precision f16 --accumulate 2", 1),
        ("lamb", "--optimizer lamb", 1),
        ("muon", "--optimizer muon --lookahead 2", 1),
        ("two", "--workers 2", 2),
        ("zero", "--workers 3 --zero 1 --zero-weights 2,0,1", 3),
        ("weights", "--workers 3 --zero 3 --zero-weights 2,0,1", 3),
        ("stages", "--workers 4 --stages 2 --microbatches 2 --boundary int8", 4),
        ("chunks", "--workers 2 --stages 2 --schedule interleaved", 2),
        ("mesh", "--mesh data=2,pipeline=2,tensor=2 --microbatches 2 --zero 1", 8),
    ] {
        let (disk, part) = (format!("{name}-disk"), format!("{name}-part"));
        done(&run, name, &format!("{args} --steps 4"));
        done(&run, &disk, &format!("{args} --steps 4 --state disk --check-every 1"));
        same(&run, name, &disk, 4);
        // Two steps of which nothing was saved besides the state.
        done(&run, &part, &format!("{args} --steps 2 --state disk --save-end false"));
        assert!(!run.at(&part).join("step-00000002").exists());
        done(&run, &part, &format!("{args} --steps 4 --state disk --resume auto"));
        same(&run, name, &part, 4);
        // Without checkpoints, and with all steps done: it is saved now.
        without_checkpoints(&run, &part, ranks);
        done(&run, &part, &format!("{args} --steps 4 --state disk --resume auto"));
        same(&run, name, &part, 4);
        // A checkpoint of a run with state in memory is continued with state on disk, and the reverse.
        done(&run, &format!("{name}-2"), &format!("{args} --steps 2"));
        done(&run, &format!("{name}-2"), &format!("{args} --steps 4 --state disk --resume auto"));
        same(&run, name, &format!("{name}-2"), 4);
    }
    done(&run, "back", "--clip 0.1 --steps 2 --state disk");
    done(&run, "back", "--clip 0.1 --steps 4 --resume auto");
    same(&run, "one", "back", 4);
    // The state is no longer that of the run.
    let again = train(&run, "--clip 0.1 --steps 6 --state disk --resume auto --out back");
    refused(&again, "back/state holds the state of step 2 of a run");
    fs::remove_dir_all(run.at("back/state")).unwrap();
    done(&run, "back", "--clip 0.1 --steps 6 --state disk --resume auto");
}

#[test]
fn a_killed_run_continues_from_its_last_step() {
    let run = llama();
    let common = "--workers 2 --accumulate 2 --steps 400 --model config.json --batch 2 --warmup 0 --codec none \
                  --threads 1 --eval-every 1000 --eval-batches 1 --sample-tokens 0 --data text.txt --quiet";
    let whole = output(&run, &format!("train {common} --out whole"));
    assert!(whole.status.success(), "{}", stderr(&whole));
    let args = format!("train {common} --state disk --resume auto --out killed");
    let steps = |least: usize| {
        let text = fs::read_to_string(run.at("killed/metrics.jsonl")).ok()?;
        Some(text.lines().count()).filter(|&steps| steps >= least)
    };
    for kill in 0..4 {
        let before = steps(0).unwrap_or(0);
        let mut program = farflung();
        program.current_dir(run.at("")).args(args.split_whitespace());
        let child = Guarded(
            program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap(),
        );
        wait_until("some steps", || steps(before + 20 + 7 * kill));
        // Somewhere within a step.
        std::thread::sleep(Duration::from_millis(3 * kill as u64));
        drop(child);
        assert!(!run.at("killed/latest").exists(), "there is no checkpoint");
    }
    let before = steps(0).unwrap();
    let end = output(&run, &args.replace(" --quiet", ""));
    assert!(end.status.success(), "{}", stderr(&end));
    let said = stderr(&end);
    let resumed = said.lines().find_map(|line| line.strip_prefix("resumed at step ")).expect(&said);
    // The last step may not have reached the disk, and the row of the one in flight is missing.
    let resumed: usize = resumed.parse().unwrap();
    assert!((before - 1..=before + 1).contains(&resumed), "{resumed} after {before} rows");
    same(&run, "whole", "killed", 400);
}

#[test]
fn state_of_another_run_or_of_an_older_copy_is_refused() {
    let run = llama();
    let to = "--state disk --state-dir scratch";
    done(&run, "a", &format!("{to} --workers 2 --steps 3 --save-end false"));
    assert!(run.at("scratch/ranks/rank-00001/state/part-0.state").exists());
    // A new run would overwrite it.
    let said = "holds the state of step 3 of a run";
    refused(&train(&run, &format!("{to} --workers 2 --out b")), said);
    // It belongs to another model, or to another optimizer.
    fs::write(run.at("other.json"), fs::read_to_string(run.at("config.json")).unwrap().replace("24", "32"))
        .unwrap();
    for other in ["--model other.json", "--optimizer sgd"] {
        refused(&train(&run, &format!("{to} --workers 2 --out b {other}")), "is a store of other arrays");
    }
    refused(&train(&run, &format!("{to} --workers 2 --out a --resume auto --seed 5")), "`seed` is 5");
    // One rank has lost its folder, or has an older copy of it.
    let lost = run.at("scratch/ranks/rank-00001");
    fs::rename(&lost, run.at("aside")).unwrap();
    let again = format!("{to} --workers 2 --steps 6 --out a --resume auto --save-end false");
    refused(&train(&run, &again), "the state on disk of rank 1 is missing, and the run has done step 3");
    fs::remove_dir_all(&lost).unwrap();
    fs::rename(run.at("aside"), &lost).unwrap();
    let copied =
        std::process::Command::new("cp").args(["-r", "scratch", "older"]).current_dir(run.at("")).status();
    assert!(copied.unwrap().success());
    done(&run, "a", &again.replace("--out a", ""));
    fs::remove_dir_all(&lost).unwrap();
    fs::rename(run.at("older/ranks/rank-00001"), &lost).unwrap();
    refused(&train(&run, &again), "the state on disk of rank 1 is of step 3, and the run has done step 6");
    // A checkpoint of as many steps replaces all of it, in a folder of its own.
    done(&run, "c", "--workers 2 --steps 6");
    refused(
        &train(&run, &format!("{to} --workers 2 --steps 8 --out a --resume c")),
        "holds the state of step",
    );
    let path = "--workers 2 --steps 8 --resume c --state disk --state-dir empty";
    done(&run, "d", path);
    done(&run, "e", "--workers 2 --steps 8");
    same(&run, "d", "e", 8);
    // The ranks' folders are not each other's.
    let swap =
        |from: &str, to: &str| fs::rename(run.at(&format!("empty/{from}")), run.at(&format!("empty/{to}")));
    swap("state", "aside").unwrap();
    swap("ranks/rank-00001/state", "state").unwrap();
    swap("aside", "ranks/rank-00001/state").unwrap();
    let again = "--workers 2 --steps 9 --state disk --state-dir empty --resume auto --out d";
    refused(&train(&run, again), "holds the state of step 8 of a run");
}

#[test]
fn a_run_does_not_go_back_in_silence_without_its_state() {
    let run = llama();
    let disk = "--state disk --steps 3 --save-end false";
    done(&run, "a", disk);
    let again = "--steps 6 --resume auto --out a";
    let said = "has step 3 of this run, and the newest checkpoint is of step 0: continue with `--state disk`";
    refused(&train(&run, again), said);
    refused(&train(&run, &format!("{again} --state disk --state-dir elsewhere")), said);
    // Another run does not take it.
    let other = "--steps 6 --resume auto --state disk --state-dir a --out b";
    refused(&train(&run, other), "holds the state of step 3 of a run");
    // Nor does it begin again once the state was lost.
    fs::remove_dir_all(run.at("a/state")).unwrap();
    let said = "the state on disk of rank 0 is missing, and the run has done step 3";
    refused(&train(&run, &format!("{again} --state disk")), said);
    assert_eq!(steps_of(&run, "a"), 3);
    // Settings that change the training are told.
    done(&run, "c", disk);
    let output = train(&run, "--steps 6 --resume auto --state disk --out c --lr 0.02");
    assert!(output.status.success(), "{}", stderr(&output));
    let warning = "warning: the training continues with settings that differ from the checkpoint's";
    assert!(
        stderr(&output).contains(warning) && stderr(&output).contains("`lr` is 0.02"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn damage_is_found_before_anything_is_forgotten() {
    let run = llama();
    done(&run, "a", "--state disk --steps 3 --save-end false");
    let path = run.at("a/state/part-0.state");
    let whole = fs::read(&path).unwrap();
    let again = "--steps 6 --resume auto --state disk --out a";
    for at in [whole.len() - 5000, whole.len() / 2] {
        let mut damaged = whole.clone();
        damaged[at..at + 4096].iter_mut().for_each(|byte| *byte ^= 0x55);
        fs::write(&path, &damaged).unwrap();
        let output = train(&run, again);
        let said = stderr(&output);
        // The end of the file may be of the generation before.
        let is_found = !output.status.success() && said.contains("piece 0 of generation 3");
        assert!(is_found || output.status.success() && said.contains("resumed at step 3"), "{at}: {said}");
        if is_found {
            assert_eq!(fs::read(&path).unwrap().len(), whole.len());
            fs::write(&path, &whole).unwrap();
            assert!(train(&run, again).status.success());
            return;
        }
        fs::remove_dir_all(run.at("a")).unwrap();
        done(&run, "a", "--state disk --steps 3 --save-end false");
    }
    panic!("no damage was found");
}

#[test]
fn folders_that_cannot_be_used_are_refused_before_the_first_step() {
    let run = llama();
    fs::write(run.at("file"), "x").unwrap();
    let on = |folder: &str| train(&run, &format!("--state disk --state-dir {folder} --out x"));
    let said = stderr(&on("file"));
    assert!(said.contains("failed to create the folder") && said.contains("file/state"), "{said}");
    fs::create_dir_all(run.at("thesis/state")).unwrap();
    fs::write(run.at("thesis/state/part-0.state"), "my thesis").unwrap();
    refused(&on("thesis"), "thesis/state/part-0.state is not a store");
    assert_eq!(fs::read(run.at("thesis/state/part-0.state")).unwrap(), b"my thesis");
    for (args, said) in [
        ("--sync diloco --workers 2", "`sync` is diloco, expected ddp with `state` disk"),
        ("--codec int8 --workers 2", "`codec` is int8+ef, expected none with `state` disk"),
        ("--optimizer onebit-adam --workers 2", "`optimizer` is onebit-adam"),
        (
            "--stages 2 --workers 2 --schedule pipedream --clip 0",
            "`state` is disk, expected device with pipedream",
        ),
        ("--stages 2 --workers 2 --sampling epochs --boundary aqsgd:4", "`boundary` is aqsgd:4"),
        ("--tune 2 --workers 2", "`tune` is 2, expected 0 with `state` disk"),
    ] {
        refused(&train(&run, &format!("{args} --state disk --out y")), said);
    }
    assert!(!run.at("x/metrics.jsonl").exists() && !run.at("y").exists());
    let output = train(&run, "--state-dir somewhere --out z");
    assert!(
        stderr(&output).contains("`state-dir` changes nothing: `state` is device"),
        "{}",
        stderr(&output)
    );
}

/// Starts a run of very many steps.
fn endless(run: &Run, out: &str) -> Guarded {
    let args = format!(
        "train {out} --steps 100000 --model config.json --workers 1 --batch 2 --codec none --threads 1 \
         --eval-batches 1 --sample-tokens 0 --data text.txt --quiet"
    );
    let mut program = farflung();
    program.current_dir(run.at("")).args(args.split_whitespace());
    let errors = fs::File::create(run.at("stderr")).unwrap();
    Guarded(program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).spawn().unwrap())
}

fn steps_of(run: &Run, out: &str) -> usize {
    fs::read_to_string(run.at(out).join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let run = llama();
    let first = endless(&run, "--state disk --state-dir shared --out first");
    wait_until("some steps", || (steps_of(&run, "first") > 2).then_some(()));
    refused(&train(&run, "--state disk --state-dir shared --out second"), "is in use by another process");
    drop(first);
}

/// A limit on the size of files stands for a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_is_full_within_a_step_costs_that_step() {
    let run = llama();
    let out = "--state disk --out full";
    let mut first = endless(&run, out);
    wait_until("some steps", || (steps_of(&run, "full") > 5).then_some(()));
    limit(first.0.id(), Some(3 * 4096));
    let status = wait_until("its end", || first.0.try_wait().unwrap());
    assert_eq!(status.code(), Some(1));
    let said = fs::read_to_string(run.at("stderr")).unwrap();
    let cause = "error: the optimizer's state on disk: failed to write full/state/part-0.state: ";
    assert!(said.contains(cause) && said.contains(" bytes at "), "{said}");
    let before = steps_of(&run, "full");
    let again = endless(&run, &format!("{out} --resume auto"));
    wait_until("more steps", || (steps_of(&run, "full") > before + 2).then_some(()));
    drop(again);
    let resumed = fs::read_to_string(run.at("full/events.jsonl")).unwrap();
    assert!(resumed.contains(r#""from":"full/state""#), "{resumed}");
}
