//! A run that starts from weights or from a model's description and that others join: newcomers need no flag of
//! the model's.

use std::fs;
use std::path::Path;

use farflung::zoo::weights::{Dtype, TokenIds, Weights, WriteOptions, config_text, write};
use farflung::zoo::{ModelSpec, Resize, gpt2};

use super::{Run, host, join, members, said, trains};
use crate::tiny::farflung;
use rustix::process::Signal;

/// A GPT-2 with a shape that differs from all presets and from the other tests' runs.
fn gpt() -> ModelSpec {
    gpt2(3, 2, 12, 10, 304).unwrap()
}

/// A LLaMA whose three heads have one head of keys and values.
fn llama() -> ModelSpec {
    let sizes =
        Resize { layers: Some(3), heads: Some(3), dim: Some(12), context: Some(10), vocab: Some(304) };
    ModelSpec::preset("llama-baby").unwrap().resized(sizes).unwrap()
}

/// Writes weights of this shape.
fn write_weights(folder: &Path, model: &ModelSpec) {
    write(folder, model, WriteOptions::default(), |index, spec, out| {
        spec.fill(5, index, out);
        Ok::<(), farflung::Error>(())
    })
    .unwrap();
}

/// Returns flags of the shape, which must be the weights' if they are given.
fn flags(model: &ModelSpec) -> String {
    let heads = model.blocks[0].block.attention.heads.query;
    format!("--layers {} --heads {heads} --dim {} --context {}", model.layers(), model.dim, model.context)
}

/// Hosts a run that starts from weights of this shape with these arguments, which a member joins, and returns
/// the folders of both.
fn together(run: &Run, model: &ModelSpec, more: &str) {
    let weights = run.at("weights");
    write_weights(&weights, model);
    let shape = flags(model);
    let args =
        format!("--steps 12 --min-members 2 --out host --init-from {} {shape} {more}", weights.display());
    let host = host(run, &args);
    let newcomer = join(run, "a", "host/run.ticket", &[]);
    for member in [newcomer, host] {
        let ended = member.ends();
        assert!(ended.status.success(), "{}", said(&ended));
    }
}

fn report(run: &Run, member: &str) -> serde_json::Value {
    serde_json::from_slice(&fs::read(run.at(member).join("report.json")).unwrap()).unwrap()
}

#[test]
fn a_newcomer_has_the_model_of_the_weights() {
    for (model, more) in [
        (gpt(), "--precision bf16"),
        (gpt(), "--sync diloco --sync-every 4"),
        (llama(), "--codec int8"),
        (llama(), "--sync diloco --sync-every 4"),
    ] {
        let run = Run::new();
        together(&run, &model, more);
        let (first, second) = (report(&run, "host"), report(&run, "a"));
        assert_eq!(first["hash"], second["hash"], "{more}");
        // The run began with the weights, and not with those of a seed.
        let mut eval = farflung();
        eval.arg("eval").arg(run.at("weights")).args(["--batches", "1", "--json", "--data"]);
        let eval = eval.arg(run.at("text.txt")).output().unwrap();
        let loss: serde_json::Value = serde_json::from_slice(&eval.stdout).unwrap();
        let (begun, loss) = (first["val_loss_before"].as_f64().unwrap(), loss["loss"].as_f64().unwrap());
        assert!((begun - loss).abs() < 0.01, "{more}: {begun} {loss}");
        // Both save the whole model, with the padded vocabulary.
        for member in ["host", "a"] {
            let weights = Weights::open(&run.at(member).join("step-00000012")).unwrap();
            assert_eq!(*weights.spec(), model, "{more}: {member}");
        }
        let settings = fs::read_to_string(run.at("a/config.toml")).unwrap();
        assert!(!settings.contains("init-from") && settings.contains("vocab = 304"), "{settings}");
    }
}

#[test]
fn a_member_of_a_pipeline_takes_its_part_of_the_weights() {
    for model in [gpt(), llama()] {
        let run = Run::new();
        together(&run, &model, "--stages 2 --microbatches 2");
        // The first rank saves the whole model, which another run can start from.
        let weights = Weights::open(&run.at("host/step-00000012")).unwrap();
        assert_eq!(*weights.spec(), model);
        let newcomers = run.at("a/step-00000012");
        let message = Weights::open(&newcomers).unwrap_err().to_string();
        assert!(message.contains("no tensor"), "the newcomer has a part: {message}");
    }
}

#[test]
fn a_newcomer_needs_no_file_of_the_model() {
    let run = Run::new();
    let file = run.at("config.json");
    fs::write(&file, config_text(&llama(), Dtype::F32, &TokenIds::default())).unwrap();
    let args = "--steps 12 --min-members 2 --stages 2 --microbatches 2 --vocab 304 --out host";
    let host = host(&run, &format!("{args} --model {} {}", file.display(), flags(&llama())));
    fs::remove_file(&file).unwrap();
    let newcomer = join(&run, "a", "host/run.ticket", &[]);
    for member in [newcomer, host] {
        let ended = member.ends();
        assert!(ended.status.success(), "{}", said(&ended));
    }
    assert_eq!(*Weights::open(&run.at("host/step-00000012")).unwrap().spec(), llama());
}

/// A host that was given up takes the state from the members, and does not read the weights again.
#[test]
fn a_host_that_joins_again_needs_no_weights() {
    let run = Run::new();
    let weights = run.at("weights");
    write_weights(&weights, &gpt());
    let shape = flags(&gpt());
    let args = format!("--steps 1000000 --out host --init-from {} {shape}", weights.display());
    let host = host(&run, &args);
    let a = join(&run, "a", "host/run.ticket", &[]);
    let _b = join(&run, "b", "host/run.ticket", &[]);
    members(&run, &host, 3);
    // The event of a change is not among those of who joined with it.
    trains(&run, &a);
    host.send(Signal::STOP);
    members(&run, &a, 2);
    fs::remove_dir_all(&weights).unwrap();
    host.send(Signal::CONT);
    members(&run, &a, 3);
    let settings = fs::read_to_string(run.at("a/config.toml")).unwrap();
    assert!(settings.contains("vocab = 304") && !settings.contains("init-from"), "{settings}");
}
