//! `farflung schedule` through the command line: every schedule in every format, files of all kinds, and
//! errors.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::{Command, Output};

use farflung::parallel::pipeline::Method;

fn schedule(args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farflung"));
    command.arg("schedule").args(args.split_whitespace()).output().unwrap()
}

fn printed(args: &str) -> String {
    let output = schedule(args);
    assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the message of a usage error.
fn refused(args: &str) -> String {
    let output = schedule(args);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && output.stdout.is_empty(), "{args}: {message}");
    message
}

#[test]
fn every_schedule_prints_in_every_format() {
    for method in Method::ALL {
        for format in ["grid", "ops", "lowered", "steps", "svg", "trace", "json", "csv"] {
            let text = printed(&format!("{method} -p 4 -m 8 --cost 1,1.5,0.5,0.25 --format {format}"));
            assert!(text.ends_with('\n') && text.lines().count() > usize::from(format != "json"), "{method}");
            if matches!(format, "json" | "trace") {
                serde_json::from_str::<serde_json::Value>(&text).unwrap();
            }
        }
    }
}

#[test]
fn more_ranks_than_can_be_computed_in_time_are_refused_by_every_schedule() {
    // Some also refuse so few microbatches.
    for method in Method::ALL {
        refused(&format!("{method} -p 1000000 -m 1"));
    }
    for ranks in ["4097", "1000000"] {
        for method in ["gpipe", "1f1b", "zb-h1", "hanayo"] {
            let message = refused(&format!("{method} -p {ranks} -m 1"));
            assert!(message.contains("stages") && message.contains("at most 4096"), "{method}: {message}");
        }
    }
}

/// The averages that a run adds after its pipeline are in drawings and in numbers.
#[test]
fn averages_are_part_of_the_step() {
    let json: serde_json::Value = serde_json::from_str(&printed("1f1b -p 4 -m 8 --reduce 5 --json")).unwrap();
    assert_eq!((json["makespan"].as_f64(), json["step"].as_f64()), (Some(33.0), Some(38.0)));
    let json: serde_json::Value = serde_json::from_str(&printed("1f1b -p 4 -m 8 --json")).unwrap();
    assert_eq!((json["makespan"].as_f64(), json["step"].as_f64()), (Some(33.0), None));
    assert!(printed("bfs -p 2 -m 4 --reduce 3").contains("= all-reduce"));
    assert!(printed("bfs -p 2 -m 4 --reduce 3").contains("averaged 3 later"));
    assert!(printed("bfs -p 2 -m 4 --reduce 3 --format svg").contains("all-reduce of stage 3"));
    assert!(printed("bfs -p 2 -m 4 --reduce 3 --format lowered").contains("2REDUCE_GRAD"));
}

/// A whole step is printed as it is executed: with averages if there are replicas, and votes and updates.
#[test]
fn steps_are_printed_with_their_averages_votes_and_updates() {
    let alone = "rank 0\npass: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_TIED\n\
                 reduce: 0WAIT_GRAD WAIT_TIED 0CONTRIBUTE VOTE WAIT_VOTE\ncommit: 0STEP1\nrank 1\n";
    let text = printed("1f1b -p 2 -m 2 --format steps");
    assert!(text.starts_with(alone), "{text}");
    let text = printed("1f1b -p 2 -m 2 --reduce 1 --format steps");
    assert!(text.contains("0OPEN_GRAD 0B1 0REDUCE_GRAD\n") && !text.contains("REDUCE_TIED"), "{text}");
    let text = printed("inference -p 2 -m 1 --format steps");
    assert_eq!(text, "rank 0\npass: 0F0 0SEND_F0\nrank 1\npass: 1RECV_F0 1F0\n");
}

