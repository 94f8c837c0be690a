//! Tests of copies of parameters that differ, on ranks that are treated as unlike devices.

mod settled;

use farflung_parallel::pipeline::Method;
use farflung_tensor::Param;

use super::*;
use crate::config::choice::{LrScheduleKind, TransportKind};
use crate::train::connections;
use crate::train::job::Job;
use crate::train::resync::Drift;
use crate::transports::MEMORY;
use crate::{Stop, TrainConfig};

const STEPS: u64 = 5;

/// Makes a job with a pipeline on a small GPT, whose copies are compared every two steps.
fn job(schedule: Method, stages: usize, workers: usize) -> Job {
    job_of(TrainConfig { workers, stages, schedule, ..TrainConfig::default() })
}

/// Makes such a job with other settings.
fn job_of(settings: TrainConfig) -> Job {
    let data = tempfile::NamedTempFile::new().unwrap();
    let text: Vec<_> = (0..2000).map(|i| format!("{i} and {}", i * i)).collect();
    std::fs::write(data.path(), text.join(", ")).unwrap();
    let config = TrainConfig {
        data: Some(data.path().to_owned()),
        layers: Some(4),
        heads: Some(2),
        dim: Some(16),
        context: Some(8),
        batch: 1,
        microbatches: Some(4),
        clip: 0.0,
        lr_schedule: LrScheduleKind::Constant,
        codec: "none".parse().unwrap(),
        transport: TransportKind::of(&MEMORY),
        threads: 1,
        resync_every: 2,
        steps: STEPS,
        ..settings
    };
    let workers = config.workers;
    Job::new(config, workers, Stop::manual()).unwrap()
}

/// Runs `work` with each rank's trainer on a thread of its own; returns the results by rank.
fn on_all<T: Send>(job: &Job, work: impl Fn(Trainer) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let connections = connections(job, None).unwrap();
        let start =
            |connection: crate::train::WorkerConnection| work(Trainer::new(job, connection.comm, 1).unwrap());
        let ranks: Vec<_> =
            connections.into_iter().map(|connection| scope.spawn(move || start(connection))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Makes the trainer treat every other rank as if it were on a GPU.
fn on_unlike_devices(mut rank: Trainer, job: &Job) -> Trainer {
    let device = ["cpu", "gpu"][rank.comm().rank().index() % 2];
    rank.resync = Resync::new(job, rank.comm(), device, true).unwrap();
    rank
}

/// Multiplies all parameters of a rank by a factor.
fn scale(rank: &mut Trainer, factor: f32) {
    for part in rank.executor.parts.values_mut() {
        let scaled: Vec<f32> = part.params.to_vec::<f32>().unwrap().iter().map(|p| p * factor).collect();
        part.params.write(&scaled).unwrap();
    }
}

type Values = Vec<(String, Vec<f32>)>;

/// Returns a rank's parameters by name.
fn values(rank: &Trainer) -> Values {
    let tensors = |(stage, flat): (&Stage, &Tensor)| {
        let all = flat.to_vec::<f32>().unwrap();
        let values = |p: &Param| (p.name.clone(), all[p.range()].to_vec());
        stage.layout().params().iter().map(values).collect::<Values>()
    };
    rank.parts().flat_map(tensors).collect()
}

/// Returns whether each parameter is equal on all ranks that hold it.
fn equal(ranks: &[Values]) -> bool {
    let mut seen = BTreeMap::new();
    ranks.iter().flatten().all(|(name, values)| seen.entry(name).or_insert(values) == &values)
}

/// Schedules, stages and workers, which cover: replicas of parts, the token table's two users on two ranks and
/// on one, two copies of the model, several parts per rank, and several versions of the weights.
const SHARED: [(Method, usize, usize); 7] = [
    (Method::OneFOneB, 2, 2),
    (Method::OneFOneB, 2, 4),
    (Method::Interleaved, 2, 4),
    (Method::ZbV, 2, 4),
    (Method::Chimera, 2, 2),
    (Method::PipeDream, 4, 4),
    (Method::PipeDream2Bw, 2, 4),
];

#[test]
#[expect(clippy::float_cmp, reason = "copies that are equal have no distance at all")]
fn copies_that_moved_apart_are_measured_and_made_equal() {
    for (schedule, stages, workers) in SHARED {
        let job = job(schedule, stages, workers);
        let ranks = on_all(&job, |rank| {
            let mut rank = on_unlike_devices(rank, &job);
            let first = rank.step(false).unwrap();
            // Each value is taken from its first holder. The last rank is the first holder of no shared value,
            // so its change must be undone.
            if rank.comm().rank().index() + 1 == workers {
                scale(&mut rank, 1.001);
            }
            let apart = values(&rank);
            rank.step = 2;
            let found = rank.compare().unwrap().unwrap();
            let mended = values(&rank);
            rank.step = 4;
            let again = rank.compare().unwrap().unwrap();
            // From here on all copies take the same updates, and no older version of the weights is in use.
            let last = rank.step(false).unwrap();
            (first.drift, apart, found, mended, again, last.drift, values(&rank))
        });
        let of = |pick: fn(&_) -> &Values| ranks.iter().map(pick).cloned().collect::<Vec<_>>();
        assert!(!equal(&of(|r| &r.1)) && equal(&of(|r| &r.3)) && equal(&of(|r| &r.6)), "{schedule}");
        assert_eq!(ranks[0].1, ranks[0].3, "{schedule}: rank 0 is the first holder of all that it has");
        let sent = |pick: fn(&_) -> &Drift| ranks.iter().map(|r| pick(r).bytes).sum::<u64>();
        assert!(sent(|r| &r.4) < sent(|r| &r.2), "{schedule}: what is equal is not sent");
        for (first, _, found, _, again, last, _) in &ranks {
            assert_eq!(*first, None, "{schedule}");
            assert!((found.distance - 1e-3).abs() < 1e-6, "{schedule}: {found:?}");
            assert_eq!(again.distance, 0.0, "{schedule}");
            assert_eq!(last.map(|drift| drift.distance), Some(0.0), "{schedule}");
        }
    }
}

#[test]
fn comparisons_come_every_so_many_steps_and_at_the_end() {
    let compared = |job: &Job, unlike: bool, from: u64| {
        on_all(job, |rank| {
            let mut rank = if unlike { on_unlike_devices(rank, job) } else { rank };
            rank.step = from;
            rank.resync.restart(from);
            (from..STEPS)
                .filter_map(|_| Some(rank.step(false).unwrap()).filter(|d| d.drift.is_some()))
                .map(|d| d.step)
                .collect::<Vec<_>>()
        })
    };
    let pair = job(Method::OneFOneB, 2, 2);
    assert_eq!(compared(&pair, true, 0), [[2, 4, 5], [2, 4, 5]]);
    assert_eq!(compared(&pair, true, 1), [[3, 5], [3, 5]], "counted from where a checkpoint was read");
    assert!(compared(&pair, false, 0).concat().is_empty(), "processors round alike");
}
