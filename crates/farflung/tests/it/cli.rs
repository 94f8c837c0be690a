//! Tests the binary's command line: help, exit codes, and which output goes to which stream.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::{Command, Output};

fn farflung(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_farflung")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn help_has_an_example_and_the_exit_codes() {
    let help = farflung(&["--help"]);
    assert!(help.status.success());
    assert!(text(&help.stdout).contains("75 a peer was lost"));
    let one_line = text(&help.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(one_line.contains("130 after SIGINT, 143 after SIGTERM and 138 after SIGUSR1"), "{one_line}");
    let help = farflung(&["launch", "--help"]);
    assert!(text(&help.stdout).contains("Examples:\n  farflung launch -n 4 -- train"));
    assert!(help.stderr.is_empty());
}

#[test]
fn help_lists_only_flags_that_the_command_uses() {
    for (command, flag, listed) in [
        ("train", "--workers <N>", true),
        ("host", "--workers <N>", false),
        ("net bench", "--peers <FILE>", true),
        ("net probe", "--rank <N>", true),
        ("net probe", "--secret-file <FILE>", true),
        ("net relay", "--peers <FILE>", false),
        ("net relay", "--rank <N>", false),
        ("net relay", "--secret-file <FILE>", false),
    ] {
        let args: Vec<_> = command.split(' ').chain(["--help"]).collect();
        let help = farflung(&args);
        assert!(help.status.success(), "{help:?}");
        assert_eq!(text(&help.stdout).contains(flag), listed, "{command} {flag}");
    }
}

#[test]
fn wrong_usage_is_exit_code_2_on_stderr() {
    for args in [
        &["fly"][..],
        &[],
        &["launch", "-n", "0", "--", "train"],
        &["launch", "-n", "2"],
        &["launch", "-n", "2", "--master", "nowhere", "--", "train"],
        &["launch", "-n", "2", "--grace", "5", "--", "train"],
        &["--log-format", "xml", "launch", "-n", "1", "--", "--version"],
    ] {
        let output = farflung(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn launch_starts_all_and_passes_stdout_through() {
    let output = farflung(&["launch", "-n", "3", "--", "--version"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout).matches("farflung 0.1.0\n").count(), 3);
}

#[test]
fn launch_prefixes_stderr_and_ends_with_the_childs_code() {
    let output = farflung(&["launch", "-n", "2", "--", "no-such-command"]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("[0] error: unrecognized subcommand"), "{stderr}");
    assert!(stderr.contains("[1] error: unrecognized subcommand"), "{stderr}");
    assert!(
        stderr.lines().any(|l| l.starts_with("error: rank ") && l.contains("exit status: 2")),
        "{stderr}"
    );
}

#[test]
fn a_port_in_use_or_an_address_of_nobody_is_an_error() {
    let output = farflung(&["launch", "-n", "1", "--master", "203.0.113.1:0", "--", "--version"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(stderr.starts_with("error: failed to find a free port at 203.0.113.1\n  cause: "), "{stderr}");
}

#[test]
fn a_plan_says_what_was_compared_and_what_is_wrong_with_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("homes.toml");
    let homes = "default = \"20mbit,25ms\"\n[[device]]\nname = \"home\"\ncount = 4\nflops = \"2 TFLOPS\"\nmemory = \"8GB\"\n";
    std::fs::write(&path, homes).unwrap();
    let file = path.to_str().unwrap();
    let output = farflung(&["plan", file, "--model", "gpt2", "--sequences", "64"]);
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stdout).contains("diloco"), "{}", text(&output.stdout));
    let output = farflung(&["plan", file, "--model", "gpt2", "--codec", "int8", "--json"]);
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["ranks"].as_array().unwrap().len(), 4);
    let chosen = plan["plan"].as_str().unwrap();
    assert!(
        chosen.contains("codec = \"int8+ef\"") && plan["candidates"].as_array().unwrap().len() > 1,
        "{plan}"
    );
    assert!(plan["step_s"].as_f64().unwrap() > 0.0 && plan["tokens_per_s"].as_f64().unwrap() > 0.0, "{plan}");
    assert_eq!(plan["memory"].as_object().unwrap().keys().next().unwrap(), "home.0");
    assert_eq!(farflung(&["plan", file, "--model", "gpt5"]).status.code(), Some(2));
    // The state takes 13.3 MB and a microbatch 2.8 MB, so layers are recomputed. Local steps need more memory
    // than that.
    std::fs::write(&path, homes.replace("8GB", "15.5MB")).unwrap();
    let output = farflung(&["plan", file, "--model", "nano", "--json"]);
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(plan["plan"].as_str().unwrap().contains("recompute = \"1MB\""), "{plan}");
    assert!(plan["memory"]["home.0"].as_u64().unwrap() <= 15_500_000, "{plan}");
    assert!(!plan["candidates"].to_string().contains("diloco"), "{plan}");
    let output = farflung(&["plan", file, "--model", "nano"]);
    assert!(text(&output.stdout).contains("3 are recomputed"), "{}", text(&output.stdout));
    let output = farflung(&["train", "--stages", "2", "--recompute", "3MB", "--print-plan"]);
    let stderr = text(&output.stderr);
    assert!(
        output.status.code() == Some(2)
            && stderr.contains("`recompute` is 3MB, expected none, full, each-layer"),
        "{stderr}"
    );
    std::fs::write(&path, "[[device]]\nname = \"home\"\nspeed = 3\n").unwrap();
    let output = farflung(&["plan", file]);
    assert!(!output.status.success() && text(&output.stderr).contains("speed"), "{output:?}");
}

#[test]
fn devices_are_listed_and_one_that_is_not_there_is_an_error_with_the_reason() {
    let listed = farflung(&["devices", "--json"]);
    assert!(listed.status.success(), "{listed:?}");
    let objects: Vec<serde_json::Value> =
        text(&listed.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let cpu = objects.iter().find(|o| o["name"] == "cpu").unwrap();
    assert_eq!((&cpu["usable"], &cpu["gpu"]), (&true.into(), &false.into()));
    // The output of a measurement is an entry of a topology file.
    let measured = farflung(&["devices", "--measure", "--device", "cpu", "--batch", "1", "--seconds", "0"]);
    assert!(measured.status.success(), "{measured:?}");
    let file = format!("{}up = \"100mbit\"\ndown = \"100mbit\"\n", text(&measured.stdout));
    let cluster: farflung::parallel::Cluster = file.parse().unwrap();
    assert_eq!(cluster.rank_names().len(), 1);
    let object =
        farflung(&["devices", "--measure", "--device", "cpu", "--batch", "1", "--seconds", "0", "--json"]);
    let object: serde_json::Value = serde_json::from_str(&text(&object.stdout)).unwrap();
    assert!(
        object["flops"].as_f64().unwrap() > 1e6 && object["tokens_per_s"].as_f64().unwrap() > 1.0,
        "{object}"
    );
    let other = farflung(&["devices", "--measure", "--device", "gpu"]);
    assert!(other.status.code() == Some(2) && text(&other.stderr).contains("expected one of"), "{other:?}");
    let missing = farflung(&["train", "--device", "wgpu:99", "--steps", "1"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(text(&missing.stderr).contains("wgpu:99"), "{missing:?}");
    let wrong = farflung(&["train", "--device", "gpu"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("cuda[:n]"), "{wrong:?}");
}

#[test]
fn net_bench_times_each_collective_and_names_the_slowest_rank() {
    for op in [
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
        "reduce",
        "scan",
        "exclusive_scan",
        "all_to_all",
    ] {
        let bench =
            ["net", "bench", "--op", op, "--min", "4000", "--max", "4000", "--iterations", "3", "--json"];
        let output = farflung(&[&["launch", "-n", "3", "--"], &bench[..]].concat());
        assert!(output.status.success(), "{op}: {output:?}");
        let row: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&row["op"], row["ranks"].as_u64()), (&op.into(), Some(3)));
        assert!(row["slowest_rank"].as_u64().unwrap() < 3 && row["time_us"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[cfg(not(feature = "watch"))]
#[test]
fn a_build_without_the_page_says_how_to_get_one() {
    let output = farflung(&["watch", "runs/nano-1"]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("build it with `--features watch`"), "{stderr}");
}
