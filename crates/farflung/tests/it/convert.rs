//! `farflung convert`: a run's checkpoint, a folder in shards and a GGUF file become folders of the same model;
//! what cannot be written changes nothing.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../../../zoo/tests/it/gguf/file.rs"]
mod file;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use farflung::zoo::ModelSpec;
use farflung::zoo::weights::{Dtype, TensorFile, Weights, WriteOptions, write};
use serde_json::{Value, json};

use crate::tiny::{Run, farflung, json_of, output, refused, stderr};
use file::{Gguf, name_in_file};

fn llama() -> ModelSpec {
    let text = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 8,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true,
    });
    farflung::zoo::weights::config_from_text(Path::new("config.json"), &text.to_string()).unwrap()
}

/// Writes a model to a folder; `change` may change a tensor.
fn write_model(folder: &Path, options: WriteOptions, change: impl Fn(usize, &mut [f32])) {
    write(folder, &llama(), options, |index, spec, out| {
        spec.fill(5, index, out);
        change(index, out);
        Ok::<_, farflung::zoo::ZooError>(())
    })
    .unwrap();
}

/// Reads all tensors of a model.
fn all(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let mut weights = Weights::open(path).unwrap();
    let tensors = weights.spec().tensors();
    let read = |spec: farflung::zoo::TensorSpec| {
        let mut values = vec![0.0; spec.count()];
        weights.tensor(&spec.name, &mut values).unwrap();
        (spec.name, values)
    };
    tensors.into_iter().map(read).collect()
}

/// Returns the bytes of a GGUF file with the values of a folder, in their order there.
fn gguf(folder: &Path) -> Vec<u8> {
    let config = fs::read(folder.join("config.json")).unwrap();
    let mut out = Gguf::described("llama", &serde_json::from_slice(&config).unwrap());
    out.u32("tokenizer.ggml.eos_token_id", &9.into());
    let mut file = TensorFile::open(&folder.join("model.safetensors")).unwrap();
    for (known, info) in file.tensors().clone() {
        let mut values = vec![0.0; info.shape.iter().product()];
        file.read_f32(&known, &info.shape, &mut values).unwrap();
        let data = values.iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
        out.tensors.push((name_in_file(&known), info.shape, 0, data));
    }
    out.bytes()
}

#[test]
fn a_run_becomes_a_folder_that_training_starts_from() {
    let run = Run::new();
    let trained = farflung()
        .args(run.args("--steps 2 --workers 1 --out out"))
        .current_dir(run.at(""))
        .output()
        .unwrap();
    assert!(trained.status.success(), "{}", stderr(&trained));
    let written = json_of(&output(&run, "convert out model --json"));
    assert_eq!((&written["dtype"], &written["copied"]), (&json!("f32"), &json!([])));
    assert_eq!(all(&run.at("model")), all(&run.at("out/step-00000002")));
    let eval = |path: &str| {
        let args = format!("eval {path} --data text.txt --batches 1 --tokenizer byte --json");
        json_of(&output(&run, &args))["loss"].as_f64().unwrap()
    };
    assert_eq!(eval("model").to_bits(), eval("out").to_bits());
    // Half precision is as near as it can be.
    json_of(&output(&run, "convert model half --dtype bf16 --shard-mb 1 --json"));
    let (exact, half) = (all(&run.at("model")), all(&run.at("half")));
    for (name, values) in &exact {
        let off = |(a, b): (&f32, &f32)| (a - b).abs() <= a.abs() / 256.0;
        assert!(values.iter().zip(&half[name]).all(off), "{name}");
    }
    assert!((eval("half") / eval("model") - 1.0).abs() < 1e-2);
}

#[test]
fn types_and_shards_are_the_sources_or_those_that_are_asked_for() {
    let run = Run::new();
    let half = WriteOptions { dtype: Dtype::Bf16, shard_bytes: Some(4000), ..WriteOptions::default() };
    write_model(&run.at("shards"), half.clone(), |_, _| ());
    fs::write(run.at("shards/tokenizer_config.json"), "{}").unwrap();
    let described = fs::read_to_string(run.at("shards/config.json")).unwrap();
    let described = described.replacen('{', "{\"eos_token_id\": [2, 7], \"pad_token_id\": null,", 1);
    fs::write(run.at("shards/config.json"), described).unwrap();
    fs::write(run.at("shards/notes.txt"), "mine").unwrap();
    let said = output(&run, "convert shards one");
    assert!(said.status.success(), "{}", stderr(&said));
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.starts_with("one: ") && said.ends_with("as bf16, with tokenizer_config.json\n"), "{said}");
    assert!(run.at("one/tokenizer_config.json").exists() && !run.at("one/notes.txt").exists());
    assert_eq!(all(&run.at("one")), all(&run.at("shards")));
    let config = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(run.at(name).join("config.json")).unwrap()).unwrap()
    };
    assert_eq!(config("one"), config("shards"));
    // The same file as was written in one piece.
    write_model(&run.at("expected"), WriteOptions { shard_bytes: None, ..half }, |_, _| ());
    let bytes = |name: &str| fs::read(run.at(name).join("model.safetensors")).unwrap();
    assert_eq!(bytes("one"), bytes("expected"));
}

