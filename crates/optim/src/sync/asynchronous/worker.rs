//! A worker of asynchronous methods, and the server on its rank.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::{Nanos, Pending, Rank};
use farflung_comm::{CommError, Communicator, WaitMode};
use farflung_compress::CompressError;
use farflung_tensor::Tensor;

use super::Servers;
use super::owner::{ServerHandle, TAGS, refused};
use super::packer::Packer;
use crate::finite::is_finite;
use crate::sync::exchange::Packing;
use crate::sync::mean::copy;
use crate::sync::saved::{optional, optional_prefix, required};
use crate::sync::server::{ModelService, Server, ServerRule, SyncRequest, ToServer};
use crate::sync::{StepEnd, SyncSettings, Synchroniser};
use crate::{Average, AverageConfig, Coding, OptimError};

/// When a worker waits, and how its changes are weighted.
#[derive(Debug, Clone, Copy)]
pub(in crate::sync) struct WaitPolicy {
    /// Number of steps after which the answer to a change is waited for; `None` means never.
    pub(in crate::sync) waits: Option<u64>,
    /// Number of steps that the worker may be ahead of the slowest; `None` sets no bound.
    pub(in crate::sync) staleness: Option<u64>,
    /// Factor of the weight of its changes.
    pub(in crate::sync) weight: f64,
}

/// A state vector that servers send with the model before a checkpoint.
#[derive(Debug, Clone, Copy)]
pub(in crate::sync) struct ServerState {
    /// Name of the vector in checkpoints.
    pub(in crate::sync) name: &'static str,
    /// Whether the values are the same on all ranks.
    pub(in crate::sync) shared: bool,
}

/// The servers of one worker, and what its own rank serves.
#[derive(Debug)]
pub(in crate::sync) struct WorkerServers {
    /// The worker's servers, each with its shard. In a synchronisation they answer with the model and, for
    /// [`SyncRequest::All`], with their states in the order of `remembered`.
    pub(in crate::sync) owners: Vec<ServerHandle>,
    /// Service of this rank.
    pub(in crate::sync) server: Arc<Mutex<dyn ModelService>>,
    /// Range of the model that this rank serves.
    pub(in crate::sync) held: Option<Range<usize>>,
    /// States of the servers.
    pub(in crate::sync) remembered: Vec<ServerState>,
    /// Whether the worker's own changes go through a codec.
    pub(in crate::sync) packs: bool,
}

