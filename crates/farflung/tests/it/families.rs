//! Runs of a tiny LLaMA with grouped queries that a `config.json` describes: in every schedule, with codecs,
//! resumed, generated from, evaluated, and used as the start of another run.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::process::Output;

use farflung::StepMetrics;
use farflung::parallel::pipeline::Method;
use farflung::train::refusal;
use serde_json::{Value, json};

use crate::tiny::{Run, json_of, output, refused, stderr};

/// Returns a folder with a text and a description of the model.
pub(crate) fn llama() -> Run {
    let run = Run::new();
    describe(&run, "config.json", &[]);
    run
}

/// Writes the description of the model with some fields changed.
pub(crate) fn describe(run: &Run, name: &str, changes: &[(&str, Value)]) {
    let mut config = json!({
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": true,
    });
    for (field, value) in changes {
        config[*field] = value.clone();
    }
    fs::write(run.at(name), config.to_string()).unwrap();
}

/// Runs `train` with these arguments and the needed ones that they do not set.
pub(crate) fn train(run: &Run, args: &str) -> Output {
    let given: Vec<&str> = args.split_whitespace().collect();
    let model = if given.contains(&"--init-from") { "" } else { "--model config.json" };
    // A mesh says how many workers there are.
    let workers = if given.contains(&"--mesh") { "" } else { "--workers 1" };
    let needed = [
        model,
        "--steps 3",
        workers,
        "--batch 2",
        "--warmup 0",
        "--lr-schedule constant",
        "--lr 0.01",
        "--codec none",
        "--threads 1",
        "--eval-every 100",
        "--eval-batches 2",
        "--sample-tokens 0",
        "--data text.txt",
    ];
    let needed = needed.into_iter().filter(|flag| !given.contains(&flag.split(' ').next().unwrap()));
    let needed = needed.collect::<Vec<_>>().join(" ");
    output(run, &format!("train --json {args} {needed}"))
}

/// Trains with these arguments and returns the steps.
#[track_caller]
pub(crate) fn done(run: &Run, out: &str, args: &str) -> Vec<StepMetrics> {
    let output = train(run, &format!("{args} --out {out}"));
    assert!(output.status.success(), "{args}: {}", stderr(&output));
    let steps = farflung::metrics::read(&run.at(out).join("metrics.jsonl")).unwrap();
    assert!(steps.iter().all(|step| step.train_loss.is_finite()), "{args}: {steps:?}");
    steps
}