#[test]
fn a_gguf_file_becomes_a_folder_of_the_same_model() {
    let run = Run::new();
    write_model(&run.at("source"), WriteOptions::default(), |_, _| ());
    fs::write(run.at("model.gguf"), gguf(&run.at("source"))).unwrap();
    // Such a file in a folder with a tokenizer of others.
    fs::write(run.at("tokenizer.json"), "{}").unwrap();
    fs::write(run.at("rows.json"), r#"{"input_ids": [[1, 2, 3, 60, 5, 6, 7, 8]]}"#).unwrap();
    let written = json_of(&output(&run, "convert model.gguf folder --json"));
    assert_eq!((&written["dtype"], &written["copied"]), (&json!("f32"), &json!([])));
    let config: Value = serde_json::from_slice(&fs::read(run.at("folder/config.json")).unwrap()).unwrap();
    assert_eq!(config["eos_token_id"], 9);
    let eval = |path: &str| json_of(&output(&run, &format!("eval {path} --tokens rows.json --json")));
    assert_eq!(eval("model.gguf"), eval("folder"));
    // Only the order of queries and keys differs, which changes what the model computes.
    assert_eq!(all(&run.at("folder")).len(), all(&run.at("source")).len());
    assert_ne!(eval("folder"), eval("source"));
    // It is trained in a pipeline.
    let flags = "--stages 2 --workers 2 --batch 1 --steps 2 --warmup 0 --sample-tokens 0 --threads 1";
    let tuned =
        output(&run, &format!("train --init-from model.gguf --tokens rows.json --out tuned {flags} --json"));
    assert!(json_of(&tuned)["val_loss"].as_f64().is_some());
    assert!(stderr(&tuned).contains("that of the GGUF file"), "{}", stderr(&tuned));
}

#[test]
fn what_cannot_be_written_changes_nothing() {
    let run = Run::new();
    write_model(&run.at("model"), WriteOptions::default(), |_, _| ());
    refused(&output(&run, "convert nowhere new"), "there is no file or folder `nowhere`");
    refused(&output(&run, "convert model model"), "`model` exists already and is not an empty folder");
    refused(&output(&run, "convert model text.txt"), "`text.txt` exists already");
    refused(&output(&run, "convert model new --dtype int8"), "int8");
    refused(&output(&run, "convert model new --shard-mb 0"), "--shard-mb");
    write_model(&run.at("large"), WriteOptions::default(), |index, out| {
        if index == 3 {
            out[7] = 70000.0;
        }
    });
    refused(
        &output(&run, "convert large new --dtype f16"),
        "its element 7 is 70000, which F16 does not have",
    );
    write_model(&run.at("broken"), WriteOptions::default(), |index, out| {
        if index == 4 {
            out[2] = f32::NAN;
        }
    });
    let said = output(&run, "convert broken new");
    assert!(!said.status.success() && stderr(&said).contains("its element 2 is NaN"), "{}", stderr(&said));
    let left: Vec<_> = fs::read_dir(run.at("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("new")), "{left:?}");
    // What another process or the user has beside it is left alone, also if it is the source.
    fs::rename(run.at("model"), run.at(".new.tmp")).unwrap();
    refused(&output(&run, "convert .new.tmp text.txt/x"), "text.txt/x");
    fs::create_dir(run.at("new")).unwrap();
    assert!(output(&run, "convert .new.tmp new/.").status.success());
    assert_eq!(all(&run.at("new")), all(&run.at(".new.tmp")));
    let hidden = |name: &str| name.starts_with('.') && name != ".new.tmp";
    let left = fs::read_dir(run.at("")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| !hidden(&name.to_string_lossy())));
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("elsewhere", run.at("link")).unwrap();
        refused(&output(&run, "convert new link"), "`link` exists already");
    }
}
