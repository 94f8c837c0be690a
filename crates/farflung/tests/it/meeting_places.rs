//! Ranks that are started by hand or by a scheduler's script: the forms of `MASTER_ADDR`, variables of Slurm
//! without `srun`, ranks that do not come, and inputs that are missing.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

use crate::tiny::{Run, farflung};

/// Returns the command of a rank of two with this `MASTER_ADDR`.
fn rank(run: &Run, rank: u32, master: &str, port: &str, args: &str) -> Command {
    let mut command = farflung();
    command.args(run.args(&format!("--steps 1 --out out {args}"))).current_dir(run.at(""));
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("MASTER_ADDR", master);
    command.env("MASTER_PORT", port).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn ranks_meet_at_an_address_as_people_write_it() {
    for master in ["tcp://127.0.0.1", "127.0.0.1\n", "[::1]", "127.0.0.1:PORT", "localhost"] {
        if master == "[::1]" && TcpListener::bind("[::1]:0").is_err() {
            continue;
        }
        let (run, port) = (Run::new(), free_port());
        let master = master.replace("PORT", &port);
        let first = rank(&run, 0, &master, &port, "--deadline 60s").spawn().unwrap();
        let second = rank(&run, 1, &master, &port, "--deadline 60s").output().unwrap();
        let first = first.wait_with_output().unwrap();
        for output in [&first, &second] {
            assert!(output.status.success(), "{master:?}: {}", said(output));
        }
    }
}

#[test]
fn an_address_with_another_port_is_refused_at_once() {
    let run = Run::new();
    let output = rank(&run, 0, "127.0.0.1:9", "10", "").output().unwrap();
    let message = said(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("MASTER_ADDR is `127.0.0.1:9`") && message.contains("MASTER_PORT"), "{message}");
}

#[test]
fn ranks_that_wait_in_vain_say_how_far_each_came_and_what_to_do() {
    let (run, port) = (Run::new(), free_port());
    let alone = rank(&run, 0, "localhost", &port, "--deadline 1s").output().unwrap();
    let message = said(&alone);
    assert_eq!(alone.status.code(), Some(75), "{message}");
    for text in [
        "rank 1 never connected",
        &format!("rank 0 listens at 127.0.0.1:{port}"),
        "`localhost` (MASTER_ADDR) is each machine's own loopback",
    ] {
        assert!(message.contains(text), "{text}: {message}");
    }
    let alone = rank(&run, 1, "127.0.0.1", &port, "--deadline 1s").output().unwrap();
    let message = said(&alone);
    assert_eq!(alone.status.code(), Some(75), "{message}");
    let refused = format!("tried 127.0.0.1:{port} (connection refused");
    assert!(message.contains(&refused) && message.contains("MASTER_ADDR"), "{message}");
    // A name that is not known may become known: the rank tries until its deadline.
    let alone = rank(&run, 1, "no-such-host.invalid", &port, "--deadline 1s --insecure").output().unwrap();
    let message = said(&alone);
    assert_eq!(alone.status.code(), Some(75), "{message}");
    assert!(message.contains("could not resolve no-such-host.invalid"), "{message}");
}

#[test]
fn a_script_of_slurm_trains_alone_and_says_so() {
    for more in ["", "--insecure"] {
        let run = Run::new();
        let mut command = farflung();
        command.args(run.args(&format!("--steps 1 --out out {more}"))).current_dir(run.at(""));
        for (name, value) in [
            ("SLURM_JOB_ID", "77"),
            ("SLURM_PROCID", "0"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_NODELIST", "n[1-2]"),
        ] {
            command.env(name, value);
        }
        let output = command.output().unwrap();
        let message = said(&output);
        assert!(output.status.success(), "{message}");
        assert!(message.contains("note: SLURM_PROCID is set, but `srun` did not start"), "{message}");
    }
}

#[test]
fn inputs_that_cannot_be_used_end_all_ranks_with_code_2_and_no_restart() {
    let run = Run::new();
    std::fs::write(run.at("short.txt"), "too short").unwrap();
    for (args, cause) in [
        ("--data nope.txt", "nope.txt"),
        ("--data short.txt", "expected at least 9 (context + 1)"),
        ("--init-from nope", "nope"),
        ("--topology nope.toml", "nope.toml"),
        ("--config nope.toml", "nope.toml"),
        ("--resume nope/step-00000003", "nope/step-00000003"),
    ] {
        let args = run.args(&format!("--steps 1 --out out {args}"));
        for before in [&[][..], &["launch", "-n", "2", "--restarts", "3", "--"]] {
            let mut command = farflung();
            let output = command.args(before).args(&args).current_dir(run.at("")).output().unwrap();
            let message = said(&output);
            assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
            assert!(message.contains(cause) && !message.contains("restart 1 of"), "{message}");
        }
    }
}

#[test]
fn a_rank_without_the_data_is_named_by_all() {
    let (run, port) = (Run::new(), free_port());
    let first = rank(&run, 0, "127.0.0.1", &port, "--deadline 60s").spawn().unwrap();
    let second = rank(&run, 1, "127.0.0.1", &port, "--deadline 60s --data nope.txt").output().unwrap();
    let first = first.wait_with_output().unwrap();
    assert_eq!((first.status.code(), second.status.code()), (Some(2), Some(2)), "{}", said(&first));
    assert!(said(&first).contains("rank 1 failed: "), "{}", said(&first));
    assert!(said(&first).contains("nope.txt") && said(&second).contains("nope.txt"));
}

/// Starts a program that listens at a port of this machine, and answers each connection so.
fn other_program(answer: &'static [u8]) -> u16 {
    use std::io::Write as _;

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(answer);
            open.push(stream);
        }
    });
    port
}

