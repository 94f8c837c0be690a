//! Tokenizers of files: `farflung tokenizer`, and runs that carry theirs.

#![cfg(feature = "tokenizers")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::process::Output;

use farflung::Checkpoint;
use farflung::zoo::Tokenizer as _;
use farflung::zoo::tokenizer::FileTokenizer;
use serde_json::json;

use crate::tiny::{Run, farflung, json_of, output, refused, stderr};

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A run's folder in which `tok` is a tokenizer with a template of conversations.
fn with_tokenizer() -> Run {
    let run = Run::new();
    json_of(&output(
        &run,
        "tokenizer train text.txt --vocab 270 --special <|end|> --special <|user|> --out tok --json",
    ));
    fs::write(
        run.at("tok/chat_template.jinja"),
        "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}",
    )
    .unwrap();
    run
}

fn trained(run: &Run, args: &str) -> Output {
    farflung().current_dir(run.at("")).args(run.args(args)).output().unwrap()
}

#[test]
fn a_tokenizer_is_trained_and_turns_texts_into_ids_and_back() {
    let run = with_tokenizer();
    let encoded = json_of(&output(&run, "tokenizer encode tok quick<|end|> --json"));
    assert_eq!(encoded["texts"].as_array().unwrap().last(), Some(&json!("<|end|>")));
    assert_eq!(encoded["ids"].as_array().unwrap().last(), Some(&json!(0)));
    let plain = json_of(&output(&run, "tokenizer encode tok/tokenizer.json quick<|end|> --plain --json"));
    assert!(plain["ids"].as_array().unwrap().len() > encoded["ids"].as_array().unwrap().len());
    let ids: Vec<String> = plain["ids"].as_array().unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(stdout(&output(&run, &format!("tokenizer decode tok {}", ids.join(",")))), "quick<|end|>");
    let decoded = json_of(&output(&run, "tokenizer decode tok 0 70 1 --skip-special-tokens --json"));
    assert_eq!(decoded["text"].as_str().unwrap().len(), 1);
    assert_eq!(stdout(&output(&run, "tokenizer encode gpt2 hello")), "31373\n");
    // Wrong words.
    refused(&output(&run, "tokenizer train text.txt --out tok"), "exists already");
    refused(&output(&run, "tokenizer train text.txt --vocab 9 --out new"), "`vocab` is 9, expected from 257");
    refused(&output(&run, "tokenizer train text.txt --vocab 99999999999 --out new"), "expected from 257");
    refused(&output(&run, "tokenizer train text.txt --special a --special a --out new"), "texts, each once");
    refused(&output(&run, "tokenizer train missing.txt --out new"), "missing.txt");
    refused(&output(&run, "tokenizer encode missing hello"), "byte, gpt2, or the path of a tokenizer.json");
    refused(&output(&run, "tokenizer encode gpt3 hello"), "did you mean `gpt2`?");
    refused(&output(&run, "tokenizer encode text.txt hello"), "not valid JSON");
    refused(&output(&run, "tokenizer decode tok 270"), "270 at position 0");
    assert!(!run.at("new").exists());
}

#[test]
fn a_run_carries_its_tokenizer() {
    let run = with_tokenizer();
    let flags = "--stages 2 --compress-checkpoints true --out run --tokenizer";
    json_of(&trained(&run, &format!("--steps 2 {flags} tok --json")));
    // From here on there is no other one.
    fs::rename(run.at("tok"), run.at("moved")).unwrap();
    let generate = "generate run --tokens 9 --temperature 0 --ignore-eos --json";
    let text = json_of(&output(&run, &format!("{generate} --prompt quick")));
    assert_eq!(text, json_of(&output(&run, &format!("{generate} --prompt quick --tokenizer moved"))));
    let answer = json_of(&output(&run, &format!("{generate} --chat --prompt quick")));
    assert_ne!(answer["text"], text["text"]);
    let staged = stdout(&output(&run, &format!("{generate} --prompt quick --stages 2")));
    assert_eq!(serde_json::from_str::<serde_json::Value>(&staged).unwrap(), text);
    json_of(&output(&run, "eval run --data text.txt --batches 1 --json"));
    let other = output(&run, "generate run --tokens 1 --tokenizer byte");
    assert!(
        stderr(&other).contains("trained with its own tokenizer, and byte is used"),
        "{}",
        stderr(&other)
    );
    // Another run starts from it, and this one continues.
    json_of(&trained(&run, "--steps 1 --init-from run --out tuned --json"));
    json_of(&output(&run, &format!("{generate} --prompt quick").replace("run", "tuned")));
    json_of(&trained(&run, &format!("--steps 3 {flags} tok --resume auto --json")));
    json_of(&trained(&run, &format!("--steps 4 {flags} moved --resume auto --json")));
    let byte = trained(&run, &format!("--steps 5 {flags} byte --resume auto --json"));
    refused(&byte, "`--tokenizer RUN` takes the run's");
    // Without the flag, it is the run's.
    json_of(&trained(
        &run,
        "--steps 5 --stages 2 --compress-checkpoints true --out run --resume auto --json",
    ));
    let gone = trained(&run, &format!("--steps 6 {flags} nowhere --resume auto --json"));
    assert!(stderr(&gone).contains("there is nothing at nowhere"), "{}", stderr(&gone));
    // As a folder for other programs.
    let written = json_of(&output(&run, "convert run folder --json"));
    assert_eq!(written["copied"], json!(["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]));
    let config = fs::read(run.at("folder/config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!((&config["eos_token_id"], &config["bos_token_id"]), (&json!(0), &json!(null)));
    let own = FileTokenizer::open(&run.at("folder")).unwrap();
    assert_eq!(own.name(), FileTokenizer::open(&run.at("moved")).unwrap().name());
    assert_eq!(own.chat_template(), FileTokenizer::open(&run.at("moved")).unwrap().chat_template());
    let newest = Checkpoint::open(&run.at("run/step-00000006")).unwrap();
    assert!(newest.names().contains(&"tokenizer.json"));
}

#[test]
fn a_text_with_bytes_that_have_no_token_is_told() {
    let run = with_tokenizer();
    let path = run.at("tok/tokenizer.json");
    let mut description: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let vocab = description["model"]["vocab"].as_object_mut().unwrap();
    vocab.remove("Ā").unwrap();
    fs::write(&path, description.to_string()).unwrap();
    fs::write(run.at("zeros.txt"), "the quick\u{0}brown fox ".repeat(500)).unwrap();
    let said = stderr(&trained(&run, "--tokenizer tok --data zeros.txt --steps 1 --out run"));
    assert!(
        said.contains("500 bytes of the text were left out: the tokenizer has no token for them"),
        "{said}"
    );
}
