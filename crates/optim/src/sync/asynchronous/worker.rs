//! A worker of asynchronous methods, and the server that its rank holds.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::{Nanos, Pending, Rank};
use farflung_comm::{CommError, Communicator, Look, ServiceTags};
use farflung_tensor::Tensor;

use super::Servers;
use super::owner::{Owner, refused};
use super::packer::Packer;
use crate::finite::is_finite;
use crate::sync::exchange::Packing;
use crate::sync::mean::copy;
use crate::sync::saved::{optional, required};
use crate::sync::server::{Server, ServerRule, Serves, ToServer, Wants};
use crate::sync::{After, SyncSettings, Synchroniser};
use crate::{Average, AverageConfig, Coding, OptimError};

/// When a worker waits, and what its changes count for.
#[derive(Debug, Clone, Copy)]
pub(in crate::sync) struct Pace {
    /// Steps until the answer to a change is waited for; never without.
    pub(in crate::sync) waits: Option<u64>,
    /// How far it may be ahead of the slowest.
    pub(in crate::sync) staleness: Option<u64>,
    /// A factor of its changes' weight.
    pub(in crate::sync) weight: f64,
}

/// A vector that servers tell beside the model where all is settled.
#[derive(Debug, Clone, Copy)]
pub(in crate::sync) struct Remembered {
    /// Its name in checkpoints.
    pub(in crate::sync) name: &'static str,
    /// Whether it is the same on all ranks.
    pub(in crate::sync) shared: bool,
}

/// Servers as one worker sees them, and what its own rank serves.
#[derive(Debug)]
pub(in crate::sync) struct Parts {
    /// The worker's servers, each with its shard. They answer a meeting with the model and, where all is
    /// settled, what they remember in the order of `remembered`.
    pub(in crate::sync) owners: Vec<Owner>,
    /// What this rank serves.
    pub(in crate::sync) server: Arc<Mutex<dyn Serves>>,
    /// The part of the model that it serves.
    pub(in crate::sync) held: Option<Range<usize>>,
    /// What servers remember.
    pub(in crate::sync) remembered: Vec<Remembered>,
    /// Whether the worker's own changes go through a codec.
    pub(in crate::sync) packs: bool,
}

/// The messages of workers and servers.
pub(super) const TAGS: ServiceTags = ServiceTags { ask: 0x5E47_0001, answer: 0x5E47_0002 };

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
    server: Arc<Mutex<dyn Serves>>,
    /// The part of the model that it has.
    held: Option<Range<usize>>,
    /// It answers until this is dropped.
    serving: Pending<Result<(), CommError>>,
    average: Average,
    /// The model as all workers last met over it.
    common: Tensor,
    gathered: bool,
    /// Whether it is about to be taken.
    last: bool,
    /// What the servers remember, as it was last settled.
    remembered: Vec<(Remembered, Tensor)>,
    /// What this worker does, as it was last settled: [`Owner`]'s vectors.
    own: Vec<(&'static str, Tensor)>,
    /// What codecs lost of this worker's changes, as it was last settled; `None` without codecs.
    residual: Option<Tensor>,
    /// Whether an answer waits to be taken up, in what was last settled.
    answered: bool,
    /// Changes of all workers, as all last met.
    pushes: u64,
}

