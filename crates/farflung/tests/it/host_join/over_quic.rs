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
