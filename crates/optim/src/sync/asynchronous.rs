//! Workers that update a model on servers, each when it is ready, without waiting for the slowest.

mod owner;
mod packer;
mod worker;

use farflung_base::Nanos;

use super::server::{DelayedNesterov, Quorum, QuorumMean, ServerRule};
use super::{BufferSettings, Buffers, OnMemberLoss, SyncMethod, SyncSettings};
pub(super) use owner::{Route, ServerHandle};
pub use worker::Asynchronous;
pub(super) use worker::{ServerState, WaitPolicy, WorkerServers};

/// Placement of the servers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Servers {
    /// Each worker serves its shard of the model.
    #[default]
    Sharded,
    /// The first worker serves the whole model.
    Central,
}

/// Settings that only asynchronous methods read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AsynchronousSettings {
    /// Placement of the servers.
    pub servers: Servers,
    /// Number of steps between synchronisations of all workers, at which they exchange losses and may evaluate
    /// and save.
    pub meet_every: u64,
    /// Number of changes that delayed Nesterov accumulates for a step of its momentum; 0 means as many as the
    /// server has workers.
    pub buffer: u64,
    /// Number of steps that a worker may be ahead of the slowest.
    pub staleness: u64,
    /// Rule for when a mean of changes is taken.
    pub quorum: Quorum,
    /// Time from the end of a round of model averaging to the next.
    pub interval: Nanos,
    /// Number of steps at the beginning that average gradients.
    pub warmup: u64,
    /// Number of tokens in this worker's local step, relative to the mean over all workers.
    pub tokens_per_step: f64,
    /// Settings of the world server, the upper of two levels of servers.
    pub world: WorldSettings,
}

/// Settings of the world server, which serves all regions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WorldSettings {
    /// Learning rate.
    pub lr: f64,
    /// Momentum, which is applied at every `n`-th change, where `n` is the number of regions.
    pub momentum: f64,
    /// Number of changes by a region's workers between two messages to the world server; 0 means two per
    /// worker.
    pub every: u64,
    /// Share of a region's own model that stays when it applies the world's model.
    pub mixing: f64,
}

impl Default for WorldSettings {
    fn default() -> Self {
        Self { lr: 1.0, momentum: 0.0, every: 0, mixing: 0.75 }
    }
}

impl Default for AsynchronousSettings {
    fn default() -> Self {
        Self {
            servers: Servers::default(),
            meet_every: 100,
            buffer: 0,
            staleness: 4,
            quorum: Quorum { least: 1, grace: Nanos::ZERO },
            interval: Nanos::from_millis(500),
            warmup: 0,
            tokens_per_step: 1.0,
            world: WorldSettings::default(),
        }
    }
}

/// Row of [`METHODS`](super::METHODS) for [`Asynchronous`] with [`DelayedNesterov`].
///
/// Source: Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling". Differs: with a delay
/// above 0, a worker trains on while its change and the answer are in flight.
pub const ASYNC: SyncMethod = SyncMethod {
    name: "async",
    summary: "each worker sends its change to the servers after its local steps, without waiting for other \
              workers: delayed Nesterov",
    each_step: false,
    reads: &[
        "sync-every",
        "outer-lr",
        "outer-momentum",
        "sync-delay",
        "outer-buffer",
        "servers",
        "meet-every",
    ],
    overlaps: true,
    replicas_differ: true,
    timed: true,
    every: None,
    codec: Some("none"),
    codes_server_changes: true,
    compensates: false,
    changing_weights: false,
    // With the paper's 0.9, eight workers whose changes are one round old diverge (bench async).
    outer_momentum: Some(0.5),
    on_member_loss: OnMemberLoss::Unsupported(
        "a member may serve a shard of the model, which is lost with it",
    ),
    buffers: |settings| buffers(if settings.momentum == 0.0 { 0 } else { 2 }, settings),
    build: |s| {
        let all = s.comm.size() as u64;
        let buffer = if s.asynchronous.buffer == 0 { all } else { s.asynchronous.buffer };
        let (lr, momentum) = (s.outer_lr, s.outer_momentum);
        let rule = |len| Box::new(DelayedNesterov::new(len, lr, momentum, buffer)) as _;
        let pace = WaitPolicy { waits: Some(s.delay), staleness: None, weight: 1.0 };
        Ok(Box::new(Asynchronous::new(s, &rule, pace)?))
    },
};

