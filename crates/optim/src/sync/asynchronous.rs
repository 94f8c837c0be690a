//! Workers that update a model on servers when each is ready, without waiting for the slowest.

mod owner;
mod packer;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::{Nanos, Pending, Rank};
use farflung_comm::{CommError, Communicator, Look, ServiceTags};
use farflung_tensor::Tensor;

use super::exchange::Packing;
use super::mean::copy;
use super::saved::{optional, required};
use super::server::{DelayedNesterov, Quorum, QuorumMean, Server, ServerRule, ToServer, Wants};
use super::{After, Buffers, Kept, SyncMethod, SyncSettings, Synchroniser};
use crate::finite::is_finite;
use crate::{Average, AverageConfig, Coding, OptimError};
use owner::{Owner, refused};
use packer::Packer;

/// Where servers are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Servers {
    /// Each worker serves its shard of the model.
    #[default]
    Sharded,
    /// The first worker serves all of it.
    Central,
}

/// What only asynchronous methods read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AsynchronousSettings {
    /// Where servers are.
    pub servers: Servers,
    /// Steps between meetings of all workers, at which they tell losses and may evaluate and save.
    pub meet_every: u64,
    /// Changes that delayed Nesterov gathers for a step of its momentum; 0 is as many as there are workers.
    pub buffer: u64,
    /// Steps that a worker may be ahead of the slowest.
    pub staleness: u64,
    /// When a mean of changes is taken.
    pub quorum: Quorum,
    /// Time from the end of a round of model averaging to the next.
    pub interval: Nanos,
    /// Steps at the beginning that average gradients.
    pub warmup: u64,
    /// Tokens of this worker's local step, where 1 is as many as all have in the mean.
    pub tokens_per_step: f64,
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
        }
    }
}

/// [`Asynchronous`] with [`DelayedNesterov`].
///
/// Source: Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling". Differs: with a delay
/// above 0, a worker trains on while its change and the answer travel.
pub const ASYNC: SyncMethod = SyncMethod {
    name: "async",
    summary: "each worker moves the model on the servers when its local steps are done, and waits for nobody \
              else: delayed Nesterov",
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
    timed: true,
    every: None,
    codec: Some("none"),
    codes_changes: true,
    compensates: false,
    // With the papers' 0.9 eight workers that are a round stale diverge (bench async).
    outer_momentum: Some(0.5),
    buffers: |&Kept { momentum, feedback, .. }| {
        let (momentum, feedback) = (if momentum == 0.0 { 0 } else { 2 }, usize::from(feedback));
        // The model and what the server remembers, the same as they are saved, three of the worker's own, and
        // what a codec lost.
        Buffers { held: 5 + 2 * (momentum + feedback), saved: 4 + momentum + feedback }
    },
    build: |s| {
        let all = s.comm.size() as u64;
        let buffer = if s.asynchronous.buffer == 0 { all } else { s.asynchronous.buffer };
        let (lr, momentum) = (s.outer_lr, s.outer_momentum);
        let rule = |len| Box::new(DelayedNesterov::new(len, lr, momentum, buffer)) as _;
        let pace = Pace { waits: Some(s.delay), staleness: None, weight: 1.0 };
        Ok(Box::new(Asynchronous::new(s, &rule, pace)?))
    },
};

/// [`Asynchronous`] stochastic gradient descent: a change after each step.
///
/// Source: Dean et al. 2012, "Large Scale Distributed Deep Networks" (Downpour SGD); Li et al. 2014, "Scaling
/// Distributed Machine Learning with the Parameter Server". Differs: workers send the steps of optimizers of
/// their own rather than gradients.
pub const PARAMETER_SERVER: SyncMethod = SyncMethod {
    name: "parameter-server",
    summary: "each worker's step moves the model on the servers at once, and the worker goes on from there",
    reads: &["servers", "meet-every"],
    every: Some(1),
    // Without momentum.
    buffers: |kept| (ASYNC.buffers)(&Kept { momentum: 0.0, ..*kept }),
    build: |s| {
        let rule = sgd(s.comm.size());
        let pace = Pace { waits: Some(0), staleness: None, weight: 1.0 };
        Ok(Box::new(Asynchronous::new(SyncSettings { every: 1, ..s }, &rule, pace)?))
    },
    ..ASYNC
};

