//! A member keeps no descriptor and no memory of members that have gone, however they went.

use super::*;

/// The descriptors that a process has open.
fn descriptors(process: u32) -> usize {
    fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}

/// The resident memory of a process that it shares with others, in KiB.
fn shared_memory(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssShmem:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Runs `goes` on each of some members, one after the other, with another one that stays. Afterwards the host
/// has as many descriptors, and as much shared memory, as after the first two.
fn holds_as_much(transport: &str, goes: impl Fn(&Run, &Member, usize)) {
    let run = Run::new();
    let host = host(&run, &format!("--steps 1000000 --out host --transport {transport}"));
    let stays = join(&run, "b", "host/run.ticket", &[]);
    members(&run, &host, 2);
    let now = || (descriptors(host.id()), shared_memory(host.id()));
    let mut least = None;
    for turn in 0..6 {
        goes(&run, &host, turn);
        if turn < 2 {
            let (files, memory) = now();
            least = Some(least.map_or((files, memory), |(f, m): (usize, u64)| (f.max(files), m.max(memory))));
        }
    }
    let least = least.unwrap();
    // What is written from time to time opens a file for a moment.
    let as_much = || {
        let (files, memory) = now();
        (files <= least.0 && memory <= least.1).then_some(())
    };
    wait_until_or(|| format!("{:?} again, not {:?}: {}", least, now(), said_by(&stays)), as_much);
}

fn comes(run: &Run, host: &Member) -> Member {
    let member = join(run, "a", "host/run.ticket", &[]);
    members(run, host, 3);
    member
}

#[test]
fn members_that_leave_or_are_killed_leave_nothing_in_shared_memory() {
    holds_as_much("auto", |run, host, turn| {
        let member = comes(run, host);
        wait_until("shared memory", || (shares_with(host.id()) == 2).then_some(()));
        member.send(if turn.is_multiple_of(2) { Signal::INT } else { Signal::KILL });
        members(run, host, 2);
        drop(member.ends());
    });
}

#[test]
fn members_that_leave_or_are_killed_leave_nothing_over_tcp() {
    holds_as_much("tcp", |run, host, turn| {
        let member = comes(run, host);
        member.send(if turn.is_multiple_of(2) { Signal::INT } else { Signal::KILL });
        members(run, host, 2);
        drop(member.ends());
    });
}

#[test]
fn newcomers_that_are_refused_or_give_up_leave_nothing() {
    holds_as_much("auto", |run, host, turn| {
        if turn.is_multiple_of(2) {
            let mut command = on(run, "a");
            command.args([
                "join",
                "--listen",
                "127.0.0.1:0",
                "--ticket-file",
                "host/run.ticket",
                "--out",
                "a",
            ]);
            fs::write(run.at("other.txt"), "another text ".repeat(500)).unwrap();
            let refused = start(run, "a", {
                command.args(["--data", "other.txt"]);
                command
            })
            .ends();
            assert!(!refused.status.success() && said(&refused).contains("data"), "{}", said(&refused));
            return;
        }
        let gives_up = join(run, "a", "host/run.ticket", &[]);
        // It may be a member by then.
        wait_until("its connection", || (shares_with(host.id()) == 2).then_some(()));
        gives_up.send(Signal::KILL);
        drop(gives_up.ends());
        wait_until("its end", || (shares_with(host.id()) == 1).then_some(()));
    });
}

#[test]
fn a_member_that_was_frozen_and_joins_again_is_held_once() {
    holds_as_much("auto", |run, host, turn| {
        if turn > 2 {
            return;
        }
        let member = comes(run, host);
        member.send(Signal::STOP);
        members(run, host, 2);
        member.send(Signal::CONT);
        members(run, host, 3);
        wait_until("one connection", || (shares_with(host.id()) == 2).then_some(()));
        member.send(Signal::INT);
        drop(member.ends());
        members(run, host, 2);
    });
}
