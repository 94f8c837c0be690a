//! A run from its first step to its report: the loop of each rank, and what rank 0 tells the world about it.

use std::time::Instant;

use farflung_base::{Link, Nanos};
use farflung_comm::Communicator;
use farflung_tensor::Tensor;
use farflung_zoo::Stage;

use super::checkpoint::{self, Totals};
use super::job::Job;
use super::links::{Seat, seats};
use super::report::{Report, sample};
use super::stages::Pipelined;
use super::sync::Synced;
use super::worker::{StepDone, Worker, hash};
use crate::config::choice::Resume;
use crate::{Error, Existing, LaunchEnv, MetricsWriter, Result, RunDir, Signal, StepMetrics, TrainConfig};

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

/// One rank of a run, with a replica of its own or a part of one. What is said of all must be called by all.
pub(super) trait Member {
    fn comm(&self) -> &Communicator;
    fn steps_done(&self) -> u64;
    /// Something about the run that is worth a line.
    fn note(&self, job: &Job) -> Result<Option<String>>;
    fn step(&mut self, stop: bool) -> Result<StepDone>;
    fn evaluate(&mut self) -> Result<f64>;
    fn resume(&mut self, job: &Job, run: &RunDir) -> Result<Option<Totals>>;
    fn save(&mut self, job: &Job, run: &RunDir, totals: Totals) -> Result<()>;
    /// All of the model, on rank 0: for all to call.
    fn whole(&mut self) -> Result<Option<(&Stage, &Tensor)>>;
}

impl Member for Worker {
    fn comm(&self) -> &Communicator {
        self.comm()
    }
    fn steps_done(&self) -> u64 {
        self.steps_done()
    }
    fn note(&self, job: &Job) -> Result<Option<String>> {
        let idle = job.config.idle();
        Ok((!idle.is_empty()).then(|| format!("one stage has no use for {}", idle.join(", "))))
    }
    fn step(&mut self, stop: bool) -> Result<StepDone> {
        self.step(stop)
    }
    fn evaluate(&mut self) -> Result<f64> {
        self.evaluate()
    }
    fn resume(&mut self, job: &Job, run: &RunDir) -> Result<Option<Totals>> {
        checkpoint::resume(self, job, run)
    }
    fn save(&mut self, job: &Job, run: &RunDir, totals: Totals) -> Result<()> {
        checkpoint::save(self, job, run, totals)
    }
    fn whole(&mut self) -> Result<Option<(&Stage, &Tensor)>> {
        Ok((self.comm().rank().0 == 0).then_some((self.stage(), self.params())))
    }
}

impl Member for Pipelined {
    fn comm(&self) -> &Communicator {
        self.comm()
    }
    fn steps_done(&self) -> u64 {
        self.steps_done()
    }
    fn note(&self, job: &Job) -> Result<Option<String>> {
        let plan = self.plan();
        let (time, bubble) = plan.prediction()?;
        let replicas = match job.replicas() {
            1 => "1 replica".to_owned(),
            n => format!("{n} replicas"),
        };
        Ok(Some(format!(
            "{} over {} stages, {} microbatches, {replicas}: a step takes {} sequences, {} tokens; predicted \
             {time} a step where links share nothing, {:.0}% of it bubble",
            plan.name,
            plan.placement().ranks(),
            plan.microbatches(),
            job.sequences(),
            job.tokens_per_replica() * job.replicas() as u64,
            bubble * 100.0
        )))
    }
    fn step(&mut self, stop: bool) -> Result<StepDone> {
        self.step(stop)
    }
    fn evaluate(&mut self) -> Result<f64> {
        self.evaluate()
    }
    fn resume(&mut self, job: &Job, run: &RunDir) -> Result<Option<Totals>> {
        checkpoint::resume(self, job, run)
    }
    fn save(&mut self, job: &Job, run: &RunDir, totals: Totals) -> Result<()> {
        self.gather_whole()?;
        checkpoint::save(self, job, run, totals)
    }
    fn whole(&mut self) -> Result<Option<(&Stage, &Tensor)>> {
        self.gather_whole()?;
        Ok(self.gathered())
    }
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
    let tie = |seat: Seat| Seat { comm: job.stop.tie(seat.comm), ..seat };
    let seats = seats(&job.config, env)?.into_iter().map(tie).collect();
    let result = run_job(&job, seats, watch);
    // Whatever a worker failed with then, that is why.
    match job.stop.cancelled() {
        Some(signal) if result.is_err() => Err(Error::Stopped(signal)),
        _ => result,
    }
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

/// When this part of the run began, and what the run had used before.
struct Clock {
    before: Totals,
    start: Nanos,
    wall: Instant,
}

impl Clock {
    fn new(comm: &Communicator, before: Totals) -> Self {
        #[expect(clippy::disallowed_methods, reason = "the run reports how long it really took")]
        let wall = Instant::now();
        Self { before, start: comm.now(), wall }
    }