/// Row of [`METHODS`](super::METHODS) for [`Asynchronous`] stochastic gradient descent: a change after each
/// step.
///
/// Source: Dean et al. 2012, "Large Scale Distributed Deep Networks" (Downpour SGD); Li et al. 2014, "Scaling
/// Distributed Machine Learning with the Parameter Server". Differs: workers send the steps of their own
/// optimizers rather than gradients.
pub const PARAMETER_SERVER: SyncMethod = SyncMethod {
    name: "parameter-server",
    summary: "the servers apply each worker's step at once, and the worker continues from their model",
    reads: &["servers", "meet-every"],
    // A worker waits for the answer to each of its changes.
    overlaps: false,
    every: Some(1),
    // The server has no momentum. No answer waits to be applied at a checkpoint, so neither it nor the
    // parameters as they were sent are saved.
    buffers: |settings| {
        let Buffers { held, saved } = buffers(0, settings);
        Buffers { held, saved: saved - 2 }
    },
    build: |s| {
        let rule = sgd(s.comm.size());
        let pace = WaitPolicy { waits: Some(0), staleness: None, weight: 1.0 };
        Ok(Box::new(Asynchronous::new(SyncSettings { every: 1, ..s }, &rule, pace)?))
    },
    ..ASYNC
};

/// Row of [`METHODS`](super::METHODS) for [`PARAMETER_SERVER`] with a bound on how many steps workers are
/// apart.
///
/// Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
pub const BOUNDED_STALE: SyncMethod = SyncMethod {
    name: "bounded-stale",
    summary: "as parameter-server, but no worker gets more than --staleness steps ahead of the slowest one",
    reads: &["staleness", "servers", "meet-every"],
    build: |s| {
        let rule = sgd(s.comm.size());
        let pace = WaitPolicy { waits: Some(0), staleness: Some(s.asynchronous.staleness), weight: 1.0 };
        Ok(Box::new(Asynchronous::new(SyncSettings { every: 1, ..s }, &rule, pace)?))
    },
    ..PARAMETER_SERVER
};

/// Row of [`METHODS`](super::METHODS) for [`Asynchronous`] with a [`QuorumMean`]: workers train on until its
/// answer arrives.
///
/// Source: Douillard et al. 2026, "Decoupled `DiLoCo`". Differs: the fragments are the servers' shards, whose
/// changes are sent together; the grace time is a constant.
pub const DECOUPLED: SyncMethod = SyncMethod {
    name: "decoupled",
    summary: "servers take an outer Nesterov step with the changes that have arrived, once there are --quorum \
              of them and --grace has passed",
    reads: &["sync-every", "outer-lr", "outer-momentum", "quorum", "grace", "servers", "meet-every"],
    // Lower than that of `async`: a quorum of half the workers moves the model twice a round.
    outer_momentum: Some(0.3),
    buffers: |settings| buffers(1, settings),
    build: |s| {
        let settings = s.asynchronous;
        let (outer, workers) = ((s.outer_lr, s.outer_momentum), s.comm.size());
        let rule = |len| Box::new(QuorumMean::new(len, outer, settings.quorum, workers)) as _;
        // The weight of a change is the worker's number of tokens, times its tokens per step.
        let pace = WaitPolicy { waits: None, staleness: None, weight: settings.tokens_per_step };
        Ok(Box::new(Asynchronous::new(s, &rule, pace)?))
    },
    ..ASYNC
};

/// Number of vectors of a worker: the parameters from which its next change is measured, those that it had when
/// it sent its last change, and the model that answers the change.
pub(super) const OF_WORKER: usize = 3;

/// Returns the number of buffers of a worker and of a server whose rule has this many states. A worker that
/// does not wait for answers may hold more: its parameters at each change that is not answered yet.
fn buffers(states: usize, &BufferSettings { coded, feedback, .. }: &BufferSettings) -> Buffers {
    let (coded, feedback) = (usize::from(coded), usize::from(feedback));
    // Held: the model, the server's states and the worker's vectors, and a copy of each for checkpoints; the
    // codec's residual, committed and next; with any codec, a copy of the residual. Saved: the copies, and the
    // replica's own parameters.
    let copies = 1 + states + OF_WORKER + coded;
    Buffers { held: 1 + states + OF_WORKER + 2 * feedback + copies, saved: copies + 1 }
}

/// Returns a constructor of rules for shards of a given length. Each change moves the model by its share of a
/// mean over `workers` changes.
fn sgd(workers: usize) -> impl Fn(usize) -> Box<dyn ServerRule> {
    move |len| Box::new(DelayedNesterov::new(len, 1.0, 0.0, workers as u64))
}