/// [`PARAMETER_SERVER`] whose workers are at most so many steps apart.
///
/// Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
pub const BOUNDED_STALE: SyncMethod = SyncMethod {
    name: "bounded-stale",
    summary: "as parameter-server, but no worker gets more than --staleness steps ahead of the slowest",
    reads: &["staleness", "servers", "meet-every"],
    build: |s| {
        let rule = sgd(s.comm.size());
        let pace = Pace { waits: Some(0), staleness: Some(s.asynchronous.staleness), weight: 1.0 };
        Ok(Box::new(Asynchronous::new(SyncSettings { every: 1, ..s }, &rule, pace)?))
    },
    ..PARAMETER_SERVER
};

/// [`Asynchronous`] with a [`QuorumMean`]: workers train on until its answer arrives.
///
/// Source: Douillard et al. 2026, "Decoupled `DiLoCo`". Differs: the fragments are the servers' shards, whose
/// changes leave together; the grace is a constant.
pub const DECOUPLED: SyncMethod = SyncMethod {
    name: "decoupled",
    summary: "servers take an outer Nesterov step of the changes that came, once these are --quorum and --grace is \
              over",
    reads: &["sync-every", "outer-lr", "outer-momentum", "quorum", "grace", "servers", "meet-every"],
    // As with `async`: a quorum of half moves the model twice a round.
    outer_momentum: Some(0.3),
    buffers: |&Kept { feedback, .. }| {
        let feedback = usize::from(feedback);
        Buffers { held: 7 + 2 * feedback, saved: 5 + feedback }
    },
    build: |s| {
        let settings = s.asynchronous;
        let (outer, workers) = ((s.outer_lr, s.outer_momentum), s.comm.size());
        let rule = |len| Box::new(QuorumMean::new(len, outer, settings.quorum, workers)) as _;
        // Tokens, times tokens of a step.
        let pace = Pace { waits: None, staleness: None, weight: settings.tokens_per_step };
        Ok(Box::new(Asynchronous::new(s, &rule, pace)?))
    },
    ..ASYNC
};

/// A mean of so many workers' changes, one by one: for a shard of a length.
fn sgd(workers: usize) -> impl Fn(usize) -> Box<dyn ServerRule> {
    move |len| Box::new(DelayedNesterov::new(len, 1.0, 0.0, workers as u64))
}

/// When a worker waits, and what its changes count for.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// Steps until the answer to a change is waited for; never without.
    waits: Option<u64>,
    /// How far it may be ahead of the slowest.
    staleness: Option<u64>,
    /// A factor of its changes' weight.
    weight: f64,
}

/// The messages of workers and servers.
const TAGS: ServiceTags = ServiceTags { ask: 0x5E47_0001, answer: 0x5E47_0002 };