/// Every `every` steps a worker sends the change of its parameters to the servers that hold the model. Each
/// server moves its shard by a [`ServerRule`] as changes arrive, and sends it back. The worker then continues
/// from this model, and keeps what it has learned since it sent its change:
///
/// ```text
/// sent:      change = base - params;  base = params
/// answered:  params = model + (params - params as they were sent)
/// ```
///
/// A change may go through a codec. Each worker has one codec per server, and what the codec loses is added to
/// the worker's next change. Models are sent uncompressed.
///
/// Without a codec a worker sends and receives `8 P (n - 1) / n` bytes in sum for each change of `P` values
/// among `n` sharded servers. Every `meet_every` steps all workers synchronise to exchange their losses. The
/// model of the run is that of the servers. Changes that wait for a quorum are merged for evaluations and
/// checkpoints and after the last step, when all workers take the model.
///
/// Two runs give the same bits only on a simulated network, which has a virtual clock: results depend on the
/// order in which changes arrive.
#[derive(Debug)]
pub struct Asynchronous {
    every: u64,
    meet_every: u64,
    pace: WaitPolicy,
    comm: Communicator,
    /// Communicator on which answers are received. It has a deadline only if answers are waited for.
    answers: Communicator,
    packing: Packing,
    owners: Vec<ServerHandle>,
    server: Arc<Mutex<dyn ModelService>>,
    /// Range of the model that this rank serves.
    held: Option<Range<usize>>,
    /// The running service, which answers until this is dropped.
    serving: Pending<Result<(), CommError>>,
    average: Average,
    /// The model as of the last synchronisation.
    common: Tensor,
    gathered: bool,
    /// Whether the next commit sets the parameters to `common`.
    last: bool,
    /// States of the servers, as of the last [`wait_in_flight`](Synchroniser::wait_in_flight).
    remembered: Vec<(ServerState, Tensor)>,
    /// Vectors of this worker's [`ServerHandle`]s, as of the last
    /// [`wait_in_flight`](Synchroniser::wait_in_flight).
    own: Vec<(&'static str, Tensor)>,
    /// What codecs lost of this worker's changes, as of the last
    /// [`wait_in_flight`](Synchroniser::wait_in_flight); `None` without codecs.
    residual: Option<Tensor>,
    /// Whether an answer was waiting to be applied at the last
    /// [`wait_in_flight`](Synchroniser::wait_in_flight).
    answered: bool,
    /// Number of changes of all workers, as of the last synchronisation.
    pushes: u64,
}

fn lock(server: &Arc<Mutex<dyn ModelService>>) -> MutexGuard<'_, dyn ModelService + 'static> {
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names of a worker's own vectors in checkpoints.
const OWN: [&str; 3] = ["base", "answer", "sent"];
const RESIDUAL: &str = "residual";

impl Asynchronous {
    /// Creates a worker, and the server of its shard. `rule` creates the rule for a number of values.
    pub(super) fn new(
        settings: SyncSettings<'_>,
        rule: &dyn Fn(usize) -> Box<dyn ServerRule>,
        pace: WaitPolicy,
    ) -> Result<Self, OptimError> {
        let SyncSettings { comm, average, asynchronous, layout, params, .. } = &settings;
        let codec = || average.codec.compressor_alone();
        let packer = |server: u32| {
            let packer = |codec| Packer::new(codec, average, comm.rank(), Rank(server));
            Ok::<_, OptimError>(codec()?.map(packer))
        };
        let values = Packing::new(layout).pack(params)?;
        let range = |rank: u32| match asynchronous.servers {
            Servers::Sharded => comm.shard_of(Rank(rank), values.len()),
            Servers::Central if rank == 0 => 0..values.len(),
            Servers::Central => 0..0,
        };
        let mine = values[range(comm.rank().0)].to_vec();
        // Every worker receives the servers' states, even one that serves nothing.
        let remembered =
            rule(1).states().iter().map(|state| ServerState { name: state.name, shared: true }).collect();
        let rule = rule(mine.len());
        let server = Server::new(mine, rule, comm.size(), pace.staleness).with_codec(codec()?);
        let owners = (0..comm.size() as u32)
            .map(|rank| (rank, range(rank)))
            .filter(|(_, range)| !range.is_empty())
            .map(|(rank, range)| {
                let owner = ServerHandle::new(Rank(rank), range.clone(), &values[range]);
                Ok(owner.with_packer(packer(rank)?))
            })
            .collect::<Result<Vec<_>, OptimError>>()?;
        let held = Some(range(comm.rank().0)).filter(|range| !range.is_empty());
        let server = Arc::new(Mutex::new(server));
        let packs = codec()?.is_some();
        Self::over(settings, pace, WorkerServers { owners, server, held, remembered, packs })
    }

    /// Creates a worker of the given servers.
    pub(in crate::sync) fn over(
        settings: SyncSettings<'_>,
        pace: WaitPolicy,
        parts: WorkerServers,
    ) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, every, params, asynchronous, .. } = settings;
        let WorkerServers { owners, server, held, remembered, packs } = parts;
        if let Some(delay) = pace.waits.filter(|&delay| delay > 0 && delay >= every) {
            let (field, value) = ("delay", delay as f64);
            let expected = "below the number of steps between two changes";
            return Err(OptimError::Setting { transform: "sync", field, value, expected });
        }
        let zeros = || device.zeros(layout.len());
        let named = |remembered| Ok::<_, OptimError>((remembered, zeros()?));
        let remembered = remembered.into_iter().map(named).collect::<Result<_, _>>()?;
        let serving = comm.start_service(TAGS, &server);
        // The trait requires an average; no values are averaged with it.
        let plain = AverageConfig { codec: Coding::default(), warmup: 0, ..average };
        let average = Average::new(comm.clone(), device, layout, plain)?;
        let mut common = zeros()?;
        copy(params, &mut common)?;
        Ok(Self {
            every: every.max(1),
            meet_every: asynchronous.meet_every.max(1),
            pace,
            owners,
            residual: if packs { Some(zeros()?) } else { None },
            packing: Packing::new(layout),
            server,
            held,
            serving,
            average,
            common,
            answers: if pace.waits.is_some() { comm.clone() } else { comm.clone().with_deadline(Nanos::MAX) },
            gathered: false,
            last: false,
            remembered,
            own: OWN.into_iter().map(|name| Ok((name, zeros()?))).collect::<Result<_, OptimError>>()?,
            answered: false,
            pushes: 0,
            comm,
        })
    }

