//! `--data FILE.jsonl`: examples to learn answers from.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::{Value, json};

use crate::tiny::{Run, farflung, losses_of, near, stderr as said};

/// Returns a prompt and its completion, which some prompts lack.
fn pair(i: usize) -> (String, String) {
    let answer = if i % 60 == 7 { String::new() } else { "wizards jug ".repeat(1 + i % 3) };
    let prompt = if i == 20 { "p".repeat(40) } else { format!("{}:", "ask ".repeat(1 + i % 4)) };
    (prompt, answer)
}

/// A run with pairs of prompt and completion of very different lengths, some too long for a row.
fn pairs() -> Run {
    let run = Run::new();
    let mut text = String::new();
    for i in 0..120_usize {
        let (prompt, answer) = pair(i);
        let line = json!({ "prompt": prompt, "completion": answer, "id": i });
        text.push_str(&line.to_string());
        text.push('\n');
    }
    fs::write(run.at("pairs.jsonl"), text).unwrap();
    run
}

fn train(run: &Run, out: &str, more: &str) -> Output {
    let data = run.at("pairs.jsonl").display().to_string();
    let more = format!("--data {data} --context 48 --steps 4 --codec none {more}");
    farflung().args(run.args(&more)).arg("--out").arg(run.at(out)).output().unwrap()
}

/// Returns the training losses and the validation losses of a run.
fn losses(run: &Run, more: &str) -> Vec<f64> {
    let _ = fs::remove_dir_all(run.at("out"));
    let done = train(run, "out", more);
    assert!(done.status.success(), "{more}: {}", said(&done));
    let losses = losses_of(&run.at("out"));
    assert_eq!(losses.len(), 8);
    losses
}

