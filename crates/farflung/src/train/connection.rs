//! The connections of a job's workers: what each has to reach the others.

use farflung_base::{Link, Topology};
use farflung_comm::Communicator;
use farflung_comm::secure::Security;

use super::elastic::Place;
use super::job::Job;
use super::links::{pace, shared_memory};
use crate::transports::{Connects, JoinSettings};
use crate::{Result, RunSettings};

/// A worker's connection to the job.
#[derive(Debug)]
pub struct WorkerConnection {
    /// The communicator with the other workers.
    pub comm: Communicator,
    /// Whether the communicator's clock is virtual.
    pub simulated: bool,
    /// The link of all ranks, if links are simulated and equal.
    pub link: Option<Link>,
    /// The view of the members to which the worker belongs, in a run whose members join and leave.
    pub place: Option<Place>,
}

/// Returns the declared links between the ranks; links of a real network are declared only by a topology file.
pub(super) fn declared_of(job: &Job, simulates: bool) -> Result<Option<Topology>> {
    (simulates || job.config.topology.is_some()).then(|| job.topology()).transpose()
}

/// Returns a communicator of a job's ranks with the declared links, the algorithm and the deadline.
fn job_communicator(job: &Job, mut comm: Communicator, declared: Option<&Topology>) -> Result<Communicator> {
    if let Some(topology) = declared {
        comm = comm.with_topology(topology.clone())?;
    }
    Ok(comm.with_algorithm(job.plain_algorithm()).with_deadline(job.deadline()))
}

/// Like [`job_communicator`], for a new view of the members during a run.
///
/// Errors: a topology that does not fit.
pub(super) fn view_communicator(job: &Job, comm: Communicator, simulates: bool) -> Result<Communicator> {
    job_communicator(job, comm, declared_of(job, simulates)?.as_ref())
}

/// Returns the connections of this process: all of the job's, or one of them under a launcher. `joined` is the
/// communicator of a launched job, from [`join`](crate::train::join).
///
/// Errors: a topology that does not fit; [`Error::PeerLost`](crate::Error::PeerLost) if a job of one process
/// cannot open its socket.
pub fn connections(job: &Job, joined: Option<Communicator>) -> Result<Vec<WorkerConnection>> {
    let config = &job.config;
    let processes = joined.as_ref().map_or(1, Communicator::size);
    let simulates = config.transport_for(processes, job.world)?.simulated;
    let link = (simulates && config.topology.is_none()).then_some(config.link);
    let declared = declared_of(job, simulates)?;
    let connection = |comm: Communicator| -> Result<WorkerConnection> {
        let comm = job_communicator(job, comm, declared.as_ref())?;
        Ok(WorkerConnection { comm, simulated: simulates, link, place: None })
    };
    ends(config, job.world, declared.as_ref(), joined)?.into_iter().map(connection).collect()
}

/// Returns the communicators of this process's ranks: of all `world` ranks, or `joined`, that of one of them
/// under a launcher.
///
/// Errors: a transport that does not fit; those of its sockets.
pub(super) fn ends(
    config: &RunSettings,
    world: usize,
    declared: Option<&Topology>,
    joined: Option<Communicator>,
) -> Result<Vec<Communicator>> {
    let processes = joined.as_ref().map_or(1, Communicator::size);
    match config.transport_for(processes, world)?.ends {
        Connects::Threads(open) => Ok(open(world, declared).into_iter().map(Communicator::new).collect()),
        Connects::Processes(meet) => {
            let alone = || JoinSettings {
                rank: 0,
                world_size: 1,
                master: "127.0.0.1:0".to_owned(),
                relays: Vec::new(),
                security: Security::unencrypted(),
                job: config.job.clone(),
                deadline: config.deadline,
                pace: pace(config),
                shared_memory: shared_memory(config),
            };
            Ok(vec![joined.map_or_else(|| meet(&alone()), Ok)?])
        }
    }
}
