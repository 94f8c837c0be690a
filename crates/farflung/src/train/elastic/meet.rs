//! A run on machines that come and leave: the one that founds it, and those that join.

use std::path::Path;
use std::sync::Arc;

use farflung_comm::CommError;
use farflung_comm::tcp::{Asked, Gate, GateConfig};
use farflung_parallel::membership::{Member, State};

use super::arrivals::{AtGate, Newcomer};
use super::kept;
use super::place::Place;
use super::seats::{first_view, settings};
use super::status::Status;
use super::welcome::Welcome;
use crate::config::choice::{Resume, TransportKind};
use crate::config::value::Setting as _;
use crate::train::claim::Claim;
use crate::train::job::{Job, plan_of};
use crate::train::links::{Seat, pace, seat, shared_memory};
use crate::train::planned;
use crate::train::report::Report;
use crate::train::run::{Watch, run_job};
use crate::train::sizes;
use crate::train::trainer::check_pipelines;
use crate::{Error, Existing, Result, RunDir, Stop, TrainArgs, TrainConfig, model_name};

/// Refuses settings with which members cannot come and leave.
fn check(config: &TrainConfig) -> Result<()> {
    let wrong = |field, value: String, expected: &str| {
        Err(Error::Setting { field, value, expected: expected.to_owned() })
    };
    if let Some(plan) = &config.plan {
        let expected = "none: a plan is made for whoever is there";
        return wrong("plan", plan.display().to_string(), expected);
    }
    if let Some(topology) = &config.topology {
        let expected = "none: members come with their own links";
        return wrong("topology", topology.display().to_string(), expected);
    }
    if let Some(pools) = &config.pools {
        let expected = "none: with `stages` and `pooled` members form pools by themselves";
        return wrong("pools", pools.value().to_string(), expected);
    }
    if config.workers > 1 {
        let expected = "1: each member is one worker, and a machine may join several times";
        return wrong("workers", config.workers.to_string(), expected);
    }
    check_transport(config.transport)
}

/// Refuses a transport whose members are those that it began with.
fn check_transport(transport: TransportKind) -> Result<()> {
    let TransportKind::Named(row) = transport else { return Ok(()) };
    let Some(reason) = row.fixed else { return Ok(()) };
    let expected = format!("another, since {reason}");
    Err(Error::Setting { field: "transport", value: row.to_string(), expected })
}

/// The settings by which members form pipelines, where each is not to hold the whole model.
///
/// Errors: a pipeline that these settings do not make, or whose parts do not all stand behind the same step.
fn pipelines(config: &TrainConfig) -> Result<Option<Arc<TrainConfig>>> {
    if config.stages == 1 {
        return Ok(None);
    }
    let whole = plan_of(TrainConfig { workers: config.stages, ..config.clone() }, config.stages)?;
    check_pipelines(&whole)?;
    Ok(Some(Arc::new(TrainConfig { workers: 1, ..config.clone() })))
}

/// Opens the data, and makes the plan of a member alone that others can come to: with `stages`, it holds the
/// whole model until they do.
///
/// Errors: settings with which members cannot come and leave; as [`Job::new`].
pub fn founder(config: TrainConfig, stop: &Stop) -> Result<Job> {
    check(&config)?;
    sizes::admit(&config, None)?;
    let pipelines = pipelines(&config)?;
    let mut config = TrainConfig { workers: 1, ..config };
    if pipelines.is_some() {
        // As many to a step as a pipeline takes.
        (config.microbatches, config.accumulate) = (Some(planned::microbatches(&config)), 1);
        config.stages = 1;
    }
    let level = planned::level(&config, 2);
    let job = Job::new(config, 1, stop.clone())?;
    let job = Job { elastic: true, pipelines, ..job };
    let mut plan = job.plan.clone();
    plan.levels = vec![level];
    job.with_plan(plan)
}

/// Founds a run that others can join, and trains. `open` is called once they can, with the run's folder.
/// `former` asks the members of an earlier run of that folder whether they go on.
///
/// Errors: settings with which members cannot come and leave; a port that is in use; [`Error::StillRuns`]
/// where the run of this folder goes on without this machine.
pub fn host(
    config: TrainConfig,
    gate: &GateConfig,
    former: Option<&GateConfig>,
    stop: &Stop,
    watch: &mut dyn Watch,
    open: &mut dyn FnMut(&Gate, &Path) -> Result<()>,
) -> Result<Option<Report>> {
    let mut job = founder(config, stop)?;
    let claim = Claim::new(job.config.out.as_deref(), &model_name(&job.model), None)?;
    let folder = claim.path();
    job.out = Some(folder.to_owned());
    let existing = if job.config.resume == Resume::No { Existing::Refuse } else { Existing::Continue };
    let run = RunDir::open(folder, existing)?;
    let before = kept::read(folder)?;
    if let Some(former) = former.filter(|_| before.is_some()) {
        kept::is_over(folder, former, watch)?;
    }
    let mut gate = gate.clone();
    gate.shared_memory = shared_memory(&job.config);
    let gate = &gate;
    let opened = Arc::new(Gate::found(gate)?);
    opened.transport().keep_pace(pace(&job.config))?;
    let welcome = Welcome::of(&job);
    opened.set_welcome(welcome.to_bytes())?;
    let me = Newcomer::from(&opened.own());
    let at = kept::next(before.as_ref());
    let view = first_view(std::slice::from_ref(&me), at, &job)?;
    let state = State::first(me.id, view.clone(), settings(job.config.deadline));
    let state = state.map_err(|fault| Error::NotAView { reason: fault.to_string() })?;
    let mut place = place((&opened, gate, welcome), me, (state, run), &job)?;
    let comm = seat(&job, place.enter(view)?, false)?;
    open(&opened, folder)?;
    let seat = Seat { comm, simulated: false, link: None, place: Some(place) };
    match run_job(&job, vec![seat], watch) {
        Err(Error::Removed { reason }) if stop.requested().is_none() => {
            watch.note(&format!("{reason}: comes back as a newcomer"));
            let given = TrainArgs::from_toml(&job.config.to_toml(), Path::new("the host's settings"))?;
            let asked = opened.ask_again(gate)?;
            drop(opened);
            come_in(&given, gate, (asked, Some(claim)), stop, watch, open)
        }
        done => done,
    }
}

