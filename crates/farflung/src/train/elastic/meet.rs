//! Entry points of runs that machines join and leave: hosting a run, joining one, and asking for its status.

use std::path::Path;
use std::sync::Arc;

use farflung_comm::CommError;
use farflung_comm::tcp::{Connected, GateConfig, GrowingNetwork, MemberList};
use farflung_parallel::Plan;
use farflung_parallel::membership::{Member, State};

use super::arrivals::{AtGate, Newcomer};
use super::connections::{first_view, settings};
use super::former_checkpoints;
use super::former_members::FormerMembers;
use super::former_runs::{self, FormerRun};
use super::newcomer_info::NewcomerInfo;
use super::own_name;
use super::place::{OwnFolder, Place};
use super::promises;
use super::run_id::RunId;
use super::status::Status;
use crate::config::choice::{Resume, StatePlace, TransportKind};
use crate::config::value::Setting as _;
use crate::train::claim::Claim;
use crate::train::job::{Job, plan_of};
use crate::train::links::{WorkerConnection, pace, shared_memory, view_communicator};
use crate::train::planned;
use crate::train::report::Report;
use crate::train::run::{RunObserver, run_job};
use crate::train::sizes;
use crate::train::trainer::check_pipelines;
use crate::{Error, Existing, Result, RunDir, Stop, TrainArgs, TrainConfig, model_name};

/// Rejects settings that do not work in a run whose members change.
fn check(config: &TrainConfig) -> Result<()> {
    let wrong = |field, value: String, expected: &str| {
        Err(Error::Setting { field, value, expected: expected.to_owned() })
    };
    if let Some(tokens) = &config.tokens {
        let expected = "none: members share out a text; `train` takes rows";
        return wrong("tokens", tokens.display().to_string(), expected);
    }
    let uneven = [
        ("document-mask", config.document_mask),
        ("objective", config.objective.has_prefix()),
        ("data", config.run_settings().reads_examples()),
    ];
    if let Some((setting, _)) = uneven.iter().find(|(_, set)| *set && !config.sync.row().each_step) {
        let why =
            "after a change of members, the tokens that earlier members counted in a round are not known";
        let expected = format!("ddp with `{setting}` among members that come and go: {why}");
        return wrong("sync", config.sync.row().name.to_owned(), &expected);
    }
    if let Some(plan) = &config.plan {
        let expected = "none, because plans are made for the members that are present";
        return wrong("plan", plan.display().to_string(), expected);
    }
    if let Some(topology) = &config.topology {
        let expected = "none, because members have their own links";
        return wrong("topology", topology.display().to_string(), expected);
    }
    if config.path_count() > 1 {
        let expected = "none, because a member that leaves would take its path with it";
        return wrong("paths", format!("{} paths", config.path_count()), expected);
    }
    if config.tensor > 1 {
        let expected = "1, because a member that leaves would take its piece of each layer with it";
        return wrong("tensor", config.tensor.to_string(), expected);
    }
    if config.context_parallel > 1 {
        let expected = "1, because a member that leaves would take its positions of each sequence with it";
        return wrong("context-parallel", config.context_parallel.to_string(), expected);
    }
    if config.state == StatePlace::Disk {
        let expected = "device: members send each other what they hold, and their state on disk is not sent";
        return wrong("state", config.state.to_string(), expected);
    }
    if config.zero > 0 {
        let expected =
            "0, because a member that leaves would take its shard of the optimizer's state with it";
        return wrong("zero", config.zero.to_string(), expected);
    }
    if config.expert > 1 {
        let expected = "1, because a member that leaves would take its experts with it";
        return wrong("expert", config.expert.to_string(), expected);
    }
    if let Some(pools) = &config.pools {
        let expected = "none, because with `stages` and `pooled` the pools are formed automatically";
        return wrong("pools", pools.value().to_string(), expected);
    }
    if config.workers > 1 {
        let expected = "1, because each member is one worker; a machine may join several times";
        return wrong("workers", config.workers.to_string(), expected);
    }
    check_transport(config.transport)
}

