//! A frozen spare in a run of pipelines delays no step, but is given up nevertheless.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use crate::virtual_members::{Ended, connections, fox, tiny};
use farflung::comm::simulated::Faults;
use farflung::train::{Job, RunObserver, run_workers};
use farflung::{StepMetrics, Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const STAGES: usize = 2;
const SPARE: u32 = 2;
/// Time for which members wait for each other, and for an answer.
const DEADLINE: Nanos = Nanos::from_millis(100);

fn job(folder: &Path) -> Job {
    let config = TrainConfig {
        layers: Some(2),
        microbatches: Some(2),
        steps: 200,
        stages: STAGES,
        workers: STAGES,
        eval_every: 1000,
        eval_batches: 1,
        copy_share: 0.0,
        codec: "none".parse().unwrap(),
        deadline: DEADLINE,
        ..tiny(folder, &fox(), TrainConfig::default())
    };
    Job { elastic: true, ..Job::new(config, STAGES, Stop::manual()).unwrap() }
}

/// The notes of a run, each with the time of the last step before it in seconds; and the last step's time.
#[derive(Default)]
struct Told {
    notes: Vec<(f64, String)>,
    time_s: f64,
}

impl RunObserver for Told {
    fn step(&mut self, metrics: &StepMetrics, _: Option<f64>) {
        self.time_s = metrics.time_s;
    }
    fn note(&mut self, note: &str) {
        self.notes.push((self.time_s, note.to_owned()));
    }
}

fn run(faults: &Faults) -> (Vec<Ended>, Told) {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path());
    let connections = connections(&job, STAGES + 1, &[(PeerId(SPARE), Nanos(1))], faults);
    let mut told = Told::default();
    let ended = run_workers(&job, connections, &mut told);
    (ended, told)
}

fn hash(ended: &Ended) -> &str {
    &ended.as_ref().unwrap().as_ref().unwrap().hash
}

#[test]
fn a_frozen_spare_is_noticed_although_no_step_waits_for_it() {
    let (calm, told) = run(&Faults::new());
    assert!(told.notes.iter().any(|(_, note)| note.contains("and 1 without a part")), "{:?}", told.notes);
    assert!(!told.notes.iter().any(|(_, note)| note.contains("lost")), "it answers: {:?}", told.notes);
    let frozen = Nanos::from_millis(500);
    let faults = Faults::new().at(frozen).freeze(PeerId(SPARE), Nanos::from_millis(3_600_000));
    let (ended, told) = run(&faults);
    let lost = told.notes.iter().find(|(_, note)| note.contains("member 2 lost; 2 members continue"));
    let (at, _) = lost.unwrap_or_else(|| unreachable!("{:?}", told.notes));
    // The spare is asked within six times the deadline, and is silent for two more. One step before and one
    // after may be added.
    let noticed = at - frozen.as_secs_f64();
    assert!((0.0..9.0 * DEADLINE.as_secs_f64()).contains(&noticed), "{noticed}");
    assert_eq!(hash(&ended[0]), hash(&calm[0]));
}