/// Becomes a member of the run of which some members are reached at these addresses; one that the others go
/// on without comes back as a newcomer. `given` are this machine's own settings. `open` is called once it is
/// connected.
///
/// Errors: [`Error::MemberDiffers`] for another version, model or data than the members'; whatever keeps it
/// from joining.
pub fn join(
    given: &TrainArgs,
    gate: &GateConfig,
    addresses: &[String],
    stop: &Stop,
    watch: &mut dyn Watch,
    open: &mut dyn FnMut(&Gate, &Path) -> Result<()>,
) -> Result<Option<Report>> {
    check_transport(given.transport.unwrap_or(TransportKind::Auto))?;
    let asked = ask(gate, addresses)?;
    come_in(given, gate, (asked, None), stop, watch, open)
}

/// Comes in with what members have answered, and again where the others go on without this one.
fn come_in(
    given: &TrainArgs,
    gate: &GateConfig,
    (mut asked, mut claim): (Asked, Option<Claim>),
    stop: &Stop,
    watch: &mut dyn Watch,
    open: &mut dyn FnMut(&Gate, &Path) -> Result<()>,
) -> Result<Option<Report>> {
    loop {
        let welcome = Welcome::read(&asked.welcome)?;
        welcome.check_version()?;
        let file = TrainArgs::from_toml(&welcome.settings, Path::new("the run's settings"))?;
        let mut job = founder(TrainConfig::merge(given.clone(), file)?, stop)?;
        welcome.check_job(&job)?;
        let folder = match claim.take() {
            Some(folder) => folder,
            None => Claim::new(job.config.out.as_deref(), &model_name(&job.model), None)?,
        };
        // A newcomer begins with the state of the others, whatever it has left in its folder before.
        let was_here = kept::is_there(folder.path());
        let existing = if was_here { Existing::Continue } else { Existing::Refuse };
        let run = RunDir::open(folder.path(), existing)?;
        job.out = Some(folder.path().to_owned());
        watch
            .note(&format!("{} of the run's members are told of: connecting to them", asked.members().len()));
        let opened = Arc::new(asked.with_shared_memory(shared_memory(&job.config)).join()?);
        opened.transport().keep_pace(pace(&job.config))?;
        let welcome = Welcome { status: None, ..welcome };
        opened.set_welcome(welcome.to_bytes())?;
        let me = Newcomer::from(&opened.own());
        let state = State::newcomer(Member::from(&me), settings(job.config.deadline));
        let mut place = place((&opened, gate, welcome), me, (state, run), &job)?;
        let comm = place.alone()?;
        open(&opened, folder.path())?;
        let seat = Seat { comm, simulated: false, link: None, place: Some(place) };
        match run_job(&job, vec![seat], watch) {
            Err(Error::Removed { reason }) if stop.requested().is_none() => {
                watch.note(&format!("{reason}: comes back as a newcomer"));
                asked = opened.ask_again(gate)?;
                claim = Some(folder);
            }
            done => return done,
        }
    }
}

fn place(
    (gate, config, welcome): (&Arc<Gate>, &GateConfig, Welcome),
    me: Newcomer,
    (state, run): (State, RunDir),
    job: &Job,
) -> Result<Place> {
    let arrivals = Arc::new(AtGate { gate: Arc::clone(gate), config: config.clone(), welcome });
    Place::new(gate.transport(), me, arrivals, (state, Some(run)), job.config.deadline)
}

/// Asks a run's members how it stands; `None` where it has not begun.
///
/// Errors: nobody answers at these addresses, or refuses.
pub fn status(gate: &GateConfig, addresses: &[String]) -> Result<Option<Status>> {
    let asked = ask(gate, addresses)?;
    Ok(Welcome::read(&asked.welcome)?.status)
}

fn ask(gate: &GateConfig, addresses: &[String]) -> Result<Asked> {
    Gate::ask(gate, addresses).map_err(|error| match error {
        CommError::Missing { master, after, .. } => Error::NobodyAnswers { addresses: master, after },
        error => error.into(),
    })
}
