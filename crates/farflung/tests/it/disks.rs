//! Runs on disks without room. A limit on the size of files stands for a full disk, since every user can set
//! one: plain checkpoints are then refused before they are written, and compressed ones fail in the middle.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::child::{Guarded, send, wait_until};
use crate::tiny::{Run, farflung};
use farflung::{EventKind, events, metrics, run_dir};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

/// A limit that is smaller than any file of tensors and larger than the other files of a checkpoint.
const SMALL: u64 = 6000;

/// Sets the size of files that a process may write, or lifts that limit.
pub(crate) fn limit(process: u32, bytes: Option<u64>) {
    let pid = Pid::from_raw(i32::try_from(process).unwrap());
    let old = prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
    assert_eq!(old.maximum, None, "the limit can be lifted again");
}

/// Runs the binary with at most 4 or 8 KiB per file, as the shell counts.
fn limited(args: &[String]) -> Output {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "ulimit -f 8; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_farflung")]);
    shell.args(args).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the names of incomplete files in a folder.
fn rubbish(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.')).collect()
}

fn saved(folder: &Path) -> u64 {
    run_dir::latest(folder).unwrap().map_or(0, |checkpoint| checkpoint.step())
}

/// Starts a run that saves often and never ends by itself. Its stderr goes to a file.
fn endless(run: &Run, before: &[&str], more: &str) -> Guarded {
    let out = run.at("run");
    let args = format!("--out {} --steps 1000000 --checkpoint-every 2 --quiet {more}", out.display());
    let stderr = fs::File::create(run.at("stderr")).unwrap();
    let mut program = farflung();
    program.args(before).args(run.args(&args)).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    Guarded(program.spawn().unwrap())
}

/// Waits until a run has saved a step after `step`.
fn wait_for_save(folder: &Path, step: u64) -> u64 {
    wait_until("a checkpoint", || {
        let latest = fs::read_to_string(folder.join("latest")).ok()?;
        let saved: u64 = latest.trim().trim_start_matches("step-").parse().ok()?;
        (saved > step).then_some(saved)
    })
}

/// Returns the steps after which a save failed, and checks what their events say.
fn unsaved(folder: &Path) -> Vec<u64> {
    let events = events::read(&folder.join("events.jsonl")).unwrap();
    let reasons = events.into_iter().filter_map(|event| match event.what {
        EventKind::Unsaved { reason } => Some((event.step, reason)),
        _ => None,
    });
    reasons
        .map(|(step, reason)| {
            assert!(reason.contains(&format!("of step {step} in ")) && reason.contains('B'), "{reason}");
            step
        })
        .collect()
}

#[test]
fn a_run_that_cannot_save_does_not_begin() {
    let run = Run::new();
    for before in [vec![], vec!["launch", "-n", "2", "--"]] {
        let args = run.args(&format!("--steps 5 --out {}", run.at("run").display()));
        let args: Vec<String> = before.iter().map(|word| (*word).to_owned()).chain(args).collect();
        let output = limited(&args);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        let folder = run.at("run").display().to_string();
        assert!(text.contains("there is no room for a checkpoint in ") && text.contains(&folder), "{text}");
        assert!(text.contains("kB of it in one file") && text.contains("ulimit -f"), "{text}");
        assert!(!run.at("run/metrics.jsonl").exists() && !run.at("run/config.toml").exists());
    }
}

/// Returns the bytes that a refusal names: a number with two decimals and `kB`.
fn needed(text: &str) -> f64 {
    let words: Vec<&str> = text.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "kB,").unwrap();
    1000.0 * words[at - 1].parse::<f64>().unwrap()
}

/// Returns the bytes of blocks that the newest checkpoints of all ranks take.
fn taken(run: &Path) -> u64 {
    let ranks = fs::read_dir(run.join("ranks")).into_iter().flatten().map(|entry| entry.unwrap().path());
    let of_rank = |folder: std::path::PathBuf| {
        let newest = run_dir::latest(&folder).unwrap().unwrap();
        let files = fs::read_dir(newest.path()).unwrap();
        files.map(|file| file.unwrap().metadata().unwrap().len().next_multiple_of(4096)).sum::<u64>()
    };
    ranks.chain([run.to_owned()]).map(of_rank).sum()
}