/// Numbers of targets differ between rows, and means are by targets; prefixes are of each example in a row.
#[test]
fn every_plan_gives_the_losses_of_one_worker() {
    let run = pairs();
    for more in ["", "--packing false", "--loss-on all", "--objective prefix-lm --packing false"] {
        let want = losses(&run, &format!("--workers 1 --batch 4 {more}"));
        for plan in [
            "--workers 2 --batch 2",
            "--workers 1 --batch 1 --accumulate 4",
            "--workers 2 --stages 2 --batch 1 --microbatches 4",
            "--workers 4 --stages 2 --batch 1 --microbatches 2 --recompute full",
            "--workers 2 --stages 2 --batch 1 --microbatches 4 --schedule zb-h1",
        ] {
            near(&losses(&run, &format!("{plan} {more}")), &want, 1e-6, &format!("{plan} {more}"));
        }
    }
    let want = losses(&run, "--workers 1 --batch 4");
    let sliced = "--workers 2 --stages 2 --batch 2 --microbatches 2 --schedule terapipe --slice-grain 8";
    near(&losses(&run, sliced), &want, 1e-6, sliced);
    let far = |more: &str| {
        let other = losses(&run, &format!("--workers 1 --batch 4 {more}"));
        other.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    for other in ["--packing false", "--loss-on all", "--objective prefix-lm"] {
        assert!(far(other) > 1e-7, "{other}");
    }
}

#[test]
fn replicas_that_meet_are_weighted_by_their_targets() {
    let run = pairs();
    let plain = "--workers 3 --batch 1 --optimizer sgd --momentum 0 --weight-decay 0 --clip 0 --lr 0.5";
    let want = losses(&run, plain);
    let local = "--sync diloco --sync-every 1 --outer-lr 1 --outer-momentum 0";
    near(&losses(&run, &format!("{plain} {local}")), &want, 1e-5, local);
}

#[test]
fn what_was_read_is_told() {
    let run = pairs();
    let done = train(&run, "out", "--workers 1 --batch 2");
    assert!(done.status.success(), "{}", said(&done));
    let told = said(&done);
    for expected in ["data: 1 file", "120 examples", " were cut at 48 tokens", "2 more were left out"] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
    let report: Value =
        serde_json::from_slice(&fs::read(run.at("out").join("report.json")).unwrap()).unwrap();
    let counts = &report["data"]["examples"];
    // Of 108 examples to train on, two have no answer.
    assert_eq!((&counts["examples"], &counts["left_out"]), (&json!(106), &json!(2)), "{counts}");
    let long = |&i: &usize| !pair(i).1.is_empty() && pair(i).0.len() + pair(i).1.len() > 48;
    let cut = (0..108).filter(long).count();
    assert_eq!((&counts["row_tokens"], &counts["cut"]), (&json!(48), &json!(cut)), "{counts}");
    // A model is measured as its run was.
    let eval = |more: &[&str]| {
        let data = run.at("pairs.jsonl");
        let done =
            farflung().arg("eval").arg(run.at("out")).arg("--data").arg(data).args(more).output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        String::from_utf8(done.stdout).unwrap()
    };
    assert_eq!(eval(&[]), eval(&["--loss-on", "answers"]));
    assert_ne!(eval(&[]), eval(&["--loss-on", "all"]));
}

#[test]
fn what_does_not_go_with_examples_is_said_and_ends_with_code_2() {
    let run = pairs();
    for (more, expected) in [
        ("--sync d-psgd", "expected ddp, diloco"),
        ("--own-data true", "expected false: all ranks count"),
        ("--shards files", "expected random"),
        ("--objective ul2", "ul2 makes its sequences of a text"),
        ("--objective prefix-lm --loss-on all", "expected answers with the objective prefix-lm"),
        ("--context 8 --loss-on some", "expected one of answers all"),
        ("--context 2", "expected examples with a token of an answer among their first 2 tokens"),
    ] {
        let done = train(&run, "refused", &format!("--workers 2 {more}"));
        assert_eq!(done.status.code(), Some(2), "{more}: {}", said(&done));
        assert!(said(&done).contains(expected), "{more}: {}", said(&done));
    }
    fs::write(run.at("bad.jsonl"), "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": 1}\n").unwrap();
    let bad = run.at("bad.jsonl").display().to_string();
    let done = farflung().args(run.args(&format!("--data {bad} --steps 1"))).output().unwrap();
    assert_eq!(done.status.code(), Some(2), "{}", said(&done));
    assert!(said(&done).contains("bad.jsonl`, line 2: its `prompt` is a number"), "{}", said(&done));
    fs::write(run.at("one.jsonl"), "{\"prompt\": \"a\", \"completion\": \"b\"}").unwrap();
    let one = run.at("one.jsonl").display().to_string();
    let done = farflung().args(run.args(&format!("--data {one} --steps 1"))).output().unwrap();
    assert_eq!(done.status.code(), Some(2), "{}", said(&done));
    assert!(said(&done).contains("expected at least two: one is held out"), "{}", said(&done));
    // A run continues with the rows with which it was begun.
    assert!(train(&run, "begun", "").status.success());
    let begun = run.at("begun").display().to_string();
    for more in ["--packing false", "--loss-on all"] {
        let done = train(&run, "other", &format!("--resume {begun} {more}"));
        assert_eq!(done.status.code(), Some(2), "{more}: {}", said(&done));
        assert!(said(&done).contains("`data` is"), "{more}: {}", said(&done));
    }
    let mut host = farflung();
    let pairs = run.at("pairs.jsonl").display().to_string();
    host.arg("host").args(run.flags(&format!("--data {pairs} --sync diloco --steps 1")));
    let done = host.arg("--out").arg(run.at("host")).output().unwrap();
    assert_eq!(done.status.code(), Some(2), "{}", said(&done));
    assert!(said(&done).contains("`sync` is diloco, expected ddp with `data`"), "{}", said(&done));
}

/// A chat model of a folder learns what the assistant says, by its own template.
#[test]
#[cfg(feature = "tokenizers")]
fn conversations_are_learnt_by_the_models_own_template() {
    let run = Run::new();
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../zoo/tests/fixtures");
    fs::create_dir(run.at("tokenizer")).unwrap();
    for (from, to) in [
        ("tokenizers/gpt2/tokenizer.json", "tokenizer.json"),
        ("chat/chatml/tokenizer_config.json", "tokenizer_config.json"),
        ("chat/chatml/chat_template.jinja", "chat_template.jinja"),
    ] {
        fs::copy(fixtures.join(from), run.at("tokenizer").join(to)).unwrap();
    }
    let line = |say: &str| {
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        json!({ "messages": [message("user", "What is a token?"), message("assistant", say)] }).to_string()
    };
    let lines: Vec<String> = (0..12).map(|i| line(&"A piece of text. ".repeat(1 + i % 3))).collect();
    fs::write(run.at("chat.jsonl"), lines.join("\n")).unwrap();
    let (data, tokenizer) = (run.at("chat.jsonl"), run.at("tokenizer"));
    let more =
        format!("--data {} --tokenizer {} --context 128 --steps 2", data.display(), tokenizer.display());
    let done = farflung().args(run.args(&more)).arg("--out").arg(run.at("out")).output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    assert!(said(&done).contains("11 examples in "), "{}", said(&done));
    let byte = run.args(&format!("--data {} --steps 1", data.display()));
    let done = farflung().args(byte).output().unwrap();
    assert_eq!(done.status.code(), Some(2), "{}", said(&done));
    assert!(said(&done).contains("no template of conversations"), "{}", said(&done));
}
