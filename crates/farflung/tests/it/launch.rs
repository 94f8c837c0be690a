//! Jobs of several processes: variables, failures, signals. The processes are shells.

use std::path::Path;
use std::time::Duration;

use farflung::launch::restarting;
use farflung::{Error, Launch, LaunchError, Signal, Stop};

fn launch(script: &str, grace: Duration, stop: &Stop) -> farflung::Result<()> {
    let job = Launch { grace, ..Launch::here(3) };
    job.run(Path::new("/bin/sh"), &["-c".into(), script.into()], stop)
}

#[test]
fn every_process_knows_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display();
    let script = format!(
        "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT > {out}/$RANK"
    );
    launch(&script, Duration::from_secs(5), &Stop::manual()).unwrap();
    let said: Vec<String> =
        (0..3).map(|r| std::fs::read_to_string(dir.path().join(r.to_string())).unwrap()).collect();
    let port: u16 = said[0].split_whitespace().last().unwrap().parse().unwrap();
    assert!(port > 0);
    for (rank, line) in said.iter().enumerate() {
        assert_eq!(*line, format!("{rank} {rank} 3 3 127.0.0.1 {port}\n"));
    }
}

#[test]
fn the_others_are_ended_after_the_grace_and_the_first_code_counts() {
    let script = "test $RANK = 1 && exit 75; sleep 60";
    match launch(script, Duration::from_millis(200), &Stop::manual()) {
        Err(error @ Error::Launch(LaunchError::Child { rank: 1, .. })) => assert_eq!(error.exit_code(), 75),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_job_that_failed_is_started_again_with_all_its_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display();
    // Rank 1 fails in the first run only.
    let script =
        format!("echo >> {out}/$RANK; test $RANK = 1 && test $(wc -l < {out}/1) = 1 && exit 75; exit 0");
    let stop = Stop::manual();
    restarting(2, &stop, || false, || launch(&script, Duration::from_secs(5), &stop)).unwrap();
    for rank in 0..3 {
        assert_eq!(
            std::fs::read_to_string(dir.path().join(rank.to_string())).unwrap(),
            "\n\n",
            "rank {rank}"
        );
    }
}

#[test]
fn who_ignores_sigterm_is_killed() {
    let script = "test $RANK = 2 && exit 3; trap '' TERM; while :; do sleep 0.05; done";
    match launch(script, Duration::from_millis(200), &Stop::manual()) {
        Err(error @ Error::Launch(LaunchError::Child { rank: 2, .. })) => assert_eq!(error.exit_code(), 3),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_signal_is_passed_on_and_children_may_save_first() {
    for (signal, name, code) in [
        (Signal::Terminate, "TERM", 143),
        (Signal::Hangup, "HUP", 129),
        (Signal::User1, "USR1", 138),
        (Signal::User2, "USR2", 140),
        (Signal::ProcessorTime, "XCPU", 152),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().display();
        let script = format!(
            "trap 'echo saved > {out}/$RANK; exit {code}' {name}; touch {out}/up-$RANK; while :; do sleep 0.05; done"
        );
        let stop = Stop::manual();
        let asker = stop.clone();
        let folder = dir.path().to_owned();
        let waiter = std::thread::spawn(move || {
            while !(0..3).all(|r| folder.join(format!("up-{r}")).exists()) {
                std::thread::sleep(Duration::from_millis(10));
            }
            asker.request(signal);
        });
        let outcome = launch(&script, Duration::from_secs(10), &stop);
        waiter.join().unwrap();
        assert!(matches!(&outcome, Err(Error::Stopped(by)) if *by == signal), "{outcome:?}");
        assert_eq!(outcome.unwrap_err().exit_code(), code);
        assert!((0..3).all(|r| dir.path().join(r.to_string()).exists()));
    }
}

/// The kernel repeats SIGXCPU every second, and Slurm may send its warning again.
#[test]
fn warnings_do_not_kill_children_that_save() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display();
    let script = format!(
        "trap 'n=$((n + 1)); echo $n > {out}/$RANK' USR1; touch {out}/up-$RANK; \
         while [ \"${{n:-0}}\" -lt 4 ]; do sleep 0.05; done; exit 138"
    );
    let stop = Stop::manual();
    let (asker, folder) = (stop.clone(), dir.path().to_owned());
    let waiter = std::thread::spawn(move || {
        let all = |what: &dyn Fn(usize) -> bool| {
            while !(0..3).all(what) {
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        all(&|rank| folder.join(format!("up-{rank}")).exists());
        for nth in 1..=4 {
            asker.request(Signal::User1);
            let seen = |rank: usize| std::fs::read_to_string(folder.join(rank.to_string()));
            all(&|rank| seen(rank).is_ok_and(|text| text.trim() == nth.to_string()));
        }
    });
    let outcome = launch(&script, Duration::from_secs(10), &stop);
    waiter.join().unwrap();
    assert!(matches!(outcome, Err(Error::Stopped(Signal::User1))), "{outcome:?}");
}

/// The exit code allows a restart for any signal that killed a rank and any order of ends, unless a rank ended
/// with exit code 1 or 2, which a restart does not mend.
#[test]
fn the_code_says_whether_a_restart_mends_it_and_the_rank_is_the_origin() {
    for (script, rank, code) in [
        ("test $RANK = 1 && kill -9 $$; exit 75", 1, 75),
        ("test $RANK = 1 && { sleep 0.2; kill -9 $$; }; exit 75", 1, 75),
        ("test $RANK = 2 && { sleep 0.2; exit 2; }; exit 75", 2, 2),
        ("test $RANK = 2 && { sleep 0.2; exit 2; }; kill -9 $$", 2, 2),
        ("test $RANK = 0 && { sleep 0.2; exit 1; }; exit 75", 0, 1),
        ("test $RANK = 1 && exit 130; exit 75", 1, 75),
        ("test $RANK = 1 && exit 75; sleep 60", 1, 75),
    ] {
        match launch(script, Duration::from_millis(500), &Stop::manual()) {
            Err(error @ Error::Launch(LaunchError::Child { .. })) => {
                let Error::Launch(LaunchError::Child { rank: named, .. }) = error else { unreachable!() };
                assert_eq!((named, error.exit_code()), (rank, code), "{script}");
            }
            other => panic!("{script}: {other:?}"),
        }
    }
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let job = Launch { grace: Duration::ZERO, ..Launch::here(2) };
    let outcome = job.run(Path::new("/no/such/program"), &[], &Stop::manual());
    assert!(matches!(outcome, Err(Error::Launch(LaunchError::Start { rank: 0, .. }))), "{outcome:?}");
}
