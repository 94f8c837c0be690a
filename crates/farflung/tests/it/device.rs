//! Training and generating on a device, alone and together with the cpu. Uses the first adapter found; in CI
//! that is a software rasteriser.
#![cfg(feature = "wgpu")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::process::Command;

use crate::small::{job, on_all};
use farflung::TrainConfig;
use farflung::config::choice::Devices;
use farflung::config::value::Setting;
use farflung::tensor::Param;
use farflung::train::{Drift, StepDone, Trainer};

const STEPS: u64 = 4;

/// A GPT of two layers.
fn config(devices: &str, workers: usize) -> (tempfile::TempDir, TrainConfig) {
    let (folder, config) = crate::small::config(STEPS);
    let device = Devices::parse(devices).unwrap();
    (folder, TrainConfig { layers: Some(2), workers, resync_every: 2, device, ..config })
}

/// Returns losses, comparisons of the replicas, and the hash at the end.
fn trained(devices: &str, workers: usize) -> Vec<(Vec<f64>, Vec<Drift>, blake3::Hash)> {
    let (_folder, config) = config(devices, workers);
    let job = job(&config);
    on_all(&job, |connection| {
        let mut worker = Trainer::new(&job, connection.comm, 1).unwrap();
        let done: Vec<_> = (0..STEPS).map(|_| worker.step(false).unwrap()).collect();
        let losses = done.iter().map(|d| d.loss).collect();
        (losses, done.iter().filter_map(|d| d.drift).collect(), worker.hash().unwrap())
    })
}

fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() < 1e-4, "{found:?} {expected:?}");
    }
}

#[test]
fn a_job_of_cpu_and_gpu_trains_as_cpus_do_and_its_replicas_come_together() {
    let cpus = trained("cpu", 2);
    assert!(cpus.iter().all(|(_, drift, _)| drift.is_empty()), "processors round alike");
    let mixed = trained("cpu,wgpu", 2);
    for (losses, drift, hash) in &mixed {
        close(losses, &cpus[0].0);
        assert_eq!(drift.len(), 2, "every two of four steps");
        assert!(drift.iter().all(|d| d.distance < 1e-5 && d.bytes > 0), "{drift:?}");
        assert_eq!(*hash, mixed[0].2);
    }
}

#[test]
fn the_same_run_on_a_gpu_gives_the_same_bits() {
    assert_eq!(trained("wgpu", 1)[0].2, trained("wgpu:0", 1)[0].2);
}

/// One pipeline whose token table is on both devices, and two pipelines with the devices in opposite orders.
#[test]
fn a_pipeline_has_a_stage_on_each_device_and_its_copies_come_together() {
    let trained = |devices: &str, workers: usize| {
        let (_folder, mut config) = config(devices, workers);
        config.stages = 2;
        let job = job(&config);
        on_all(&job, |connection| {
            let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
            let done: Vec<_> = (0..STEPS).map(|_| rank.step(false).unwrap()).collect();
            let copies = rank.parts().flat_map(|(stage, flat)| {
                let tensor = |(i, p): (usize, &Param)| {
                    let values = stage.layout().view(flat, i).unwrap().to_vec::<f32>().unwrap();
                    (p.name.clone(), values)
                };
                stage.layout().params().iter().enumerate().map(tensor).collect::<Vec<_>>()
            });
            (done, copies.collect::<BTreeMap<_, _>>())
        })
    };
    for (devices, workers) in [("cpu,wgpu", 2), ("cpu,wgpu,wgpu,cpu", 4)] {
        let (cpus, mixed) = (trained("cpu", workers), trained(devices, workers));
        let losses = |done: &[StepDone]| done.iter().map(|d| d.loss).collect::<Vec<_>>();
        let mut copies = BTreeMap::new();
        for ((done, params), (on_cpus, _)) in mixed.iter().zip(&cpus) {
            close(&losses(done), &losses(on_cpus));
            assert!(on_cpus.iter().all(|d| d.drift.is_none()), "processors round alike");
            let compared: Vec<_> = done.iter().filter_map(|d| d.drift).collect();
            assert_eq!(compared.len(), 2, "every two of four steps");
            assert!(compared.iter().all(|d| d.distance < 1e-5 && d.bytes > 0), "{compared:?}");
            for (name, values) in params {
                assert!(*copies.entry(name).or_insert(values) == values, "{devices}: copies of {name}");
            }
        }
    }
}

#[test]
fn what_a_gpu_trained_generates_alike_on_both() {
    let (folder, config) = config("wgpu", 1);
    let (data, out) = (config.data.unwrap(), folder.path().join("run"));
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_farflung")).args(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    let (data, out) = (data.to_str().unwrap(), out.to_str().unwrap());
    let shape = ["--layers", "2", "--heads", "2", "--dim", "16", "--context", "16", "--batch", "2"];
    let rest =
        ["--steps", "2", "--workers", "1", "--device", "wgpu", "--sample-tokens", "0", "--eval-batches", "2"];
    run(&[&["train", "--data", data, "--out", out][..], &shape, &rest].concat());
    let generate = |device| {
        run(&["generate", out, "--prompt", "4 is", "--tokens", "8", "--temperature", "0", "--device", device])
    };
    assert_eq!(generate("wgpu"), generate("cpu"));
}
