//! Hosts that are started again from a checkpoint of a run that had several members.

use super::*;

/// Returns the events of this kind that a member has written.
fn events(run: &Run, member: &Member, kind: &str) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(run.at(member.name).join("events.jsonl")).unwrap_or_default();
    let events = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    events.filter(|event| event["event"] == kind).collect()
}

fn newest(saved: &BTreeMap<String, PathBuf>) -> u64 {
    saved.keys().map(|name| name.rsplit('-').next().unwrap().parse().unwrap()).max().unwrap_or(0)
}

/// Waits for a checkpoint of a later step than `step`.
fn saves_after(run: &Run, member: &Member, step: u64) {
    wait_until("a checkpoint", || (newest(&saved(run, member)) > step).then_some(()));
}

/// Starts the host again with these arguments, and waits until it has trained a step.
fn goes_on(run: &Run, args: &[&str]) -> Member {
    let rows = || fs::read_to_string(run.at("host/metrics.jsonl")).unwrap().lines().count();
    let mut command = on(run, "host");
    command.args(["host", "--listen", "127.0.0.1:0", "--out", "host", "--resume", "auto"]).args(args);
    let mut again = start(run, "host", command);
    wait_until("its resume", || {
        let ended = again.process.as_mut().unwrap().try_wait().unwrap();
        assert!(ended.is_none(), "{}", said_by(&again));
        (!events(run, &again, "resumed").is_empty()).then_some(())
    });
    let before = rows();
    wait_until_or(|| said_by(&again), || (rows() > before).then_some(()));
    again
}

/// The residuals of the outer average are those of a third of the values: a host alone has others.
#[test]
fn a_host_goes_on_alone_after_local_steps_of_three() {
    let run = Run::new();
    let flags = "--steps 1000000 --sync diloco --sync-every 4 --checkpoint-every 8 --out host";
    let host = host(&run, flags);
    let others = ["a", "b"].map(|name| join(&run, name, "host/run.ticket", &[]));
    members(&run, &host, 3);
    saves_after(&run, &host, newest(&saved(&run, &host)) + 16);
    for member in [&host].into_iter().chain(&others) {
        member.send(Signal::KILL);
    }
    drop((host.ends(), others.map(Member::ends)));
    let again = goes_on(&run, &["--config", "host/config.toml"]);
    assert!(said_by(&again).contains("residuals of the codec"), "{}", said_by(&again));
    // A host that was alone when it saved has its own residuals.
    saves_after(&run, &again, newest(&saved(&run, &again)) + 8);
    again.send(Signal::KILL);
    drop(again.ends());
    let again = goes_on(&run, &["--config", "host/config.toml"]);
    assert!(!said_by(&again).contains("residuals of the codec"), "{}", said_by(&again));
}

/// The folder has the settings as they were given, not the share of the member.
#[test]
fn a_host_goes_on_after_shares_have_followed_speed() {
    let run = Run::new();
    let host =
        host(&run, "--steps 1000000 --microbatches 8 --dim 32 --context 32 --checkpoint-every 5 --out host");
    let slow = join(&run, "a", "host/run.ticket", &[]);
    members(&run, &host, 2);
    wait_until_or(
        || said_by(&host),
        || {
            // The machine of this member is slow.
            slow.send(Signal::STOP);
            std::thread::sleep(std::time::Duration::from_millis(15));
            slow.send(Signal::CONT);
            let shares = events(&run, &host, "shares").pop()?["microbatches"].clone();
            (shares[0] != shares[1]).then_some(())
        },
    );
    saves_after(&run, &host, newest(&saved(&run, &host)) + 10);
    for member in [host, slow] {
        member.send(Signal::KILL);
        let folder = run.at(member.name);
        let settings = fs::read_to_string(folder.join("config.toml")).unwrap();
        assert!(settings.contains("\nmicrobatches = 8"), "{settings}");
        assert!(settings.contains("\nworkers = 1"), "{settings}");
        drop(member.ends());
    }
    goes_on(&run, &["--config", "host/config.toml"]);
}
