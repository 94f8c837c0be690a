//! Training with products in 16 bits: close to the run in f32, equal on all replicas, and steps that overflow
//! are tried again.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::small::{job, on_all};
use farflung::config::choice::{LossScaling, SamplingKind};
use farflung::optim::LossScale;
use farflung::tensor::Precision;
use farflung::train::Trainer;
use farflung::zoo::weights::{WriteOptions, write};
use farflung::{Error, TrainConfig};

const STEPS: u64 = 4;

/// Returns losses, the gradients of the first step, the loss scale and the hash at the end.
fn trained(config: &TrainConfig) -> Vec<(Vec<f64>, Vec<f32>, LossScale, blake3::Hash)> {
    let job = job(config);
    on_all(&job, |connection| {
        let mut worker = Trainer::new(&job, connection.comm, 1).unwrap();
        let mut losses = vec![worker.step(false).unwrap().loss];
        let grads = worker.grads().to_vec().unwrap();
        losses.extend((1..STEPS).map(|_| worker.step(false).unwrap().loss));
        (losses, grads, *worker.loss_scale(), worker.hash().unwrap())
    })
}

fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let off: f64 = found.iter().zip(expected).map(|(f, e)| square(f - e)).sum();
    (off / expected.iter().map(|e| square(*e)).sum::<f64>()).sqrt()
}

#[test]
fn gradients_in_16_bits_are_near_those_in_32_and_all_replicas_have_the_same() {
    let (_folder, config) = crate::small::config(STEPS);
    let config = TrainConfig { workers: 2, ..config };
    let exact = trained(&config).remove(0);
    for (precision, most, scale) in [(Precision::Bf16, 2e-2, 1), (Precision::F16, 2e-3, 65_536)] {
        let found = trained(&TrainConfig { precision, ..config.clone() });
        let off = distance(&found[0].1, &exact.1);
        assert!(off > 0.0 && off < most, "{precision}: {off:e}");
        assert_eq!(found[0].2.get() as u32, scale);
        assert_eq!(found[0].3, found[1].3);
        for (f, e) in found[0].0.iter().zip(&exact.0) {
            assert!((f - e).abs() < 0.02, "{precision}: {f} {e}");
        }
    }
}

/// Returns settings that start from weights with gradients so large that the first loss scale overflows.
fn steep() -> (tempfile::TempDir, TrainConfig) {
    let (folder, config) = crate::small::config(STEPS);
    let weights = folder.path().join("weights");
    write(&weights, &job(&config).model, WriteOptions::default(), |index, spec, values| {
        spec.fill(1, index, values);
        if spec.name.ends_with("ln_f.weight") {
            values.fill(300.0);
        }
        Ok::<_, farflung::zoo::ZooError>(())
    })
    .unwrap();
    (folder, TrainConfig { init_from: Some(weights), precision: Precision::F16, workers: 2, ..config })
}

/// Checks that a run whose first scale overflows has the result of a run that begins with the scale that it
/// found.
fn overflows_leave_no_trace(config: TrainConfig) {
    let found = trained(&config);
    let scale = found[0].2.get();
    assert!(scale < 65_536.0 && scale > 1.0, "{scale}");
    let at_once = trained(&TrainConfig { loss_scale: LossScaling::Fixed(scale), ..config });
    for (found, at_once) in found.iter().zip(&at_once) {
        // No step and no batch was lost.
        assert_eq!((&found.0, &found.1, found.3), (&at_once.0, &at_once.1, at_once.3));
    }
}

#[test]
fn a_step_that_overflows_is_the_step_with_a_smaller_scale() {
    let (_folder, config) = steep();
    overflows_leave_no_trace(config);
}

/// A step that overflows leaves nothing in the samples that boundary codecs store, and values that no codec can
/// encode still show the overflow.
#[test]
fn boundaries_remember_nothing_of_a_step_that_overflows() {
    let (_folder, config) = steep();
    let config = TrainConfig {
        stages: 2,
        sampling: SamplingKind::Epochs,
        boundary: "aqsgd:4".parse().unwrap(),
        boundary_backward: "int8".parse().unwrap(),
        ..config
    };
    overflows_leave_no_trace(config);
}

#[test]
fn a_fixed_scale_that_overflows_ends_the_run_and_says_so() {
    let (_folder, config) = steep();
    let config = TrainConfig { loss_scale: LossScaling::Fixed(65_536.0), workers: 1, ..config };
    let job = job(&config);
    on_all(&job, |connection| {
        let mut worker = Trainer::new(&job, connection.comm, 1).unwrap();
        let before = worker.hash().unwrap();
        let error = worker.step(false).unwrap_err().to_string();
        assert!(error.contains("norm"), "{error}");
        assert_eq!(worker.hash().unwrap(), before);
    });
}

#[test]
fn a_pipeline_tries_again_together() {
    let (_folder, config) = steep();
    let losses = |config: &TrainConfig| {
        let job = job(config);
        on_all(&job, |connection| {
            let mut worker = Trainer::new(&job, connection.comm, 1).unwrap();
            (0..STEPS).map(|_| worker.step(false).unwrap().loss).collect::<Vec<_>>()
        })
    };
    let pipeline = TrainConfig { workers: 4, stages: 2, accumulate: 2, ..config.clone() };
    let whole = trained(&TrainConfig { workers: 2, accumulate: 2, ..config.clone() });
    let found = losses(&pipeline);
    assert_eq!(found[0], found[3]);
    for (f, e) in found[0].iter().zip(&whole[0].0) {
        assert!((f - e).abs() < 1e-2 * e.abs(), "{f} {e}");
    }

    let apart = TrainConfig { schedule: "pipedream".parse().unwrap(), workers: 2, clip: 0.0, ..pipeline };
    let error = farflung::train::Job::new(apart, 2, farflung::Stop::manual()).unwrap_err();
    assert!(matches!(error, Error::Setting { field: "loss-scale", .. }), "{error}");
}
