//! A pipeline that loses a part of which no member has a copy in memory continues from the checkpoints that its
//! members can read.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::{Path, PathBuf};

use crate::virtual_members::{Ended, connections, fox, tiny};
use farflung::comm::simulated::Faults;
use farflung::config::choice::{Resume, SyncKind};
use farflung::events::{self, EventKind};
use farflung::optim::sync::DILOCO;
use farflung::train::{Job, Report, RunObserver, elastic, run_workers};
use farflung::{Error, Existing, RunDir, StepMetrics, Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const STEPS: u64 = 12;
const STAGES: usize = 2;
/// Number of members: two stages and a spare.
const MEMBERS: usize = 3;
/// The last checkpoint before the loss, and the step of the loss.
const SAVED: u64 = 6;
const LOSS: u64 = 9;

/// Returns a job of small steps in a pipeline of two, saved every three steps and without copies between
/// members.
fn job(folder: &Path, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(2),
        microbatches: Some(2),
        steps: STEPS,
        stages: STAGES,
        workers: STAGES,
        eval_every: 2,
        eval_batches: 1,
        checkpoint_every: 3,
        copy_share: 0.0,
        codec: "none".parse().unwrap(),
        deadline: Nanos::from_millis(2000),
        ..tiny(folder, &fox(), config)
    };
    Job { elastic: true, ..Job::new(config, STAGES, Stop::manual()).unwrap() }
}

#[derive(Default)]
struct Notes {
    notes: Vec<String>,
    /// A file in which a bit is flipped before the loss.
    damages: Option<PathBuf>,
}

impl RunObserver for Notes {
    fn step(&mut self, metrics: &StepMetrics, _: Option<f64>) {
        if let Some(path) = self.damages.take_if(|_| metrics.step == LOSS - 1) {
            let mut bytes = fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(&path, bytes).unwrap();
        }
    }
    fn note(&mut self, note: &str) {
        self.notes.push(note.to_owned());
    }
}

/// Folders on one disk, as with `launch --elastic`.
fn shared(run: &Path) -> Vec<PathBuf> {
    let others = (1..MEMBERS).map(|member| run.join("members").join(member.to_string()));
    std::iter::once(run.to_owned()).chain(others).collect()
}

/// Returns the results of the members with these folders, and the notes. The last member is a spare, if it
/// joins at all.
fn run(job: &Job, folders: &[PathBuf], spare: bool, faults: &Faults) -> (Vec<Ended>, Vec<String>) {
    watched(job, folders, (spare, faults), Notes::default())
}

fn watched(
    job: &Job,
    folders: &[PathBuf],
    (spare, faults): (bool, &Faults),
    mut notes: Notes,
) -> (Vec<Ended>, Vec<String>) {
    let come = [(PeerId(STAGES as u32), Nanos(1))];
    let mut connections = connections(job, MEMBERS, if spare { &come } else { &[] }, faults);
    for (connection, folder) in connections.iter_mut().zip(folders) {
        let own = RunDir::open(folder, Existing::Continue).unwrap();
        connection.place = connection.place.take().map(|place| place.saves_in(own));
    }
    let ended = run_workers(job, connections, &mut notes);
    assert!(notes.damages.is_none(), "the file was not damaged");
    (ended, notes.notes)
}

/// Returns the report of the only member that has the whole model at the end.
fn report(ended: &[Ended]) -> &Report {
    ended.iter().flatten().flatten().next().unwrap_or_else(|| {
        let errors: Vec<String> = ended.iter().map(|e| format!("{:?}", e.as_ref().err())).collect();
        unreachable!("nobody ends with a report: {errors:?}")
    })
}

fn losses(report: &Report) -> Vec<f64> {
    report.rows.iter().map(|row| row.train_loss).collect()
}

/// Returns, for each change of members in the events of a folder, the number of lost steps and whether
/// checkpoints were read.
fn changes(folder: &Path) -> Vec<(u64, bool)> {
    let told = events::read(&folder.join(events::EVENTS)).unwrap();
    let change = |event: events::Event| match event.what {
        EventKind::Members { lost_steps, from_checkpoints, .. } => Some((lost_steps, from_checkpoints)),
        _ => None,
    };
    told.into_iter().filter_map(change).collect()
}

