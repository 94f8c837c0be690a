//! Newcomers that wait for the state of a run: they end when they are asked to, and when the run is gone, and
//! no newcomer holds up the members for long. The host's link is so slow that the state takes minutes.

use std::fs;

use rustix::process::Signal;

use super::{Member, Run, host, join, said, said_by};
use crate::child::wait_until_or;

/// The uplink of the host: the state takes three minutes.
const SLOW: &str = "--layers 2 --dim 64 --context 64 --up 0.064mbit --deadline 20s";

fn waits_for_the_state(newcomer: &Member) {
    wait_until_or(
        || said_by(newcomer),
        || said_by(newcomer).contains("asks for a copy of the state").then_some(()),
    );
}

fn steps(run: &Run) -> usize {
    fs::read_to_string(run.at("host/metrics.jsonl")).unwrap_or_default().lines().count()
}

#[test]
fn a_newcomer_that_waits_for_the_state_ends_when_it_is_asked_to() {
    let run = Run::new();
    let host = host(&run, &format!("--steps 1000000 --out host {SLOW}"));
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let name = if code == 130 { "a" } else { "b" };
        let newcomer = join(&run, name, "host/run.ticket", &[]);
        waits_for_the_state(&newcomer);
        newcomer.send(signal);
        let ended = newcomer.ends();
        assert_eq!(ended.status.code(), Some(code), "{}", said(&ended));
    }
    let before = steps(&run);
    wait_until_or(|| said_by(&host), || (steps(&run) > before + 5).then_some(()));
}

#[test]
fn a_newcomer_of_a_run_that_is_gone_ends_by_itself() {
    for signal in [Signal::KILL, Signal::INT] {
        let run = Run::new();
        let host = host(&run, &format!("--steps 1000000 --out host {SLOW}"));
        let newcomer = join(&run, "a", "host/run.ticket", &[]);
        waits_for_the_state(&newcomer);
        host.send(signal);
        drop(host.ends());
        let ended = newcomer.ends();
        assert_eq!(ended.status.code(), Some(75), "{signal:?}: {}", said(&ended));
    }
}

#[test]
fn a_newcomer_for_which_all_would_wait_too_long_is_refused_and_the_run_goes_on() {
    let run = Run::new();
    let host = host(&run, &format!("--steps 1000000 --out host {SLOW} --join-wait 5s"));
    let newcomer = join(&run, "a", "host/run.ticket", &[]);
    let ended = newcomer.ends();
    assert_eq!(ended.status.code(), Some(2), "{}", said(&ended));
    assert!(said(&ended).contains("longer than --join-wait 5s"), "{}", said(&ended));
    let told = fs::read_to_string(run.at("host/events.jsonl")).unwrap();
    assert!(told.contains("\"event\":\"unadmitted\"") && !told.contains("\"event\":\"members\""), "{told}");
    let before = steps(&run);
    wait_until_or(|| said_by(&host), || (steps(&run) > before + 5).then_some(()));
}

#[test]
fn members_that_wait_for_a_newcomer_go_on_without_it_when_it_freezes_and_when_they_are_asked_to_stop() {
    let run = Run::new();
    let host = host(&run, &format!("--steps 1000000 --out host {SLOW} --join-wait 1h"));
    let waits = |count: usize| {
        wait_until_or(
            || said_by(&host),
            || (said_by(&host).matches("during which all members wait").count() == count).then_some(()),
        );
    };
    let frozen = join(&run, "a", "host/run.ticket", &[]);
    waits(1);
    frozen.send(Signal::STOP);
    let before = steps(&run);
    wait_until_or(|| said_by(&host), || (steps(&run) > before + 5).then_some(()));
    // The next one is not delayed by it. The host is asked to stop while it sends the state.
    let next = join(&run, "b", "host/run.ticket", &[]);
    waits(2);
    host.send(Signal::INT);
    let ended = host.ends();
    assert_eq!(ended.status.code(), Some(130), "{}", said(&ended));
    assert!(said(&ended).contains("is saved in host/step-"), "{}", said(&ended));
    let ended = next.ends();
    assert_eq!(ended.status.code(), Some(75), "{}", said(&ended));
}

/// The members' own pings wait behind the state that they send: the newcomer is heard all the same.
#[test]
fn a_newcomer_whose_state_takes_seconds_is_admitted() {
    let run = Run::new();
    let slow = "--layers 2 --dim 64 --context 64 --stages 2 --up 2mbit --deadline 20s";
    let host = host(&run, &format!("--steps 1000000 --out host {slow}"));
    let newcomer = join(&run, "a", "host/run.ticket", &[]);
    super::members(&run, &host, 2);
    assert_eq!(said_by(&host).matches("during which all members wait").count(), 1, "{}", said_by(&host));
    drop(newcomer);
}
