//! `farflung host`, `join` and `status` as processes: members are killed, frozen and stopped, also the host.
//! The members that can continue do so, and all have the same bits.

#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[cfg(feature = "iroh")]
mod over_quic;
mod again;
mod leaving;
mod newcomers;
mod come_and_go;
mod from_weights;
mod records;
mod resumed;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use crate::child::{send, shares_with, wait_until, wait_until_or};
use crate::tiny::{Run, farflung};
use rustix::process::Signal;

/// A process of a test, which is killed at the end of the test.
struct Member {
    name: &'static str,
    process: Option<Child>,
    /// Folder of the files with its output; a pipe that is not read would fill up.
    at: PathBuf,
}

impl Member {
    fn id(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    fn send(&self, signal: Signal) {
        send(self.id(), signal);
    }

    /// Waits for the process to end.
    fn ends(mut self) -> Output {
        let status = self.process.take().unwrap().wait().unwrap();
        Output { status, stdout: fs::read(self.at.join("out.txt")).unwrap(), stderr: self.stderr() }
    }

    fn stderr(&self) -> Vec<u8> {
        fs::read(self.at.join("err.txt")).unwrap()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Returns the `farflung` command with a home of its own, like a separate machine.
fn on(run: &Run, machine: &str) -> Command {
    let mut command = farflung();
    command.env("FARFLUNG_HOME", run.at(&format!("home-{machine}"))).current_dir(run.at(""));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts the command; it is killed at the end of the test.
fn start(run: &Run, name: &'static str, mut command: Command) -> Member {
    let at = run.at(&format!("home-{name}"));
    fs::create_dir_all(&at).unwrap();
    let file = |name| fs::File::create(at.join(name)).unwrap();
    command.stdout(file("out.txt")).stderr(file("err.txt"));
    Member { name, process: Some(command.spawn().unwrap()), at }
}

fn host(run: &Run, more: &str) -> Member {
    host_on(run, "host", more)
}

/// Starts a host on a machine of this name, whose folder must have the same.
fn host_on(run: &Run, name: &'static str, more: &str) -> Member {
    let deadline = if more.contains("--deadline") { "" } else { "--deadline 2s" };
    let args = format!("--listen 127.0.0.1:0 {deadline} --eval-every 100000 --eval-batches 1 {more}");
    let mut command = on(run, name);
    command.arg("host").args(run.flags(&args));
    let mut host = start(run, name, command);
    wait_until("the ticket", || {
        let ended = host.process.as_mut().unwrap().try_wait().unwrap();
        assert!(ended.is_none(), "{}", String::from_utf8_lossy(&host.stderr()));
        run.at(name).join("run.ticket").exists().then_some(())
    });
    host
}

fn join(run: &Run, name: &'static str, ticket: &str, more: &[&str]) -> Member {
    let mut command = on(run, name);
    command.args([
        "join",
        "--listen",
        "127.0.0.1:0",
        "--threads",
        "1",
        "--ticket-file",
        ticket,
        "--out",
        name,
    ]);
    command.args(["--data", run.at("text.txt").to_str().unwrap()]).args(more);
    start(run, name, command)
}

/// Waits until a member's last event says that there are `count` members.
fn members(run: &Run, member: &Member, count: usize) {
    let path = run.at(member.name).join("events.jsonl");
    let events = || fs::read_to_string(&path).unwrap_or_default();
    let last = |text: &str| {
        let mut changes = text.lines().filter(|line| line.contains("\"event\":\"members\""));
        changes.next_back().is_some_and(|line| line.contains(&format!("\"members\":{count},")))
    };
    let what = || {
        let said = String::from_utf8_lossy(&member.stderr()).into_owned();
        format!("{count} members of {}:\n{}\n{said}", member.name, events())
    };
    wait_until_or(what, || last(&events()).then_some(()));
}

/// Waits until a new member has trained a step.
fn trains(run: &Run, member: &Member) {
    let path = run.at(member.name).join("metrics.jsonl");
    wait_until("its first step", || fs::metadata(&path).is_ok_and(|m| m.len() > 0).then_some(()));
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn said_by(member: &Member) -> String {
    String::from_utf8_lossy(&member.stderr()).into_owned()
}

/// Returns the weights that a member has saved, by step.
fn saved(run: &Run, member: &Member) -> BTreeMap<String, PathBuf> {
    let entries = fs::read_dir(run.at(member.name)).unwrap().map(|entry| entry.unwrap());
    let steps = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("step-"));
    let weights = |step: fs::DirEntry| (step.file_name().to_string_lossy().into_owned(), step.path());
    steps.map(weights).map(|(step, path)| (step, path.join("model.safetensors"))).collect()
}

#[test]
fn members_come_at_once_freeze_wake_and_leave_while_the_others_train() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host");
    let a = join(&run, "a", "host/run.ticket", &[]);
    let b = join(&run, "b", "host/run.ticket", &[]);
    members(&run, &host, 3);
    let status = on(&run, "eye").args(["status", "--ticket-file", "host/run.ticket"]).output().unwrap();
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.contains(" of 1000000\n") && status.contains(" (answers)\n"), "{status}");
    // Member `a` is frozen and given up; after it is resumed, it joins again.
    a.send(Signal::STOP);
    members(&run, &host, 2);
    a.send(Signal::CONT);
    members(&run, &host, 3);
    // The host is frozen and resumed in the same way, after the other members have learned of the change.
    members(&run, &b, 3);
    host.send(Signal::STOP);
    members(&run, &b, 2);
    // The view without the host has the hash of the weights with which it began, although the host, which fell
    // silent, is the one that would have told it.
    let text = fs::read_to_string(run.at("b/promises.json")).unwrap();
    let promises: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(promises["view"]["members"].as_array().unwrap().len(), 2, "{text}");
    assert!(
        promises["view"]["weights"].to_string().contains(|c: char| c.is_ascii_digit() && c != '0'),
        "{text}"
    );
    host.send(Signal::CONT);
    members(&run, &b, 3);
    // Member `a` leaves normally, with a checkpoint.
    a.send(Signal::INT);
    let left = a.ends();
    assert_eq!(left.status.code(), Some(130), "{}", said(&left));
    assert!(said(&left).contains("is saved in a/step-"), "{}", said(&left));
    members(&run, &host, 2);
    // Member `c` leaves because of a notice that its machine will be taken away.
    let c = join(&run, "c", "host/run.ticket", &["--notice-file", "notice", "--notice-every", "20ms"]);
    members(&run, &host, 3);
    fs::write(run.at("notice"), "").unwrap();
    let left = c.ends();
    assert_eq!(left.status.code(), Some(143), "{}", said(&left));
    assert!(
        said(&left).contains("notice exists: this process stops after the current step"),
        "{}",
        said(&left)
    );
    members(&run, &host, 2);
    // The host is killed. `b` can continue alone: since the host was given up before, another member is the
    // tie-breaker.
    members(&run, &b, 2);
    host.send(Signal::KILL);
    members(&run, &b, 1);
    b.send(Signal::INT);
    let ended = b.ends();
    assert_eq!(ended.status.code(), Some(130), "{}", said(&ended));
}

/// The host's own job has no pipelines, because it begins alone. It joins again with the settings of the run.
#[test]
fn a_host_of_pipelines_that_was_frozen_joins_again() {
    let run = Run::new();
    let pipelines = "--layers 2 --stages 2 --microbatches 2";
    let host = host(&run, &format!("--steps 1000000 --out host {pipelines}"));
    // `a` completes the pipeline, and `b` comes as a spare.
    let a = join(&run, "a", "host/run.ticket", &[]);
    members(&run, &host, 2);
    let b = join(&run, "b", "host/run.ticket", &[]);
    members(&run, &a, 3);
    // By then each part has been copied to the other rank.
    let steps = || fs::read_to_string(run.at("host/metrics.jsonl")).unwrap().lines().count();
    let before = steps();
    wait_until("steps", || (steps() > before + 300).then_some(()));
    host.send(Signal::STOP);
    // `b` takes the host's place.
    members(&run, &a, 2);
    host.send(Signal::CONT);
    members(&run, &a, 3);
    // Now the host is the spare.
    let said = said_by(&a);
    assert!(
        said.contains("3 members continue") && said.contains("1 pipeline of 2, and 1 without a part"),
        "{said}"
    );
    assert!(!said_by(&b).contains("error"), "{}", said_by(&b));
}

/// Each newcomer fetches the state while the others take steps, and then has the same bits.
#[test]
fn newcomers_fetch_the_state_while_the_others_train() {
    let run = Run::new();
    // Steps take much longer than a newcomer needs to replay them.
    let more = "--dim 64 --context 64 --batch 128 --deadline 20s --checkpoint-every 2 --keep-last 0";
    let host = host(&run, &format!("--steps 1000000 --out host {more}"));
    let mut names = ["a", "b"].map(|name| (name, 0));
    let mut joined = Vec::new();
    for (number, (name, came)) in names.iter_mut().enumerate() {
        let member = join(&run, name, "host/run.ticket", &[]);
        members(&run, &host, number + 2);
        trains(&run, &member);
        let events = fs::read_to_string(run.at("host/events.jsonl")).unwrap();
        let events = events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let events: Vec<_> = events.collect();
        let newest = |kind: &str| events.iter().rfind(|event| event["event"] == kind).unwrap().clone();
        let (follows, comes) = (newest("following"), newest("members"));
        let step = |event: &serde_json::Value| event["step"].as_u64().unwrap();
        assert_eq!(follows["member"], comes["joined"][0], "{follows} {comes}");
        assert!(step(&follows) < step(&comes), "steps while it fetches: {follows} {comes}");
        let admitting = newest("admitting");
        // When it is admitted, the newcomer takes only records of steps since.
        let (takes, record) = (admitting["state"].as_u64().unwrap(), follows["record"].as_u64().unwrap());
        let since = step(&admitting) - step(&follows);
        assert!(takes.is_multiple_of(record) && takes / record <= since, "{follows} {admitting}");
        let said = said_by(&member);
        assert!(
            said.contains("fetches the state of step") && said.contains("has replayed to step"),
            "{said}"
        );
        *came = step(&comes);
        joined.push(member);
    }
    let (_, came) = names[1];
    let both = || {
        let (host, last) = (saved(&run, &host), saved(&run, &joined[1]));
        let number = |name: &str| name.rsplit('-').next().unwrap().parse::<u64>().unwrap();
        let step = last.keys().find(|name| number(name) > came && host.contains_key(*name))?;
        Some((fs::read(&host[step]).unwrap(), fs::read(&last[step]).unwrap()))
    };
    let (of_host, of_last) = wait_until_or(|| said_by(&host), both);
    assert!(of_host == of_last, "the newcomer has the host's bits");
}

/// The loss is noticed long before the deadline: a member that is only slow would have announced that it is
/// alive.
#[test]
fn a_frozen_member_is_noticed_when_a_step_takes_longer_than_those_before() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host --deadline 1h");
    let a = join(&run, "a", "host/run.ticket", &[]);
    let b = join(&run, "b", "host/run.ticket", &[]);
    members(&run, &host, 3);
    trains(&run, &a);
    trains(&run, &b);
    a.send(Signal::STOP);
    members(&run, &host, 2);
    let events = fs::read_to_string(run.at("host/events.jsonl")).unwrap();
    let lost: serde_json::Value = serde_json::from_str(events.lines().last().unwrap()).unwrap();
    assert!(lost["took_ms"].as_u64().unwrap() < 60_000, "{lost}");
    assert!(
        said_by(&b).contains("does not answer: the step is stopped")
            || said_by(&host).contains("does not answer")
    );
    a.send(Signal::CONT);
    members(&run, &host, 3);
}

/// Two of three members are frozen. The third one may not go on without them, and says for whom it waits. With
/// equal shares, no member tells how long it computes: none waits for a slower one.
#[test]
fn the_status_shows_who_does_not_answer() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host --deadline 1h --balance equal");
    let a = join(&run, "a", "host/run.ticket", &[]);
    trains(&run, &a);
    let b = join(&run, "b", "host/run.ticket", &[]);
    trains(&run, &b);
    let steps = || fs::read_to_string(run.at("host/metrics.jsonl")).unwrap().lines().count();
    let before = steps();
    wait_until("steps", || (steps() > before + 20).then_some(()));
    a.send(Signal::STOP);
    b.send(Signal::STOP);
    let status = || {
        let told = on(&run, "eye").args(["status", "--ticket-file", "host/run.ticket"]).output().unwrap();
        String::from_utf8_lossy(&told.stdout).into_owned()
    };
    // Its number, its share, and the view with which it became a member come first.
    let waits_for = |text: &str| -> Option<String> {
        let own = text.lines().find(|line| line.ends_with("(answers)"))?;
        own.split_whitespace().nth(3).map(str::to_owned)
    };
    let waits = || {
        let text = status();
        let other = waits_for(&text).filter(|other| other != "0")?;
        text.lines().any(|line| line.split_whitespace().next() == Some(&other)).then_some(())
    };
    wait_until_or(|| format!("{}{}", status(), said_by(&host)), waits);
    a.send(Signal::CONT);
    b.send(Signal::CONT);
    let before = steps();
    wait_until_or(|| said_by(&host), || (steps() > before + 20).then_some(()));
}

