//! Ranks of one job that are started with different settings, files or plans: all of them end with exit code 2
//! and an error that names the difference.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::net::TcpListener;
use std::process::{Output, Stdio};

use crate::tiny::{Run, farflung, json_of, output};

const RANKS: usize = 3;

/// Returns the outputs of three processes of a job; the second one gets `args` in addition.
fn job(run: &Run, all: &str, args: &str) -> Vec<Output> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let out = run.at(&format!("out-{rank}"));
        let own = if rank == 1 { args } else { "" };
        let deadline = if all.contains("--deadline") { "" } else { "--deadline 20s" };
        let args = format!("--out {} {deadline} {all} {own}", out.display());
        let mut command = farflung();
        command.args(run.args(&args)).env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", RANKS.to_string()).env("LOCAL_WORLD_SIZE", RANKS.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..RANKS).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Checks that all ranks end with exit code 2 and each of these texts.
fn refused(run: &Run, all: &str, args: &str, texts: &[&str]) {
    for (rank, output) in job(run, all, args).iter().enumerate() {
        let said = stderr(output);
        assert_eq!(output.status.code(), Some(2), "rank {rank}, {args}: {said}");
        assert!(texts.iter().all(|text| said.contains(text)), "rank {rank}, {args}: {said}");
        assert!(!run.at(&format!("out-{rank}")).exists(), "{args}: nothing was begun");
    }
}

#[test]
fn settings_that_decide_the_result_are_refused_by_name() {
    let run = Run::new();
    for (args, name, values) in [
        ("--lr 0.002", "lr", "0.001 on ranks 0, 2 and 0.002 on rank 1"),
        ("--beta2 0.9", "beta2", "0.95 on ranks 0, 2 and 0.9 on rank 1"),
        ("--outer-lr 0.6", "outer-lr", "0.7 on ranks 0, 2 and 0.6 on rank 1"),
        ("--seed 7", "seed", "1337 on ranks 0, 2 and 7 on rank 1"),
        ("--heads 1", "heads", "2 on ranks 0, 2 and 1 on rank 1"),
        // Before settings were compared, such a job ended with code 75 and "peer was lost", so supervisors
        // restarted it forever.
        ("--dim 16", "dim", "8 on ranks 0, 2 and 16 on rank 1"),
        ("--steps 3", "steps", "500 on ranks 0, 2 and 3 on rank 1"),
        ("--codec none", "codec", "\"int8\" on ranks 0, 2 and \"none\" on rank 1"),
        ("--bucket-mb 1", "bucket-mb", "4.0 on ranks 0, 2 and 1.0 on rank 1"),
        // Two stages do not divide three ranks, but the difference between ranks is reported first.
        ("--stages 2", "stages", "1 on ranks 0, 2 and 2 on rank 1"),
        ("--resume auto", "resume", "no on ranks 0, 2 and auto on rank 1"),
    ] {
        refused(&run, "", args, &[&format!("the setting `{name}` is {values}")]);
    }
}

#[test]
fn each_rank_keeps_its_own_state_where_it_likes_if_the_codec_is_the_same() {
    let run = Run::new();
    let texts = ["the setting `codec` is", "`state` differs too"];
    refused(&run, "", "--state disk", &texts);
    let steps = "--steps 2 --json";
    let in_memory = run.args(&format!("--workers 3 --codec none {steps}")).join(" ");
    let in_memory = json_of(&output(&run, &in_memory));
    let outputs = job(&run, &format!("--codec none {steps}"), "--state disk");
    assert!(outputs.iter().all(|output| output.status.success()), "{}", stderr(&outputs[1]));
    let report: serde_json::Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!(report["hash"], in_memory["hash"]);
    assert!(run.at("out-1/ranks/rank-00001/state").is_dir() && !run.at("out-0/state").exists());
}

