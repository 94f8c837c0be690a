//! A real model in a real file: SmolLM2-135M-Instruct as GGUF, read, asked, trained over a slow link and
//! written. All by the `farflung` command, as a user would.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use farflung::ModelSource;
use farflung::zoo::chat::{ChatTemplate, Conversation};
use serde_json::{Value, json};

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "smollm2",
    claim: "SmolLM2-135M-Instruct in a GGUF file of Q4_1 has the ids, log-probabilities (within 1e-3), rendered \
            conversation and greedy answer that transformers computes with the same weights; it is written as a \
            folder of Hugging Face's layout that is the same model; and it trains in a pipeline over 20 Mbit/s",
    source: "transformers 5.24 with torch 2.15 on the dequantised weights",
    seed: 0,
    run,
};

/// What transformers computes.
const EXPECTED: &str = include_str!("../fixtures/smollm2.json");
/// Where `cargo xtask setup smollm2` puts the file.
const FILE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");

/// Runs a command and returns what it prints.
fn said(args: &[&str]) -> Result<String> {
    let output = farflung(args)?.stdout(Stdio::piped()).stderr(Stdio::piped()).output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`farflung {}`: {}: {error}", args.join(" "), output.status);
    String::from_utf8(output.stdout).context("it printed no text")
}

fn object(args: &[&str]) -> Result<Value> {
    let args = [args, &["--json"]].concat();
    serde_json::from_str(&said(&args)?).with_context(|| format!("`farflung {}`", args.join(" ")))
}

/// Returns the number of ids that differ.
fn differing(found: &Value, expected: &Value) -> Result<f64> {
    let ids = |ids: &Value| serde_json::from_value::<Vec<u32>>(ids.clone());
    let (found, expected) = (ids(found)?, ids(expected)?);
    let apart = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
    Ok((apart + found.len().abs_diff(expected.len())) as f64)
}

/// Returns the largest distance of log-probabilities from those that are expected.
fn farthest(found: &[f64], expected: &Value) -> Result<f64> {
    let expected: Vec<f64> = serde_json::from_value(expected.clone())?;
    ensure!(found.len() == expected.len(), "{} log-probabilities, expected {}", found.len(), expected.len());
    Ok(found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max))
}

/// Returns the log-probabilities of the ids of a row after the first.
fn logprobs(model: &str, row: &Value, folder: &Path) -> Result<Vec<f64>> {
    let rows = folder.join("rows.json");
    fs::write(&rows, json!({"input_ids": [row["ids"]]}).to_string())?;
    let rows = rows.display().to_string();
    Ok(serde_json::from_value(object(&["eval", model, "--tokens", &rows])?["logprobs"][0].take())?)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let file = PathBuf::from(FILE);
    ensure!(file.is_file(), "{} is not there: `cargo xtask setup smollm2` fetches it", file.display());
    let expected: Value = serde_json::from_str(EXPECTED)?;
    let (folder, file) = (tempfile::tempdir()?, file.display().to_string());
    let written = folder.path().join("folder");
    let written = written.display().to_string();
    let converted = object(&["convert", &file, &written])?;
    let counted = converted["parameters"].as_f64().unwrap_or(0.0);
    let published = expected["parameters"].as_f64().context("a count")?;
    let off = (counted - published).abs();
    report.row("parameters: off from those of transformers by", off, "", Threshold::AtMost(0.0))?;
    for (model, path) in [("GGUF", &file), ("folder", &written)] {
        for row in expected["rows"].as_array().into_iter().flatten() {
            let text = row["text"].as_str().context("a text")?;
            let name = format!("{model}, {:?}", text.chars().take(12).collect::<String>());
            let ids = object(&["tokenizer", "encode", path, text])?;
            let apart = differing(&ids["ids"], &row["ids"])?;
            report.row(&format!("{name}: ids that differ"), apart, "", Threshold::AtMost(0.0))?;
            let off = farthest(&logprobs(path, row, folder.path())?, &row["logprobs"])?;
            report.row(&format!("{name}: log-probabilities off by"), off, "", Threshold::AtMost(1e-3))?;
        }
        conversation(report, (model, path), &expected["chat"])?;
    }
    trains(report, options, &file, folder.path())
}

/// Compares a conversation and its answer.
fn conversation(report: &mut Report<'_>, (model, path): (&str, &str), chat: &Value) -> Result<()> {
    let tokenizer = ModelSource::find(Path::new(path))?.own_tokenizer()?;
    let template = ChatTemplate::new(tokenizer.chat_template().context("there is no template")?)?;
    let mut asked = Conversation::from_json(&chat["messages"].to_string())?.asking();
    asked.marks = tokenizer.marks();
    let rendered = template.render(&asked)?;
    let same = f64::from(u8::from(rendered == chat["rendered"]));
    report.row(&format!("{model}: conversation is written the same"), same, "", Threshold::AtLeast(1.0))?;
    let ids = json!(tokenizer.encode_marked(&rendered)?);
    let apart = differing(&ids, &chat["ids"])?;
    report.row(&format!("{model}: ids of it that differ"), apart, "", Threshold::AtMost(0.0))?;
    let question = chat["messages"][0]["content"].as_str().context("a question")?;
    let count = chat["greedy"].as_array().map_or(0, Vec::len).to_string();
    let args = [
        "generate",
        path,
        "--chat",
        "--prompt",
        question,
        "--temperature",
        "0",
        "--ignore-eos",
        "--tokens",
        &count,
    ];
    let answer = object(&args)?;
    let same = f64::from(u8::from(answer["text"] == chat["greedy_text"]));
    report.row(&format!("{model}: greedy answer is the same"), same, "", Threshold::AtLeast(1.0))?;
    Ok(())
}

/// Trains the model in two stages over a slow link, and lets a checkpoint answer.
fn trains(report: &mut Report<'_>, options: &Options, file: &str, folder: &Path) -> Result<()> {
    let (text, out) = (folder.join("text.txt"), folder.join("run"));
    let lines = (0..2000).map(|n| format!("Machine {n} sends its gradients over a slow link, and waits.\n"));
    fs::write(&text, lines.collect::<String>())?;
    let (text, out) = (text.display().to_string(), out.display().to_string());
    let steps = if options.quick { "2" } else { "6" };
    let trained = object(&[
        "train",
        "--init-from",
        file,
        "--data",
        &text,
        "--out",
        &out,
        "--stages",
        "2",
        "--workers",
        "2",
        "--batch",
        "1",
        "--microbatches",
        "2",
        "--context",
        "64",
        "--steps",
        steps,
        "--warmup",
        "1",
        "--lr",
        "1e-4",
        "--link",
        "20mbit,25ms",
        "--deadline",
        "1h",
        "--eval-batches",
        "2",
        "--sample-tokens",
        "0",
        "--quiet",
    ])?;
    let (before, after) = (trained["val_loss_before"].as_f64(), trained["val_loss"].as_f64());
    let (before, after) = (before.context("a loss before")?, after.context("a loss after")?);
    report.row("held-out loss after over before", after / before, "", Threshold::AtMost(1.0))?;
    let answer = object(&[
        "generate",
        &out,
        "--prompt",
        "Machine 7 sends its",
        "--tokens",
        "4",
        "--temperature",
        "0",
    ])?;
    let is_text = answer["text"].as_str().is_some_and(|text| !text.trim().is_empty());
    report.row("the run's checkpoint answers", f64::from(u8::from(is_text)), "", Threshold::AtLeast(1.0))?;
    Ok(())
}