fn lock(server: &Arc<Mutex<dyn Serves>>) -> MutexGuard<'_, dyn Serves + 'static> {
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The names of a worker's own vectors in checkpoints.
const OWN: [&str; 3] = ["base", "answer", "sent"];
const RESIDUAL: &str = "residual";

impl Asynchronous {
    /// A worker, and the server of its shard, with the rule for so many values.
    pub(super) fn new(
        settings: SyncSettings<'_>,
        rule: &dyn Fn(usize) -> Box<dyn ServerRule>,
        pace: Pace,
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
        // Also of a worker that serves nothing.
        let remembered =
            rule(1).states().iter().map(|state| Remembered { name: state.name, shared: true }).collect();
        let rule = rule(mine.len());
        let server = Server::new(mine, rule, comm.size(), pace.staleness).with_codec(codec()?);
        let owners = (0..comm.size() as u32)
            .map(|rank| (rank, range(rank)))
            .filter(|(_, range)| !range.is_empty())
            .map(|(rank, range)| {
                let owner = Owner::new(Rank(rank), range.clone(), &values[range]);
                Ok(owner.with_packer(packer(rank)?))
            })
            .collect::<Result<Vec<_>, OptimError>>()?;
        let held = Some(range(comm.rank().0)).filter(|range| !range.is_empty());
        let server = Arc::new(Mutex::new(server));
        let packs = codec()?.is_some();
        Self::over(settings, pace, Parts { owners, server, held, remembered, packs })
    }

    /// A worker of some servers.
    pub(in crate::sync) fn over(
        settings: SyncSettings<'_>,
        pace: Pace,
        parts: Parts,
    ) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, every, params, asynchronous, .. } = settings;
        let Parts { owners, server, held, remembered, packs } = parts;
        if let Some(delay) = pace.waits.filter(|&delay| delay > 0 && delay >= every) {
            let (field, value) = ("delay", delay as f64);
            let expected = "below the steps between two changes";
            return Err(OptimError::Setting { transform: "sync", field, value, expected });
        }
        let zeros = || device.zeros(layout.len());
        let named = |remembered| Ok::<_, OptimError>((remembered, zeros()?));
        let remembered = remembered.into_iter().map(named).collect::<Result<_, _>>()?;
        let serving = comm.start_service(TAGS, &server);
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

    /// What servers remember: what is the same on all ranks, or what is not.
    fn remembered_by(&self, shared: bool) -> impl Iterator<Item = (&str, &Tensor)> {
        let of = self.remembered.iter().filter(move |(remembered, _)| remembered.shared == shared);
        of.map(|(remembered, tensor)| (remembered.name, tensor))
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
            self.meet(Wants::End)?;
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
        if let Some(range) = &self.held {
            lock(&self.server).stand_at(&values[range.clone()]);
        }
        Ok(())
    }
    fn steps(&self) -> u64 {
        self.pushes
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        [("model", &self.common)].into_iter().chain(self.remembered_by(true)).collect()
    }
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        let noted = if self.answered { OWN.len() } else { 1 };
        let own = self.own[..noted].iter().map(|(name, tensor)| (*name, tensor));
        let residual = self.residual.iter().map(|residual| (RESIDUAL, residual));
        own.chain(residual).chain(self.remembered_by(false)).collect()
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.common.shape().len();
        let found = |name: &str| required(get, name, expected);
        let model = self.packing.pack_host(&found("model")?);
        let mut remembered = Vec::new();
        for (Remembered { name, shared }, _) in &self.remembered {
            let flat = if *shared { Some(found(name)?) } else { optional(get, name, expected)? };
            remembered.extend(flat.map(|flat| (*name, self.packing.pack_host(&flat))));
        }
        let own: Vec<Vec<f32>> = OWN.iter().map_while(|name| found(name).ok()).collect();
        let own: Vec<_> = own.iter().map(|flat| self.packing.pack_host(flat)).collect();
        let residual = optional(get, RESIDUAL, expected)?.map(|flat| self.packing.pack_host(&flat));
        self.packing.unpack(&model, &mut self.common)?;
        for owner in &mut self.owners {
            if let Some(residual) = &residual {
                owner.set_residual(residual)?;
            }
            owner.stand_at(&model);
            if let [base, rest @ ..] = &own[..] {
                owner.stand_at(base);
                if let [answer, sent] = rest {
                    owner.set_answer(answer, sent);
                }
            }
        }
        let mut server = lock(&self.server);
        server.resume(steps);
        if let Some(range) = &self.held {
            server.stand_at(&model[range.clone()]);
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