/// Every `every` steps a worker sends how far its parameters moved to the servers that hold the model. Each
/// server moves its shard by a [`ServerRule`] as changes arrive and sends it back; the worker then goes on from
/// there, and keeps what it has learned since it sent:
///
/// ```text
/// sent:      change = base - params;  base = params
/// answered:  params = model + (params - params as they were sent)
/// ```
///
/// A change may go through a codec, of which each worker has one for each server; what that loses joins the
/// worker's next change. Models travel as they are.
///
/// Without one a worker sends and receives `8 P (n - 1) / n` bytes for each change of `P` values among `n`
/// sharded servers. Every `meet_every` steps all workers meet to tell their losses. The model of the run is
/// the servers'; what waits for a quorum is merged where it is evaluated, saved, and after the last step,
/// when all take it.
///
/// Bits are the same in each run on the virtual clock alone: the order in which changes arrive matters.
#[derive(Debug)]
pub struct Asynchronous {
    every: u64,
    meet_every: u64,
    pace: Pace,
    comm: Communicator,
    /// Gives up waiting for an answer at the deadline only where answers are waited for.
    answers: Communicator,
    packing: Packing,
    owners: Vec<Owner>,
    server: Arc<Mutex<Server>>,
    /// It answers until this is dropped.
    serving: Pending<Result<(), CommError>>,
    average: Average,
    /// The model as all workers last met over it.
    common: Tensor,
    gathered: bool,
    /// Whether it is about to be taken.
    last: bool,
    /// What the servers remember, as it was last settled.
    remembered: Vec<(&'static str, Tensor)>,
    /// What this worker does, as it was last settled: [`Owner`]'s vectors.
    own: Vec<(&'static str, Tensor)>,
    /// What codecs lost of this worker's changes, as it was last settled; `None` without codecs.
    residual: Option<Tensor>,
    /// Whether an answer waits to be taken up, in what was last settled.
    answered: bool,
    /// Changes of all workers, as all last met.
    pushes: u64,
}

fn lock(server: &Arc<Mutex<Server>>) -> MutexGuard<'_, Server> {
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The names of a worker's own vectors in checkpoints.
const OWN: [&str; 3] = ["base", "answer", "sent"];
const RESIDUAL: &str = "residual";

impl Asynchronous {
    /// A worker, and the server of its shard, with the rule for so many values.
    fn new(
        settings: SyncSettings<'_>,
        rule: &dyn Fn(usize) -> Box<dyn ServerRule>,
        pace: Pace,
    ) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, every, params, asynchronous, .. } = settings;
        if let Some(delay) = pace.waits.filter(|&delay| delay > 0 && delay >= every) {
            let (field, value) = ("delay", delay as f64);
            let expected = "below the steps between two changes";
            return Err(OptimError::Setting { transform: "sync", field, value, expected });
        }
        let codec = || average.codec.compressor_alone();
        let packer = |server: u32| {
            let packer = |codec| Packer::new(codec, &average, comm.rank(), Rank(server));
            Ok::<_, OptimError>(codec()?.map(packer))
        };
        let packing = Packing::new(layout);
        let values = packing.pack(params)?;
        let range = |rank: u32| match asynchronous.servers {
            Servers::Sharded => comm.shard_of(Rank(rank), values.len()),
            Servers::Central if rank == 0 => 0..values.len(),
            Servers::Central => 0..0,
        };
        let mine = values[range(comm.rank().0)].to_vec();
        let zeros = || device.zeros(layout.len());
        // Also of a worker that serves nothing.
        let names: Vec<&'static str> = rule(1).states().iter().map(|state| state.name).collect();
        let named = |name| Ok::<_, OptimError>((name, zeros()?));
        let remembered = names.into_iter().map(named).collect::<Result<_, _>>()?;
        let rule = rule(mine.len());
        let server = Server::new(mine, rule, comm.size(), pace.staleness).with_codec(codec()?);
        let server = Arc::new(Mutex::new(server));
        let serving = comm.start_service(TAGS, &server);
        let owners = (0..comm.size() as u32)
            .map(|rank| (rank, range(rank)))
            .filter(|(_, range)| !range.is_empty())
            .map(|(rank, range)| {
                let owner = Owner::new(Rank(rank), range.clone(), &values[range]);
                Ok(owner.with_packer(packer(rank)?))
            })
            .collect::<Result<Vec<_>, OptimError>>()?;
        let residual = if codec()?.is_some() { Some(zeros()?) } else { None };
        // What is averaged are numbers of meetings: nothing goes through it.
        let plain = AverageConfig { codec: Coding::default(), warmup: 0, ..average };
        let average = Average::new(comm.clone(), device, layout, plain)?;
        let mut common = zeros()?;
        copy(params, &mut common)?;
        Ok(Self {
            every: every.max(1),
            meet_every: asynchronous.meet_every.max(1),
            pace,
            owners,
            residual,
            packing,
            server,
            serving,
            average,
            common,
            answers: if pace.waits.is_some() { comm.clone() } else { comm.clone().with_deadline(Nanos::MAX) },
            gathered: false,
            last: false,
            remembered,
            own: OWN.into_iter().map(named).collect::<Result<_, _>>()?,
            answered: false,
            pushes: 0,
            comm,
        })
    }

