//! Connects workers with transports: threads of one process over memory or simulated links, or one process per
//! rank over the network.

pub(super) mod file;

use std::io::ErrorKind;
use std::path::Path;
use std::str::FromStr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use farflung_base::{Rank, Topology};
use farflung_comm::tcp::{Pace, SharedMemory};
use farflung_comm::{CommError, Communicator, WireError};
use farflung_parallel::{Cluster, ParallelError, Plan, shipped};

pub(super) use super::connection::view_communicator;
pub use super::connection::{WorkerConnection, connections};
use crate::config::choice::TransportKind;
use crate::transports::{Connects, JoinSettings, TRANSPORTS, TransportMethod, meet_by_auto};
use crate::{Error, LaunchEnv, LaunchError, Result, RunSettings, Stop};

/// Reads the topology of the settings, if there is one: a file, or a shipped topology by its name.
///
/// Errors: [`Error::Io`], and [`Error::Parallel`] with the line.
pub(crate) fn cluster(config: &RunSettings) -> Result<Option<Cluster>> {
    config.topology.as_deref().map(read_topology).transpose()
}

/// Reads a topology file. If it cannot be read, returns the shipped topology of this name.
///
/// Errors: [`Error::Io`], and [`Error::Parallel`] with the line. For a plain name (without folder or extension)
/// that is neither a file nor a shipped topology, [`Error::Parallel`] with the names of the shipped ones.
pub fn read_topology(path: &Path) -> Result<Cluster> {
    read_or_shipped(path, shipped::cluster)
}

/// Reads a file. If it cannot be read, returns the shipped one of this name, which `shipped` parses.
///
/// Errors: as [`read_topology`].
pub fn read_or_shipped<T: FromStr<Err = ParallelError>>(
    path: &Path,
    shipped: impl Fn(&str) -> Result<T, ParallelError>,
) -> Result<T> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.parse()?),
        Err(source) => {
            let is_name = path.extension().is_none() && path.components().count() == 1;
            match path.to_str().map(shipped) {
                Some(Ok(shipped)) => Ok(shipped),
                Some(Err(unknown)) if is_name && source.kind() == ErrorKind::NotFound => Err(unknown.into()),
                _ => Err(Error::io("read", path)(source)),
            }
        }
    }
}

/// Returns the links of the settings: those between the machines of a file, in its order, or equal access
/// links.
pub(super) fn declared(config: &RunSettings, world: usize, cluster: Option<&Cluster>) -> Result<Topology> {
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

/// Returns the links between the machines of a plan, in the order of its ranks.
///
/// Errors: [`Error::Setting`] for a machine that the file does not have.
pub(super) fn of_plan(config: &RunSettings, plan: &Plan, cluster: Option<&Cluster>) -> Result<Topology> {
    let Some(cluster) = cluster else { return Ok(Topology::uniform(plan.ranks() as usize, config.link)) };
    let (names, all) = (cluster.rank_names(), cluster.topology()?);
    let place = |name: &String| {
        let found = names.iter().position(|n| n == name).map(|i| Rank(i as u32));
        found.ok_or_else(|| Error::Setting {
            field: "topology",
            value: config.topology.as_ref().map_or_else(String::new, |p| p.display().to_string()),
            expected: format!(
                "a file with the plan's machine `{name}`; its machines are {}",
                names.join(", ")
            ),
        })
    };
    let machines: Vec<Rank> = plan.machines.iter().map(place).collect::<Result<_>>()?;
    Ok(all.among(&machines))
}

/// Returns the limits on this process's sending rate over sockets.
pub(super) const fn pace(config: &RunSettings) -> Pace {
    Pace { all: config.up, each: config.up_each }
}

/// Returns whether processes of one machine share memory: with transport `auto`, unless a sending rate is
/// given, which only sockets support.
pub(super) fn shared_memory(config: &RunSettings) -> SharedMemory {
    match config.transport {
        TransportKind::Auto if pace(config) == Pace::default() => SharedMemory::WherePossible,
        _ => SharedMemory::Never,
    }
}

/// Joins the processes of a launched job by their ranks and number. It uses the settings of the network, but
/// not the model, the data or the plan.
///
/// Errors: [`LaunchError::Rendezvous`] if processes do not find each other in time;
/// [`LaunchError::OtherProgram`] and [`LaunchError::PortInUse`] if another program is at the meeting place;
/// those of the transport.
pub fn join(config: &RunSettings, env: &LaunchEnv) -> Result<Communicator> {
    meet(config, env).map_err(|error| match error {
        Error::Comm(source) => match &source {
            CommError::Missing { ranks, .. } => {
                let refused = !env.security.refused().counts().is_empty();
                let advice = env.advice(ranks, refused);
                LaunchError::Rendezvous { source, advice }.into()
            }
            CommError::Handshake { peer, source: WireError::Magic } => {
                LaunchError::OtherProgram { at: peer.clone(), source: WireError::Magic }.into()
            }
            CommError::Io { what: "listen at", kind: ErrorKind::AddrInUse, .. } if env.rank.0 == 0 => {
                LaunchError::PortInUse { source }.into()
            }
            _ => Error::Comm(source),
        },
        error => error,
    })
}

fn meet(config: &RunSettings, env: &LaunchEnv) -> Result<Communicator> {
    let meeting = JoinSettings {
        rank: env.rank.0,
        world_size: env.world_size as u32,
        master: env.meeting_place(),
        relays: config.relays(),
        security: env.security.clone(),
        job: config.job.clone(),
        deadline: config.deadline,
        pace: pace(config),
        shared_memory: shared_memory(config),
    };
    if config.transport == TransportKind::Auto
        && let Some(met) = meet_by_auto(&meeting)?
    {
        return Ok(met);
    }
    // If the setting is a transport within a process, meet anyway, so that the other ranks learn of the
    // difference.
    let meets = |row: &TransportMethod| match row.ends {
        Connects::Processes(meet) => Some(meet),
        Connects::Threads(_) => None,
    };
    let wished = match config.transport {
        TransportKind::Auto => None,
        TransportKind::Named(row) => meets(&row),
    };
    let meet = wished.or_else(|| TRANSPORTS.iter().find_map(meets));
    meet.expect("the table has a transport between processes")(&meeting)
}

/// Time between two checks for a stop while waiting for other processes.
const LOOK: Duration = Duration::from_millis(50);

/// Like [`join`], but returns when a signal asks for a stop. The attempt then ends with the process, or at its
/// deadline.
///
/// Errors: also [`Error::Stopped`].
pub(super) fn join_unless_stopped(
    config: &RunSettings,
    env: &LaunchEnv,
    stop: &Stop,
) -> Result<Communicator> {
    let (told, joined) = mpsc::channel();
    let (config, env) = (config.clone(), env.clone());
    let joining = std::thread::spawn(move || {
        // The receiver is gone if the wait was given up.
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
                let panic = joining.join().expect_err("the thread ends without a message only if it panics");
                std::panic::resume_unwind(panic);
            }
        }
    }
}