    /// Fails if the service of this rank failed, because it has lost all other ranks.
    fn check(&mut self) -> Result<(), OptimError> {
        if !self.serving.is_ready() {
            return Ok(());
        }
        let failed = std::mem::replace(&mut self.serving, Pending::ready(Ok(())));
        Ok(failed.wait()?)
    }

    /// Sends the change of the parameters to all servers.
    fn push(&mut self, params: &[f32], step: u64, weight: f64) -> Result<(), OptimError> {
        let weight = weight * self.pace.weight;
        // Messages that have already arrived at this rank's service are handled first.
        self.comm.first(&mut [&mut self.serving], WaitMode::Now);
        for owner in &mut self.owners {
            let message = owner.push(params, (step, step / self.every), weight)?;
            owner.send(&self.comm, message);
        }
        Ok(())
    }

    /// Applies the servers' models that have arrived. Waits for the answers to changes whose step is `due`.
    fn apply_models(&mut self, params: &mut Tensor, due: impl Fn(u64) -> bool) -> Result<(), OptimError> {
        self.check()?;
        for owner in &mut self.owners {
            owner.receive_ready(&self.answers)?;
            while owner.awaits().is_some_and(&due) {
                owner.receive(&self.answers)?;
            }
        }
        if self.owners.iter().any(ServerHandle::has_answer) {
            let mut values = self.packing.pack(params)?;
            self.owners.iter_mut().for_each(|owner| owner.apply_model(&mut values));
            self.packing.unpack(&values, params)?;
        }
        Ok(())
    }