/// A run without a loss, and the time at which a rank is to be lost: in the middle of a step.
struct Undisturbed {
    hash: String,
    losses: Vec<f64>,
    loss: Nanos,
}

impl Undisturbed {
    fn new(spare: bool) -> Self {
        Self::of(spare, TrainConfig::default())
    }

    fn of(spare: bool, config: TrainConfig) -> Self {
        let root = tempfile::tempdir().unwrap();
        let job = job(root.path(), config);
        let (ended, _) = run(&job, &shared(&root.path().join("run")), spare, &Faults::new());
        let report = report(&ended);
        let time = |step: u64| report.rows[step as usize - 1].time_s * 1e9;
        let loss = Nanos(f64::midpoint(time(LOSS - 1), time(LOSS)) as u64);
        Self { hash: report.hash.clone(), losses: losses(report), loss }
    }

    fn without(&self, rank: u32) -> Faults {
        Faults::new().at(self.loss).crash(PeerId(rank))
    }
}

#[test]
fn a_lost_part_comes_from_the_checkpoints_on_a_shared_disk() {
    let calm = Undisturbed::new(true);
    for rank in 0..STAGES as u32 {
        let root = tempfile::tempdir().unwrap();
        let folders = shared(&root.path().join("run"));
        let (ended, notes) =
            run(&job(root.path(), TrainConfig::default()), &folders, true, &calm.without(rank));
        for (n, ended) in ended.iter().enumerate().filter(|(n, _)| *n != rank as usize) {
            assert!(ended.is_ok(), "{rank} is lost: {n}: {:?}", ended.as_ref().err());
        }
        let left = report(&ended);
        assert_eq!(left.hash, calm.hash, "{rank} is lost");
        // The steps since the checkpoint of step `SAVED` are lost, and done again.
        let lost = LOSS - 1 - SAVED;
        let told = changes(&folders[1 - rank as usize]);
        assert!(told.contains(&(lost, true)), "{told:?}");
        if rank == 1 {
            let note = format!("from the checkpoints of step {SAVED}; {lost} steps are lost");
            assert!(notes.iter().any(|said| said.contains(&note)), "{notes:?}");
            assert_eq!(losses(left), calm.losses);
        }
    }
}

/// The checkpoint has the anchor and the momentum of the outer optimizer, and each rank's own optimizer.
#[test]
fn with_local_steps_it_comes_from_the_checkpoint_of_an_average() {
    let config = || TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 3, ..TrainConfig::default() };
    let calm = Undisturbed::of(true, config());
    for rank in 0..STAGES as u32 {
        let root = tempfile::tempdir().unwrap();
        let folders = shared(&root.path().join("run"));
        let (ended, notes) = run(&job(root.path(), config()), &folders, true, &calm.without(rank));
        let left = report(&ended);
        assert_eq!(left.hash, calm.hash, "{rank} is lost: {notes:?}");
        let told = changes(&folders[1 - rank as usize]);
        assert!(told.contains(&(LOSS - 1 - SAVED, true)), "{told:?}");
        if rank == 1 {
            assert_eq!(losses(left), calm.losses);
        }
    }
}

#[test]
fn without_a_spare_who_is_left_goes_on_alone() {
    let calm = Undisturbed::new(false);
    let root = tempfile::tempdir().unwrap();
    let (ended, _) = run(
        &job(root.path(), TrainConfig::default()),
        &shared(&root.path().join("run")),
        false,
        &calm.without(1),
    );
    let left = report(&ended);
    assert_eq!((left.workers, left.rows.len() as u64), (1, STEPS));
    for (found, expected) in losses(left).iter().zip(&calm.losses) {
        assert!((found - expected).abs() < 1e-4, "{found} {expected}");
    }
}

