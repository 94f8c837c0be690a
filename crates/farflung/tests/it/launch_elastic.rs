//! Jobs on one machine whose processes come and go.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::child::{Guarded, send, wait_until_or};
use crate::tiny::{Run, farflung};
use farflung::launch::{Elastic, Start};
use farflung::{Error, LaunchError, Signal, Stop};
use rustix::process::Signal as SystemSignal;

fn elastic(least: usize, most: usize, restarts: u32) -> Elastic {
    Elastic { least, most, restarts, grace: Duration::from_millis(300), notice: None }
}

/// Runs shell scripts; returns the result and the list of starts.
fn shells(
    job: &Elastic,
    stop: &Stop,
    script: impl Fn(usize) -> String,
) -> (farflung::Result<()>, Vec<Start>) {
    let started = RefCell::new(Vec::new());
    let ended = job.run(stop, |start| {
        started.borrow_mut().push(start.clone());
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(script(started.borrow().len() - 1));
        Ok(Some(command))
    });
    (ended, started.into_inner())
}

#[test]
fn one_that_fails_is_started_again_and_the_others_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let done = folder.path().join("done").display().to_string();
    // The second one fails at once; the others wait until it has been started again.
    let script = |nth| match nth {
        1 => "exit 75".to_owned(),
        3 => format!("echo > {done}"),
        _ => format!("while ! test -e {done}; do sleep 0.02; done"),
    };
    let (ended, started) = shells(&elastic(2, 3, 1), &Stop::manual(), script);
    ended.unwrap();
    let members: Vec<_> = started.iter().map(|start| (start.member, start.running.len())).collect();
    assert_eq!(members, [(0, 0), (1, 1), (2, 2), (1, 2)]);
}

#[test]
fn with_fewer_than_the_least_the_job_ends() {
    let script = |nth| if nth == 0 { "exec sleep 60" } else { "exit 1" }.to_owned();
    let (ended, started) = shells(&elastic(2, 2, 2), &Stop::manual(), script);
    match ended {
        Err(error @ Error::Launch(LaunchError::Child { rank: 1, .. })) => assert_eq!(error.exit_code(), 75),
        other => panic!("{other:?}"),
    }
    assert_eq!(started.len(), 4);
}

/// If all processes are lost, no member is left that a new process could join.
#[test]
fn where_all_are_lost_the_job_ends_however_many_restarts_there_are() {
    let (ended, started) = shells(&elastic(1, 3, 100), &Stop::manual(), |_| "sleep 0.2; exit 75".to_owned());
    assert_eq!((ended.unwrap_err().exit_code(), started.len()), (75, 3));
}

#[test]
fn what_was_started_wrongly_is_not_started_again() {
    let (ended, started) = shells(&elastic(1, 1, 5), &Stop::manual(), |_| "exit 2".to_owned());
    assert_eq!((ended.unwrap_err().exit_code(), started.len()), (2, 1));
}

#[test]
fn a_signal_ends_all_and_nothing_is_started_again() {
    let stop = Stop::manual();
    stop.request(Signal::Interrupt);
    let (ended, started) = shells(&elastic(1, 2, 5), &stop, |_| "exec sleep 60".to_owned());
    assert!(matches!(ended, Err(Error::Stopped(Signal::Interrupt))), "{ended:?}");
    assert_eq!(started.len(), 2);
}

/// Returns the number of members in a member's last event.
fn members(folder: &Path) -> Option<u64> {
    let text = fs::read_to_string(folder.join("events.jsonl")).ok()?;
    let mut events = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    events.rfind(|event| event["event"] == "members")?["members"].as_u64()
}

/// Returns a child of the process `parent` that has these words on its command line.
fn child_of(parent: u32, words: &str) -> Option<u32> {
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    processes.filter_map(|name| name.parse::<u32>().ok()).find(|id| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{id}/{file}")).unwrap_or_default();
        // The state and the parent's id follow the name in brackets.
        let parents = read("stat")
            .rsplit(") ")
            .next()
            .is_some_and(|rest| rest.split(' ').nth(1).is_some_and(|number| number == parent.to_string()));
        parents && read("cmdline").contains(words)
    })
}

