//! Asynchronous local steps on two levels: a server in each region, and one of all regions.

mod node;

use std::ops::Range;
use std::sync::{Arc, Mutex};

use farflung_base::Rank;

use super::asynchronous::{
    Asynchronous, OF_WORKER, Route, ServerHandle, ServerState, Servers, WaitPolicy, WorkerServers,
    WorldSettings,
};
use super::exchange::Packing;
use super::server::DelayedNesterov;
use super::{ASYNC, BufferSettings, Buffers, SyncMethod, SyncSettings};
use crate::OptimError;
use node::{Node, Region, World, forward};

/// Row of [`METHODS`](super::METHODS) for [`Asynchronous`] workers of regional servers, which in turn are
/// workers of a world server.
///
/// Every `every` steps a worker sends its change to the server of its region and continues from that server's
/// model, as in [`ASYNC`]. After `world.every` of these changes, a region's server sends the sum of the moves
/// of its model to the world server. It answers its workers in the meantime. Both levels move by delayed
/// Nesterov. When the world's model comes back:
///
/// ```text
/// sent:      change = pending;  pending = 0
/// answered:  region = mixing region + (1 - mixing) world
/// ```
///
/// The model of the run is the world's. A synchronisation does not send `pending`; after the last step it is
/// sent.
///
/// If the smallest region has `s` workers, the first `s` workers of each region serve a shard of its model
/// each; with `central` only the first worker serves. The world's shards are spread over the same ranks. For
/// `P` values, a worker that serves a shard sends and receives `4 P (s - 1) / s` bytes each per change, and any
/// other worker `4 P`. One of `m` regions sends and receives about `4 P (m - 1) / m` bytes each per
/// `world.every` changes. Only messages of regions go through a codec; what it loses stays in `pending`.
///
/// A region's change is weighted by its share of the workers, and a worker's by its tokens, so that a round of
/// all workers is the mean by tokens.
///
/// Source: Kim et al. 2025, "`HALoS`: Hierarchical Asynchronous Local SGD over Slow Networks for
/// Geo-Distributed Large Language Model Training". Differs: the authors' code measures a region's next change
/// from the merged model, so that what workers sent while a message was in flight never reaches the world. Here
/// it is part of the next message.
pub const HALOS: SyncMethod = SyncMethod {
    name: "halos",
    summary: "as async, with a server in each region of --topology; each sends its changes to a world server \
              every --world-every changes, without waiting",
    reads: &[
        "sync-every",
        "outer-lr",
        "outer-momentum",
        "sync-delay",
        "outer-buffer",
        "servers",
        "meet-every",
        "world-every",
        "world-lr",
        "world-momentum",
        "world-mixing",
    ],
    compensates: true,
    changing_weights: false,
    buffers: |&BufferSettings { momentum, world_momentum, feedback, .. }| {
        let states = |momentum: f64| if momentum == 0.0 { 0 } else { 2 };
        let (region, world) = (states(momentum), states(world_momentum));
        // World: the model and its states. Region: the same, `pending`, and the number of changes.
        let remembered = 1 + world + 3 + region;
        // Held: the vectors that the rank serves and those of the worker, and a copy of each for checkpoints;
        // the residual of the region's codec, committed and next. Saved: the copies, and the replica's own
        // parameters.
        let (copies, residuals) = (remembered + OF_WORKER, 2 * usize::from(feedback));
        Buffers { held: (3 + world + region) + OF_WORKER + residuals + copies, saved: copies + 1 }
    },
    build: |s| {
        let pace = WaitPolicy { waits: Some(s.delay), staleness: None, weight: 1.0 };
        let parts = parts(&s)?;
        Ok(Box::new(Asynchronous::over(s, pace, parts)?))
    },
    ..ASYNC
};

/// Placement of the servers.
struct ServerPlacement {
    /// Ranks by region.
    regions: Vec<Vec<Rank>>,
    /// Number of shards of each region's model and of the world's.
    shards: usize,
    values: usize,
}

