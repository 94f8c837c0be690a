//! A run from its settings to its report: what comes before the loop of each rank, and what a failure means.

use farflung_base::Link;
use farflung_comm::{Communicator, Stats};

use super::all_succeed::all_succeed;
use super::blame;
pub use super::callbacks::{Quiet, RunObserver};
use super::checkpoint;
use super::claim::Claim;
use super::deadline;
use super::elastic;
use super::exit_listener::{ExitListener, ExitNotice};
use super::finished::{self, RemainingWork};
use super::job::Job;
use super::links::{self, WorkerConnection, connections};
use super::meet::{same_job, same_settings};
use super::planned;
use super::report::Report;
use super::run_loop::{FixedRanks, Start};
use super::sizes;
use super::steps::LastDone;
use super::stop_in_step::{self, RunProgress};
use super::trainer::{Thoroughness, Trainer};
use super::tune::tune;
use crate::config::choice::Resume;
use crate::events::{EventKind, EventLog};
use crate::{Error, Existing, LaunchEnv, Result, RunDir, TrainConfig, model_name};

/// Returns the number of ranks of a run: the launched processes, else the plan's ranks, else the workers of the
/// settings.
///
/// Errors: a plan that cannot be read.
pub fn world(config: &TrainConfig, env: Option<&LaunchEnv>) -> Result<usize> {
    Ok(match (env.map_or(1, |e| e.world_size), &config.plan) {
        (processes @ 2.., _) => processes,
        (_, Some(path)) => planned::read(path)?.ranks() as usize,
        (_, None) => config.workers,
    })
}

/// Trains as the settings say: all workers in this process, or one of them under a launcher. Returns the report
/// on rank 0, and `None` on other ranks.
pub fn run(
    config: TrainConfig,
    env: Option<&LaunchEnv>,
    stop: crate::Stop,
    watch: &mut dyn RunObserver,
) -> Result<Option<Report>> {
    let launched = env.filter(|env| env.world_size > 1);
    let admitted = admit(&config, env).map_err(Error::of_input);
    // A run that does not fit on this machine is reported at once. Other errors wait until ranks are connected,
    // so that all ranks get them.
    let admitted = match admitted {
        Err(error @ Error::TooLarge(_)) => return Err(error),
        admitted => admitted,
    };
    let (mut job, joined) = match launched {
        None => (admitted.and_then(|()| prepare(config, env, stop))?, None),
        Some(env) => {
            if env.rank.0 == 0 && !env.security.is_encrypted() && !env.is_local() {
                let at = &env.master_addr;
                watch.note(&format!(
                    "{at}: links are neither encrypted nor authenticated: use this only in trusted networks"
                ));
            }
            let comm = stop.with_stop(links::join_unless_stopped(&config.run_settings(), env, &stop)?);
            let met = same_settings(&config, &comm);
            let job = met.and_then(|()| {
                let mut job =
                    all_succeed(&comm, admitted.and_then(|()| prepare(config, Some(env), stop.clone())))?;
                job.processes = env.world_size;
                same_job(&job, &comm)?;
                Ok(job)
            });
            match (job, stop.cancelled()) {
                (Err(_), Some(signal)) => return Err(Error::Stopped(signal)),
                (job, _) => (job?, Some(comm)),
            }
        }
    };
    let tie = |connection: WorkerConnection| WorkerConnection {
        comm: job.stop.with_stop(connection.comm),
        ..connection
    };
    let connections: Vec<WorkerConnection> = connections(&job, joined)?.into_iter().map(tie).collect();
    let between = connections.first().map(|connection| &connection.comm).filter(|_| launched.is_some());
    let result = Claim::new(job.config.out.as_deref(), &model_name(&job.model), between).and_then(|claim| {
        job.out = Some(claim.path().to_owned());
        run_job(&job, connections, watch)
    });
    // After a cancelling signal, the signal is the cause of any worker's failure.
    match job.stop.cancelled() {
        Some(signal) if result.as_ref().is_err_and(|error| !matches!(error, Error::StoppedAt { .. })) => {
            Err(Error::Stopped(signal))
        }
        _ => result,
    }
}

/// Checks that this machine can run its part: its transport, its memory, its threads.
fn admit(config: &TrainConfig, env: Option<&LaunchEnv>) -> Result<()> {
    config.run_settings().transport_for(env.map_or(1, |env| env.world_size), config.workers)?;
    let own = config.clone().with_own_model()?;
    match &config.plan {
        Some(path) => sizes::admit(&planned::as_planned(&own, &planned::read(path)?), env),
        None => sizes::admit(&own, env),
    }
}

/// Reads the data and makes the plan.
fn prepare(config: TrainConfig, env: Option<&LaunchEnv>, stop: crate::Stop) -> Result<Job> {
    let transport =
        config.run_settings().transport_for(env.map_or(1, |env| env.world_size), config.workers)?;
    let world = world(&config, env)?;
    let job = Job::new(config, world, stop)?;
    deadline::check(&job, transport)?;
    if let Some(env) = env {
        // Opening the device here reports a missing one to the other ranks.
        job.device(env.rank.index(), 1)?;
    }
    Ok(job)
}

