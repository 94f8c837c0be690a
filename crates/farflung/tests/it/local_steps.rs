//! Slower replicas take fewer local steps: the values that replicas average, the steps in which they
//! synchronise, and the time of a step.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::small::{config, job, on_all};
use farflung::TrainConfig;
use farflung::config::choice::TransportKind;
use farflung::config::value::Setting;
use farflung::train::{Job, Prediction, Trainer};
use farflung::transports::SIMULATED;

fn read<T: Setting>(text: &str) -> T {
    T::parse(text).unwrap()
}

/// Returns the parameters of each rank after `steps` steps.
fn after(config: &TrainConfig, steps: u64) -> Vec<Vec<f32>> {
    let job = job(config);
    on_all(&job, |connection| {
        let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
        for _ in 0..steps {
            rank.step(false).unwrap();
        }
        rank.params().to_vec::<f32>().unwrap()
    })
}

#[test]
fn a_mean_is_by_the_tokens_of_the_steps_that_were_taken() {
    let (_folder, config) = config(8);
    let base = TrainConfig {
        workers: 2,
        sync: read("diloco"),
        sync_every: 4,
        outer_lr: 1.0,
        outer_momentum: 0.0,
        local_steps: read("4,2"),
        ..config
    };
    // The same local steps, without an average of replicas.
    let apart = after(&TrainConfig { sync_every: 8, local_steps: read("8,4"), ..base.clone() }, 4);
    let met = after(&base, 4);
    assert_eq!(met[0], met[1]);
    assert_ne!(apart[0], apart[1]);
    let mean = apart[0].iter().zip(&apart[1]).map(|(a, b)| (4.0 * f64::from(*a) + 2.0 * f64::from(*b)) / 6.0);
    for (met, mean) in met[0].iter().zip(mean) {
        assert!((f64::from(*met) - mean).abs() < 1e-6, "{met} {mean}");
    }
    // A replica does not change in a step that it does not take.
    let slow = TrainConfig { sync_every: 8, local_steps: read("8,4"), ..base };
    let [one, two, three] = [1, 2, 3].map(|steps| after(&slow, steps).swap_remove(1));
    assert_eq!(two, three);
    assert_ne!(one, two);
}

#[test]
fn machines_of_unequal_speed_reach_the_meeting_together() {
    let (folder, config) = config(12);
    let topology = folder.path().join("topology.toml");
    let device = |name: &str, speed: &str| {
        format!("[[device]]\nname = \"{name}\"\nflops = \"{speed}\"\nmemory = \"8GB\"\n")
    };
    let devices = [device("fast", "300 MFLOPS"), device("slow", "100 MFLOPS")].concat();
    let text = format!("default = \"100mbit,1ms\"\n{devices}");
    std::fs::write(&topology, text).unwrap();
    let base = TrainConfig {
        workers: 2,
        sync: read("diloco"),
        sync_every: 6,
        topology: Some(topology),
        transport: TransportKind::of(&SIMULATED),
        ..config
    };
    let timed = |job: &Job| {
        let ends = on_all(job, |connection| {
            let mut rank = Trainer::new(job, connection.comm, 1).unwrap();
            let begun = rank.comm().now();
            for _ in 0..6 {
                rank.step(false).unwrap();
            }
            (rank.comm().now() - begun).as_secs_f64()
        });
        ends.into_iter().fold(0.0, f64::max)
    };
    let times = ["equal", "by-speed", "6,3"].map(|steps| {
        let job = job(&TrainConfig { local_steps: read(steps), ..base.clone() });
        if steps == "by-speed" {
            assert_eq!(job.plan.outermost().steps, [6, 2]);
            assert_eq!(job.tokens_after(6), 8 * 2 * 16);
            assert_eq!(job.tokens_after(7) - job.tokens_after(6), 2 * 16);
        }
        let (took, predicted) = (timed(&job), Prediction::of(&job).unwrap().total.as_secs_f64());
        assert!((took / predicted - 1.0).abs() < 0.01, "{steps}: {took} s, predicted {predicted} s");
        took
    });
    let [equal, by_speed, half] = times;
    assert!(by_speed < half && half < equal, "{times:?}");
}

#[test]
fn numbers_that_a_plan_does_not_admit_are_refused_by_the_settings_name() {
    let (_folder, config) = config(4);
    let base = TrainConfig { workers: 2, sync: read("diloco"), sync_every: 4, ..config };
    for (steps, said) in [
        ("4,4,4", "2 numbers, one for each replica"),
        ("4,0", "at least 1 for each replica"),
        ("4,5", "a multiple of 4"),
        ("8,4", "4 for the fastest replica with diloco"),
    ] {
        let config = TrainConfig { local_steps: read(steps), ..base.clone() };
        let error = Job::new(config, 2, farflung::Stop::manual()).unwrap_err().to_string();
        assert!(error.contains("local-steps") && error.contains(said), "{steps}: {error}");
    }
}