/// Checks that a run of each division, whose names begin with `prefix`, is continued under any other, with a
/// validation loss within `most` of the first division's; under its own with the same bits.
#[track_caller]
pub(crate) fn each_continues_any(
    run: &Run,
    (prefix, common): (&str, &str),
    divisions: &[(&str, &str)],
    most: f64,
) {
    for (name, args) in divisions {
        done(run, &format!("{prefix}{name}"), &format!("{common} {args} --steps 4"));
        done(run, &format!("{prefix}{name}-2"), &format!("{common} {args} --steps 2"));
    }
    let whole = |out: &str| fs::read(run.at(out).join("step-00000004/model.safetensors")).unwrap();
    let loss = |out: &str| {
        let text = fs::read_to_string(run.at(out).join("metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        last["val_loss"].as_f64().unwrap()
    };
    for (from, _) in divisions {
        for (to, args) in divisions {
            let out = format!("{prefix}{from}-{to}");
            let copied = std::process::Command::new("cp")
                .args(["-r", &format!("{prefix}{from}-2"), &out])
                .current_dir(run.at("."))
                .status();
            assert!(copied.unwrap().success());
            done(run, &out, &format!("{common} {args} --steps 4 --resume auto"));
            if from == to {
                assert!(whole(&out) == whole(&format!("{prefix}{to}")), "{out}");
            }
            let off = (loss(&out) - loss(&format!("{prefix}{}", divisions[0].0))).abs();
            assert!(off < most, "{out}: {off}");
        }
    }
}

/// Returns the largest relative difference between the losses of two runs of the same length.
#[track_caller]
pub(crate) fn farthest(a: &[StepMetrics], b: &[StepMetrics]) -> f64 {
    assert_eq!(a.len(), b.len());
    let off = |(a, b): (&StepMetrics, &StepMetrics)| (a.train_loss / b.train_loss - 1.0).abs();
    a.iter().zip(b).map(off).fold(0.0, f64::max)
}

#[test]
fn it_trains_in_every_schedule() {
    let run = llama();
    let alone = done(&run, "alone", "--accumulate 4");
    assert!(alone[2].train_loss < alone[0].train_loss, "{alone:?}");
    for schedule in Method::ALL.into_iter().filter(|method| refusal(*method).is_none()) {
        let name = schedule.name();
        let clip = if schedule.is_synchronous() { "" } else { "--clip 0" };
        let args = format!("--workers 2 --stages 2 --microbatches 4 --schedule {name} {clip}");
        let steps = done(&run, name, &args);
        assert_eq!(steps.len(), alone.len(), "{name}");
        if schedule.is_synchronous() {
            let off = farthest(&steps, &alone);
            assert!(off < 1e-4, "{name}: {off}");
        }
    }
}

#[test]
fn a_head_of_its_own_trains_in_stages_as_in_one_process() {
    let run = llama();
    describe(&run, "config.json", &[("tie_word_embeddings", false.into())]);
    let alone = done(&run, "alone", "--accumulate 4");
    let stages = done(&run, "stages", "--workers 2 --stages 2 --microbatches 4");
    assert!(farthest(&stages, &alone) < 1e-4, "{stages:?} {alone:?}");
    let config: Value =
        serde_json::from_slice(&fs::read(run.at("stages/step-00000003/config.json")).unwrap()).unwrap();
    assert_eq!((&config["tie_word_embeddings"], &config["model_type"]), (&json!(false), &json!("llama")));
}

#[test]
fn codecs_change_its_losses_little() {
    let run = llama();
    let stages = "--workers 4 --stages 2 --microbatches 4 --sampling epochs";
    let plain = done(&run, "plain", stages);
    for codecs in ["--boundary int8", "--boundary aqsgd:4", "--codec int8"] {
        let out = codecs.replace(|c: char| !c.is_alphanumeric(), "");
        let coded = done(&run, &out, &format!("{stages} {codecs}"));
        let off = farthest(&coded, &plain);
        assert!(0.0 < off && off < 0.02, "{codecs}: {off}");
    }
}

#[test]
fn it_is_resumed_to_the_same_bits() {
    let run = llama();
    for (name, args) in [
        ("one", "--accumulate 2"),
        ("two", "--workers 2 --stages 2 --microbatches 2"),
        ("sliced", "--workers 2 --stages 2 --microbatches 2 --schedule terapipe --boundary int8"),
    ] {
        let (whole, parts) = (format!("{name}-whole"), format!("{name}-parts"));
        done(&run, &whole, &format!("{args} --steps 4"));
        done(&run, &parts, &format!("{args} --steps 2"));
        done(&run, &parts, &format!("{args} --steps 4 --resume auto"));
        for file in ["model", "optimizer"] {
            let read =
                |out: &str| fs::read(run.at(out).join(format!("step-00000004/{file}.safetensors"))).unwrap();
            assert!(read(&whole) == read(&parts), "{name}: {file}");
        }
    }
}

#[test]
fn its_checkpoint_is_used_without_a_flag_of_the_model() {
    let run = llama();
    let report = json_of(&train(&run, "--out run"));
    let loss = report["val_loss"].as_f64().unwrap();
    for path in ["run", "run/step-00000003", "run/step-00000003/model.safetensors"] {
        let eval =
            output(&run, &format!("eval {path} --data text.txt --batch 2 --batches 12 --threads 1 --json"));
        assert_eq!(json_of(&eval)["loss"].as_f64().unwrap().to_bits(), loss.to_bits(), "{path}");
        // More tokens than its context.
        let text = output(&run, &format!("generate {path} --prompt the --tokens 12 --temperature 0 --json"));
        assert!(json_of(&text)["text"].as_str().is_some_and(|text| !text.is_empty()), "{path}");
        for (number, args) in ["", "--workers 2 --stages 2 --microbatches 2"].into_iter().enumerate() {
            let out = format!("{}-{number}", path.replace('/', "-"));
            let tuned = json_of(&train(&run, &format!("--init-from {path} {args} --out {out}")));
            let before = tuned["val_loss_before"].as_f64().unwrap();
            assert!((before - loss).abs() < 1e-5, "{path} {args}: {before} {loss}");
            let settings = fs::read_to_string(run.at(&out).join("config.toml")).unwrap();
            assert!(settings.contains("num_key_value_heads"), "{settings}");
        }
    }
}

#[test]
fn a_wrong_model_is_named() {
    let run = llama();
    refused(&train(&run, "--model no-such --out no"), "`model` is no-such, expected one of ");
    refused(&train(&run, "--model lama-nano --out no"), "llama-nano");
    refused(&train(&run, "--model missing/config.json --out no"), "missing/config.json");
    for (field, value, said) in [
        ("model_type", json!("mamba"), "`model_type` is \"mamba\", expected"),
        ("rope_scaling", json!({"rope_type": "yarn"}), "`rope_scaling.factor` is missing, expected"),
        (
            "rope_scaling",
            json!({"rope_type": "longrope"}),
            "`rope_scaling.rope_type` is \"longrope\", expected",
        ),
        ("hidden_act", json!("relu"), "`hidden_act` is \"relu\", expected"),
        ("num_key_value_heads", json!(3), "`num_key_value_heads` is 3, expected"),
        ("num_hidden_layers", json!(1_u64 << 40), "`num_hidden_layers` is 1099511627776, expected"),
    ] {
        describe(&run, "wrong.json", &[(field, value)]);
        let output = train(&run, "--model wrong.json --out no");
        refused(&output, said);
        assert!(stderr(&output).contains("wrong.json"), "the file is named: {}", stderr(&output));
    }
    assert!(!run.at("no").exists());
}

#[test]
fn another_model_than_the_checkpoints_is_refused_by_its_field() {
    let run = llama();
    done(&run, "run", "");
    describe(&run, "more-heads.json", &[("num_key_value_heads", json!(4))]);
    describe(&run, "wider.json", &[("intermediate_size", json!(32))]);
    describe(&run, "own-head.json", &[("tie_word_embeddings", json!(false))]);
    let gpt = "nano --layers 4 --heads 4 --dim 16 --context 8 --vocab 256";
    for (model, said) in [
        (
            "more-heads.json",
            "`model` is one with `num_key_value_heads` 4, expected one with `num_key_value_heads` 2",
        ),
        (
            "wider.json",
            "`model` is one with `intermediate_size` 32, expected one with `intermediate_size` 24",
        ),
        (
            "own-head.json",
            "one with `tie_word_embeddings` false, expected one with `tie_word_embeddings` true",
        ),
        (gpt, "`model` is a GPT-2, expected one with "),
    ] {
        let resumed = train(&run, &format!("--model {model} --steps 5 --resume auto --out run"));
        refused(&resumed, said);
        refused(&resumed, ", as when the checkpoint was written");
    }
    done(&run, "gpt", &format!("--model {gpt}"));
    let resumed = train(&run, "--steps 5 --resume auto --out gpt");
    refused(&resumed, "`model_type` \"llama\"");
    refused(&resumed, "expected a GPT-2, as when");
    // Weights have their own shape, as is said.
    let tuned = train(&run, "--model wider.json --out other --init-from run");
    assert!(stderr(&tuned).contains("`model` changes nothing"), "{}", stderr(&tuned));
}

/// Settings in a run's folder have the model, so that its file may be gone and another machine may join.
#[test]
fn a_run_needs_the_file_of_its_model_once() {
    let run = llama();
    done(&run, "llama", "");
    fs::write(
        run.at("gpt.json"),
        json!({
            "model_type": "gpt2", "vocab_size": 256, "n_embd": 12, "n_layer": 3, "n_head": 2, "n_positions": 10,
        })
        .to_string(),
    )
    .unwrap();
    done(&run, "gpt", "--model gpt.json --heads 3");
    for name in ["config.json", "gpt.json"] {
        fs::remove_file(run.at(name)).unwrap();
    }
    for (out, model) in [("llama", "llama-4x16"), ("gpt", "gpt-3x12")] {
        let args = format!("train --config {out}/config.toml --steps 4 --resume auto --out {out} --json");
        let report = json_of(&output(&run, &args));
        assert_eq!((&report["model"], &report["steps"]), (&json!(model), &json!(4)), "{report}");
    }
}