#[test]
fn files_are_compared_by_what_they_say() {
    let run = Run::new();
    std::fs::write(run.at("other.txt"), "the lazy dog sleeps ".repeat(500)).unwrap();
    std::fs::write(run.at("same.txt"), std::fs::read(run.at("text.txt")).unwrap()).unwrap();
    let other = format!("--data {}", run.at("other.txt").display());
    refused(&run, "--steps 2", &other, &["the setting `data` is 10000 tokens with hash"]);
    // The same text, of which other tokens are held out.
    let text = std::fs::read(run.at("text.txt")).unwrap();
    std::fs::create_dir(run.at("parts")).unwrap();
    std::fs::write(run.at("parts/train.txt"), &text[..5000]).unwrap();
    std::fs::write(run.at("parts/valid.txt"), &text[5000..]).unwrap();
    let parts = format!("--data {}", run.at("parts").display());
    refused(&run, "--steps 2", &parts, &["1000 of them held out", "5000 of them held out"]);
    // All ranks report the device or file that one rank lacks.
    for (rank, output) in job(&run, "--steps 2", "--device wgpu:99").iter().enumerate() {
        assert_eq!(output.status.code(), Some(2), "rank {rank}: {}", stderr(output));
        assert!(stderr(output).contains("wgpu"), "rank {rank}: {}", stderr(output));
    }
    let missing = format!("--data {}", run.at("missing.txt").display());
    for (rank, output) in job(&run, "--steps 2", &missing).iter().enumerate() {
        assert_eq!(output.status.code(), Some(2), "rank {rank}: {}", stderr(output));
        assert!(stderr(output).contains("missing.txt"), "rank {rank}: {}", stderr(output));
    }
    // Settings that may differ by rank: paths, devices, threads, output.
    let own = format!("--data {} --threads 2 --quiet --keep-last 3", run.at("same.txt").display());
    for (rank, output) in job(&run, "--steps 2", &own).iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", stderr(output));
    }
}

#[test]
fn a_text_of_ones_own_is_not_compared() {
    let run = Run::new();
    std::fs::write(run.at("other.txt"), "the lazy dog sleeps ".repeat(500)).unwrap();
    let other = format!("--data {}", run.at("other.txt").display());
    let all = "--steps 2 --own-data --checkpoint-every 1";
    for (rank, output) in job(&run, all, &other).iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", stderr(output));
    }
    // These weights are compared below with those of a job whose ranks have the same text.
    let weights =
        |folder: &str| std::fs::read(run.at(folder).join("step-00000002/model.safetensors")).unwrap();
    let own = weights("out-0");
    std::fs::remove_dir_all(run.at("out-0")).unwrap();
    // Rank 0 has lost its folder, and gets everything except the text from another rank.
    let all = "--steps 4 --own-data --resume auto";
    for (rank, output) in job(&run, all, &other).iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", stderr(output));
    }
    let one = Run::new();
    for output in job(&one, "--steps 2 --checkpoint-every 1", "") {
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let same = std::fs::read(one.at("out-0").join("step-00000002/model.safetensors")).unwrap();
    assert!(own != same);
    // Both ends of a pipeline need the same text.
    for output in job(&run, "--steps 2 --own-data --stages 3", "") {
        assert_eq!(output.status.code(), Some(2));
        assert!(
            stderr(&output).contains("`own-data` is true, expected false with 3 stages"),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn a_transport_that_only_one_rank_has_is_told_to_all() {
    let expected = "tcp or shared-memory or iroh or mpi or mpi-native, since the job has 3 processes";
    let texts = ["`transport` is memory", expected];
    refused(&Run::new(), "--steps 2", "--transport memory", &texts);
}

/// Two jobs use one port: a rank of the other job is rejected, and this job's ranks wait for a rank of their
/// own job until the deadline.
#[test]
fn a_rank_of_another_job_is_turned_away() {
    let run = Run::new();
    // It ends at once when it is rejected; the others by their limit.
    let outputs = job(&run, "--deadline 3s", "--job other --deadline 60s");
    let codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
    assert_eq!(codes, [Some(75), Some(2), Some(75)], "{outputs:?}");
    assert!(stderr(&outputs[1]).contains("job"), "{}", stderr(&outputs[1]));
    assert!(stderr(&outputs[0]).contains("rank 1"), "{}", stderr(&outputs[0]));
}

#[cfg(feature = "tokenizers")]
#[test]
fn tokenizers_may_have_other_paths_but_not_other_tokens() {
    let run = Run::new();
    std::fs::write(run.at("other.txt"), "another text of other words ".repeat(99)).unwrap();
    for (text, out) in [("text.txt", "one"), ("text.txt", "same"), ("other.txt", "other")] {
        let args = format!("tokenizer train {text} --vocab 270 --out {out}");
        assert!(output(&run, &args).status.success());
    }
    let path = |name: &str| format!("--tokenizer {}", run.at(name).display());
    refused(&run, &path("one"), &path("other"), &["tokenizer", "tokenizer.json-", "on rank 1"]);
    let same = job(&run, &format!("{} --steps 1", path("one")), &path("same"));
    assert!(same.iter().all(|output| output.status.success()), "{}", stderr(&same[1]));
}