/// Rejects a transport whose set of members is fixed.
fn check_transport(transport: TransportKind) -> Result<()> {
    let TransportKind::Named(row) = transport else { return Ok(()) };
    let Some(reason) = row.fixed else { return Ok(()) };
    let expected = format!("another, because {reason}");
    Err(Error::Setting { field: "transport", value: row.to_string(), expected })
}

/// Returns the settings by which members form pipelines; `None` if each member holds the whole model.
///
/// Errors: settings that make no valid pipeline; a method of synchronisation that does not average in each
/// step, or a schedule without a flush, since the parts of the model are then not all at the same step.
fn pipelines(config: &TrainConfig) -> Result<Option<Arc<TrainConfig>>> {
    if config.stages == 1 {
        return Ok(None);
    }
    let whole = plan_of(TrainConfig { workers: config.stages, ..config.clone() }, config.stages)?;
    check_pipelines(&whole)?;
    Ok(Some(Arc::new(TrainConfig { workers: 1, ..config.clone() })))
}

/// Creates the job of a run that begins with one member. With `stages`, this member holds the whole model until
/// others join.
///
/// Errors: settings that do not work in a run whose members change; as [`Job::new`].
pub fn founder(config: TrainConfig, stop: &Stop) -> Result<Job> {
    check(&config)?;
    let config = config.with_own_model()?;
    sizes::admit(&config, None)?;
    let pipelines = pipelines(&config)?;
    let mut config = TrainConfig { workers: 1, ..config };
    let given = Arc::new(config.clone());
    if pipelines.is_some() {
        // The founder takes as many microbatches per step as a whole pipeline.
        (config.microbatches, config.accumulate) = (Some(planned::microbatches(&config)), 1);
        config.stages = 1;
    }
    let level = planned::level(&config, 2);
    let job = Job::new(config, 1, stop.clone())?;
    let job = Job { elastic: true, pipelines, given, ..job };
    job.with_plan(Plan { levels: vec![level.into_level()], ..Plan::from(&job.plan) })
}

/// Starts a run that others can join, and trains. `open` is called with the run's folder once others can
/// connect. `former` are the runs that this folder was used for: their members are asked whether they are still
/// training, at the beginning and from time to time.
///
/// Errors: settings that do not work in a run whose members change; a port in use; [`Error::StillRuns`] if the
/// run of this folder is still training without this machine. If that becomes known only later, all members of
/// the new run save and stop.
pub fn host(
    config: TrainConfig,
    gate: &GateConfig,
    former: &[FormerRun],
    stop: &Stop,
    watch: &mut dyn RunObserver,
    open: &mut dyn FnMut(&GrowingNetwork, &Path) -> Result<()>,
) -> Result<Option<Report>> {
    let config = config.with_own_model()?;
    // The settings of this machine's job are those of a run of one member.
    let own_settings = config.to_toml();
    let mut job = founder(config, stop)?;
    let claim = Claim::new(job.config.out.as_deref(), &model_name(&job.model), None)?;
    let folder = claim.path();
    job.out = Some(folder.to_owned());
    let existing = if job.config.resume == Resume::No { Existing::Refuse } else { Existing::Continue };
    let run = RunDir::open(folder, existing)?;
    let before = promises::read(folder)?;
    let id = before.as_ref().and_then(|before| before.run);
    let former = if before.is_some() { former_runs::members(former, id)? } else { Vec::new() };
    former_runs::are_over(&former, watch)?;
    former_runs::put_aside(folder)?;
    if before.as_ref().is_some_and(|before| before.holds_another)
        && let Some(text) = former_checkpoints::put_checkpoints_aside(folder, None)?
    {
        watch.note(&text);
    }
    let id = id.map_or_else(RunId::draw, Ok)?;
    let mut gate = gate.clone();
    gate.shared_memory = shared_memory(&job.config);
    let gate = &gate;
    let opened = Arc::new(GrowingNetwork::found(gate)?);
    opened.transport().keep_pace(pace(&job.config))?;
    let welcome = NewcomerInfo { run: Some(id), ..NewcomerInfo::of(&job) };
    opened.set_welcome(welcome.to_bytes())?;
    let me = Newcomer::from(&opened.own());
    let at = promises::next(before.as_ref());
    let view = first_view(std::slice::from_ref(&me), at, &job)?;
    let state = State::first(me.id, view.clone(), settings(job.config.deadline));
    let state = state.map_err(|fault| Error::NotAView { reason: fault.to_string() })?;
    let mut place = place(
        (&opened, gate, welcome),
        me,
        (state, OwnFolder { dir: run, run: id, members: None, former_view: None }),
        &job,
    )?;
    let comm = view_communicator(&job, place.enter(view)?, false)?;
    open(&opened, folder)?;
    let connection = WorkerConnection { comm, simulated: false, link: None, place: Some(place) };
    let former = FormerMembers::ask(former, Arc::downgrade(&opened), at.incarnation, stop.clone());
    let done = stopped_first(stop, run_job(&job, vec![connection], watch));
    if let Some(error) = former.answered().filter(|_| done.is_err()) {
        return Err(error);
    }
    match done {
        Err(Error::Removed { reason }) if stop.requested().is_none() => {
            watch.note(&format!("{reason}: this member joins again as a newcomer"));
            let mut given = TrainArgs::from_toml(&own_settings, Path::new("the host's settings"))?;
            // A newcomer takes the state from the members.
            given.init_from = None;
            let asked = opened.ask_again(gate)?;
            drop(opened);
            come_in(&given, gate, (asked, Some(claim)), stop, watch, open)
        }
        done => done,
    }
}