/// Gathering weights takes time, and activations that are offloaded do not count as held.
#[test]
fn gathers_and_moves_are_listed_and_told() {
    let lowered = printed("gpipe -p 2 -m 4 --gather 1 --offload 3 --format lowered");
    for entry in ["0UNSHARD", "1RESHARD", "0OFFLOAD0", "0LOAD0"] {
        assert!(lowered.contains(entry), "{lowered}");
    }
    let plain: serde_json::Value = serde_json::from_str(&printed("1f1b -p 4 -m 8 --json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&printed("1f1b -p 4 -m 8 --gather 2 --json")).unwrap();
    // With one stage per rank, a rank gathers its weights once.
    assert_eq!(plain["makespan"].as_f64().map(|time| time + 2.0), json["step"].as_f64());
    let held = |args: &str| {
        let text = printed(args);
        let (_, held) = text.split_once("held at once by rank ").unwrap_or_else(|| panic!("{text}"));
        held.split_whitespace().map(|n| n.parse::<u32>().unwrap()).max().unwrap()
    };
    // Without offloading, all eight activations are held until their backward; with it, only those that are
    // needed soon.
    assert_eq!(held("gpipe -p 2 -m 8 --offload 100"), 8);
    assert_eq!(held("gpipe -p 2 -m 8 --offload 4"), 2);
    let json: serde_json::Value =
        serde_json::from_str(&printed("gpipe -p 2 -m 8 --offload 4 --json")).unwrap();
    assert_eq!((json["ranks"][1]["peak"].as_u64(), json["ranks"][1]["held"].as_u64()), (Some(8), Some(2)));
    assert!(!printed("gpipe -p 2 -m 8").contains("held at once"));
}

#[test]
fn what_makes_no_sense_is_refused_with_the_flag() {
    for (args, reason) in [
        ("", "required"),
        ("gpip", "gpipe, 1f1b"),
        ("1f1b --file x.txt", "cannot be used with"),
        ("1f1b --format foo", "lowered"),
        ("1f1b -p 0", "at least 1"),
        ("1f1b -m 0", "at least 1"),
        ("1f1b -p -1", "-1"),
        ("1f1b -p 99999999999", "99999999999"),
        ("1f1b --cost 1,1,1", "four numbers"),
        ("1f1b --cost 1,1,1,-2", "is not a number"),
        ("1f1b --cost 1,1,1,0:1,1,1,0", "one entry or 4"),
        ("1f1b --chunks 2", "for 1f1b 1"),
        ("1f1b --overlap 101", "101"),
        ("1f1b-mu --mu 0", "at least 1"),
        ("1f1b-mu --memory 3", "room for 4 microbatches"),
        ("varuna --memory 0", "room for"),
        ("zb-auto --memory 0", "room for"),
        ("zb-h2 -p 4294967295 -m 1", "at least 8589934589"),
        ("gpipe -p 4294967295 -m 4294967295", "actions"),
        ("terapipe --slices 0", "at least 1"),
        ("interleaved -m 6", "a multiple of the 4 stages"),
        ("hanayo --chunks 3", "two for each wave"),
        ("compare -p 0", "at least 1"),
        ("compare --chunks 2", "with `compare`"),
        ("compare --mu 2", "with `compare`"),
        ("compare --pools 1,2", "`pools` is 1,2, expected no value (each stage has one rank) with `compare`"),
        ("compare --pools 1,2 --pool-rates 1,2,1", "with `compare`"),
        ("compare --reduce 2", "with `compare`"),
        ("compare --gather 2", "with `compare`"),
        ("compare --offload 2", "with `compare`"),
        ("gpipe --offload 1", "1 is not in 2.."),
        ("compare --ascending", "with `compare`"),
        ("compare --recompute", "with `compare`"),
        ("compare --format svg", "grid or json with `compare`"),
        ("compare --cost 1,1,1,0:1,1,1,0", "one entry or 4"),
    ] {
        let message = refused(args);
        assert!(message.contains(reason), "{args}: {message}");
        assert!(!message.contains("panicked"), "{args}: {message}");
    }
}

#[test]
fn files_are_read_or_refused_with_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        format!("--file {}", path.display())
    };
    // The printed form can be read back, for every schedule.
    for method in Method::ALL {
        for (format, name) in [("ops", "mine.txt"), ("csv", "mine.csv")] {
            let text = printed(&format!("{method} -p 4 -m 8 --format {format}"));
            let again = printed(&format!("{} --format {format}", file(name, text.as_bytes())));
            assert_eq!(again, text, "{method}");
        }
    }
    let wrong: [(&str, &[u8], &str); 9] = [
        ("empty.txt", b"", "too few for a schedule"),
        ("empty.csv", b"\n\n", "too few for a schedule"),
        ("words.txt", b"hello world\n", "line 1"),
        ("second.txt", b"r0: 0F0 0B0\nr2: 1F0 1B0\n", "line 2"),
        ("huge.txt", b"r0: 4294967295F4294967295\n", "too few for a schedule"),
        ("slices.csv", b"0F0.65535,0B0\n", "too few for a schedule"),
        ("twice.txt", b"r0: 0F0 0B0 0B0\n", "it comes twice"),
        ("stuck.txt", b"r0: 0F0 0B0 0F1 0B1\nr1: 1F0 1F1 1B0 1B1\n", "deadlock: rank"),
        ("bytes.txt", &[0xff, 0xfe, 0x00, 0x80], "UTF-8"),
    ];
    for (name, bytes, reason) in wrong {
        let output = schedule(&file(name, bytes));
        let message = String::from_utf8_lossy(&output.stderr);
        let readable = std::str::from_utf8(bytes).is_ok();
        assert_eq!(output.status.code(), Some(if readable { 2 } else { 1 }), "{name}: {message}");
        assert!(message.contains(name) && message.contains(reason), "{name}: {message}");
    }
}

#[test]
fn numbers_that_would_need_the_whole_memory_are_refused() {
    for (args, expected) in [
        ("v-1f1b -p 4000 -m 4", "at most 2048"),
        ("1f1b -p 4 -m 4000000000", "at most"),
        ("pools --pools 4000000000,4000000000 -m 4", "at most 1048576 ranks"),
    ] {
        let message = refused(args);
        assert!(message.contains(expected), "{args}: {message}");
    }
}
