//! Who sits at which transport: threads of one process over memory or simulated links, or one process a rank over TCP.

use std::sync::Arc;
use std::time::Duration;

use farflung_base::{Link, Topology};
use farflung_comm::{Communicator, Transport, memory, simulated, tcp};
use farflung_parallel::Cluster;

use crate::config::choice::TransportKind;
use crate::{Error, LaunchEnv, Result, TrainConfig};

/// A worker's place in the job.
#[derive(Debug)]
pub struct Seat {
    /// How it reaches the others.
    pub comm: Communicator,
    /// Whether its clock is virtual.
    pub simulated: bool,
    /// The link that all ranks have, where it is simulated and one.
    pub link: Option<Link>,
}

/// The topology of the settings: the file's, or equal access links.
pub(crate) fn topology(config: &TrainConfig, world: usize) -> Result<Topology> {
    let Some(path) = &config.topology else { return Ok(Topology::uniform(world, config.link)) };
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let cluster: Cluster = text.parse()?;
    let topology = cluster.topology()?;
    if topology.size() == world {
        return Ok(topology);
    }
    Err(Error::Setting {
        field: "topology",
        value: format!("{} ranks in {}", topology.size(), path.display()),
        expected: format!("{world}, the number of workers"),
    })
}

/// The seats of this process: all of the job's, or one of them under a launcher.
///
/// Errors: a topology that does not fit; [`Error::PeerLost`] and others when processes do not find each other in time.
pub fn seats(config: &TrainConfig, env: Option<&LaunchEnv>) -> Result<Vec<Seat>> {
    let processes = env.map_or(1, |e| e.world_size);
    let world = if processes > 1 { processes } else { config.workers };
    let kind = config.transport_for(processes)?;
    let simulates = !matches!(kind, TransportKind::Memory | TransportKind::Tcp);
    // Of real links only a file says anything.
    let declared = (simulates || config.topology.is_some()).then(|| topology(config, world)).transpose()?;
    let link = (simulates && config.topology.is_none()).then_some(config.link);
    let seat = |transport: Arc<dyn Transport>| -> Result<Seat> {
        let mut comm = Communicator::new(transport);
        if let Some(topology) = &declared {
            comm = comm.with_topology(topology.clone())?;
        }
        let comm = comm.with_algorithm(config.algorithm).with_deadline(config.deadline);
        Ok(Seat { comm, simulated: simulates, link })
    };
    match kind {
        TransportKind::Memory => memory::cluster(world).into_iter().map(|t| seat(t)).collect(),
        TransportKind::Tcp => {
            let (rank, master) = match env {
                Some(e) => (e.rank.0, format!("{}:{}", e.master_addr, e.master_port)),
                None => (0, "127.0.0.1:0".to_owned()),
            };
            let mut join = tcp::Config::new(rank, world as u32, master);
            join.deadline = Duration::from(config.deadline);
            Ok(vec![seat(tcp::join(&join)?)?])
        }
        TransportKind::Simulated | TransportKind::Auto => {
            let topology = declared.as_ref().expect("it was declared for simulated links");
            simulated::cluster(topology).into_iter().map(|t| seat(t)).collect()
        }
    }
}