/// Joins the run whose members listen at `addresses`, and trains. If the others later continue without this
/// machine, it joins again as a newcomer. `given` are this machine's own settings. `open` is called once it is
/// connected.
///
/// Errors: [`Error::MemberDiffers`] if the version, model or data differ from the members'; any error that
/// prevents joining.
pub fn join(
    given: &TrainArgs,
    gate: &GateConfig,
    addresses: &[String],
    stop: &Stop,
    watch: &mut dyn RunObserver,
    open: &mut dyn FnMut(&GrowingNetwork, &Path) -> Result<()>,
) -> Result<Option<Report>> {
    check_transport(given.transport.unwrap_or(TransportKind::Auto))?;
    let asked = ask(gate, addresses)?;
    come_in(given, gate, (asked, None), stop, watch, open)
}

/// Replaces the error of a run by the signal that has cancelled it, which is its cause.
fn stopped_first<T>(stop: &Stop, done: Result<T>) -> Result<T> {
    match (done, stop.cancelled()) {
        (Err(error), Some(signal)) if !matches!(error, Error::StoppedAt { .. }) => {
            Err(Error::Stopped(signal))
        }
        (done, _) => done,
    }
}

/// Joins with the members' answer in `asked`, and joins again if the others continue without this machine.
fn come_in(
    given: &TrainArgs,
    gate: &GateConfig,
    (mut asked, mut claim): (MemberList, Option<Claim>),
    stop: &Stop,
    watch: &mut dyn RunObserver,
    open: &mut dyn FnMut(&GrowingNetwork, &Path) -> Result<()>,
) -> Result<Option<Report>> {
    loop {
        let welcome = NewcomerInfo::read(&asked.welcome)?;
        welcome.check_version()?;
        let file = TrainArgs::from_toml(&welcome.settings, Path::new("the run's settings"))?;
        let mut job = founder(TrainConfig::merge(given.clone(), file)?, stop)?;
        welcome.check_job(&job)?;
        let id = welcome.run.ok_or_else(|| NewcomerInfo::wrong("has no identity of the run"))?;
        let again = claim.is_some();
        let new = || Claim::new(job.config.out.as_deref(), &model_name(&job.model), None);
        let folder = claim.take().map_or_else(new, Ok)?;
        // A newcomer takes the state from the members, even if its folder has checkpoints.
        let was_here = promises::are_there(folder.path());
        let existing = if was_here { Existing::Continue } else { Existing::Refuse };
        let run = RunDir::open(folder.path(), existing)?;
        let before = promises::read(folder.path())?;
        let is_another = before.as_ref().is_some_and(|before| before.run != Some(id));
        if let Some(name) = job.config.name.as_ref().filter(|_| !again) {
            own_name::check(name, welcome.status.as_ref(), before.as_ref().filter(|_| !is_another))?;
        }
        let former_view = before.filter(|_| !is_another).map(|before| before.state.view.id());
        if is_another || !again {
            // It may be the folder of another run, or of another incarnation.
            former_runs::put_aside(folder.path())?;
        }
        job.out = Some(folder.path().to_owned());
        let members: Vec<String> = asked.members().iter().map(Connected::to_reach).collect();
        watch.note(&format!("connecting to the run's {} known members", members.len()));
        let opened = Arc::new(asked.with_shared_memory(shared_memory(&job.config)).join()?);
        opened.transport().keep_pace(pace(&job.config))?;
        let welcome = NewcomerInfo { status: None, ..welcome };
        opened.set_welcome(welcome.to_bytes())?;
        let me = Newcomer::from(&opened.own());
        let state = State::newcomer(Member::from(&me), settings(job.config.deadline));
        let own = OwnFolder { dir: run, run: id, members: Some(members), former_view };
        let mut place = place((&opened, gate, welcome), me, (state, own), &job)?;
        let comm = place.alone()?;
        open(&opened, folder.path())?;
        let connection = WorkerConnection { comm, simulated: false, link: None, place: Some(place) };
        match stopped_first(stop, run_job(&job, vec![connection], watch)) {
            Err(Error::Removed { reason }) if stop.requested().is_none() => {
                watch.note(&format!("{reason}: this member joins again as a newcomer"));
                asked = opened.ask_again(gate)?;
                claim = Some(folder);
            }
            done => return done,
        }
    }
}

