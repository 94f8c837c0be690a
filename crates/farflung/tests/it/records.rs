//! Runs whose records (`metrics.jsonl` and others) were damaged, moved or deleted: they go on, and say so.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::process::{Command, Output, Stdio};

use crate::child::{Guarded, wait_until};
use crate::tiny::{Run, farflung};
use farflung::{events, metrics};

const RECORDS: [&str; 3] = ["metrics.jsonl", "events.jsonl", "times.jsonl"];

fn train(run: &Run, args: &str) -> Output {
    let args = format!("--out {} {args}", run.at("run").display());
    farflung().args(run.args(&args)).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn steps(run: &Run) -> Vec<u64> {
    metrics::read(&run.at("run/metrics.jsonl")).unwrap().iter().map(|row| row.step).collect()
}

#[test]
fn damage_of_any_kind_is_put_aside_when_the_run_is_resumed() {
    let noise: Vec<u8> = (0..20_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
    for damage in [&noise[..], b"{\"step\":\n", b"\0\0\0\0\n\0\n", b"\xff\xfe\n"] {
        let run = Run::new();
        assert!(train(&run, "--steps 3").status.success());
        for name in RECORDS {
            let path = run.at("run").join(name);
            let lines = fs::read(&path).unwrap();
            let end = lines.iter().position(|&byte| byte == b'\n').unwrap() + 1;
            fs::write(&path, [&lines[..end], damage, b"\n", &lines[end..]].concat()).unwrap();
        }
        let again = train(&run, "--steps 5 --resume auto");
        let text = said(&again);
        assert!(again.status.success(), "{text}");
        for name in RECORDS {
            let aside = format!("{name}.damaged-1");
            assert!(text.contains(&format!("{name} is damaged in ")) && text.contains(&aside), "{text}");
            assert!(run.at("run").join(aside).exists(), "{text}");
        }
        assert_eq!(steps(&run), [1, 2, 3, 4, 5]);
        assert_eq!(events::read(&run.at("run/events.jsonl")).unwrap().len(), 3, "saved, resumed, saved");
    }
}

#[test]
fn rows_that_are_lost_are_told_when_the_run_is_resumed() {
    let run = Run::new();
    assert!(train(&run, "--steps 3").status.success());
    let path = run.at("run/metrics.jsonl");
    let first_row = fs::read_to_string(&path).unwrap().split_inclusive('\n').next().unwrap().to_owned();
    fs::write(&path, first_row).unwrap();
    let again = train(&run, "--steps 4 --resume auto");
    assert!(
        again.status.success() && said(&again).contains("has no rows of steps 2 to 3"),
        "{}",
        said(&again)
    );
    assert_eq!(steps(&run), [1, 4]);
    for name in RECORDS {
        fs::remove_file(run.at("run").join(name)).unwrap();
    }
    let again = train(&run, "--steps 5 --resume auto");
    assert!(
        again.status.success() && said(&again).contains("has no rows of steps 1 to 4"),
        "{}",
        said(&again)
    );
    assert_eq!(steps(&run), [5]);
}

#[test]
fn a_finished_run_whose_records_are_damaged_is_finished() {
    let run = Run::new();
    assert!(train(&run, "--steps 3").status.success());
    for (report, damage) in [(true, "noise\n"), (false, "noise\n"), (false, "{}\n{}\n")] {
        fs::write(run.at("run/metrics.jsonl"), damage).unwrap();
        if !report {
            fs::remove_file(run.at("run/report.json")).unwrap();
        }
        let again = train(&run, "--steps 3 --resume auto");
        assert!(again.status.success(), "{report} {damage}: {}", said(&again));
        assert!(run.at("run/report.json").exists());
    }
    // A finished run is not changed while its report is there.
    assert!(
        run.at("run/metrics.jsonl.damaged-2").exists() && !run.at("run/metrics.jsonl.damaged-3").exists()
    );
}

#[test]
fn a_folder_or_a_pipe_in_the_place_of_a_record_is_named() {
    for name in RECORDS {
        let run = Run::new();
        assert!(train(&run, "--steps 2").status.success());
        let path = run.at("run").join(name);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let refused = train(&run, "--steps 3 --resume auto");
        assert_eq!(refused.status.code(), Some(1));
        assert!(
            said(&refused).contains(&format!("{name} is a folder, expected a file")),
            "{}",
            said(&refused)
        );
        fs::remove_dir(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let refused = train(&run, "--steps 3 --resume auto");
        assert_eq!(refused.status.code(), Some(1));
        assert!(said(&refused).contains(&format!("{name} is a pipe or a device")), "{}", said(&refused));
    }
}

#[test]
fn records_that_are_rotated_while_a_run_trains_are_begun_again() {
    let run = Run::new();
    let args = run.args(&format!("--steps 3000 --out {}", run.at("run").display()));
    let mut program = farflung();
    program.args(args).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = Guarded(program.spawn().unwrap());
    let lines = |name: &str| fs::read_to_string(run.at("run").join(name)).unwrap_or_default().lines().count();
    wait_until("some steps", || (lines("metrics.jsonl") > 3).then_some(()));
    for name in RECORDS {
        let path = run.at("run").join(name);
        if path.exists() {
            fs::rename(&path, path.with_extension("1")).unwrap();
        }
    }
    wait_until("further steps", || (lines("metrics.jsonl") > 3 && lines("times.jsonl") > 3).then_some(()));
    fs::write(run.at("run/metrics.jsonl"), "").unwrap();
    let status = wait_until("its end", || child.try_wait().unwrap());
    assert!(status.success(), "{status}");
    let rows = steps(&run);
    assert!(rows.last() == Some(&3000) && rows.windows(2).all(|pair| pair[0] < pair[1]), "{rows:?}");
}
