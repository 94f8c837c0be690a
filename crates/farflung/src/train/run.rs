//! A run from its first step to its report: the loop of each rank, and what rank 0 tells the world about it.

use std::time::Instant;

use farflung_base::{Link, Nanos};

use super::checkpoint::{self, Totals};
use super::job::Job;
use super::links::{Seat, seats};
use super::report::{Report, sample};
use super::sync::Synced;
use super::worker::Worker;
use crate::config::choice::Resume;
use crate::{Error, Existing, LaunchEnv, Result, RunDir, Signal, StepMetrics, TrainConfig};

/// Follows a run: called on rank 0.
pub trait Watch: Send {
    /// A step is done. `link_use` is the share of the link's time that this worker's bytes took so far.
    fn step(&mut self, metrics: &StepMetrics, link_use: Option<f64>);

    /// Something worth a line.
    fn note(&mut self, text: &str);
}

/// Watches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl Watch for Quiet {
    fn step(&mut self, _: &StepMetrics, _: Option<f64>) {}
    fn note(&mut self, _: &str) {}
}

/// Trains as the settings say: all workers in this process, or one of them under a launcher. The report is rank 0's;
/// other ranks give `None`.
pub fn run(
    config: TrainConfig,
    env: Option<&LaunchEnv>,
    stop: crate::Stop,
    watch: &mut dyn Watch,
) -> Result<Option<Report>> {
    let world = env.map_or(1, |e| e.world_size);
    let world = if world > 1 { world } else { config.workers };
    let mut job = Job::new(config, world, stop)?;
    let out = job.config.out.clone();
    job.out = Some(out.unwrap_or_else(|| RunDir::next_free("runs".as_ref(), &job.config.model)));
    let seats = seats(&job.config, env)?;
    run_job(&job, seats, watch)
}