/// The estimate comes from the list of files that are written: it is what they take, and a few blocks for
/// folders and for headers that are longer than estimated.
#[test]
fn the_room_that_is_asked_for_is_what_checkpoints_take() {
    for (ranks, args) in [
        (1, "--workers 1"),
        (1, "--workers 1 --optimizer lion"),
        (2, "--workers 2 --sync ddp --codec none"),
        (2, "--workers 2 --sync diloco --sync-every 2 --codec none"),
        (2, "--workers 2 --sync noloco --sync-every 2 --codec none"),
        (2, "--workers 2 --stages 2 --microbatches 2"),
        (4, "--workers 4 --stages 2 --microbatches 2 --codec none"),
    ] {
        let run = Run::new();
        let args = run.args(&format!("--steps 4 --out {} {args} --dim 16", run.at("run").display()));
        let refused = said(&limited(&args));
        let asked = needed(&refused);
        let done = farflung().args(&args).args(["--resume", "auto"]).output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        let least = taken(&run.at("run")) as f64;
        let most = least + 4096.0 * 6.0 * f64::from(ranks);
        assert!((least * 0.999..=most).contains(&asked), "{args:?}: {asked} is not within {least} to {most}");
    }
}

#[test]
fn the_last_save_without_room_is_a_failure_that_leaves_nothing_half_done() {
    let run = Run::new();
    let args = run.args(&format!("--steps 5 --compress-checkpoints true --out {}", run.at("run").display()));
    let output = limited(&args);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let folder = format!("there is no room for the checkpoint of step 5 in {}", run.at("run").display());
    assert!(text.contains(&folder) && text.contains("it needs ") && text.contains("are free"), "{text}");
    assert!(text.contains("safetensors.zst") && text.contains("File too large"), "{text}");
    assert_eq!((rubbish(&run.at("run")), saved(&run.at("run"))), (Vec::new(), 0));
    // With room, the run begins anew in its folder.
    let again = farflung().args(&args).args(["--resume", "auto"]).output().unwrap();
    assert!(again.status.success(), "{}", said(&again));
    assert_eq!(saved(&run.at("run")), 5);
}

/// A disk that is full for a while costs the checkpoints and the records of that time, and nothing else.
#[test]
fn a_disk_that_is_full_for_a_while_does_not_end_a_run() {
    for (before, more, victim) in [
        (&[][..], "", None),
        (&[][..], "--compress-checkpoints true", None),
        (&["launch", "-n", "2", "--"][..], "", Some(1)),
        (&["launch", "-n", "2", "--"][..], "--compress-checkpoints true", Some(0)),
    ] {
        let run = Run::new();
        let mut child = endless(&run, before, more);
        let rank_0 = run.at("run");
        let folders: Vec<_> = match victim {
            None => vec![rank_0.clone()],
            Some(_) => vec![rank_0.clone(), run.at("run/ranks/rank-00001")],
        };
        wait_for_save(&rank_0, 0);
        let process = victim.map_or(child.id(), |rank| process_of(child.id(), rank));
        limit(process, Some(SMALL));
        let failed = wait_until("two saves that fail", || {
            let text = fs::read_to_string(rank_0.join("events.jsonl")).ok()?;
            (text.matches("\"unsaved\"").count() >= 2 || limit_reached(&run)).then(|| saved(&rank_0))
        });
        for folder in &folders {
            assert_eq!(saved(folder), failed, "the last checkpoint is good, and the same on all ranks");
        }
        assert_eq!(child.try_wait().unwrap(), None, "{more}");
        limit(process, None);
        wait_for_save(&rank_0, failed);
        send(child.id(), Signal::INT);
        let status = wait_until("its end", || child.try_wait().unwrap());
        assert_eq!(status.code(), Some(130), "{status}");
        let newest = saved(&rank_0);
        for folder in &folders {
            assert_eq!((saved(folder), rubbish(folder)), (newest, Vec::new()), "{more}");
            unsaved(folder);
        }
        let text = fs::read_to_string(run.at("stderr")).unwrap();
        assert!(
            text.contains("there is no room for the checkpoint of step ") && text.contains("the run goes on"),
            "{text}"
        );
        let rows = metrics::read(&rank_0.join("metrics.jsonl")).unwrap();
        assert!(
            rows.windows(2).all(|pair| pair[0].step < pair[1].step) && rows.last().unwrap().step == newest
        );
        let args = run.args(&format!("--out {} --steps {} --resume auto", rank_0.display(), newest + 2));
        let again = farflung().args(before).args(args).output().unwrap();
        assert!(again.status.success(), "{}", said(&again));
    }
}

