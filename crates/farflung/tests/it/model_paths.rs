//! Paths of models that users give to `generate`, `eval` and `--init-from`: all forms lead to the same model,
//! and the error for a path without a model says what to do.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::process::{Command, Output};

use farflung::zoo::ModelSpec;
use farflung::zoo::weights::{Weights, WriteOptions, write};
use serde_json::Value;

use crate::tiny::{Run, farflung};

/// Runs a command in the folder of `run`, with caches of its own.
fn output(run: &Run, mut command: Command) -> Output {
    command.current_dir(run.at("")).env("HF_HUB_CACHE", run.at("hub")).output().unwrap()
}

fn generate(run: &Run, path: &str, more: &[&str]) -> Output {
    let mut command = farflung();
    command.args(["generate", path, "--tokens", "12", "--threads", "1"]).args(more);
    output(run, command)
}

fn eval(run: &Run, path: &str, more: &[&str]) -> Output {
    let mut command = farflung();
    command.args(["eval", path, "--data", "text.txt", "--batches", "2", "--json"]).args(more);
    output(run, command)
}

fn train(run: &Run, args: &str) -> Output {
    let mut command = farflung();
    command.args(run.args(&format!("{args} --workers 1 --json")));
    output(run, command)
}

/// Trains with these arguments, without flags of the model's shape.
fn fine_tune(run: &Run, args: &str) -> Output {
    let mut command = farflung();
    let flags = "train --workers 1 --json --batch 1 --warmup 0 --threads 1 --eval-batches 1 --data text.txt";
    command.args(format!("{flags} {args}").split_whitespace());
    output(run, command)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn json(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

#[track_caller]
fn refused(output: &Output, expected: &[&str]) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(expected.iter().all(|words| said.contains(words)), "{said} / {expected:?}");
}

/// Returns the folder of a run of three steps in `run`.
fn trained() -> Run {
    let run = Run::new();
    stdout(&train(&run, "--steps 3 --checkpoint-every 1 --out run"));
    run
}

fn copy(run: &Run, from: &str, to: &str) {
    fs::create_dir_all(run.at(to).parent().unwrap()).unwrap();
    fs::copy(run.at(from), run.at(to)).unwrap();
}

/// Writes the run's model with another vocabulary. The rows of more tokens get `value`.
fn with_vocabulary(run: &Run, folder: &str, vocab: usize, value: f32) {
    let mut weights = Weights::open(&run.at("run/step-00000003")).unwrap();
    let config = ModelSpec { vocab, ..weights.spec().clone() };
    let known = 256 * config.dim;
    write(&run.at(folder), &config, WriteOptions::default(), |_, spec, out| {
        let (own, more) = out.split_at_mut(if spec.name == "wte.weight" { known } else { spec.count() });
        more.fill(value);
        weights.tensor(&spec.name, own)
    })
    .unwrap();
}

#[test]
fn all_paths_of_a_model_lead_to_it() {
    let run = trained();
    let step = "run/step-00000003";
    for name in ["config.json", "model.safetensors"] {
        let file = format!("{step}/{name}");
        copy(&run, &file, &format!("plain/{name}"));
        copy(&run, &file, &format!("hub/models--me--tiny/snapshots/5f91d94/{name}"));
        copy(&run, &file, &format!("hub/models--me--tiny/snapshots/older/{name}"));
    }
    copy(&run, "plain/config.json", "renamed/config.json");
    copy(&run, "plain/model.safetensors", "renamed/tuned.safetensors");
    fs::create_dir_all(run.at("hub/models--me--tiny/refs")).unwrap();
    fs::write(run.at("hub/models--me--tiny/refs/main"), "5f91d94").unwrap();
    stdout(&train(&run, "--steps 3 --compress-checkpoints true --out packed"));
    let step_as_file = [format!("{step}/model.safetensors"), format!("{step}/config.json")];
    let forms = [
        step,
        "run",
        "run/latest",
        &step_as_file[0],
        &step_as_file[1],
        "plain",
        "renamed",
        "renamed/tuned.safetensors",
        "hub/models--me--tiny",
        "packed",
        "packed/step-00000003",
    ];
    let (text, loss) = (stdout(&generate(&run, "plain", &[])), json(&eval(&run, "plain", &[])));
    assert!(text.len() > 12, "{text:?}");
    let start = json(&fine_tune(&run, "--steps 1 --sample-tokens 0 --init-from plain --out of-plain"));
    assert_eq!(start["val_loss_before"].as_f64(), before(&run), "the run ended with this loss");
    for (number, form) in forms.into_iter().enumerate() {
        assert_eq!(stdout(&generate(&run, form, &[])), text, "{form}");
        assert_eq!(json(&eval(&run, form, &[])), loss, "{form}");
        let args = format!("--steps 1 --sample-tokens 0 --init-from {form} --out of-{number}");
        let tuned = fine_tune(&run, &args);
        assert_eq!(json(&tuned)["val_loss_before"], start["val_loss_before"], "{form}");
        assert_eq!(json(&tuned)["hash"], start["hash"], "{form}");
        // The checkpoint of a run's folder is named.
        let names = |of: &str| stderr(&tuned).contains(&format!("the run starts from the weights of {of}"));
        assert_eq!(names(step), form.starts_with("run") && form != step, "{form}: {}", stderr(&tuned));
    }
}

/// Returns the validation loss at the end of the run.
fn before(run: &Run) -> Option<f64> {
    let report = fs::read_to_string(run.at("run/report.json")).unwrap();
    serde_json::from_str::<Value>(&report).unwrap()["val_loss"].as_f64()
}

#[test]
fn the_newest_good_checkpoint_of_a_run_is_used() {
    let run = trained();
    let older = stdout(&generate(&run, "run/step-00000002", &[]));
    let file = run.at("run/step-00000003/model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[end - 1] ^= 1;
    fs::write(&file, bytes).unwrap();
    assert_eq!(stdout(&generate(&run, "run", &[])), older);
    let tuned = fine_tune(&run, "--steps 1 --init-from run --out tuned");
    assert!(tuned.status.success() && stderr(&tuned).contains("run/step-00000002"), "{}", stderr(&tuned));
}

#[test]
fn what_is_no_model_is_refused_with_what_to_do() {
    let run = trained();
    let at = |name: &str| run.at(name);
    for folder in ["empty", "torch", "begun", "nanogpt", "hub/models--me--cached/snapshots/1"] {
        fs::create_dir_all(at(folder)).unwrap();
    }
    for folder in ["torch", "hub/models--me--cached/snapshots/1"] {
        copy(&run, "run/step-00000003/config.json", &format!("{folder}/config.json"));
    }
    copy(&run, "run/step-00000003/model.safetensors", "lone/model.safetensors");
    for file in ["torch/pytorch_model.bin", "nanogpt/ckpt.pt"] {
        fs::write(at(file), "PK\x03\x04\0\0").unwrap();
    }
    fs::write(at("begun/config.toml"), "").unwrap();
    let folder = "expected a folder with config.json and model.safetensors, a GGUF file, a checkpoint, or a run's folder";
    fs::create_dir(at("adapter")).unwrap();
    fs::copy(at("lone/model.safetensors"), at("adapter/adapter_model.safetensors")).unwrap();
    let cases: [(&str, &[&str]); 16] = [
        ("adapter", &["is an adapter without its model", "merge_and_unload"]),
        (
            "openai-community/gpt2",
            &[
                "no file or folder `openai-community/gpt2`",
                folder,
                "hf download openai-community/gpt2 --local-dir gpt2",
            ],
        ),
        (
            "https://huggingface.co/openai-community/gpt2",
            &["hf download openai-community/gpt2 --local-dir gpt2"],
        ),
        ("huggingface.co/openai-community/gpt2/", &["hf download openai-community/gpt2 --local-dir gpt2"]),
        ("gpt2-xl", &["hf download gpt2-xl --local-dir gpt2-xl"]),
        ("me/cached", &["your Hugging Face cache has a copy", "hub/models--me--cached/snapshots/1"]),
        ("~/gpt2", &["the shell has not replaced `~`"]),
        ("run/step-00000009", &[folder, "the newest checkpoint of run is step-00000003"]),
        ("rum", &["did you mean run?"]),
        ("no/such/folder", &["there is no folder no"]),
        ("empty", &["`empty` is an empty folder", folder]),
        ("begun", &["`begun` is the folder of a run that has no checkpoint yet", folder]),
        (".", &["contains some", "./run"]),
        ("nanogpt", &["has ckpt.pt, but no config.json", "convert it"]),
        ("nanogpt/ckpt.pt", &["is a zip archive", "PyTorch's torch.save", "convert it"]),
        ("lone/model.safetensors", &["without config.json beside it", "config.json into the folder"]),
    ];
    for (path, expected) in cases {
        refused(&generate(&run, path, &[]), expected);
        refused(&eval(&run, path, &[]), expected);
        refused(&fine_tune(&run, &format!("--init-from {path} --out refused")), expected);
    }
    // These are models, but their weights cannot be read.
    let said = stderr(&generate(&run, "torch", &[]));
    assert!(said.contains("no model.safetensors, but `pytorch_model.bin`: PyTorch's torch.save"), "{said}");
    fs::remove_file(at("torch/config.json")).unwrap();
    fs::create_dir(at("torch/config.json")).unwrap();
    let said = stderr(&generate(&run, "torch", &[]));
    assert!(said.starts_with("error: failed to read `torch/config.json`\n  cause: "), "{said}");
    assert_eq!(said.lines().count(), 2, "each cause is told once: {said}");
    assert!(!at("refused").exists());
}

#[test]
fn a_padded_vocabulary_is_trained_and_never_drawn() {
    let run = trained();
    // The rows without text are the likeliest ones by far.
    with_vocabulary(&run, "padded", 304, 50.0);
    for more in
        [&["--temperature", "0"][..], &["--temperature", "5", "--top-p", "1"], &["--tokenizer", "byte"]]
    {
        let json = json(&generate(&run, "padded", &[&["--json", "--prompt", "fox"], more].concat()));
        let text = json["text"].as_str().unwrap();
        // Bytes that are no UTF-8 became replacement characters, so that there may be fewer characters.
        assert!((1..=12).contains(&text.chars().count()), "{json}");
    }
    let loss = json(&eval(&run, "padded", &[]))["loss"].as_f64().unwrap();
    assert!(loss.is_finite());
    with_vocabulary(&run, "zeros", 304, 0.0);
    let tuned = json(&fine_tune(&run, "--steps 3 --init-from zeros --out tuned --sample-tokens 12"));
    assert!(tuned["sample"]["text"].as_str().is_some_and(|text| !text.is_empty()), "{tuned}");
    assert!(tuned["val_loss"].as_f64() < tuned["val_loss_before"].as_f64(), "{tuned}");
    // The run's folder says what its model is, so that nothing else is needed to use and to continue it.
    assert!(!stdout(&generate(&run, "tuned", &[])).is_empty());
    let settings = fs::read_to_string(run.at("tuned/config.toml")).unwrap();
    for line in ["vocab = 304", "layers = 2", "heads = 2", "dim = 8", "context = 8", "tokenizer = \"byte\""] {
        assert!(settings.contains(&format!("\n{line} # by default\n")), "{line}: {settings}");
    }
    json(&fine_tune(&run, "--config tuned/config.toml --steps 5 --out tuned --resume auto"));
    json(&train(&run, "--vocab 304 --steps 7 --out tuned --resume auto"));
}

#[test]
fn a_setting_that_differs_from_the_weights_is_refused() {
    let run = trained();
    for (flag, field, given, weights) in [
        ("--layers 1", "layers", 1, 2),
        ("--heads 4", "heads", 4, 2),
        ("--dim 16", "dim", 16, 8),
        ("--context 4", "context", 4, 8),
        ("--vocab 300", "vocab", 300, 256),
    ] {
        let expected = format!("`{field}` is {given}, expected {weights}, as in the weights of `init-from`");
        refused(&fine_tune(&run, &format!("--steps 1 --init-from run {flag} --out refused")), &[&expected]);
    }
    let output = fine_tune(&run, "--steps 1 --init-from run --tokenizer gpt2 --out refused");
    refused(&output, &["`tokenizer` is gpt2", "expected one for a vocabulary of 256"]);
    json(&train(&run, "--steps 1 --init-from run --vocab 256 --tokenizer byte --out same"));
}

#[test]
fn the_default_tokenizer_is_the_models() {
    let run = trained();
    with_vocabulary(&run, "large", 50304, 0.0);
    json(&fine_tune(&run, "--steps 1 --init-from large --out tuned --sample-tokens 0"));
    let settings = fs::read_to_string(run.at("tuned/config.toml")).unwrap();
    assert!(settings.contains("\ntokenizer = \"gpt2\" # by default\n"), "{settings}");
    // A checkpoint knows the tokenizer of its run, whatever the vocabulary is.
    json(&fine_tune(&run, "--steps 1 --init-from large --tokenizer byte --out bytes --sample-tokens 0"));
    let loss = |path: &str, more: &[&str]| json(&eval(&run, path, more))["loss"].as_f64().unwrap();
    assert_eq!(loss("bytes", &[]).to_bits(), loss("bytes", &["--tokenizer", "byte"]).to_bits());
    let output = eval(&run, "bytes", &["--tokenizer", "gpt2"]);
    let warning = "warning: the model was trained with the tokenizer byte, and gpt2 is used";
    assert!(output.status.success() && stderr(&output).contains(warning), "{}", stderr(&output));
}

#[test]
fn a_tokenizer_of_a_model_that_is_not_read_is_told() {
    let run = trained();
    with_vocabulary(&run, "own", 256, 0.0);
    let tokenizer = serde_json::json!({
        "pre_tokenizer": {"type": "Whitespace"},
        "normalizer": null,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    });
    fs::write(run.at("own/tokenizer.json"), tokenizer.to_string()).unwrap();
    let difference = "neither `model.unk_token`, nor all bytes";
    for output in [generate(&run, "own", &[]), eval(&run, "own", &[])] {
        refused(&output, &["tokenizer.json in `own`, cannot be used", difference, "--tokenizer byte"]);
    }
    let warning = "warning: the model's own tokenizer, tokenizer.json in own, is not used";
    for output in [
        generate(&run, "own", &["--tokenizer", "byte"]),
        fine_tune(&run, "--steps 1 --init-from own --out tuned --sample-tokens 0"),
    ] {
        stdout(&output);
        assert!(
            stderr(&output).contains(warning) && stderr(&output).contains(difference),
            "{}",
            stderr(&output)
        );
    }
    // The tuned model is one of bytes.
    stdout(&generate(&run, "tuned", &[]));
}

#[test]
fn a_part_of_a_model_is_called_so() {
    let run = trained();
    let mut command = farflung();
    command.args(run.args("--steps 2 --stages 2 --out parts --json"));
    json(&output(&run, command));
    assert!(!stdout(&generate(&run, "parts", &[])).is_empty());
    refused(&generate(&run, "parts/ranks/rank-00001", &[]), &["holds a part of the model", "rank 0"]);
}

#[test]
fn a_checkpoint_without_its_weights_is_called_so_and_pipes_are_not_waited_for() {
    let run = trained();
    fs::create_dir(run.at("pipe")).unwrap();
    copy(&run, "run/step-00000003/config.json", "pipe/config.json");
    let pipe = Command::new("mkfifo").arg(run.at("pipe/model.safetensors")).status();
    assert!(pipe.unwrap().success());
    for path in ["pipe", "pipe/model.safetensors"] {
        refused(&generate(&run, path, &[]), &["no regular file"]);
    }
    fs::remove_file(run.at("run/step-00000003/model.safetensors")).unwrap();
    let refused_by = generate(&run, "run/step-00000003", &[]);
    assert_eq!(refused_by.status.code(), Some(2), "{}", stderr(&refused_by));
    assert!(stderr(&refused_by).contains("model.safetensors"), "{}", stderr(&refused_by));
    assert!(!stderr(&refused_by).contains("a part of the model"), "{}", stderr(&refused_by));
}

#[test]
fn a_text_is_measured_as_the_models_run_has_read_it() {
    let run = Run::new();
    fs::write(run.at("text.txt"), "caf\u{e9} ".repeat(2000).chars().map(|c| c as u8).collect::<Vec<u8>>())
        .unwrap();
    stdout(&train(&run, "--steps 1 --encoding windows-1252 --out run"));
    let of = |more: &[&str]| json(&eval(&run, "run", more))["loss"].clone();
    let as_in_run = of(&[]);
    assert_eq!(as_in_run, of(&["--encoding", "windows-1252"]));
    // The same bytes in another encoding are other characters.
    assert_ne!(as_in_run, of(&["--encoding", "windows-1251"]));
}

#[test]
fn a_checkpoint_whose_weights_have_changed_is_refused_by_its_own_path() {
    let run = Run::new();
    stdout(&train(&run, "--steps 1 --compress-checkpoints false --out run"));
    let path = run.at("run/step-00000001/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() * 3 / 4;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    let checkpoint = "run/step-00000001";
    for output in [
        generate(&run, checkpoint, &[]),
        eval(&run, checkpoint, &[]),
        fine_tune(&run, &format!("--steps 1 --init-from {checkpoint} --out tuned")),
    ] {
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("its hash differs from the manifest's"), "{}", stderr(&output));
    }
}

#[test]
fn a_run_is_continued_without_the_weights_that_it_started_from() {
    let run = Run::new();
    stdout(&train(&run, "--steps 1 --compress-checkpoints false --out first"));
    fs::rename(run.at("first/step-00000001"), run.at("weights")).unwrap();
    stdout(&fine_tune(&run, "--steps 2 --init-from weights --out tuned"));
    fs::remove_dir_all(run.at("weights")).unwrap();
    let again = json(&fine_tune(&run, "--config tuned/config.toml --out tuned --steps 4 --resume auto"));
    assert_eq!(again["steps"], 4);
    // Where there is nothing to continue, the weights are needed.
    for resume in ["", "--resume auto"] {
        let refused = fine_tune(&run, &format!("--steps 2 --init-from weights --out other {resume}"));
        assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
        assert!(stderr(&refused).contains("there is no file or folder `weights`"), "{}", stderr(&refused));
    }
}

/// Sequences are as long as is asked for, and never as long as a file claims.
#[test]
fn a_model_is_measured_on_sequences_of_a_given_length() {
    let run = Run::new();
    let describe = |context: usize| {
        serde_json::json!({
            "model_type": "llama", "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 24,
            "max_position_embeddings": context, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": true,
        })
        .to_string()
    };
    let config = run.at("model/config.json");
    let spec = farflung::zoo::weights::config_from_text(&config, &describe(16)).unwrap();
    write(&run.at("model"), &spec, WriteOptions::default(), |index, spec, out| {
        spec.fill(3, index, out);
        Ok::<_, farflung::zoo::ZooError>(())
    })
    .unwrap();
    fs::write(run.at("rows.json"), r#"{"input_ids": [[1, 2, 3, 4]]}"#).unwrap();
    let rows = |run: &Run| {
        let mut command = farflung();
        command.args(["eval", "model", "--tokens", "rows.json", "--json"]);
        json(&output(run, command))
    };
    let (of_rows, of_eight) = (rows(&run), json(&eval(&run, "model", &["--context", "8"])));
    assert_eq!(of_eight["tokens"], 2 * 12 * 8);
    let refused = eval(&run, "model", &["--context", "17"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("at most 16, the model's context"), "{}", stderr(&refused));
    // A table of 2^24 positions would take 8 GiB.
    fs::write(&config, describe(1 << 24)).unwrap();
    assert_eq!(rows(&run), of_rows);
    assert_eq!(json(&eval(&run, "model", &["--context", "8"])), of_eight);
}
