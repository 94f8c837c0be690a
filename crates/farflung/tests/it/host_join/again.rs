//! A host that is started again from its folder, and the runs that the folder was used for before.

use super::*;

/// The host is started again, twice, while the other members cannot answer. Once they can, the third run ends.
#[test]
fn a_later_run_ends_once_a_member_of_the_first_one_answers() {
    let run = Run::new();
    let first = host(&run, "--steps 1000000 --out host --checkpoint-every 20");
    let a = join(&run, "a", "host/run.ticket", &[]);
    trains(&run, &a);
    let b = join(&run, "b", "host/run.ticket", &[]);
    trains(&run, &b);
    wait_until("a checkpoint", || (!saved(&run, &first).is_empty()).then_some(()));
    first.send(Signal::KILL);
    members(&run, &b, 2);
    for member in [&a, &b] {
        member.send(Signal::STOP);
    }
    let ticket = || fs::read(run.at("host/run.ticket")).unwrap();
    let restarted = || {
        let before = ticket();
        let again = host(&run, "--steps 1000000 --out host --resume auto");
        wait_until("another ticket", || (ticket() != before).then_some(()));
        again
    };
    // The host is killed once more: also the third run knows the members of the first.
    let second = restarted();
    trains(&run, &second);
    second.send(Signal::KILL);
    let mut again = restarted();
    // Another machine joins the third run.
    let mut c = join(&run, "c", "host/run.ticket", &[]);
    trains(&run, &c);
    for member in [&a, &b] {
        member.send(Signal::CONT);
    }
    let code = |member: &mut Member| {
        wait_until_or(
            || "the third run goes on".to_owned(),
            || member.process.as_mut().unwrap().try_wait().unwrap().map(|status| status.code()),
        )
    };
    assert_eq!(code(&mut again), Some(2), "{}", said_by(&again));
    assert!(said_by(&again).contains("the run of this folder is still running"), "{}", said_by(&again));
    assert_eq!(code(&mut c), Some(143), "{}", said_by(&c));
    // The first run goes on.
    let steps = || fs::read_to_string(run.at("a/metrics.jsonl")).unwrap().lines().count();
    let before = steps();
    wait_until("more steps", || (steps() > before + 5).then_some(()));
}

#[test]
fn a_host_goes_on_from_the_folders_of_all_that_held_parts() {
    let run = Run::new();
    let flags = "--steps 1000000 --out host --stages 2 --checkpoint-every 20";
    let first = host(&run, flags);
    let a = join(&run, "host/members/a", "host/run.ticket", &[]);
    let both = || {
        let theirs = saved(&run, &first);
        saved(&run, &a).into_keys().rev().find(|step| theirs.contains_key(step))
    };
    trains(&run, &a);
    let step = wait_until_or(|| said_by(&first), both);
    first.send(Signal::KILL);
    a.send(Signal::KILL);
    drop((first, a));
    let flags = format!("{flags} --resume auto");
    // The other half of the model cannot be read.
    fs::rename(run.at("host/members"), run.at("elsewhere")).unwrap();
    let alone =
        on(&run, "host").arg("host").args(run.flags(&format!("--listen 127.0.0.1:0 {flags}"))).output();
    let alone = alone.unwrap();
    assert_eq!(alone.status.code(), Some(2), "{}", said(&alone));
    assert!(said(&alone).contains("none on this disk has layers"), "{}", said(&alone));
    fs::rename(run.at("elsewhere"), run.at("host/members")).unwrap();
    let again = host(&run, &flags);
    let resumed = || {
        let events = fs::read_to_string(run.at("host/events.jsonl")).unwrap();
        let line = events.lines().find(|line| line.contains("\"event\":\"resumed\""))?.to_owned();
        Some(line)
    };
    let line = wait_until_or(|| said_by(&again), resumed);
    // The run resumes at least at the step that both members had, and continues to train.
    let number = |name: &str| name.rsplit('-').next().unwrap().parse::<u64>().unwrap();
    let from = line.split_once("step-").unwrap().1;
    let from: String = from.chars().take_while(char::is_ascii_digit).collect();
    assert!(number(&from) >= number(&step), "{line}, and both had {step}");
    let steps = || {
        let rows = fs::read_to_string(run.at("host/metrics.jsonl")).unwrap_or_default();
        let last =
            rows.lines().next_back()?.split_once("\"step\":")?.1.split(',').next()?.parse::<u64>().ok()?;
        (last > number(&from) + 5).then_some(())
    };
    wait_until_or(|| said_by(&again), steps);
}