    fn totals(&self, comm: &Communicator) -> Totals {
        let stats = comm.stats();
        Totals {
            time_s: self.before.time_s + comm.now().saturating_sub(self.start).as_secs_f64(),
            wall_s: self.before.wall_s + self.wall.elapsed().as_secs_f64(),
            bytes_sent: self.before.bytes_sent + stats.sent.wire.0,
            bytes_received: self.before.bytes_received + stats.received.wire.0,
        }
    }
}

/// What rank 0 tells about the run's steps.
struct Record<'a, 'w> {
    job: &'a Job,
    link: Option<Link>,
    metrics: Option<MetricsWriter>,
    watch: Option<&'a mut (dyn Watch + 'w)>,
    rows: Vec<StepMetrics>,
    /// The run's clock after the last step.
    time_s: f64,
}

impl Record<'_, '_> {
    fn step(&mut self, done: StepDone, val_loss: Option<f64>, totals: &Totals) -> Result<()> {
        let tokens = self.job.tokens_per_replica() * self.job.replicas() as u64;
        let row = StepMetrics {
            step: done.step,
            time_s: totals.time_s,
            wall_s: totals.wall_s,
            tokens: tokens * done.step,
            train_loss: done.loss,
            val_loss,
            bytes_sent: totals.bytes_sent,
            bytes_received: totals.bytes_received,
            tokens_per_s: tokens as f64 / (totals.time_s - self.time_s).max(1e-9),
            drift: done.drift.map(|d| d.distance),
        };
        self.time_s = totals.time_s;
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&row)?;
        }
        if let Some(watch) = &mut self.watch {
            if let Some(drift) = done.drift.filter(|d| d.distance > 0.0) {
                watch.note(&format!(
                    "step {}: copies of parameters were up to {:.1e} apart and are equal again (rank 0 sent {})",
                    done.step,
                    drift.distance,
                    farflung_base::Bytes(drift.bytes)
                ));
            }
            watch.step(&row, link_use(self.link, totals));
        }
        self.rows.push(row);
        Ok(())
    }
}

/// A rank's folder, opened; rank 0 makes the one in which the others have theirs.
fn open_folder(job: &Job, comm: &Communicator) -> Result<Option<RunDir>> {
    let Some(out) = &job.out else { return Ok(None) };
    let rank = comm.rank();
    let existing = if job.config.resume == Resume::No { Existing::Refuse } else { Existing::Continue };
    if rank.0 > 0 {
        comm.barrier()?;
    }
    let run = RunDir::open(&checkpoint::folder(out, rank), existing)?;
    run.write_config(&job.config.to_toml())?;
    if rank.0 == 0 {
        comm.barrier()?;
    }
    Ok(Some(run))
}

/// One rank's run.
fn work(job: &Job, seat: Seat, local: usize, watch: Option<&mut (dyn Watch + '_)>) -> Result<Option<Report>> {
    let Seat { comm, simulated, link } = seat;
    let threads = job.threads(local);
    if job.config.stages > 1 {
        train(job, Pipelined::new(job, comm, threads)?, (simulated, link), watch)
    } else {
        train(job, Worker::new(job, comm, threads)?, (simulated, link), watch)
    }
}

fn train(
    job: &Job,
    mut worker: impl Member,
    (simulated, link): (bool, Option<Link>),
    watch: Option<&mut (dyn Watch + '_)>,
) -> Result<Option<Report>> {
    let config = &job.config;
    let first = worker.comm().rank().0 == 0;
    let run = open_folder(job, worker.comm())?;
    let before = match &run {
        Some(run) => worker.resume(job, run)?.unwrap_or_default(),
        None => Totals::default(),
    };
    let begun = worker.steps_done();
    let metrics = run.as_ref().filter(|_| first).map(|run| run.metrics(begun)).transpose()?;
    let clock = Clock::new(worker.comm(), before);
    let mut record = Record { job, link, metrics, watch, rows: Vec::new(), time_s: before.time_s };
    if let Some(watch) = record.watch.as_deref_mut() {
        if let Some(note) = worker.note(job)? {
            watch.note(&note);
        }
        if begun > 0 {
            watch.note(&format!("resumed at step {begun}"));
        }
    }

    let first_loss = if begun == 0 { Some(worker.evaluate()?) } else { None };
    let mut last_loss = first_loss;
    let (mut evaluated, mut saved) = (begun, begun);
    while worker.steps_done() < config.steps {
        let done = worker.step(job.stop.requested().is_some())?;
        let agreed = done.synced == Synced::Yes;
        let end = done.step == config.steps;
        let stop = done.stop && agreed && !end;
        let due = |every: u64, since: u64| every > 0 && done.step - since >= every;
        let mut val_loss = None;
        if agreed && (end || due(config.eval_every, evaluated)) {
            val_loss = Some(worker.evaluate()?);
            last_loss = val_loss;
            evaluated = done.step;
        }
        if first {
            record.step(done, val_loss, &clock.totals(worker.comm()))?;
        }
        if let Some(run) = &run
            && agreed
            && (end || stop || due(config.checkpoint_every, saved))
        {
            let totals = clock.totals(worker.comm());
            worker.save(job, run, totals)?;
            saved = done.step;
        }
        if stop {
            return Err(Error::Stopped(job.stop.requested().unwrap_or(Signal::Terminate)));
        }
    }
    let totals = clock.totals(worker.comm());
    let Some((stage, params)) = worker.whole()? else { return Ok(None) };
    let text = sample(job, stage, params)?;
    let hash = hash(stage, params)?.to_hex().to_string();
    let report =
        Report::new(job, (simulated, link), (first_loss, last_loss), record.rows, totals, hash, text)?;
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