/// A member resumes at about the time at which it is given up: it either is still a member, or it joins again.
#[test]
fn a_member_that_stops_for_a_moment_does_not_hold_up_the_run() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host --deadline 1h");
    let a = join(&run, "a", "host/run.ticket", &[]);
    trains(&run, &a);
    let b = join(&run, "b", "host/run.ticket", &[]);
    trains(&run, &b);
    let steps = || fs::read_to_string(run.at("host/metrics.jsonl")).unwrap().lines().count();
    for pause in [1_900, 2_300, 2_600, 2_900, 3_300] {
        a.send(Signal::STOP);
        std::thread::sleep(std::time::Duration::from_millis(pause));
        a.send(Signal::CONT);
        let before = steps();
        let what = || format!("steps after a pause of {pause} ms: {}\n{}", said_by(&host), said_by(&b));
        wait_until_or(what, || (steps() > before + 20).then_some(()));
        wait_until_or(what, || {
            let status =
                on(&run, "eye").args(["status", "--ticket-file", "host/run.ticket"]).output().unwrap();
            let text = String::from_utf8_lossy(&status.stdout).into_owned();
            (text.matches("127.0.0.1:").count() == 3).then_some(())
        });
    }
}

#[test]
fn the_host_may_go_while_the_others_are_more_than_half() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host --checkpoint-every 20 --keep-last 0 --name office");
    let a = join(&run, "a", "host/run.ticket", &["--name", "home-3"]);
    trains(&run, &a);
    let b = join(&run, "b", "host/run.ticket", &[]);
    trains(&run, &b);
    let together = [&host, &a, &b].map(Member::id);
    wait_until("shared memory", || together.iter().all(|&id| shares_with(id) == 2).then_some(()));
    host.send(Signal::KILL);
    members(&run, &b, 2);
    // `b` knows those that were there before it by their names.
    let told = fs::read_to_string(run.at("b/events.jsonl")).unwrap();
    assert!(told.contains("\"left\":[0],\"names\":{\"0\":\"office\"}"), "{told}");
    let status = on(&run, "eye").args(["status", "--ticket-file", "b/run.ticket"]).output().unwrap();
    let told = String::from_utf8_lossy(&status.stdout);
    assert!(told.contains(", home-3\n") && told.contains("office lost; 2 members continue"), "{told}");
    // The host's folder shows that the run continues on other members.
    let again = on(&run, "host").arg("host").args(run.flags("--steps 9 --out host --resume auto")).output();
    let again = again.unwrap();
    assert_eq!(again.status.code(), Some(2), "{}", said(&again));
    assert!(said(&again).contains("the run of this folder is still running"), "{}", said(&again));
    // A new member can join with another member's ticket.
    let c = join(&run, "c", "b/run.ticket", &[]);
    trains(&run, &c);
    // All three members have the same bits after the same step.
    let common = || {
        let [a, b, c] = [&a, &b, &c].map(|member| saved(&run, member));
        let step = a.keys().rev().find(|step| b.contains_key(*step) && c.contains_key(*step))?;
        Some([&a, &b, &c].map(|saved| fs::read(&saved[step]).unwrap()))
    };
    let [of_a, of_b, of_c] = wait_until("a step of all three", common);
    assert!(of_a == of_b && of_b == of_c, "the members' weights differ");
}