/// Trains a job with the given connections, one thread per connection.
pub fn run_job(
    job: &Job,
    connections: Vec<WorkerConnection>,
    watch: &mut dyn RunObserver,
) -> Result<Option<Report>> {
    let results = run_workers(job, connections, watch);
    // A failed worker makes the others fail too; the cause is the first error that is not about a lost peer.
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

/// Trains a job with the given connections, one thread per connection, and returns the result of each.
pub fn run_workers(
    job: &Job,
    connections: Vec<WorkerConnection>,
    watch: &mut dyn RunObserver,
) -> Vec<Result<Option<Report>>> {
    let local = connections.len();
    let mut watch = Some(watch);
    std::thread::scope(|scope| {
        let workers: Vec<_> = connections
            .into_iter()
            .map(|connection| {
                let shown = connection.comm.rank().0 == 0 || local == 1;
                let watch = if shown { watch.take() } else { None };
                scope.spawn(move || work(job, connection, local, watch))
            })
            .collect();
        workers
            .into_iter()
            .map(|w| w.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Opens a rank's folder. Rank 0 does so first, since its folder contains those of the others.
fn open_folder(job: &Job, comm: &Communicator) -> Result<Option<RunDir>> {
    let Some(out) = &job.out else { return Ok(None) };
    let rank = comm.rank();
    let existing = if job.config.resume == Resume::No { Existing::Refuse } else { Existing::Continue };
    let open = || RunDir::open(&checkpoint::folder(out, rank), existing);
    let first = all_succeed(comm, if rank.0 == 0 { open().map(Some) } else { Ok(None) })?;
    let others = all_succeed(comm, if rank.0 == 0 { Ok(None) } else { open().map(Some) })?;
    Ok(first.or(others))
}

/// Runs one rank.
fn work(
    job: &Job,
    connection: WorkerConnection,
    local: usize,
    watch: Option<&mut (dyn RunObserver + '_)>,
) -> Result<Option<Report>> {
    if connection.place.is_some() {
        return elastic::work(job, connection, local, watch);
    }
    let WorkerConnection { comm, simulated, link, .. } = connection;
    let threads = job.threads(local);
    let tuned = tune(job, &comm, threads)?;
    let mut watch = watch;
    if let (Some(tuned), Some(watch)) = (&tuned, watch.as_deref_mut()) {
        tuned.lines().iter().for_each(|line| watch.note(line));
    }
    let (job, comm) = tuned.as_ref().map_or((job, comm), |tuned| (&tuned.job, tuned.comm.clone()));
    let trials = tuned.as_ref().map_or(Stats::default(), |tuned| tuned.comm.stats());
    let mut trainer = Trainer::new(job, comm, threads)?;
    let run = open_folder(job, trainer.comm())?;
    let mut events = EventLog::new(run.as_ref().map(RunDir::path));
    let hearing = (job.processes > 1).then(|| ExitListener::new(trainer.comm(), &job.stop));
    let mut kept = RunProgress::default();
    let done =
        train(job, &mut trainer, run.as_ref(), &mut events, &mut kept, (simulated, link, trials), watch);
    let done = done.map_err(|mut error| {
        let mut stopper = None;
        // A stop request of this rank takes precedence.
        if let Some(hearing) = hearing.as_ref().filter(|_| job.stop.requested().is_none()) {
            error = blame::attribute_failure(trainer.comm(), hearing, error);
            stopper =
                hearing.heard().filter(|heard| heard.word == ExitNotice::Stopped).map(|heard| heard.from);
        }
        stop_in_step::handle_stop(job, &mut trainer, run.as_ref(), &mut events, kept, stopper, error)
    });
    // Nothing is written to a folder in which no run has begun.
    if let Err(error) = &done
        && run.as_ref().is_some_and(RunDir::has_begun)
    {
        events.write(trainer.steps_done(), EventKind::ended(error));
    }
    done
}

fn train(
    job: &Job,
    trainer: &mut Trainer,
    run: Option<&RunDir>,
    events: &mut EventLog,
    kept: &mut RunProgress,
    (simulated, link, trials): (bool, Option<Link>, Stats),
    mut watch: Option<&mut (dyn RunObserver + '_)>,
) -> Result<Option<Report>> {
    let first = trainer.comm().rank().0 == 0;
    trainer.hold_samples(job, run.map(RunDir::path))?;
    let resumed = checkpoint::resume(trainer, job, run)?;
    let begun = trainer.steps_done();
    let seen = watch.as_deref_mut();
    let from = resumed.as_ref().map(|resumed| resumed.from.as_path());
    if let RemainingWork::Nothing(report) =
        finished::remaining_work(job, run, trainer.comm(), from, begun, seen)?
    {
        return Ok(report.map(|report| *report));
    }
    // Checks copies that were read from checkpoints, and initial weights.
    trainer.with_common(|trainer| trainer.verify(Thoroughness::All))?;
    if let Some(run) = run.filter(|_| job.config.save_end || job.config.checkpoint_every > 0) {
        checkpoint::admit(trainer, job, run, watch.as_deref_mut())?;
    }
    // The settings are written only after all checks of the folder have passed.
    if let Some(run) = run {
        run.write_settings(&job.given.to_toml(), &job.plan.to_string())?;
    }
    if let Some(run) = run.filter(|_| first) {
        links::file::write(job, simulated, run)?;
    }
    if run.is_some() {
        trainer.set_rollback_point()?;
    }
    let start = Start {
        job: job.clone(),
        run,
        watch,
        simulated,
        link,
        trials,
        resumed,
        tells: first,
        rows: begun,
        last: LastDone::at(begun),
        evaluates: begun == 0,
        tokens_before: 0,
    };
    start.run(&mut FixedRanks, trainer, events, kept)
}
