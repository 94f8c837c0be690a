//! Jobs of several processes with tickets and secrets: the same results as without, errors with advice, and no
//! secret in any output.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::tiny::{Run, farflung};

fn free() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Returns the `farflung` command with a home in the run's folder, like a separate machine.
fn on(run: &Run, machine: &str) -> Command {
    let mut command = farflung();
    command.env("FARFLUNG_HOME", run.at(machine)).current_dir(run.at(""));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn rank(run: &Run, machine: &str, rank: usize, port: u16, more: &str) -> Child {
    let mut command = on(run, machine);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("MASTER_PORT", port.to_string());
    let args = format!("--steps 3 --sync ddp --deadline 20s --out {machine}-{port} {more}");
    command.args(run.args(&args)).spawn().unwrap()
}

fn ended(child: Child) -> Output {
    child.wait_with_output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn private(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// Returns the losses of rank 0.
fn losses(run: &Run, port: u16) -> Vec<String> {
    let text = fs::read_to_string(run.at(&format!("a-{port}")).join("metrics.jsonl")).unwrap();
    let loss =
        |line: &str| line.split("\"train_loss\":").nth(1).unwrap().split(',').next().unwrap().to_owned();
    text.lines().map(loss).collect()
}

/// Collects the contents of all files below a folder.
fn files(folder: &Path, all: &mut Vec<Vec<u8>>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, all);
        } else {
            all.push(fs::read(path).unwrap());
        }
    }
}

#[test]
fn two_machines_train_with_a_ticket_and_a_third_is_refused() {
    let run = Run::new();
    let clear = free();
    let ranks = [("a", 0), ("b", 1)].map(|(machine, number)| rank(&run, machine, number, clear, ""));
    for output in ranks.map(ended) {
        assert!(output.status.success(), "{}", said(&output));
    }

    let port = free();
    let address = format!("127.0.0.1:{port}");
    let made = on(&run, "a").args(["ticket", "--address", &address, "--out", "ticket"]).output().unwrap();
    assert!(made.status.success(), "{}", said(&made));
    let word = fs::read_to_string(run.at("ticket")).unwrap();
    let shown = on(&run, "b").args(["ticket", "--show", "--ticket-file", "ticket"]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains(&address) && shown.contains("valid") && !shown.contains(word.trim()), "{shown}");

    // This ticket is for another run: another host made it for the same address.
    let other = on(&run, "c").args(["ticket", "--address", &address]).output().unwrap();
    private(&run.at("other"), &String::from_utf8(other.stdout).unwrap());
    let rank_0 = rank(&run, "a", 0, port, "--ticket-file ticket");
    let stranger = ended(rank(&run, "c", 1, port, "--ticket-file other"));
    assert_eq!(stranger.status.code(), Some(2), "{}", said(&stranger));
    assert!(said(&stranger).contains("this process rejected"), "{}", said(&stranger));
    // A rank without a ticket is rejected.
    let stranger = ended(rank(&run, "c", 1, port, ""));
    assert_eq!(stranger.status.code(), Some(2), "{}", said(&stranger));
    assert!(said(&stranger).contains("--insecure"), "{}", said(&stranger));
    let outputs = [rank_0, rank(&run, "b", 1, port, "--ticket-file ticket")].map(ended);
    for output in &outputs {
        assert!(output.status.success(), "{}", said(output));
    }
    assert!(said(&outputs[0]).contains("not encrypted"), "{}", said(&outputs[0]));
    assert_eq!(losses(&run, port), losses(&run, clear));

    // No file and no output contains the ticket or the keys.
    let mut written = vec![outputs.iter().map(said).collect::<String>().into_bytes()];
    for folder in ["a", "b"] {
        files(&run.at(&format!("{folder}-{port}")), &mut written);
    }
    let secrets = ["a/key", "a/join-secret", "b/key"].map(|name| fs::read(run.at(name)).unwrap());
    let has = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).any(|window| window == what);
    assert!(written.len() > 6);
    for bytes in &written {
        assert!(!has(bytes, word.trim().as_bytes()));
        assert!(secrets.iter().all(|secret| !has(bytes, secret)));
    }
}

#[test]
fn a_launched_job_takes_a_secret_from_a_file_or_a_variable() {
    let run = Run::new();
    private(&run.at("secret"), "a frog jumps into the old pond\n");
    for (name, variable, file) in
        [("flag", None, "--secret-file secret"), ("variable", Some("a frog and a pond"), "")]
    {
        let mut command = on(&run, "a");
        if let Some(secret) = variable {
            command.env("FARFLUNG_SECRET", secret);
        }
        command.args(["launch", "-n", "2", "--"]);
        command.args(run.args(&format!("--steps 2 --sync ddp --out {name} {file}")));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }
    // A secret that all users can read is rejected.
    fs::set_permissions(run.at("secret"), fs::Permissions::from_mode(0o644)).unwrap();
    let output = ended(rank(&run, "a", 0, free(), "--secret-file secret"));
    assert!(output.status.code() == Some(2) && said(&output).contains("chmod 600"), "{}", said(&output));
}

#[test]
fn off_the_loopback_nothing_starts_without_a_proof() {
    let run = Run::new();
    // An address that no machine has (RFC 5737): the error comes before any connection.
    for args in ["train --steps 1", "net probe"] {
        let mut command = on(&run, "a");
        command.env("RANK", "1").env("WORLD_SIZE", "2").env("MASTER_ADDR", "192.0.2.1");
        let output = command.args(args.split(' ')).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains("192.0.2.1:29500") && said(&output).contains("--secret-file"));
    }
    assert!(!run.at("a").exists(), "no key was needed");
}