#[test]
fn sockets_alone_carry_what_members_say_where_the_run_says_so() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host --transport tcp");
    let a = join(&run, "a", "host/run.ticket", &[]);
    trains(&run, &a);
    assert_eq!([&host, &a].map(|member| shares_with(member.id())), [0, 0]);
}

#[test]
fn half_of_the_members_without_the_tie_breaker_save_and_end() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host");
    let a = join(&run, "a", "host/run.ticket", &[]);
    trains(&run, &a);
    host.send(Signal::KILL);
    let ended = a.ends();
    assert_eq!(ended.status.code(), Some(75), "{}", said(&ended));
    let text = said(&ended);
    assert!(
        text.contains(
            "no majority: this member hears 1 of 2 members, itself included, without the tie-breaker"
        ),
        "{text}"
    );
    assert!(text.contains("is saved in a/step-"), "{text}");
}

#[test]
fn whoever_does_not_belong_is_refused_and_the_run_goes_on() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host");
    let refused = |member: Member, code: i32, reason: &str| {
        let ended = member.ends();
        assert_eq!(ended.status.code(), Some(code), "{}", said(&ended));
        assert!(said(&ended).contains(reason), "{reason}: {}", said(&ended));
    };
    let ticket = fs::read_to_string(run.at("host/run.ticket")).unwrap();
    fs::write(run.at("short.ticket"), &ticket[..ticket.len() / 2]).unwrap();
    refused(join(&run, "a", "short.ticket", &[]), 2, "ticket");
    fs::write(run.at("other.txt"), "another text ".repeat(400)).unwrap();
    refused(join(&run, "b", "host/run.ticket", &["--data", "other.txt"]), 2, "data");
    // This ticket has the right address, but another host's key.
    let show =
        on(&run, "other").args(["ticket", "--show", "--ticket-file", "host/run.ticket"]).output().unwrap();
    let shown = String::from_utf8_lossy(&show.stdout).into_owned();
    let at = shown.split_whitespace().find(|word| word.starts_with("127.0.0.1:")).unwrap();
    let made = on(&run, "other").args(["ticket", "--address", at, "--out", "other.ticket"]).output().unwrap();
    assert!(made.status.success(), "{}", said(&made));
    refused(join(&run, "d", "other.ticket", &[]), 2, "key");
    // A second host for the same folder is rejected.
    let second = on(&run, "host").arg("host").args(run.flags("--steps 5 --out host --resume auto")).output();
    let second = second.unwrap();
    assert!(!second.status.success());
    assert!(said(&second).contains("host is in use by another run"), "{}", said(&second));
    let good = join(&run, "c", "host/run.ticket", &[]);
    members(&run, &host, 2);
    drop(good);
    members(&run, &host, 1);
}

