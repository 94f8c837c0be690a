//! A run that starts from weights and that others join: newcomers need no flag of the model's.

use std::fs;
use std::path::Path;

use farflung::zoo::weights::{Weights, WriteOptions, write};
use farflung::zoo::{ModelSpec, gpt2};

use super::{Run, host, join, members, said, trains};
use crate::tiny::farflung;
use rustix::process::Signal;

/// A shape that differs from all presets and from the other tests' runs.
fn shape() -> ModelSpec {
    gpt2(3, 2, 12, 10, 304).unwrap()
}

/// Writes weights of this shape.
fn write_weights(folder: &Path) {
    write(folder, &shape(), WriteOptions::default(), |index, spec, out| {
        spec.fill(5, index, out);
        Ok::<(), farflung::Error>(())
    })
    .unwrap();
}

/// Hosts a run with these arguments, which a member joins, and returns the folders of both.
fn together(run: &Run, more: &str) {
    let weights = run.at("weights");
    write_weights(&weights);
    // Flags of the shape that are given must be the weights'.
    let shape = "--layers 3 --heads 2 --dim 12 --context 10";
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
    for more in ["--precision bf16", "--sync diloco --sync-every 4"] {
        let run = Run::new();
        together(&run, more);
        let (first, second) = (report(&run, "host"), report(&run, "a"));
        assert_eq!(first["hash"], second["hash"], "{more}");
        // The run began with the weights, and not with those of a seed.
        let mut eval = farflung();
        eval.arg("eval").arg(run.at("weights")).args(["--batches", "1", "--batch", "1", "--json", "--data"]);
        let eval = eval.arg(run.at("text.txt")).output().unwrap();
        let loss: serde_json::Value = serde_json::from_slice(&eval.stdout).unwrap();
        let (begun, loss) = (first["val_loss_before"].as_f64().unwrap(), loss["loss"].as_f64().unwrap());
        assert!((begun - loss).abs() < 0.01, "{more}: {begun} {loss}");
        // Both save the whole model, with the padded vocabulary.
        for member in ["host", "a"] {
            let weights = Weights::open(&run.at(member).join("step-00000012")).unwrap();
            assert_eq!(*weights.spec(), shape(), "{more}: {member}");
        }
        let settings = fs::read_to_string(run.at("a/config.toml")).unwrap();
        assert!(!settings.contains("init-from") && settings.contains("vocab = 304"), "{settings}");
    }
}

#[test]
fn a_member_of_a_pipeline_takes_its_part_of_the_weights() {
    let run = Run::new();
    together(&run, "--stages 2 --microbatches 2");
    // The first rank saves the whole model, which another run can start from.
    let weights = Weights::open(&run.at("host/step-00000012")).unwrap();
    assert_eq!(weights.spec().clone(), shape());
    let newcomers = run.at("a/step-00000012");
    let message = Weights::open(&newcomers).unwrap_err().to_string();
    assert!(message.contains("no tensor"), "the newcomer has a part: {message}");
}

/// A host that was given up takes the state from the members, and does not read the weights again.
#[test]
fn a_host_that_joins_again_needs_no_weights() {
    let run = Run::new();
    let weights = run.at("weights");
    write_weights(&weights);
    let shape = "--layers 3 --heads 2 --dim 12 --context 10";
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