#[test]
fn what_listens_in_place_of_rank_0_is_told_from_a_rank_0_that_is_not_there() {
    let run = Run::new();
    // A supervisor may try again: rank 0 may hang.
    let port = other_program(b"").to_string();
    let alone = rank(&run, 1, "127.0.0.1", &port, "--deadline 1s").output().unwrap();
    assert_eq!(alone.status.code(), Some(75), "{}", said(&alone));
    assert!(said(&alone).contains("connected, then: no answer in time"), "{}", said(&alone));
    // The first answer is shorter than a header of our protocol.
    for answer in [&b"SSH-2.0-x\r\n"[..], b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"] {
        let port = other_program(answer).to_string();
        let alone = rank(&run, 1, "127.0.0.1", &port, "--deadline 60s").output().unwrap();
        assert_eq!(alone.status.code(), Some(2), "{}", said(&alone));
        let text = said(&alone);
        assert!(
            text.contains(&format!("127.0.0.1:{port} is no rank")) && text.contains("MASTER_PORT"),
            "{text}"
        );
    }
    let port = other_program(b"").to_string();
    let second = rank(&run, 0, "127.0.0.1", &port, "--deadline 60s").output().unwrap();
    assert!(
        !second.status.success() && said(&second).contains("a second process with RANK=0"),
        "{}",
        said(&second)
    );
}

#[test]
fn where_a_rank_was_refused_the_loopback_is_not_blamed() {
    let run = Run::new();
    let port = free_port();
    let first = rank(&run, 0, "127.0.0.1", &port, "--deadline 5s").spawn().unwrap();
    let mut second = rank(&run, 1, "127.0.0.1", &port, "--deadline 60s");
    let second = second.env("WORLD_SIZE", "3").output().unwrap();
    assert_eq!(second.status.code(), Some(2), "{}", said(&second));
    let first = first.wait_with_output().unwrap();
    assert_eq!(first.status.code(), Some(75), "{}", said(&first));
    assert!(
        said(&first).contains("the same WORLD_SIZE") && !said(&first).contains("loopback"),
        "{}",
        said(&first)
    );
}