/// Trains a job in the given seats, a thread each.
pub fn run_job(job: &Job, seats: Vec<Seat>, watch: &mut dyn Watch) -> Result<Option<Report>> {
    let local = seats.len();
    let mut watch = Some(watch);
    let results: Vec<Result<Option<Report>>> = std::thread::scope(|scope| {
        let workers: Vec<_> = seats
            .into_iter()
            .map(|seat| {
                let watch = if seat.comm.rank().0 == 0 { watch.take() } else { None };
                scope.spawn(move || work(job, seat, local, watch))
            })
            .collect();
        workers
            .into_iter()
            .map(|w| w.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    // A worker that fails takes the others with it: the first cause is the one that is not about a lost peer.
    let mut report = None;
    let mut failure: Option<Error> = None;
    for result in results {
        match result {
            Ok(found) => report = report.or(found),
            Err(error) => {
                if failure.as_ref().is_none_or(|f| matches!(f, Error::PeerLost { .. })) {
                    failure = Some(error);
                }
            }
        }
    }
    failure.map_or(Ok(report), Err)
}

/// Where the numbers of a run come from.
struct Clock<'a> {
    worker: &'a Worker,
    before: Totals,
    start: Nanos,
    wall: Instant,
}

impl Clock<'_> {
    fn totals(&self) -> Totals {
        let stats = self.worker.comm.stats();
        Totals {
            time_s: self.before.time_s + self.worker.comm.now().saturating_sub(self.start).as_secs_f64(),
            wall_s: self.before.wall_s + self.wall.elapsed().as_secs_f64(),
            bytes_sent: self.before.bytes_sent + stats.sent.wire.0,
            bytes_received: self.before.bytes_received + stats.received.wire.0,
        }
    }
}

/// One rank's run.
fn work(job: &Job, seat: Seat, local: usize, mut watch: Option<&mut dyn Watch>) -> Result<Option<Report>> {
    let Seat { comm, link } = seat;
    let rank = comm.rank();
    let config = &job.config;
    let mut worker = Worker::new(job, comm, job.threads(local))?;
    let run = match &job.out {
        Some(out) => {
            let existing = if config.resume == Resume::No { Existing::Refuse } else { Existing::Continue };
            // Rank 0 makes the folder in which the others have theirs.
            if rank.0 > 0 {
                worker.comm().barrier()?;
            }
            let run = RunDir::open(&checkpoint::folder(out, rank), existing)?;
            run.write_config(&config.to_toml())?;
            if rank.0 == 0 {
                worker.comm().barrier()?;
            }
            Some(run)
        }
        None => None,
    };
    let before = match &run {
        Some(run) => checkpoint::resume(&mut worker, job, run)?.unwrap_or_default(),
        None => Totals::default(),
    };
    let mut metrics = match run.as_ref().filter(|_| rank.0 == 0) {
        Some(run) => Some(run.metrics(worker.step)?),
        None => None,
    };
    if let Some(watch) = watch.as_deref_mut().filter(|_| worker.step > 0) {
        watch.note(&format!("resumed at step {}", worker.step));
    }
    #[expect(clippy::disallowed_methods, reason = "the run reports how long it really took")]
    let wall = Instant::now();
    let start = worker.comm.now();
    let clock = |worker: &Worker| Clock { worker, before, start, wall }.totals();

    let first_loss = if worker.step == 0 { Some(worker.evaluate()?) } else { None };
    let mut last_val = first_loss;
    let mut rows: Vec<StepMetrics> = Vec::new();
    let (mut evaluated, mut saved) = (worker.step, worker.step);
    let mut stopped: Option<Signal> = None;
    let mut time = clock(&worker).time_s;
    while worker.step < config.steps {
        let done = worker.step(job.stop.requested().is_some())?;
        let end = done.step == config.steps;
        if done.stop && done.synced == Synced::Yes && !end {
            stopped = Some(job.stop.requested().unwrap_or(Signal::Terminate));
        }
        let agreed = done.synced == Synced::Yes;
        let due = |every: u64, since: u64| every > 0 && done.step - since >= every;
        let mut val_loss = None;
        if agreed && (end || due(config.eval_every, evaluated)) {
            val_loss = Some(worker.evaluate()?);
            last_val = val_loss;
            evaluated = done.step;
        }
        let totals = clock(&worker);
        if rank.0 == 0 {
            let tokens = job.tokens_per_worker() * job.world as u64;
            let row = StepMetrics {
                step: done.step,
                time_s: totals.time_s,
                wall_s: totals.wall_s,
                tokens: tokens * done.step,
                train_loss: done.loss,
                val_loss,
                bytes_sent: totals.bytes_sent,
                bytes_received: totals.bytes_received,
                tokens_per_s: tokens as f64 / (totals.time_s - time).max(1e-9),
            };
            if let Some(metrics) = &mut metrics {
                metrics.write(&row)?;
            }
            if let Some(watch) = watch.as_deref_mut() {
                watch.step(&row, link_use(link, &totals));
            }
            rows.push(row);
        }
        time = totals.time_s;
        if let Some(run) = &run
            && agreed
            && (end || stopped.is_some() || due(config.checkpoint_every, saved))
        {
            checkpoint::save(&worker, job, run, clock(&worker))?;
            saved = done.step;
        }
        if stopped.is_some() {
            break;
        }
    }
    if let Some(signal) = stopped {
        return Err(Error::Stopped(signal));
    }
    if rank.0 != 0 {
        return Ok(None);
    }
    let text = sample(job, &worker)?;
    let report = Report::new(
        job,
        link,
        first_loss,
        last_val,
        rows,
        clock(&worker),
        worker.hash()?.to_hex().to_string(),
        text,
    )?;
    if let Some(run) = &run {
        report.write(run)?;
    }
    Ok(Some(report))
}

/// Share of the elapsed time that the bytes sent take on the link.
fn link_use(link: Option<Link>, totals: &Totals) -> Option<f64> {
    let link = link.filter(|l| l.bandwidth.0 != u64::MAX)?;
    let sending = totals.bytes_sent as f64 * 8.0 / link.bandwidth.0 as f64;
    (totals.time_s > 0.0).then(|| (sending / totals.time_s).min(1.0))
}
