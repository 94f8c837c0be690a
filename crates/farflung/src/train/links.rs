//! Who sits at which transport: threads of one process over memory or simulated links, or one process a rank
//! over TCP.

pub(super) mod file;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use farflung_base::{Link, Rank, Topology};
use farflung_comm::Communicator;
use farflung_comm::secure::Security;
use farflung_comm::tcp::{Pace, SharedMemory};
use farflung_parallel::{Cluster, Plan, shipped};

use super::elastic::Place;
use super::job::Job;
use crate::config::choice::TransportKind;
use crate::transports::{Ends, Meeting, TRANSPORTS, TransportMethod};
use crate::{Error, LaunchEnv, Result, Stop, TrainConfig};

/// A worker's place in the job.
#[derive(Debug)]
pub struct Seat {
    /// How it reaches the others.
    pub comm: Communicator,
    /// Whether its clock is virtual.
    pub simulated: bool,
    /// The link that all ranks have, where it is simulated and one.
    pub link: Option<Link>,
    /// Its place among members that come and leave, in a run that has them.
    pub place: Option<Place>,
}

/// The machines of the settings' topology, if there is one: a file's, or shipped ones by their name.
///
/// Errors: [`Error::Io`], and [`Error::Parallel`] with the line.
pub(crate) fn cluster(config: &TrainConfig) -> Result<Option<Cluster>> {
    config.topology.as_deref().map(read_topology).transpose()
}

/// Reads a topology file, or where it cannot be read the shipped topology of this name.
///
/// Errors: [`Error::Io`], and [`Error::Parallel`] with the line; for a name without a folder or an ending that
/// is no file, [`Error::Parallel`] with the names of the shipped ones.
pub fn read_topology(path: &Path) -> Result<Cluster> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.parse()?),
        Err(source) => {
            let shipped = path.to_str().map(shipped::cluster);
            let is_name = path.extension().is_none() && path.components().count() == 1;
            match shipped {
                Some(Ok(cluster)) => Ok(cluster),
                Some(Err(unknown)) if is_name && source.kind() == ErrorKind::NotFound => Err(unknown.into()),
                _ => Err(Error::io("read", path)(source)),
            }
        }
    }
}

/// The links of the settings: those between the machines of a file, in its order, or equal access links.
pub(super) fn declared(config: &TrainConfig, world: usize, cluster: Option<&Cluster>) -> Result<Topology> {
    let Some(cluster) = cluster else { return Ok(Topology::uniform(world, config.link)) };
    let topology = cluster.topology()?;
    if topology.size() == world {
        return Ok(topology);
    }
    let path = config.topology.as_deref().unwrap_or_else(|| Path::new("the topology"));
    Err(Error::Setting {
        field: "topology",
        value: format!("{} ranks in {}", topology.size(), path.display()),
        expected: format!("{world}, the number of workers: --workers {} for all of them", topology.size()),
    })
}

/// The links between the machines of a plan, in the order of its ranks.
///
/// Errors: [`Error::Setting`] for a machine that the file does not have.
pub(super) fn of_plan(config: &TrainConfig, plan: &Plan, cluster: Option<&Cluster>) -> Result<Topology> {
    let Some(cluster) = cluster else { return Ok(Topology::uniform(plan.ranks() as usize, config.link)) };
    let (names, all) = (cluster.rank_names(), cluster.topology()?);
    let place = |name: &String| {
        let found = names.iter().position(|n| n == name).map(|i| Rank(i as u32));
        found.ok_or_else(|| Error::Setting {
            field: "topology",
            value: config.topology.as_ref().map_or_else(String::new, |p| p.display().to_string()),
            expected: format!("one with the plan's machine `{name}`; it has {}", names.join(", ")),
        })
    };
    let machines: Vec<Rank> = plan.machines.iter().map(place).collect::<Result<_>>()?;
    Ok(all.among(&machines))
}

/// How fast this process sends over sockets.
pub(super) const fn pace(config: &TrainConfig) -> Pace {
    Pace { all: config.up, each: config.up_each }
}

/// Whether processes of one machine share memory: where nothing else is said, unless a rate is to be kept,
/// which only sockets do.
pub(super) fn shared_memory(config: &TrainConfig) -> SharedMemory {
    match config.transport {
        TransportKind::Auto if pace(config) == Pace::default() => SharedMemory::WherePossible,
        _ => SharedMemory::Never,
    }
}

/// The relays of the settings.
fn relays(config: &TrainConfig) -> Vec<String> {
    let all = config.relay.iter().flat_map(|relays| relays.split(','));
    all.filter(|one| !one.is_empty()).map(str::to_owned).collect()
}

