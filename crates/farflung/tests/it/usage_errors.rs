//! What people type wrong ends with exit code 2, and with a message that names what is wrong and what to type.
//! A supervisor then does not try again.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::process::{Output, Stdio};

use crate::tiny::{Run, farflung};

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a command in the run's folder, and checks its exit code.
fn ends(run: &Run, words: &[&str], flags: &str, code: i32) -> Output {
    let mut command = farflung();
    command.current_dir(run.at("")).env("FARFLUNG_HOME", run.at("home")).stdin(Stdio::null());
    let output = command.args(words).args(run.flags(flags)).output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{words:?} {flags}: {}", said(&output));
    output
}

#[test]
fn addresses_files_and_devices_that_cannot_be_are_usage_errors() {
    let run = Run::new();
    fs::write(run.at("file"), "a file").unwrap();
    let no_device = if cfg!(feature = "wgpu") { "--device wgpu:999" } else { "--device wgpu" };
    let launch = ["launch", "-n", "2", "--master", "no-such-name.invalid:1", "--", "train"];
    for (words, flags, texts) in [
        (&["host"][..], "--listen 29500", ["`listen` is 29500", "0.0.0.0:29500"]),
        (&["host"], "--listen 127.0.0.1:0 --address 0.0.0.0:29500", ["`address` is 0.0.0.0:29500", "reach"]),
        (&["train"], "--steps 1 --out file", ["`out` is file", "a folder"]),
        (&["train"], no_device, ["wgpu", ":"]),
        (&launch, "--steps 1", ["`master` is no-such-name.invalid:1", "no host"]),
    ] {
        let output = ends(&run, words, flags, 2);
        assert!(texts.iter().all(|text| said(&output).contains(text)), "{flags}: {}", said(&output));
        assert!(!run.at("runs").exists(), "{flags}: a run was begun");
    }
}

#[test]
fn a_run_of_which_all_checkpoints_are_damaged_is_a_usage_error() {
    let run = Run::new();
    ends(&run, &["train"], "--steps 2 --checkpoint-every 1 --out damaged", 0);
    let steps = [1, 2].map(|step| run.at(&format!("damaged/step-{step:08}")));
    for step in &steps {
        fs::write(step.join("optimizer.safetensors"), "rotten").unwrap();
    }
    let whole = ends(&run, &["train"], "--steps 3 --out next --resume damaged", 2);
    assert!(said(&whole).contains("is damaged"), "{}", said(&whole));
    let one = format!("--steps 3 --out next --resume {}", steps[0].display());
    assert!(said(&ends(&run, &["train"], &one, 2)).contains("is damaged"));
}

#[test]
fn a_run_is_continued_without_flags_of_its_model() {
    let run = Run::new();
    ends(&run, &["train"], "--steps 2 --layers 3 --dim 12 --out first", 0);
    let plain = |resume: &str, more: &str| {
        let mut command = farflung();
        command.current_dir(run.at("")).stdin(Stdio::null());
        command.args(["train", "--data", "text.txt", "--batch", "1", "--steps", "4", "--threads", "1"]);
        command.args(["--warmup", "0", "--eval-batches", "1", "--sample-tokens", "0"]);
        command.args(["--resume", resume]).args(more.split_whitespace()).output().unwrap()
    };
    for (resume, more) in
        [("first", "--out second"), ("first/step-00000002", "--out third"), ("auto", "--out first")]
    {
        let output = plain(resume, more);
        let text = said(&output);
        assert!(output.status.success() && text.contains("resumed at step 2"), "{resume}: {text}");
        assert!(!text.contains("init-from"), "{text}");
    }
    // Who gives a size means it.
    let other = plain("second", "--out fourth --layers 2");
    assert_eq!(other.status.code(), Some(2));
    assert!(said(&other).contains("`layers` is 2, expected 3"), "{}", said(&other));
    // Weights beside a checkpoint change nothing.
    let both = plain("second", "--out fifth --init-from first");
    assert!(both.status.success() && said(&both).contains("init-from"), "{}", said(&both));
}

#[test]
fn a_process_whose_rank_was_forgotten_says_that_it_trains_alone() {
    let run = Run::new();
    let mut command = farflung();
    command.current_dir(run.at("")).env("MASTER_ADDR", "10.0.0.1").stdin(Stdio::null());
    let output = command.args(run.args("--steps 1 --out alone")).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(
        said(&output).contains("MASTER_ADDR is set, but RANK and WORLD_SIZE are not"),
        "{}",
        said(&output)
    );
}

#[test]
fn a_host_that_only_its_machine_reaches_does_not_send_its_ticket_elsewhere() {
    let run = Run::new();
    let local = said(&ends(&run, &["host"], "--listen 127.0.0.1:0 --steps 1 --out local", 0));
    assert!(local.contains("only this machine") && !local.contains("other machines, and there"), "{local}");
    assert!(local.contains("--ticket-file local/run.ticket"), "{local}");
    let address = "--listen 127.0.0.1:0 --address 198.51.100.7:29500 --steps 1 --out far";
    let far = said(&ends(&run, &["host"], address, 0));
    assert!(far.contains("copy it to other machines"), "{far}");
}