    /// Synchronises all workers: each server then has all changes, and all workers have the model. For
    /// [`SyncRequest::All`] they also receive the servers' states.
    fn synchronise(&mut self, wants: SyncRequest) -> Result<(), OptimError> {
        self.check()?;
        // A server that is alive answers, so a lost rank is noticed here: this wait has a deadline.
        self.comm.barrier()?;
        for owner in &mut self.owners {
            owner.send(&self.comm, ToServer::Synchronise { wants }.to_bytes());
        }
        let parts = if wants == SyncRequest::All { 1 + self.remembered.len() } else { 1 };
        let mut all = vec![vec![0.0; self.packing.len()]; parts];
        for owner in &mut self.owners {
            let (pushes, values) = owner.wait_for_sync(&self.answers)?;
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

    /// Returns the servers' states that are the same on all ranks, or those that are not.
    fn server_states(&self, shared: bool) -> impl Iterator<Item = (&str, &Tensor)> {
        let of = self.remembered.iter().filter(move |(remembered, _)| remembered.shared == shared);
        of.map(|(remembered, tensor)| (remembered.name, tensor))
    }

    /// Copies the vectors and residuals of all servers' views to flat buffers, for a checkpoint.
    fn collect_own_states(&mut self) -> Result<(), OptimError> {
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
        self.answered = self.owners.iter().any(ServerHandle::has_answer);
        Ok(())
    }
}

impl Synchroniser for Asynchronous {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn mix(&mut self, params: &mut Tensor, after: StepEnd, weight: f64) -> Result<(), OptimError> {
        let waits = self.pace.waits;
        self.apply_models(params, |step| waits.is_some_and(|delay| step + delay <= after.step))?;
        // A worker that took no local step has nothing to send.
        if after.step.is_multiple_of(self.every) && !after.last && weight > 0.0 {
            let values = self.packing.pack(params)?;
            self.push(&values, after.step, weight)?;
            if waits == Some(0) {
                self.apply_models(params, |_| true)?;
            }
        }
        Ok(())
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.step.is_multiple_of(self.meet_every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, after: StepEnd, weight: f64) -> Result<(), OptimError> {
        self.last = after.last;
        if after.last {
            if weight > 0.0 {
                let values = self.packing.pack(params)?;
                self.push(&values, after.step, weight)?;
            }
            self.synchronise(SyncRequest::End)?;
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
            self.owners.iter_mut().for_each(|owner| owner.reset_base(&values));
        }
        Ok(())
    }
    fn replicas_differ(&self) -> bool {
        true
    }
    fn gather_common(&mut self, _: &Tensor) -> Result<(), OptimError> {
        self.synchronise(SyncRequest::Model)
    }
    fn common(&self) -> Option<&Tensor> {
        self.gathered.then_some(&self.common)
    }
    fn wait_in_flight(&mut self) -> Result<(), OptimError> {
        self.synchronise(SyncRequest::All)?;
        self.collect_own_states()
    }
    fn drop_in_flight(&mut self) {
        self.average.open();
    }
    fn rollback(&mut self) {
        self.last = false;
    }
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError> {
        copy(params, &mut self.common)?;
        let values = self.packing.pack(params)?;
        self.owners.iter_mut().for_each(|owner| owner.reset_base(&values));
        if let Some(range) = &self.held {
            lock(&self.server).set_model(&values[range.clone()]);
        }
        Ok(())
    }
    fn steps(&self) -> u64 {
        self.pushes
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        [("model", &self.common)].into_iter().chain(self.server_states(true)).collect()
    }
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        let noted = if self.answered { OWN.len() } else { 1 };
        let own = self.own[..noted].iter().map(|(name, tensor)| (*name, tensor));
        let residual = self.residual.iter().map(|residual| (RESIDUAL, residual));
        own.chain(residual).chain(self.server_states(false)).collect()
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.common.shape().len();
        let found = |name: &str| required(get, name, expected);
        let model = self.packing.pack_host(&found("model")?);
        let mut remembered = Vec::new();
        for (ServerState { name, shared }, _) in &self.remembered {
            let flat = if *shared { Some(found(name)?) } else { optional(get, name, expected)? };
            remembered.extend(flat.map(|flat| (*name, self.packing.pack_host(&flat))));
        }
        let own = optional_prefix(get, &OWN, expected)?;
        let own: Vec<_> = own.iter().map(|flat| self.packing.pack_host(flat)).collect();
        let residual = optional(get, RESIDUAL, expected)?.map(|flat| self.packing.pack_host(&flat));
        // A codec rejects such a residual, but then those of other servers have already changed.
        let not_finite = residual.iter().flatten().position(|lost| !lost.is_finite());
        if let Some((residual, index)) = residual.as_ref().zip(not_finite) {
            return Err(CompressError::NonFinite { index, value: residual[index] }.into());
        }
        self.packing.unpack(&model, &mut self.common)?;
        for owner in &mut self.owners {
            if let Some(residual) = &residual {
                owner.set_residual(residual)?;
            }
            owner.reset_base(&model);
            if let [base, rest @ ..] = &own[..] {
                owner.reset_base(base);
                if let [answer, sent] = rest {
                    owner.set_answer(answer, sent);
                }
            }
        }
        let mut server = lock(&self.server);
        server.resume(steps);
        if let Some(range) = &self.held {
            server.set_model(&model[range.clone()]);
            for (name, values) in &remembered {
                server.restore(name, &values[range.clone()]);
            }
        }
        drop(server);
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
