//! What a member writes down and says: rows of steps that count, its address, its name and its folder.

use super::*;

/// Returns the loss of each step in a member's metrics, as text.
fn losses(run: &Run, member: &Member) -> BTreeMap<u64, String> {
    let text = fs::read_to_string(run.at(member.name).join("metrics.jsonl")).unwrap();
    let rows = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    rows.map(|row| (row["step"].as_u64().unwrap(), row["train_loss"].to_string())).collect()
}

/// The others go back to a copy of the part that the frozen member held, and do the steps since anew.
#[test]
fn a_member_that_joins_again_has_no_rows_of_steps_that_the_others_have_undone() {
    let run = Run::new();
    let pipeline = "--layers 3 --stages 3 --microbatches 3";
    let host = host(&run, &format!("--steps 1000000 --out host {pipeline}"));
    let a = join(&run, "a", "host/run.ticket", &[]);
    members(&run, &host, 2);
    let b = join(&run, "b", "host/run.ticket", &[]);
    members(&run, &host, 3);
    for member in [&a, &b] {
        let before = losses(&run, &host).len();
        wait_until("steps of all", || (losses(&run, &host).len() > before + 200).then_some(()));
        member.send(Signal::STOP);
        members(&run, &host, 2);
        member.send(Signal::CONT);
        members(&run, &host, 3);
        // It drops its rows when it has its state, before its first row.
        let newest = |of: &Member| losses(&run, of).keys().max().copied().unwrap_or(0);
        let joined = newest(&host);
        wait_until("its rows", || (newest(member) > joined).then_some(()));
    }
    let (of_a, of_b) = (losses(&run, &a), losses(&run, &b));
    // The host's rows are written at the same time as the others'.
    let last = of_a.keys().chain(of_b.keys()).max().copied().unwrap();
    wait_until("the host's rows", || losses(&run, &host).keys().any(|&step| step > last).then_some(()));
    let of_host = losses(&run, &host);
    for (step, loss) in of_a.iter().chain(&of_b) {
        assert_eq!(Some(loss), of_host.get(step), "step {step}");
    }
}

#[test]
fn an_address_that_nobody_can_resolve_is_refused_at_once() {
    let run = Run::new();
    for address in ["no such host:29500", "nowhere"] {
        let host = run.flags(&format!("--listen 127.0.0.1:0 --steps 1 --out {}", run.at("host").display()));
        for command in ["host", "join"] {
            let args = if command == "host" { host.clone() } else { Vec::new() };
            let ended = on(&run, "x").arg(command).args(args).args(["--address", address]).output().unwrap();
            assert_eq!(ended.status.code(), Some(2), "{}", said(&ended));
            assert!(said(&ended).contains("`address`") && said(&ended).contains(address), "{}", said(&ended));
        }
    }
}

#[test]
fn a_newcomer_with_the_name_of_a_member_is_refused_and_that_member_may_come_again() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host --name shed");
    let a = join(&run, "a", "host/run.ticket", &["--name", "attic"]);
    members(&run, &host, 2);
    // The members tell their names after the next step.
    let status = || {
        let told = on(&run, "eye").args(["status", "--ticket-file", "host/run.ticket"]).output().unwrap();
        String::from_utf8_lossy(&told.stdout).contains("attic").then_some(())
    };
    wait_until("the names", status);
    for name in ["shed", "attic"] {
        let twin = join(&run, "twin", "host/run.ticket", &["--name", name]).ends();
        assert_eq!(twin.status.code(), Some(2), "{}", said(&twin));
        assert!(said(&twin).contains("`name`") && said(&twin).contains(name), "{}", said(&twin));
    }
    a.send(Signal::STOP);
    members(&run, &host, 1);
    a.send(Signal::CONT);
    members(&run, &host, 2);
    // Its process is started again, perhaps before the others have missed it.
    a.send(Signal::KILL);
    drop(a.ends());
    let again = join(&run, "a", "host/run.ticket", &["--name", "attic"]);
    trains_anew(&run, &again);
}

/// Waits until a member has joined and trained a step; its folder may have rows of before.
fn trains_anew(run: &Run, member: &Member) {
    wait_until_or(|| said_by(member), || said_by(member).contains("joined at step").then_some(()));
    let before = losses(run, member).len();
    wait_until_or(|| said_by(member), || (losses(run, member).len() > before).then_some(()));
}

#[test]
fn a_member_whose_folder_is_removed_says_so_and_the_others_go_on() {
    let run = Run::new();
    let host = host(&run, "--steps 1000000 --out host --checkpoint-every 400 --context 64 --dim 64");
    let a = join(&run, "a", "host/run.ticket", &[]);
    members(&run, &host, 2);
    let b = join(&run, "b", "host/run.ticket", &[]);
    members(&run, &host, 3);
    trains(&run, &b);
    // The member may write into it meanwhile.
    wait_until("the removal", || fs::remove_dir_all(run.at("b")).ok());
    wait_until_or(
        || said_by(&b),
        || said_by(&b).contains("the folder b of this member is not there any more").then_some(()),
    );
    // It does not end at its next checkpoint, and says why it has none when it leaves.
    let tries = "failed to create b/";
    wait_until_or(|| said_by(&b), || said_by(&b).contains(tries).then_some(()));
    assert!(said_by(&b).contains("the run goes on"), "{}", said_by(&b));
    b.send(Signal::INT);
    let left = b.ends();
    assert_eq!(left.status.code(), Some(130), "{}", said(&left));
    assert!(said(&left).contains("could not be saved: failed to create b/"), "{}", said(&left));
    members(&run, &host, 2);
    for member in [&host, &a] {
        let before = losses(&run, member).len();
        wait_until("steps of the others", || (losses(&run, member).len() > before + 10).then_some(()));
    }
}