    /// Fails where the own server does: it has lost all others.
    fn check(&mut self) -> Result<(), OptimError> {
        if !self.serving.is_ready() {
            return Ok(());
        }
        let failed = std::mem::replace(&mut self.serving, Pending::ready(Ok(())));
        Ok(failed.wait()?)
    }

    /// Sends how far the parameters moved.
    fn push(&mut self, params: &[f32], step: u64, weight: f64) -> Result<(), OptimError> {
        let weight = weight * self.pace.weight;
        // What has arrived here by now was first.
        self.comm.first(&mut [&mut self.serving], Look::Now);
        for owner in &mut self.owners {
            let message = owner.push(params, (step, step / self.every), weight)?;
            owner.send(&self.comm, message);
        }
        Ok(())
    }

    /// Takes up the servers' models that have come; waits for those that are due.
    fn take_up(&mut self, params: &mut Tensor, due: impl Fn(u64) -> bool) -> Result<(), OptimError> {
        self.check()?;
        for owner in &mut self.owners {
            owner.look(&self.answers)?;
            while owner.awaits().is_some_and(&due) {
                owner.receive(&self.answers)?;
            }
        }
        if self.owners.iter().any(Owner::has_answer) {
            let mut values = self.packing.pack(params)?;
            self.owners.iter_mut().for_each(|owner| owner.take_up(&mut values));
            self.packing.unpack(&values, params)?;
        }
        Ok(())
    }

    /// All workers meet: each server has all changes, and all know the model. What servers remember too, where
    /// it is wanted.
    fn meet(&mut self, wants: Wants) -> Result<(), OptimError> {
        self.check()?;
        // A server that is there answers: this wait has a deadline.
        self.comm.barrier()?;
        for owner in &mut self.owners {
            owner.send(&self.comm, ToServer::Meet { wants }.to_bytes());
        }
        let parts = if wants == Wants::All { 1 + self.remembered.len() } else { 1 };
        let mut all = vec![vec![0.0; self.packing.len()]; parts];
        for owner in &mut self.owners {
            let (pushes, values) = owner.met(&self.answers)?;
            let (range, rank) = (owner.range(), owner.rank());
            if values.len() != parts * range.len() {
                return Err(refused(rank, 4 * parts * range.len(), 4 * values.len()));
            }
            for (part, values) in all.iter_mut().zip(values.chunks(range.len())) {
                part[range.clone()].copy_from_slice(values);
            }
            self.pushes = pushes;
        }
        self.packing.unpack(&all[0], &mut self.common)?;
        for ((_, tensor), values) in self.remembered.iter_mut().zip(&all[1..]) {
            self.packing.unpack(values, tensor)?;
        }
        self.gathered = true;
        Ok(())
    }

    /// All owners' vectors of one kind, as a flat buffer.
    fn note_own(&mut self) -> Result<(), OptimError> {
        let mut all = [(); OWN.len()].map(|()| vec![0.0; self.packing.len()]);
        for owner in &self.owners {
            for (all, own) in all.iter_mut().zip(owner.vectors()) {
                all[owner.range()].copy_from_slice(own);
            }
        }
        for ((_, tensor), values) in self.own.iter_mut().zip(&all) {
            self.packing.unpack(values, tensor)?;
        }
        if let Some(residual) = &mut self.residual {
            let mut all = vec![0.0; self.packing.len()];
            for owner in &self.owners {
                if let Some(lost) = owner.residual() {
                    all[owner.range()].copy_from_slice(&lost?);
                }
            }
            self.packing.unpack(&all, residual)?;
        }
        self.answered = self.owners.iter().any(Owner::has_answer);
        Ok(())
    }
}