#[test]
fn an_expired_ticket_is_refused_and_the_run_goes_on() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host --expires 1s");
    std::thread::sleep(std::time::Duration::from_millis(2_500));
    let ended = join(&run, "a", "host/run.ticket", &[]).ends();
    assert_eq!(ended.status.code(), Some(2), "{}", said(&ended));
    let text = said(&ended);
    assert!(text.contains("the ticket expired ") && text.contains("make a new one with"), "{text}");
    let steps = || fs::read_to_string(run.at("host/metrics.jsonl")).unwrap_or_default().lines().count();
    let before = steps();
    wait_until_or(|| said_by(&host), || (steps() > before + 5).then_some(()));
    // The host has seen no member but itself.
    let events = fs::read_to_string(run.at("host/events.jsonl")).unwrap_or_default();
    assert!(!events.contains("\"members\":2,"), "{events}");
}

/// Two pipelines of two: one member is lost, the other three continue, and a new member completes the second
/// pipeline again.
#[test]
fn members_form_pipelines_that_survive_a_loss() {
    let run = Run::new();
    let settings = "--steps 1000000 --out host --stages 2 --microbatches 2 --checkpoint-every 20";
    let host = host(&run, settings);
    let names = ["a", "b", "c"];
    let mut others: Vec<Member> = names.iter().map(|name| join(&run, name, "host/run.ticket", &[])).collect();
    members(&run, &host, 4);
    let steps = || fs::read_to_string(run.at("host/metrics.jsonl")).unwrap_or_default().lines().count();
    let goes_on = |host: &Member, for_steps: usize| {
        let before = steps();
        wait_until_or(|| said_by(host), || (steps() > before + for_steps).then_some(()));
    };
    goes_on(&host, 5);
    let plan = || fs::read_to_string(run.at("host/plan.toml")).unwrap();
    // The third and the fourth member first fetch their parts while the others train on.
    wait_until_or(|| said_by(&host), || plan().contains("data=2,pipeline=2").then_some(()));
    others.remove(2).send(Signal::KILL);
    let tells = |name: &str| {
        let events = fs::read_to_string(run.at(name).join("events.jsonl")).unwrap_or_default();
        events.contains("\"members\":3,\"joined\":[],\"left\":[")
    };
    wait_until_or(|| said_by(&host), || ["host", "a", "b"].iter().all(|name| tells(name)).then_some(()));
    goes_on(&host, 3);
    assert!(plan().contains("data=1,pipeline=3") && plan().contains("[pools]"), "{}", plan());
    let d = join(&run, "d", "host/run.ticket", &[]);
    let steps_of_d = || fs::read_to_string(run.at("d/metrics.jsonl")).unwrap_or_default().lines().count();
    wait_until_or(|| said_by(&d), || (steps_of_d() > 0).then_some(()));
    members(&run, &host, 4);
    goes_on(&host, 5);
    assert!(plan().contains("data=2,pipeline=2"), "{}", plan());
    drop(d);
}
