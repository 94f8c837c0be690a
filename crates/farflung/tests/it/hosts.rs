//! Tests `launch --hosts`: a job over ssh with the test's own sshd on the loopback, and with a substitute for
//! ssh for failures of ssh or of a machine.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]
#![expect(clippy::print_stdout, reason = "a test that is left out says so")]

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use crate::tiny::{Run, farflung};

const SSHD: &str = "/usr/sbin/sshd";

/// Returns whether sshd is installed. It must be in CI.
fn has_sshd() -> bool {
    let there = Path::new(SSHD).exists();
    assert!(there || std::env::var_os("CI").is_none(), "no {SSHD}: `cargo xtask setup ssh` installs it");
    if !there {
        println!("left out: there is no {SSHD}; `cargo xtask setup ssh` installs it");
    }
    there
}

fn free() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// An sshd on the loopback that accepts one key, made for the test.
struct Sshd {
    child: Child,
    /// Path of the configuration for `ssh -F`.
    config: PathBuf,
}

impl Sshd {
    fn start(folder: &Path) -> Self {
        let at = |name: &str| folder.join(name);
        let key = |name: &str| {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(at(name))
                .status();
            assert!(made.unwrap().success());
        };
        key("host");
        key("user");
        fs::copy(at("user.pub"), at("authorized")).unwrap();
        let port = free();
        let show = |path: PathBuf| path.display().to_string();
        let server = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\n\
             PidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n",
            show(at("host")),
            show(at("authorized"))
        );
        fs::write(at("sshd_config"), server).unwrap();
        let client = format!(
            "Host *\nPort {port}\nHostName 127.0.0.1\nIdentityFile {}\nIdentitiesOnly yes\nBatchMode yes\n\
             UserKnownHostsFile {}\nStrictHostKeyChecking accept-new\nLogLevel ERROR\n",
            show(at("user")),
            show(at("known"))
        );
        let config = at("ssh_config");
        fs::write(&config, client).unwrap();
        // The folder to which sshd changes its root before a login; only an sshd of root needs it.
        drop(fs::create_dir_all("/run/sshd"));
        let child =
            Command::new(SSHD).args(["-D", "-e", "-f"]).arg(at("sshd_config")).stderr(Stdio::null()).spawn();
        let sshd = Self { child: child.unwrap(), config };
        for _ in 0..500 {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return sshd;
            }
            thread::sleep(Duration::from_millis(20));
        }
        panic!("sshd does not listen");
    }

    fn ssh(&self) -> String {
        format!("ssh -F {}", self.config.display())
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Writes a hosts file, for example with two names of this machine and one process on each.
fn hosts(run: &Run, text: &str) -> PathBuf {
    let path = run.at("hosts");
    fs::write(&path, text).unwrap();
    path
}

/// Returns the `launch --hosts` command in the run's folder.
fn launch(run: &Run, ssh: &str, more: &[&str]) -> Command {
    let mut command = farflung();
    let master = format!("127.0.0.1:{}", free());
    command.current_dir(run.at("")).args(["launch", "--hosts"]).arg(run.at("hosts"));
    command.args(["--ssh", ssh]).stdin(Stdio::null());
    if !more.contains(&"--grace") {
        command.args(["--grace", "3s"]);
    }
    if !more.contains(&"--master") {
        command.args(["--master", &master]);
    }
    command.args(more);
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the losses in a run's metrics, and the weights of its last checkpoint.
fn results(run: &Run, folder: &str) -> (Vec<String>, Vec<u8>) {
    let metrics = fs::read_to_string(run.at(folder).join("metrics.jsonl")).unwrap();
    let loss =
        |line: &str| line.split("\"train_loss\":").nth(1).unwrap().split(',').next().unwrap().to_owned();
    let mut weights: Vec<PathBuf> = Vec::new();
    let mut folders = vec![run.at(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().is_some_and(|name| name == "model.safetensors") {
                weights.push(path);
            }
        }
    }
    weights.sort();
    (metrics.lines().map(loss).collect(), fs::read(weights.last().unwrap()).unwrap())
}

#[test]
fn a_job_over_ssh_has_the_bits_of_one_on_this_machine() {
    if !has_sshd() {
        return;
    }
    let run = Run::new();
    let sshd = Sshd::start(&run.at(""));
    hosts(&run, "127.0.0.1 # the first\nlocalhost slots=1\n");
    let train = |out: &str| run.args(&format!("--steps 20 --sync ddp --deadline 30s --out {out}"));

    let here =
        farflung().current_dir(run.at("")).args(["launch", "-n", "2", "--"]).args(train("here")).output();
    assert!(here.as_ref().unwrap().status.success(), "{here:?}");
    let mut over = launch(&run, &sshd.ssh(), &["--"]);
    // The secret is passed on without being on a command line; without it, the ranks would not meet.
    over.env("FARFLUNG_SECRET", "a secret of this test").env("FARFLUNG_HOME", run.at("home"));
    let over = over.args(train("over")).output().unwrap();
    assert!(over.status.success(), "{}", said(&over));
    assert!(said(&over).contains("[0] step 20/20"), "{}", said(&over));
    assert_eq!(results(&run, "here"), results(&run, "over"));
}

#[test]
fn a_rank_that_fails_over_ssh_ends_the_job_with_its_code_and_its_machine() {
    if !has_sshd() {
        return;
    }
    let run = Run::new();
    let sshd = Sshd::start(&run.at(""));
    hosts(&run, "127.0.0.1\nlocalhost\n");
    let failed = launch(&run, &sshd.ssh(), &["--", "train", "--steps", "none"]).output().unwrap();
    assert_eq!(failed.status.code(), Some(2), "{}", said(&failed));
    let named = |host: &str| said(&failed).contains(&format!("the ranks on {host} failed"));
    assert!(named("127.0.0.1") || named("localhost"), "{}", said(&failed));
    let nowhere =
        launch(&run, &sshd.ssh(), &["--dir", "/no/such/folder", "--", "--version"]).output().unwrap();
    assert!(!nowhere.status.success() && said(&nowhere).contains("/no/such/folder"), "{}", said(&nowhere));
}

/// Returns the number of processes that have this text among their arguments.
fn processes(mark: &str) -> usize {
    let all = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let lines = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| String::from_utf8_lossy(line).contains(mark)).count()
}

fn until(what: &str, is: impl Fn() -> bool) {
    for _ in 0..1000 {
        if is() {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("{what}");
}

#[test]
fn a_signal_and_the_launchers_death_end_the_ranks_on_all_machines() {
    if !has_sshd() {
        return;
    }
    let run = Run::new();
    let sshd = Sshd::start(&run.at(""));
    hosts(&run, "127.0.0.1\nlocalhost\n");
    for (out, signal, code) in [("interrupted", "-INT", Some(130)), ("killed", "-KILL", None)] {
        let train = run.args(&format!("--steps 1000000 --sync ddp --deadline 30s --out {out}"));
        let mut job = launch(&run, &sshd.ssh(), &["--"]);
        let mut job = job.args(&train).stderr(Stdio::null()).spawn().unwrap();
        let metrics = run.at(out).join("metrics.jsonl");
        until("no step is done", || fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 2));
        let sent = Command::new("kill").args([signal, &job.id().to_string()]).status().unwrap();
        assert!(sent.success());
        assert_eq!(job.wait().unwrap().code(), code, "{out}");
        // The folder's name is in the arguments of each rank.
        let mark = run.at("text.txt").display().to_string();
        until("ranks are left behind", || processes(&mark) == 0);
    }
}

/// Makes a program that replaces ssh; it gets ssh's arguments.
fn stand_in(run: &Run, script: &str) -> String {
    let path = run.at("ssh");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    path.display().to_string()
}

#[test]
fn only_the_programs_path_stands_on_the_command_line() {
    let run = Run::new();
    hosts(&run, "a slots=2\nme@b\n");
    let note = run.at("noted");
    let ssh = stand_in(&run, &format!("echo \"$@\" >> {0}; head -n 1 >> {0}.lines", note.display()));
    let mut job = launch(&run, &ssh, &["--master", "10.0.0.1:4000", "--", "train", "--note", "x"]);
    let output = job.env("FARFLUNG_SECRET_FILE", "/secret").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let program = farflung::shell_word::shell_word(env!("CARGO_BIN_EXE_farflung"));
    let mut calls: Vec<String> = fs::read_to_string(&note).unwrap().lines().map(str::to_owned).collect();
    calls.sort();
    assert_eq!(calls, ["a", "me@b"].map(|host| format!("-- {host} {program} launch --from-stdin")));
    let lines = fs::read_to_string(run.at("noted.lines")).unwrap();
    let mut shares: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    shares.sort_by_key(|share| share["ranks"]["start"].as_u64());
    let ranks =
        |share: &serde_json::Value| (share["ranks"]["start"].as_u64(), share["ranks"]["end"].as_u64());
    assert_eq!([ranks(&shares[0]), ranks(&shares[1])], [(Some(0), Some(2)), (Some(2), Some(3))]);
    for share in &shares {
        assert_eq!(share["world_size"], 3);
        assert_eq!(share["master"], serde_json::json!(["10.0.0.1", 4000]));
        assert_eq!(share["args"], serde_json::json!(["train", "--note", "x"]));
        assert_eq!(share["variables"]["FARFLUNG_SECRET_FILE"], "/secret");
        assert!(
            share["variables"].get("FARFLUNG_SECRET").is_none() && share["variables"].get("PATH").is_none()
        );
    }
    // If the user gives no secret, ranks that meet at an address that others can reach get a new one.
    fs::remove_file(run.at("noted.lines")).unwrap();
    let output = launch(&run, &ssh, &["--master", "10.0.0.1:4000", "--", "train"]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let lines = fs::read_to_string(run.at("noted.lines")).unwrap();
    let share: serde_json::Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    let secret = share["variables"]["FARFLUNG_SECRET"].as_str().unwrap();
    assert!(secret.len() >= 32 && !fs::read_to_string(&note).unwrap().contains(secret));
}

/// A scheduler's warning comes to ssh, too.
#[test]
fn a_warning_is_passed_on_to_all_machines() {
    let run = Run::new();
    hosts(&run, "127.0.0.1\nlocalhost\n");
    let ssh = stand_in(&run, "shift 2; exec sh -c \"$1\"");
    let train = run.args("--steps 1000000 --sync ddp --deadline 30s --out warned");
    let mut job = launch(&run, &ssh, &["--"]);
    let mut job = job.args(&train).stderr(Stdio::null()).spawn().unwrap();
    let metrics = run.at("warned/metrics.jsonl");
    until("no step is done", || fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 2));
    let listed = format!("/proc/{0}/task/{0}/children", job.id());
    let mut warned = fs::read_to_string(listed).unwrap();
    warned += &job.id().to_string();
    let sent = Command::new("kill").arg("-USR1").args(warned.split_whitespace()).status().unwrap();
    assert!(sent.success());
    assert_eq!(job.wait().unwrap().code(), Some(138));
    for rank in ["warned", "warned/ranks/rank-00001"] {
        let events = farflung::events::read(&run.at(rank).join("events.jsonl")).unwrap();
        let last = format!("{:?}", events.last());
        assert!(last.contains("Stopped") && last.contains("SIGUSR1"), "{events:?}");
    }
}

#[test]
fn a_machine_that_is_not_reached_is_named_and_nobody_waits_for_it() {
    let run = Run::new();
    hosts(&run, "good\nbad\n");
    // The substitute for ssh fails with 255 for `bad`, as ssh does if it cannot connect. For `good` it waits
    // until its input ends.
    let ssh = stand_in(
        &run,
        "case \"$2\" in bad) echo 'ssh: no route' >&2; exit 255;; esac; cat > /dev/null; exit 0",
    );
    let output =
        launch(&run, &ssh, &["--master", "10.0.0.1:4000", "--grace", "300ms", "--", "train"]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", said(&output));
    let text = said(&output);
    assert!(text.contains("[bad] ssh: no route") && text.contains("ssh to bad failed"), "{text}");
}

#[test]
fn what_cannot_be_is_refused_before_anything_starts() {
    let run = Run::new();
    let ssh = stand_in(&run, "touch started");
    for (text, more, expected) in [
        ("a\n-oProxyCommand=x\n", &["--", "train"][..], "in line 2"),
        ("a\nb\n", &["-n", "3", "--", "train"], "at most the 2 slots"),
        ("a\nb\n", &["--master", "10.0.0.1:0", "--", "train"], "a port"),
        ("localhost\nb\n", &["--master", "127.0.0.1:1", "--", "train"], "that the other machines can reach"),
        ("# nobody\n", &["--", "train"], "at least one machine"),
    ] {
        hosts(&run, text);
        let output = launch(&run, &ssh, more).output().unwrap();
        assert_ne!(output.status.code(), Some(0));
        assert!(said(&output).contains(expected), "{text}: {}", said(&output));
        assert!(!run.at("started").exists(), "{text}");
    }
    let told = farflung().args(["launch", "--from-stdin"]).stdin(Stdio::null()).output().unwrap();
    assert!(!told.status.success() && said(&told).contains("launch --hosts"), "{}", said(&told));
}