impl ServerPlacement {
    fn range(&self, shard: usize) -> Range<usize> {
        self.values * shard / self.shards..self.values * (shard + 1) / self.shards
    }

    /// Returns the servers of a shard, by region.
    fn regional(&self, shard: usize) -> Vec<Rank> {
        self.regions.iter().map(|region| region[shard]).collect()
    }

    /// Returns the rank that is the world server of a shard.
    fn world(&self, shard: usize) -> Rank {
        self.regional(shard)[shard % self.regions.len()]
    }

    /// Returns a rank's region, and its index in that region.
    fn place(&self, rank: Rank) -> (usize, usize) {
        let at = |(i, region): (usize, &Vec<Rank>)| Some((i, region.iter().position(|r| *r == rank)?));
        self.regions.iter().enumerate().find_map(at).expect("each rank is in a region")
    }
}

/// Returns a worker's servers, and the services of its rank.
fn parts(s: &SyncSettings<'_>) -> Result<WorkerServers, OptimError> {
    let SyncSettings { comm, average, asynchronous, .. } = s;
    let WorldSettings { lr, momentum, every, mixing } = asynchronous.world;
    let values = Packing::new(s.layout).pack(s.params)?;
    let regions = comm.regions();
    let least = regions.iter().map(Vec::len).min().unwrap_or(1);
    let shards = if asynchronous.servers == Servers::Central { 1 } else { least };
    let sites = ServerPlacement { regions, shards, values: values.len() };
    let me = comm.rank();
    let (home, place) = sites.place(me);
    let members = sites.regions[home].clone();
    let (all, here, among) = (comm.size() as f64, members.len() as u64, sites.regions.len() as u64);
    let buffer = if asynchronous.buffer == 0 { here } else { asynchronous.buffer };
    let regional = |len| DelayedNesterov::new(len, s.outer_lr, s.outer_momentum, buffer);
    let worldwide = |len| DelayedNesterov::new(len, lr, momentum, among);
    let held = Some(place).filter(|place| *place < sites.shards).map(|shard| sites.range(shard));
    let codec = || average.codec.compressor_alone();
    let region = held.clone().map(|range| {
        let model = values[range].to_vec();
        let rule = Box::new(regional(model.len()));
        let region = Region::new(model, rule, members.clone(), sites.world(place));
        // If each region is weighted by its number of workers, the mean over regions is the mean over all
        // workers.
        let weight = here as f64 * among as f64 / all;
        let every = if every == 0 { 2 * here } else { every };
        Ok::<_, OptimError>(region.sends(every, weight, s.every).merges(mixing).packs(codec()?, average))
    });
    let world = held.clone().filter(|_| sites.world(place) == me).map(|range| {
        let model = values[range].to_vec();
        let rule = Box::new(worldwide(model.len()));
        Ok::<_, OptimError>(World::new(model, rule, sites.regional(place), codec()?))
    });
    let node = Node::new(me, comm.size(), region.transpose()?, world.transpose()?);
    let owner = |shard: usize| {
        let (server, range) = (members[shard], sites.range(shard));
        ServerHandle::new(server, range.clone(), &values[range]).with_route(Route::Own(me, forward(server)))
    };
    let owners = (0..sites.shards).filter(|shard| !sites.range(*shard).is_empty()).map(owner).collect();
    let remembered = |names: Vec<&'static str>, shared| {
        names.into_iter().map(move |name| ServerState { name, shared }).collect::<Vec<_>>()
    };
    let held = held.filter(|range| !range.is_empty());
    let remembered =
        [remembered(World::names(&worldwide(1)), true), remembered(Region::names(&regional(1)), false)]
            .concat();
    Ok(WorkerServers { owners, server: Arc::new(Mutex::new(node)), held, remembered, packs: false })
}