fn place(
    (gate, config, welcome): (&Arc<GrowingNetwork>, &GateConfig, NewcomerInfo),
    me: Newcomer,
    (state, own): (State, OwnFolder),
    job: &Job,
) -> Result<Place> {
    let arrivals = Arc::new(AtGate { gate: Arc::clone(gate), config: config.clone(), welcome });
    Place::new(gate.transport(), me, arrivals, (state, Some(own)), job.config.deadline)
}

/// Asks a run's members for its status; `None` if it has not begun. If the member that answers takes no steps,
/// asks the others.
///
/// Errors: no member answers at these addresses, or one rejects the connection.
pub fn status(gate: &GateConfig, addresses: &[String]) -> Result<Option<Status>> {
    let status =
        |addresses: &[String]| Ok::<_, Error>(NewcomerInfo::read(&ask(gate, addresses)?.welcome)?.status);
    let first = status(addresses)?;
    let Some(spare) = first.as_ref().filter(|first| first.is_spare) else { return Ok(first) };
    let others =
        spare.members.iter().filter(|member| !member.answers).filter_map(|member| member.address.clone());
    let mut told = others.filter_map(|other| match status(&[other]) {
        Ok(told) => told.filter(|told| !told.is_spare),
        Err(error) => {
            tracing::debug!(%error, "a member does not answer");
            None
        }
    });
    Ok(told.next().or_else(|| first.clone()))
}

fn ask(gate: &GateConfig, addresses: &[String]) -> Result<MemberList> {
    GrowingNetwork::ask(gate, addresses).map_err(|error| match error {
        CommError::Missing { master, after, progress, .. } => {
            Error::NobodyAnswers { addresses: format!("{master} ({})", progress.join("; ")), after }
        }
        error => error.into(),
    })
}