#[test]
fn a_run_of_processes_goes_on_while_they_are_killed() {
    let run = Run::new();
    let said = fs::File::create(run.at("said.txt")).unwrap();
    let mut command = farflung();
    command.env("FARFLUNG_HOME", run.at("home")).current_dir(run.at(""));
    command.args(["launch", "--elastic", "2:3", "--restarts", "2", "--", "host"]);
    let flags =
        "--listen 127.0.0.1:0 --deadline 5s --steps 1000000 --eval-every 100000 --out run --transport tcp";
    command.args(run.flags(flags)).stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
    let mut launcher = Guarded(command.spawn().unwrap());
    let says = || fs::read_to_string(run.at("said.txt")).unwrap_or_default();
    let wait = |folder: &Path, count: u64| {
        wait_until_or(says, || (members(folder) == Some(count)).then_some(()));
    };
    let host = run.at("run");
    wait(&host, 3);
    // No step is taken before the second member has joined.
    let events = fs::read_to_string(host.join("events.jsonl")).unwrap();
    let mut events = events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let first = events.find(|event| event["event"] == "members").unwrap();
    assert_eq!((first["members"].as_u64(), first["step"].as_u64()), (Some(2), Some(0)), "{first}");
    let process = |words: &str| child_of(launcher.id(), words).unwrap();
    // Those that join listen on the host's interface only.
    process("--listen\x00127.0.0.1:0\0--transport\0tcp");
    send(process("run/members/1"), SystemSignal::KILL);
    wait(&host, 2);
    wait(&host, 3);
    // The host also comes back as a member, which joins with another one's ticket.
    send(process("farflung\0host"), SystemSignal::KILL);
    let other = run.at("run/members/2");
    wait(&other, 2);
    wait(&other, 3);
    wait_until_or(says, || run.at("run/members/0/metrics.jsonl").exists().then_some(()));
    send(launcher.id(), SystemSignal::INT);
    let ended = launcher.wait().unwrap();
    assert_eq!(ended.code(), Some(130), "{}", says());
    let text = says();
    assert!(text.contains("it is started again, restart 1 of 2"), "{text}");
    let resume = "to continue with all members: farflung launch --elastic 2:3 --restarts 2 -- host ";
    let line = text.lines().find(|line| line.starts_with(resume));
    assert!(line.is_some_and(|line| line.ends_with(" --resume auto")), "{text}");
}

/// Slurm sends its warning to the launcher and to its processes, which all save and leave.
#[test]
fn a_warning_ends_all_members_and_is_in_their_events() {
    let run = Run::new();
    let said = fs::File::create(run.at("said.txt")).unwrap();
    let mut command = farflung();
    command.env("FARFLUNG_HOME", run.at("home")).current_dir(run.at(""));
    command.args(["launch", "--elastic", "1:2", "--restarts", "5", "--", "host"]);
    let flags =
        "--listen 127.0.0.1:0 --deadline 5s --steps 1000000 --eval-every 100000 --out run --transport tcp";
    command.args(run.flags(flags)).stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
    let mut launcher = Guarded(command.spawn().unwrap());
    let says = || fs::read_to_string(run.at("said.txt")).unwrap_or_default();
    wait_until_or(says, || (members(&run.at("run")) == Some(2)).then_some(()));
    // A member that has taken no step leaves without a trace.
    wait_until_or(says, || run.at("run/members/1/metrics.jsonl").exists().then_some(()));
    let host = child_of(launcher.id(), "farflung\0host").unwrap();
    let join = child_of(launcher.id(), "run/members/1").unwrap();
    for process in [launcher.id(), host, join] {
        send(process, SystemSignal::USR1);
    }
    let ended = wait_until_or(says, || launcher.try_wait().unwrap());
    assert_eq!(ended.code(), Some(138), "{}", says());
    assert!(!says().contains("is started again"), "{}", says());
    for folder in ["run", "run/members/1"] {
        let events = farflung::events::read(&run.at(folder).join("events.jsonl")).unwrap();
        let last = format!("{:?}", events.last());
        assert!(last.contains("stopped by SIGUSR1"), "{folder}: {last}\n{}", says());
        let saved = farflung::run_dir::latest(&run.at(folder)).unwrap();
        assert!(saved.is_some(), "{folder}: {}", says());
    }
}

#[test]
fn after_a_notice_all_processes_leave_and_none_is_started_again() {
    let run = Run::new();
    let said = fs::File::create(run.at("said.txt")).unwrap();
    let mut command = farflung();
    command.env("FARFLUNG_HOME", run.at("home")).current_dir(run.at(""));
    command.args(["launch", "--elastic", "1:3", "--restarts", "5", "--", "host"]);
    let flags = "--listen 127.0.0.1:0 --deadline 5s --steps 1000000 --eval-every 100000 --out run \
                 --notice-file notice --notice-every 20ms";
    command.args(run.flags(flags)).stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
    let mut launcher = Guarded(command.spawn().unwrap());
    let says = || fs::read_to_string(run.at("said.txt")).unwrap_or_default();
    wait_until_or(says, || (members(&run.at("run")) == Some(3)).then_some(()));
    fs::write(run.at("notice"), "").unwrap();
    let ended = wait_until_or(says, || launcher.try_wait().unwrap());
    assert_eq!(ended.code(), Some(75), "{}", says());
    let text = says();
    assert_eq!(text.matches("it is not started again").count(), 3, "{text}");
    assert!(!text.contains("is started again, restart"), "{text}");
    // The state is saved at least once.
    let folders = ["run", "run/members/1", "run/members/2"].map(|folder| run.at(folder));
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.filter(|name| name.starts_with("step-")).count() > 0, "{text}");
}

#[test]
fn other_commands_are_refused() {
    let run = Run::new();
    let refused = |args: &[&str], reason: &str| {
        let output = farflung().current_dir(run.at("")).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(reason), "{said}");
    };
    refused(&["launch", "--elastic", "2:3", "--", "train"], "`host` with its flags");
    refused(&["launch", "--elastic", "2:3", "--", "host"], "`host --out DIR`");
    refused(&["launch", "--elastic", "2:3", "--", "host", "--stepz", "3"], "--stepz");
    assert!(!run.at("run").exists());
    refused(&["launch", "--elastic", "3:2", "--", "host"], "the smaller first");
    refused(&["launch", "--elastic", "1:2", "-n", "2", "--", "host"], "cannot be used with");
}
