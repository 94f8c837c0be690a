//! A run on a simulated network as a file: its links, its faults, and every event that reached a rank. A
//! program can be run on the same network again, and the two runs can be compared to the bit. Independent of
//! the program.

use std::fmt;
use std::sync::Arc;

use farflung_base::{AccessLink, Link, Rank, Topology};

use super::event::SimulatedEvent;
use super::world::World;
use super::{Faults, Simulated, build, distances};
use crate::control::BoundedVec;
use crate::{CommError, WireError};

const MAGIC: [u8; 4] = *b"FFLR";
/// Newest version. A topology without shared lines of regions is written as version 1, which has no such lines.
const VERSION: u8 = 2;
/// Length in bytes of the header: magic, version, and checksum of the rest.
const HEADER: usize = 9;

/// The recording of a run. Two runs with equal recordings were equal bit for bit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    topology: Topology,
    faults: Faults,
    events: Vec<SimulatedEvent>,
}

/// A recording in progress.
#[must_use = "call `finish` when the ranks are done"]
pub struct Recorder {
    world: Arc<World>,
    topology: Topology,
    faults: Faults,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorder({} ranks)", self.topology.size())
    }
}

/// Creates a network like [`cluster_with`](super::cluster_with) and records all events.
pub fn record(topology: &Topology, faults: &Faults) -> (Vec<Arc<Simulated>>, Recorder) {
    let (ranks, world) = build(topology, faults, distances(topology));
    world.record();
    (ranks, Recorder { world, topology: topology.clone(), faults: faults.clone() })
}

impl Recorder {
    /// Returns the recording. Must be called after all ranks have finished.
    #[must_use]
    pub fn finish(self) -> Recording {
        let mut events = self.world.recorded();
        // Ranks that run in parallel record their events in any order.
        events.sort_unstable();
        Recording { topology: self.topology, faults: self.faults, events }
    }
}

/// Contents of a file after the header: links and access links of all ranks, faults, events.
type Body = (BoundedVec<Link>, BoundedVec<AccessLink>, Faults, BoundedVec<SimulatedEvent>);

/// The region of each rank, and the shared line of each region. Comes before the body; only in version 2.
type Lines = (BoundedVec<Option<u32>>, BoundedVec<AccessLink>);

impl Recording {
    /// Returns the links of the run.
    #[must_use]
    pub const fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the events that reached the ranks, in the order of time.
    #[must_use]
    pub fn events(&self) -> &[SimulatedEvent] {
        &self.events
    }

    /// Creates the same network with the same faults, and records it too. Run the program on it, and
    /// [compare](Recording::compare) the two recordings.
    pub fn replay(&self) -> (Vec<Arc<Simulated>>, Recorder) {
        record(&self.topology, &self.faults)
    }

    /// Compares another run with this one.
    ///
    /// # Errors
    /// [`CommError::Diverged`] with the first event in which they differ.
    pub fn compare(&self, other: &Self) -> Result<(), CommError> {
        let (recorded, seen) = (&self.events, &other.events);
        let same = recorded.iter().zip(seen).take_while(|(a, b)| a == b).count();
        if same == recorded.len() && same == seen.len() {
            return Ok(());
        }
        let at = |all: &[SimulatedEvent]| all.get(same).copied().map(Box::new);
        Err(CommError::Diverged { after: same, recorded: at(recorded), seen: at(seen) })
    }

    /// Encodes the recording as the bytes of a file.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let ranks = || (0..self.topology.size() as u32).map(Rank);
        let links = ranks().flat_map(|a| ranks().map(move |b| self.topology.link(a, b))).collect();
        let ports = ranks().map(|rank| self.topology.access_link(rank)).collect();
        let body: Body =
            (BoundedVec(links), BoundedVec(ports), self.faults.clone(), BoundedVec(self.events.clone()));
        let plain = "numbers can always be serialized";
        let mut body = postcard::to_stdvec(&body).expect(plain);
        let mut version = 1;
        if self.topology.regions() > 0 {
            let regions =
                ranks().map(|rank| self.topology.region(rank).map(|region| region as u32)).collect();
            let lines =
                (0..self.topology.regions()).map(|region| self.topology.region_access_link(region)).collect();
            let lines: Lines = (BoundedVec(regions), BoundedVec(lines));
            version = VERSION;
            body = [postcard::to_stdvec(&lines).expect(plain), body].concat();
        }
        let mut bytes = MAGIC.to_vec();
        bytes.push(version);
        bytes.extend(crc32fast::hash(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Decodes a recording from the untrusted bytes of a file.
    ///
    /// # Errors
    /// If they are not a valid recording.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        const MALFORMED: WireError = WireError::Malformed("recording");
        let (header, body) = bytes.split_first_chunk::<HEADER>().ok_or(MALFORMED)?;
        if header[..4] != MAGIC {
            return Err(WireError::Magic);
        }
        if !(1..=VERSION).contains(&header[4]) {
            return Err(WireError::Version { want: VERSION, got: header[4] });
        }
        if header[5..] != crc32fast::hash(body).to_le_bytes() {
            return Err(WireError::Checksum);
        }
        let ((regions, lines), body) = match header[4] {
            1 => ((BoundedVec(Vec::new()), BoundedVec(Vec::new())), body),
            _ => postcard::take_from_bytes::<Lines>(body).map_err(|_| MALFORMED)?,
        };
        let Ok(((links, ports, faults, events), [])) = postcard::take_from_bytes::<Body>(body) else {
            return Err(MALFORMED);
        };
        let (n, count) = (ports.0.len(), lines.0.len());
        let known = regions.0.iter().flatten().all(|&region| (region as usize) < count);
        let fits = count == 0 || regions.0.len() == n;
        if links.0.len() != n * n || !fits || !known {
            return Err(MALFORMED);
        }
        let mut topology = Topology::uniform(n, Link::FREE);
        for (a, &port) in ports.0.iter().enumerate() {
            topology.set_access_link(Rank(a as u32), port);
            for b in (0..n).filter(|&b| b != a) {
                topology.set_link(Rank(a as u32), Rank(b as u32), links.0[a * n + b]);
            }
        }
        for (region, &port) in (0..).zip(&lines.0) {
            let members = (0..).zip(&regions.0).filter(|&(_, of)| *of == Some(region));
            let members: Vec<Rank> = members.map(|(rank, _)| Rank(rank)).collect();
            topology.set_region(&members, port);
        }
        Ok(Self { topology, faults, events: events.0 })
    }
}