/// Joins the processes of a launched job by their ranks and number. Nothing else of the job needs to be known.
///
/// Errors: [`Error::PeerLost`] and others when processes do not find each other in time.
pub fn join(config: &TrainConfig, env: &LaunchEnv) -> Result<Communicator> {
    let meeting = Meeting {
        rank: env.rank.0,
        world_size: env.world_size as u32,
        master: env.meeting_place(),
        relays: relays(config),
        security: env.security.clone(),
        job: config.job.clone(),
        deadline: config.deadline,
        pace: pace(config),
        shared_memory: shared_memory(config),
    };
    // Where a rank has a transport of another kind, the others are to hear of it.
    let meets = |row: &TransportMethod| match row.ends {
        Ends::Processes(meet) => Some(meet),
        Ends::Threads(_) => None,
    };
    let wished = match config.transport {
        TransportKind::Auto => None,
        TransportKind::Named(row) => meets(&row),
    };
    let meet = wished.or_else(|| TRANSPORTS.iter().find_map(meets));
    meet.expect("the table has one between processes")(&meeting)
}

/// How often a wait for other processes looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(50);

/// [`join`], given up when a signal asks for a stop. The attempt then ends with the process, or at its
/// deadline.
///
/// Errors: [`Error::Stopped`] as well.
pub(super) fn join_unless_stopped(
    config: &TrainConfig,
    env: &LaunchEnv,
    stop: &Stop,
) -> Result<Communicator> {
    let (told, joined) = mpsc::channel();
    let (config, env) = (config.clone(), env.clone());
    let joining = std::thread::spawn(move || {
        // Nobody listens any more once it was given up.
        let _ = told.send(join(&config, &env));
    });
    loop {
        match joined.recv_timeout(LOOK) {
            Ok(joined) => return joined,
            Err(RecvTimeoutError::Timeout) => {
                if let Some(signal) = stop.requested() {
                    return Err(Error::Stopped(signal));
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                let panic = joining.join().expect_err("it ends without a word only where it panics");
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// What is declared of the links between the ranks: of real ones only a file says anything.
fn declared_of(job: &Job, simulates: bool) -> Result<Option<Topology>> {
    (simulates || job.config.topology.is_some()).then(|| job.topology()).transpose()
}

/// A communicator of a job's ranks with what the job declares of their links.
fn prepared(job: &Job, mut comm: Communicator, declared: Option<&Topology>) -> Result<Communicator> {
    if let Some(topology) = declared {
        comm = comm.with_topology(topology.clone())?;
    }
    Ok(comm.with_algorithm(job.plain_algorithm()).with_deadline(job.deadline()))
}

/// The same for members that were decided on while the run was under way.
///
/// Errors: a topology that does not fit.
pub(super) fn seat(job: &Job, comm: Communicator, simulates: bool) -> Result<Communicator> {
    prepared(job, comm, declared_of(job, simulates)?.as_ref())
}

/// The seats of this process: all of the job's, or one of them under a launcher. `joined` has [joined](join)
/// the processes of a launched job.
///
/// Errors: a topology that does not fit; [`Error::PeerLost`] where a process alone cannot open its socket.
pub fn seats(job: &Job, joined: Option<Communicator>) -> Result<Vec<Seat>> {
    let config = &job.config;
    let processes = joined.as_ref().map_or(1, Communicator::size);
    let world = job.world;
    let transport = config.transport_for(processes)?;
    let simulates = transport.simulated;
    let link = (simulates && config.topology.is_none()).then_some(config.link);
    let declared = declared_of(job, simulates)?;
    let seat_of = |comm: Communicator| -> Result<Seat> {
        let comm = prepared(job, comm, declared.as_ref())?;
        Ok(Seat { comm, simulated: simulates, link, place: None })
    };
    match transport.ends {
        Ends::Threads(open) => {
            let ends = open(world, declared.as_ref()).into_iter();
            ends.map(|end| seat_of(Communicator::new(end))).collect()
        }
        Ends::Processes(meet) => {
            let alone = || Meeting {
                rank: 0,
                world_size: 1,
                master: "127.0.0.1:0".to_owned(),
                relays: Vec::new(),
                security: Security::clear(),
                job: config.job.clone(),
                deadline: config.deadline,
                pace: pace(config),
                shared_memory: shared_memory(config),
            };
            Ok(vec![seat_of(joined.map_or_else(|| meet(&alone()), Ok)?)?])
        }
    }
}