/// Returns whether the run has told the user twice that a save failed. Its events may be dropped, too.
fn limit_reached(run: &Run) -> bool {
    let text = fs::read_to_string(run.at("stderr")).unwrap_or_default();
    text.matches("the next one is tried after step").count() >= 2
}

/// Returns the process of a rank of a launched job.
fn process_of(launcher: u32, rank: usize) -> u32 {
    let listed = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    let processes = listed.split_whitespace().map(|process| process.parse().unwrap());
    let wanted = format!("\0RANK={rank}\0");
    let is_it = |process: &u32| {
        let environment = fs::read(format!("/proc/{process}/environ")).unwrap();
        format!("\0{}", String::from_utf8_lossy(&environment)).contains(&wanted)
    };
    processes.into_iter().find(is_it).unwrap()
}

#[test]
fn a_stop_without_room_says_so_and_names_the_last_checkpoint() {
    let run = Run::new();
    let mut child = endless(&run, &[], "");
    wait_for_save(&run.at("run"), 0);
    limit(child.id(), Some(SMALL));
    wait_until("a save that fails", || {
        let text = fs::read_to_string(run.at("stderr")).ok()?;
        text.contains("there is no room").then_some(())
    });
    send(child.id(), Signal::TERM);
    let status = wait_until("its end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(143), "{status}");
    let text = fs::read_to_string(run.at("stderr")).unwrap();
    let last = text.lines().last().unwrap();
    let saved = saved(&run.at("run"));
    assert!(
        last.contains("stopped by SIGTERM after ") && last.contains("could not be saved: there is no room"),
        "{text}"
    );
    assert!(last.contains(&format!("; step {saved} is saved in ")), "{text}");
    assert_eq!(rubbish(&run.at("run")), Vec::<String>::new());
}

#[test]
fn a_member_that_cannot_save_does_not_begin() {
    let run = Run::new();
    let flags = run.flags(&format!(
        "--steps 5 --out {} --listen 127.0.0.1:0 --key-file {}",
        run.at("run").display(),
        run.at("key").display()
    ));
    let args: Vec<String> = ["host".to_owned()].into_iter().chain(flags).collect();
    let output = limited(&args);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("there is no room for a checkpoint in ") && text.contains("kB of it in one file"),
        "{text}"
    );
    assert!(!run.at("run/metrics.jsonl").exists());
}

/// Members that each have the whole model do not depend on the disks of others.
#[test]
fn a_member_whose_disk_is_full_stays_and_the_others_save() {
    let run = Run::new();
    let start = |command: &str, out: &Path, more: &[&str]| {
        let stderr = fs::File::create(run.at(&format!("{command}.stderr"))).unwrap();
        let mut program = farflung();
        program.arg(command).arg("--out").arg(out).arg("--key-file").arg(run.at("key")).args(more);
        program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().unwrap()
    };
    let (hosted, joined) = (run.at("host"), run.at("join"));
    let flags =
        run.flags("--listen 127.0.0.1:0 --steps 1000000 --checkpoint-every 20 --sync ddp --min-members 2");
    let mut host = start("host", &hosted, &flags.iter().map(String::as_str).collect::<Vec<_>>());
    let ticket = hosted.join("run.ticket");
    wait_until("the ticket", || ticket.exists().then_some(()));
    let (ticket, text) = (ticket.display().to_string(), run.at("text.txt").display().to_string());
    let mut join =
        start("join", &joined, &["--ticket-file", &ticket, "--listen", "127.0.0.1:0", "--data", &text]);
    wait_for_save(&joined, 0);
    limit(join.id(), Some(SMALL));
    let said = || fs::read_to_string(run.at("join.stderr")).unwrap();
    wait_until("a save that fails", || said().contains("there is no room for the checkpoint").then_some(()));
    let kept = saved(&joined);
    wait_for_save(&hosted, kept + 40);
    assert!(said().contains(&joined.display().to_string()) && rubbish(&joined).is_empty());
    limit(join.id(), None);
    wait_for_save(&joined, kept);
    assert_eq!((host.try_wait().unwrap(), join.try_wait().unwrap()), (None, None));
    for (child, code) in [(&mut join, 130), (&mut host, 130)] {
        send(child.id(), Signal::INT);
        let status = wait_until("its end", || child.try_wait().unwrap());
        assert_eq!(status.code(), Some(code), "{}", said());
    }
}