/// A machine that has hosted a run joins another one with the same folder, and then hosts that one.
#[test]
fn a_folder_of_one_run_is_used_for_another() {
    let run = Run::new();
    let first = host(&run, "--steps 1000000 --out host --checkpoint-every 300 --keep-last 2");
    let a = join(&run, "a", "host/run.ticket", &[]);
    trains(&run, &a);
    let b = join(&run, "b", "host/run.ticket", &[]);
    trains(&run, &b);
    wait_until_or(|| said_by(&first), || (saved(&run, &first).len() > 1).then_some(()));
    first.send(Signal::KILL);
    members(&run, &b, 2);
    drop(first);
    let names = |of: &str| -> Vec<String> {
        let entries = fs::read_dir(run.at(of)).into_iter().flatten().map(|entry| entry.unwrap().file_name());
        entries.map(|name| name.into_string().unwrap()).filter(|name| name.starts_with("step-")).collect()
    };
    let checkpoints = names("host");
    let ticket = fs::read(run.at("host/run.ticket")).unwrap();
    let id = |folder: &str| {
        let text = fs::read_to_string(run.at(folder).join("promises.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["run"].clone()
    };
    assert_eq!(id("host"), id("a"));
    // The host's machine joins the run of another one, and is lost.
    let second = host_on(&run, "second", "--steps 1000000 --out second --checkpoint-every 100");
    let joined = join(&run, "host", "second/run.ticket", &[]);
    wait_until_or(|| said_by(&joined), || (id("host") == id("second")).then_some(()));
    members(&run, &second, 2);
    assert_ne!(id("host"), id("a"));
    // It has the address of the other member from its first step on.
    wait_until_or(|| said_by(&joined), || run.at("host/members.txt").exists().then_some(()));
    // How the members of the first run are asked is kept.
    assert_eq!(fs::read(run.at("host/former/1/run.ticket")).unwrap(), ticket);
    assert_ne!(fs::read(run.at("host/run.ticket")).unwrap(), ticket);
    // So are its checkpoints, which no later start takes for those of the second run.
    wait_until_or(|| said_by(&joined), || (names("host/former").len() == checkpoints.len()).then_some(()));
    assert!(
        said_by(&joined).contains("are of another run than that of this machine now"),
        "{}",
        said_by(&joined)
    );
    wait_until_or(|| said_by(&joined), || (!names("host").is_empty()).then_some(()));
    joined.send(Signal::KILL);
    drop(joined);
    members(&run, &second, 1);
    let again = on(&run, "host").arg("host").args(run.flags("--steps 9 --out host --resume auto")).output();
    let again = again.unwrap();
    assert_eq!(again.status.code(), Some(2), "{}", said(&again));
    assert!(said(&again).contains("the run of this folder is still running"), "{}", said(&again));
    second.send(Signal::KILL);
    drop(second);
    // The first run goes on, and is another run.
    let before = fs::read(run.at("host/run.ticket")).unwrap();
    let again = host(&run, "--steps 1000000 --out host --resume auto");
    let restarted = || (fs::read(run.at("host/run.ticket")).unwrap() != before).then_some(());
    wait_until_or(|| said_by(&again), restarted);
    assert_eq!(id("host"), id("second"));
    let steps = |of: &str| fs::read_to_string(run.at(of).join("metrics.jsonl")).unwrap().lines().count();
    let stood = ["host", "a"].map(steps);
    wait_until_or(
        || said_by(&again),
        || ["host", "a"].iter().zip(stood).all(|(of, stood)| steps(of) > stood).then_some(()),
    );
}
