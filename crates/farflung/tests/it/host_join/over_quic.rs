//! Members that connect over QUIC, alone or beside TCP, through a relay of the test and on the loopback only.

use super::*;

/// Starts a relay; returns its URL.
fn relay(run: &Run) -> (Member, String) {
    let mut command = on(run, "relay");
    command.args(["relay", "--listen", "127.0.0.1:0"]);
    let relay = start(run, "relay", command);
    let url = wait_until("the relay", || {
        let text = fs::read_to_string(relay.at.join("out.txt")).unwrap();
        text.lines().next().filter(|_| text.contains('\n')).map(str::to_owned)
    });
    (relay, url)
}

/// Waits until all have saved the same step, and returns whether their weights are equal.
fn agree(run: &Run, all: [&Member; 3]) -> bool {
    let common = || {
        let saved = all.map(|member| saved(run, member));
        let has = |step: &&String| saved.iter().all(|saved| saved.contains_key(*step));
        let step = saved[0].keys().rev().find(has)?;
        Some(saved.each_ref().map(|saved| fs::read(&saved[step]).unwrap()))
    };
    let [a, b, c] = wait_until("a step of all three", common);
    a == b && b == c
}

fn status(run: &Run, ticket: &str) -> String {
    let output = on(run, "eye").args(["status", "--ticket-file", ticket]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn members_meet_over_quic_alone_one_is_killed_and_another_comes() {
    let run = Run::new();
    let (_relay, url) = relay(&run);
    let more = format!(
        "--steps 1000000 --out host --checkpoint-every 20 --keep-last 0 --transport iroh --relay {url}"
    );
    let host = host(&run, &more);
    let a = join(&run, "a", "host/run.ticket", &[]);
    let b = join(&run, "b", "host/run.ticket", &[]);
    members(&run, &host, 3);
    let status = status(&run, "host/run.ticket");
    assert_eq!(status.matches(&url).count(), 3, "{status}");
    assert!(status.matches("quic:127.0.0.1:").count() >= 3, "{status}");
    assert!(agree(&run, [&host, &a, &b]), "the members' weights differ");
    b.send(Signal::KILL);
    members(&run, &host, 2);
    // Through a member's own ticket.
    let c = join(&run, "c", "a/run.ticket", &[]);
    members(&run, &host, 3);
    trains(&run, &c);
    assert!(agree(&run, [&host, &a, &c]), "the members' weights differ");
    host.send(Signal::KILL);
    members(&run, &c, 2);
    // The host's folder shows that the run continues on other members.
    let again = format!("--steps 9 --out host --resume auto --transport iroh --relay {url}");
    let again = on(&run, "host").arg("host").args(run.flags(&again)).output().unwrap();
    assert_eq!(again.status.code(), Some(2), "{}", said(&again));
    assert!(said(&again).contains("the run of this folder is still running"), "{}", said(&again));
}

#[test]
fn two_members_meet_over_tcp_and_a_third_over_quic() {
    let run = Run::new();
    let (_relay, url) = relay(&run);
    let more = format!("--steps 1000000 --out host --checkpoint-every 20 --keep-last 0 --relay {url}");
    let host = host(&run, &more);
    let a = join(&run, "a", "host/run.ticket", &[]);
    let b = join(&run, "b", "host/run.ticket", &["--transport", "iroh"]);
    members(&run, &host, 3);
    let status = status(&run, "host/run.ticket");
    let of_tcp = |line: &&str| line.split_whitespace().any(|word| word.starts_with("127.0.0.1:"));
    assert_eq!(status.lines().filter(of_tcp).count(), 2, "{status}");
    // The two that have sockets share memory, as they do without the third.
    wait_until("shared memory", || {
        ([&host, &a, &b].map(|member| shares_with(member.id())) == [1, 1, 0]).then_some(())
    });
    assert!(agree(&run, [&host, &a, &b]), "the members' weights differ");
    a.send(Signal::KILL);
    members(&run, &host, 2);
    let c = join(&run, "c", "b/run.ticket", &[]);
    members(&run, &host, 3);
    trains(&run, &c);
    assert!(agree(&run, [&host, &b, &c]), "the members' weights differ");
}

/// Two processes with one key would get each other's messages from the relay: the second one is told before it
/// connects.
#[test]
fn members_of_one_machine_with_one_key_are_told_at_once_and_with_keys_of_their_own_they_train() {
    let run = Run::new();
    let (_relay, url) = relay(&run);
    let more = format!("--steps 1000000 --out host --checkpoint-every 20 --keep-last 0 --relay {url}");
    let host = host(&run, &more);
    let joins = |name: &'static str, more: &[&str]| {
        let mut command = on(&run, "host");
        command.args(["join", "--listen", "127.0.0.1:0", "--threads", "1", "--out", name]);
        command.args(["--ticket-file", "host/run.ticket", "--data", run.at("text.txt").to_str().unwrap()]);
        command.args(more);
        start(&run, name, command)
    };
    let refused = joins("a", &[]).ends();
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    let text = said(&refused);
    assert!(text.contains("home-host/key") && text.contains("--key-file"), "{text}");
    assert!(!run.at("a").exists(), "it has a folder already");
    // The same file by another name.
    std::os::unix::fs::symlink(run.at("home-host/key"), run.at("other")).unwrap();
    let refused = joins("a", &["--key-file", "other"]).ends();
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    let second = joins("a", &["--key-file", "key2"]);
    members(&run, &host, 2);
    trains(&run, &second);
    // Who only asks does not disturb the members.
    let status = on(&run, "host").args(["status", "--ticket-file", "host/run.ticket"]).output().unwrap();
    assert!(status.status.success(), "{}", said(&status));
    members(&run, &host, 2);
}