#[test]
fn a_damaged_checkpoint_is_passed_over_for_the_one_before() {
    let calm = Undisturbed::new(true);
    let root = tempfile::tempdir().unwrap();
    let (job, folders) = (job(root.path(), TrainConfig::default()), shared(&root.path().join("run")));
    let damages = Some(folders[1].join(format!("step-{SAVED:08}/optimizer.safetensors")));
    let notes = Notes { damages, ..Notes::default() };
    let (ended, notes) = watched(&job, &folders, (true, &calm.without(1)), notes);
    assert_eq!(report(&ended).hash, calm.hash);
    let before = format!("from the checkpoints of step {};", SAVED - job.config.checkpoint_every);
    assert!(notes.iter().any(|said| said.contains(&before)), "{notes:?}");
}

#[test]
fn a_part_that_no_member_can_read_is_lost() {
    let calm = Undisturbed::new(true);
    let root = tempfile::tempdir().unwrap();
    // Each member has its own disk.
    let folders: Vec<PathBuf> = (0..MEMBERS).map(|n| root.path().join(format!("disk-{n}"))).collect();
    let (ended, _) = run(&job(root.path(), TrainConfig::default()), &folders, true, &calm.without(1));
    for n in [0, 2] {
        let error = ended[n].as_ref().unwrap_err();
        assert!(matches!(error, Error::PartLost { .. }) && error.exit_code() == 75, "{n}: {error}");
    }
}

/// Two pipelines are cut off from each other. The second one may not continue: its members save their parts,
/// and a run begins again from there.
#[test]
fn those_that_may_not_go_on_save_their_parts() {
    for sync_every in [1, 3] {
        let local = sync_every > 1;
        let sync = if local { SyncKind::of(&DILOCO) } else { TrainConfig::default().sync };
        let root = tempfile::tempdir().unwrap();
        let config = TrainConfig { sync, sync_every, resume: Resume::Auto, ..TrainConfig::default() };
        let job = |workers| {
            let job = job(root.path(), config.clone());
            let config = TrainConfig { workers, checkpoint_every: 0, ..TrainConfig::clone(&job.given) };
            Job { elastic: true, ..Job::new(config, workers, Stop::manual()).unwrap() }
        };
        let disk = |name: &str| root.path().join(name);
        let folders = [disk("a"), disk("b"), disk("run"), disk("run").join("members").join("1")];
        let train = |faults: &Faults, names: &[&PathBuf]| {
            let job = job(4);
            let mut connections = connections(&job, 4, &[], faults);
            for (connection, folder) in connections.iter_mut().zip(names) {
                let own = RunDir::open(folder, Existing::Continue).unwrap();
                connection.place = connection.place.take().map(|place| place.saves_in(own));
            }
            run_workers(&job, connections, &mut Notes::default())
        };
        let calm = train(&Faults::new(), &[]);
        let time = |step: usize| report(&calm).rows[step - 1].time_s * 1e9;
        let cut = Nanos(f64::midpoint(time(7), time(8)) as u64);
        let faults = Faults::new().at(cut).partition(&[PeerId(2), PeerId(3)], 4, Nanos::MAX);
        let ended = train(&faults, &folders.each_ref());
        assert_eq!(report(&ended).rows.len() as u64, STEPS);
        // With local steps, replicas agreed last after the sixth step.
        let step = if local { 6 } else { 7 };
        for n in [2, 3] {
            let error = ended[n].as_ref().unwrap_err();
            let Error::NoMajority { left: Some(left), .. } = error else { panic!("{n}: {error}") };
            assert_eq!((left.step, left.saved.as_ref().map(|saved| saved.0)), (step, Some(step)), "{error}");
            assert_eq!(error.exit_code(), 75);
        }
        // A host finds both parts, and begins after that step.
        let founder = elastic::founder(
            TrainConfig { workers: 1, ..TrainConfig::clone(&job(4).given) },
            &Stop::manual(),
        )
        .unwrap();
        let mut connections = connections(&founder, 1, &[], &Faults::new());
        let own = RunDir::open(&folders[2], Existing::Continue).unwrap();
        connections[0].place = connections[0].place.take().map(|place| place.saves_in(own));
        let ended = run_workers(&founder, connections, &mut Notes::default());
        let rows = &report(&ended).rows;
        assert_eq!(rows.first().map(|row| row.step), Some(step + 1));
    }
}