impl Synchroniser for Asynchronous {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn mix(&mut self, params: &mut Tensor, after: After, weight: f64) -> Result<(), OptimError> {
        let waits = self.pace.waits;
        self.take_up(params, |step| waits.is_some_and(|delay| step + delay <= after.step))?;
        // A worker that took no local step has nothing to send.
        if after.step.is_multiple_of(self.every) && !after.last && weight > 0.0 {
            let values = self.packing.pack(params)?;
            self.push(&values, after.step, weight)?;
            if waits == Some(0) {
                self.take_up(params, |_| true)?;
            }
        }
        Ok(())
    }
    fn is_due(&self, after: After) -> bool {
        after.step.is_multiple_of(self.meet_every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, after: After, weight: f64) -> Result<(), OptimError> {
        self.last = after.last;
        if after.last {
            if weight > 0.0 {
                let values = self.packing.pack(params)?;
                self.push(&values, after.step, weight)?;
            }
            self.meet(Wants::Model)?;
        }
        Ok(())
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        if self.last { Some(&mut self.common) } else { None }
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        if self.last && !is_finite(self.common.view())? {
            return Err(OptimError::StepNotFinite { name: "parameters".to_owned() });
        }
        Ok(())
    }
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        if std::mem::take(&mut self.last) {
            copy(&self.common, params)?;
            let values = self.packing.pack(params)?;
            self.owners.iter_mut().for_each(|owner| owner.stand_at(&values));
        }
        Ok(())
    }
    fn is_apart(&self) -> bool {
        true
    }
    fn gather_common(&mut self, _: &Tensor) -> Result<(), OptimError> {
        self.meet(Wants::Model)
    }
    fn common(&self) -> Option<&Tensor> {
        self.gathered.then_some(&self.common)
    }
    fn settle(&mut self) -> Result<(), OptimError> {
        self.meet(Wants::All)?;
        self.note_own()
    }
    fn abandon(&mut self) {
        self.average.open();
    }
    fn rollback(&mut self) {
        self.last = false;
    }
    fn moved(&mut self, params: &Tensor) -> Result<(), OptimError> {
        copy(params, &mut self.common)?;
        let values = self.packing.pack(params)?;
        self.owners.iter_mut().for_each(|owner| owner.stand_at(&values));
        let mine = self.owners.iter().find(|owner| owner.rank() == self.comm.rank());
        if let Some(range) = mine.map(Owner::range) {
            lock(&self.server).model.copy_from_slice(&values[range]);
        }
        Ok(())
    }
    fn steps(&self) -> u64 {
        self.pushes
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        let remembered = self.remembered.iter().map(|(name, tensor)| (*name, tensor));
        [("model", &self.common)].into_iter().chain(remembered).collect()
    }
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        let noted = if self.answered { OWN.len() } else { 1 };
        let own = self.own[..noted].iter().map(|(name, tensor)| (*name, tensor));
        own.chain(self.residual.iter().map(|residual| (RESIDUAL, residual))).collect()
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.common.shape().len();
        let found = |name: &str| required(get, name, expected);
        let shared = self.states().iter().map(|(name, _)| found(name)).collect::<Result<Vec<_>, _>>()?;
        let own: Vec<Vec<f32>> = OWN.iter().map_while(|name| found(name).ok()).collect();
        let packed = |flat: &Vec<f32>| self.packing.pack_host(flat);
        let packed_shared: Vec<_> = shared.iter().map(packed).collect();
        let packed_own: Vec<_> = own.iter().map(packed).collect();
        let residual = optional(get, RESIDUAL, expected)?.map(|flat| self.packing.pack_host(&flat));
        self.common.write(&shared[0])?;
        for owner in &mut self.owners {
            if let Some(residual) = &residual {
                owner.set_residual(residual)?;
            }
            owner.stand_at(&packed_shared[0]);
            if let [base, rest @ ..] = &packed_own[..] {
                owner.stand_at(base);
                if let [answer, sent] = rest {
                    owner.set_answer(answer, sent);
                }
            }
            if owner.rank() == self.comm.rank() {
                let mut server = lock(&self.server);
                server.model.copy_from_slice(&packed_shared[0][owner.range()]);
                for ((name, _), values) in self.remembered.iter().zip(&packed_shared[1..]) {
                    if let Some(state) = server.rule.state_mut(name) {
                        state.copy_from_slice(&values[owner.range()]);
                    }
                }
            }
        }
        lock(&self.server).resume(steps);
        self.pushes = steps;
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.average
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.average
    }
}
