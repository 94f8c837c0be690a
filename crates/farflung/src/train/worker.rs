//! One rank: its replica of the model, its optimizer, its batches, and how it agrees with the others.

use std::collections::BTreeMap;

use farflung_base::Nanos;
use farflung_comm::{Communicator, ReduceOp};
use farflung_optim::{AdamW, Chain, LossScale, OptimError, OuterOptimizer, Schedule, Sgd, adamw, sgd};
use farflung_tensor::{Device, Param, ParamLayout, Tensor};
use farflung_zoo::block::Grads;
use farflung_zoo::weights::Weights;
use farflung_zoo::{Input, Output, Sampler, Stage, stage};

use super::checkpoint::{Counters, Keeps, Named, Source};
use super::job::Job;
use super::repeat;
use super::resync::{Drift, Resync};
use super::sync::{Sync, Synced, vote};
use crate::config::choice::{OptimizerKind, ScheduleKind};
use crate::{Result, TrainConfig};

/// One rank of a run.
#[derive(Debug)]
pub struct Worker {
    pub(super) stage: Stage,
    pub(super) params: Tensor,
    pub(super) grads: Tensor,
    pub(super) chain: Chain,
    /// Of gradients in products of 16 bits.
    scale: LossScale,
    pub(super) sync: Sync,
    resync: Resync,
    pub(super) comm: Communicator,
    pub(super) step: u64,
    sampler: Sampler,
    evaluation: Sampler,
    accumulate: usize,
    world: usize,
    /// Modelled time of a microbatch's forward pass, and of its whole backward pass.
    compute: (Nanos, Nanos),
    buffers: (Vec<u32>, Vec<u32>),
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepDone {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean loss of the step's tokens in nats: of all workers where they agreed on the step, else of this one.
    pub loss: f64,
    /// Whether all replicas are the same now.
    pub synced: Synced,
    /// Whether any worker wants to stop; known where workers agree.
    pub stop: bool,
    /// Where copies of parameters were compared: how far apart they were.
    pub drift: Option<Drift>,
}

/// The name of the loss scale among a rank's states.
pub(super) const LOSS_SCALE: &str = "loss_scale";

/// The optimizer chain of a config that makes so many updates in a step.
pub(super) fn chain(config: &TrainConfig, device: &Device, stage: &Stage, updates: u64) -> Result<Chain> {
    let decay = match config.lr_schedule {
        ScheduleKind::Constant => farflung_optim::Decay::Constant,
        ScheduleKind::Linear => farflung_optim::Decay::Linear,
        ScheduleKind::Cosine => farflung_optim::Decay::Cosine,
    };
    let least = config.min_lr.min(config.lr);
    let schedule = Schedule::new(config.lr, least, config.warmup * updates, config.steps * updates, decay)?;
    let clip = (config.clip > 0.0).then_some(config.clip);
    let weight_decay = config.weight_decay;
    let links = match config.optimizer {
        OptimizerKind::AdamW => {
            let (beta1, beta2) = (config.beta1, config.beta2);
            adamw(AdamW { beta1, beta2, eps: 1e-8, weight_decay, clip, schedule })
        }
        OptimizerKind::Sgd => {
            sgd(Sgd { momentum: config.momentum, nesterov: false, weight_decay, clip, schedule })
        }
    };
    Ok(links.build(device, stage.layout())?)
}

impl Keeps for Worker {
    fn comm(&self) -> &Communicator {
        &self.comm
    }
    fn parts(&self) -> Vec<(usize, usize)> {
        Vec::new()
    }
    fn counters(&self) -> Counters {
        Counters {
            step: self.step,
            outer_step: self.sync.outer().map_or(0, OuterOptimizer::step),
            rounds: self.sync.average().round(),
        }
    }
    fn weights(&self) -> Result<Vec<Named>> {
        named(&self.stage, &self.params, str::to_owned)
    }
    fn states(&self) -> Result<Vec<Named>> {
        let mut states = Vec::new();
        for (name, state) in self.chain.states() {
            states.push((format!("chain.{name}"), state.to_vec::<f32>()?));
        }
        if let Some(outer) = self.sync.outer() {
            for (name, state) in outer.states() {
                states.push((format!("outer.{name}"), state.to_vec::<f32>()?));
            }
        }
        states.push((LOSS_SCALE.to_owned(), self.scale.save().to_vec()));
        states.extend(self.sync.average().save("average.")?);
        let flat = |(name, values): (String, Vec<f32>)| Named { name, shape: vec![values.len()], values };
        Ok(states.into_iter().map(flat).collect())
    }
    fn restore(&mut self, from: &Source) -> Result<()> {
        self.params.write(&from.weights(self.stage.layout())?)?;
        restore_chain(&mut self.chain, self.stage.layout(), from, from.step())?;
        if let Some(outer) = self.sync.outer_mut() {
            outer.restore(from.outer_step(), |name| from.state(&format!("outer.{name}")))?;
        }
        // What codecs still owe belongs to ranks; where those held other parts, it is let go of.
        if from.own {
            self.sync.average_mut().restore("average.", from.rounds(), |name| from.state(name))?;
        }
        self.scale.restore(from.state(LOSS_SCALE).unwrap_or_default());
        self.step = from.step();
        self.resync.restart(self.step);
        Ok(())
    }
}

/// The tensors of a stage's flat buffer.
pub(super) fn named(stage: &Stage, flat: &Tensor, name: impl Fn(&str) -> String) -> Result<Vec<Named>> {
    let all = flat.to_vec::<f32>()?;
    let tensor = |p: &Param| Named {
        name: name(&p.name),
        shape: p.shape.dims().to_vec(),
        values: all[p.range()].to_vec(),
    };
    Ok(stage.layout().params().iter().map(tensor).collect())
}

/// An optimizer after so many updates, with a checkpoint's states.
pub(super) fn restore_chain(
    chain: &mut Chain,
    layout: &ParamLayout,
    from: &Source,
    updates: u64,
) -> Result<()> {
    let states: BTreeMap<String, Vec<f32>> = chain
        .states()
        .filter_map(|(name, _)| Some((name.to_owned(), from.flat(&format!("chain.{name}"), layout)?)))
        .collect();
    Ok(chain.restore(updates, |name| states.get(name).map(Vec::as_slice))?)
}

/// Hash of a stage's parameters, padding left out.
pub(super) fn hash(stage: &Stage, params: &Tensor) -> Result<blake3::Hash> {
    let all = params.to_vec::<f32>()?;
    Ok(digest(stage.layout().params().iter().flat_map(|p| &all[p.range()])))
}

/// Hash of numbers.
pub(super) fn digest<'a>(values: impl IntoIterator<Item = &'a f32>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for value in values {
        hasher.update(&value.to_le_bytes());
    }
    hasher.finalize()
}

impl Worker {
    /// A worker at step 0 of a job.
    pub fn new(job: &Job, comm: Communicator, threads: usize) -> Result<Self> {
        let rank = comm.rank().index();
        let device = job.device(rank, threads)?;
        let mut stage = Stage::whole(job.model, &device)?;
        let keeping = job.config.keeping();
        stage.set_keeping(keeping);
        let params = match &job.config.init_from {
            Some(folder) => stage.load(&mut Weights::open(folder)?)?,
            None => stage.init(job.config.seed)?,
        };
        if job.config.deterministic {
            repeat::check(&stage, &params, job.config.batch)?;
        }
        let flops = job.model.flops_per_token(job.model.context) as f64
            * (job.config.batch * job.model.context) as f64;
        let layers = job.model.layers;
        let again = keeping.recompute.min(layers) as f64 / layers as f64;
        let compute = (job.modelled(flops / 3.0), job.modelled(flops * (2.0 + again) / 3.0));
        Ok(Self {
            grads: stage.zeros()?,
            chain: chain(&job.config, &device, &stage, 1)?,
            scale: job.config.loss_scale.start(job.config.precision),
            sync: Sync::new(job, &comm, &stage, &params)?,
            resync: Resync::new(job, &comm, device.name(), comm.size() > 1)?,
            sampler: job.sampler(rank)?,
            evaluation: job.evaluation(rank)?,
            accumulate: job.microbatches(),
            world: job.world,
            stage,
            params,
            comm,
            step: 0,
            compute,
            buffers: (Vec::new(), Vec::new()),
        })
    }

    /// Steps done.
    #[must_use]
    pub const fn steps_done(&self) -> u64 {
        self.step
    }

    /// How it reaches the others.
    #[must_use]
    pub const fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// Its model.
    #[must_use]
    pub const fn stage(&self) -> &Stage {
        &self.stage
    }

    /// What its gradients are multiplied with where products round them.
    #[must_use]
    pub const fn loss_scale(&self) -> &LossScale {
        &self.scale
    }

    /// Its replica's parameters.
    #[must_use]
    pub const fn params(&self) -> &Tensor {
        &self.params
    }

    /// The gradients of the last step: averaged under ddp, this worker's own under DiLoCo.
    #[must_use]
    pub const fn grads(&self) -> &Tensor {
        &self.grads
    }

    /// Hash of the parameters, padding left out: equal on all replicas after each agreed step.
    pub fn hash(&self) -> Result<blake3::Hash> {
        hash(&self.stage, &self.params)
    }

    /// One optimizer step: forward and backward of each microbatch, averaging as the run's method says, and the update.
    ///
    /// In f16 a step whose gradients overflow is computed again with a smaller loss scale. Prepare, agree, commit: a step that fails anywhere before all workers agreed leaves parameters, moments and
    /// residuals as they were.
    pub fn step(&mut self, stop: bool) -> Result<StepDone> {
        let (loss, stop, prepared) = loop {
            let (loss, stop) = self.compute_gradients(stop)?;
            match self.chain.prepare(&self.grads) {
                Ok(prepared) => break (loss, stop, prepared),
                // The same on all ranks that averaged, and there it never happened.
                Err(OptimError::NotFinite { .. }) if self.scale.overflowed() => {
                    self.sync.average_mut().rollback();
                }
                Err(error) => return Err(error.into()),
            }
        };
        self.scale.taken();
        self.chain.commit(&mut self.params, &self.grads, prepared)?;
        self.step += 1;
        let after = self.sync.after_step(&self.comm, self.step, &mut self.params, loss, stop)?;
        let mut drift = None;
        if after.synced == Synced::Yes
            && let Some(mut comparison) = self.resync.after_step(self.step, &self.comm)
        {
            comparison.mend(&self.comm, &mut self.params, 0..self.stage.layout().len())?;
            let found = comparison.done()?;
            if found.distance > 0.0
                && let Some(outer) = self.sync.outer_mut()
            {
                outer.anchor_at(&self.params)?;
            }
            drift = Some(found);
        }
        Ok(StepDone { step: self.step, loss: after.loss, synced: after.synced, stop: after.stop, drift })
    }

    /// Forward and backward of all microbatches, and the average where the method averages gradients. Gives the mean
    /// loss, and whether to stop: of all workers where they averaged, else of this one.
    fn compute_gradients(&mut self, stop: bool) -> Result<(f64, bool)> {
        let per_microbatch = (self.sampler.shard().batch * self.sampler.context()) as f64;
        let scale = farflung_optim::loss_scale(
            self.world,
            (per_microbatch as u64) * (self.accumulate * self.world) as u64,
        );
        self.stage.set_gradient_scale(self.scale.get());
        let mut coming = Vec::with_capacity(self.accumulate);
        let mut averaging = self.sync.begin();
        for micro in 0..self.accumulate {
            let batch = self.step * self.accumulate as u64 + micro as u64;
            let (inputs, targets) = &mut self.buffers;
            self.sampler.batch(batch, inputs, targets)?;
            let len = self.sampler.context();
            let (x, y) = (self.stage.tokens(inputs, len)?, self.stage.tokens(targets, len)?);
            // Declared before it is done, so that workers on simulated links compute side by side.
            self.comm.advance(self.compute.0);
            let (out, saved) = self.stage.forward(&self.params, Input::Tokens(x), Some((&y, scale)))?;
            if let Output::Losses(losses) = out {
                coming.push(stage::start_total(&losses));
            }
            let last = micro + 1 == self.accumulate;
            let (comm, total) = (&self.comm, self.stage.layout().len() as u64);
            let backward = self.compute.1;
            let mut failed = None;
            let mut grads = Grads { flat: &mut self.grads, accumulate: micro > 0 };
            self.stage.backward(&self.params, saved, None, &mut grads, |range, flat| {
                // The share of the backward pass that these parameters stand for has passed.
                comm.advance(Nanos(backward.0 * range.len() as u64 / total));
                if let Some(averaging) = averaging.as_mut().filter(|_| last && failed.is_none()) {
                    failed = averaging.ready(range, flat).err();
                }
            })?;
            failed.map_or(Ok(()), Err)?;
        }
        // What failed on the device shows here, before anything is agreed on.
        self.stage.device().fence()?;
        let mut loss = 0.0;
        for total in coming {
            loss += total.wait()?;
        }
        let loss = loss / (per_microbatch * self.accumulate as f64);
        let Some(averaging) = averaging else { return Ok((loss, stop)) };
        let vote = vote(&self.comm, loss, stop);
        averaging.finish(&mut self.grads)?;
        let vote = vote.wait()?;
        Ok((vote[0], vote[1] > 0.0))
    }

    /// Mean loss of the held-out batches in nats, shared out among the workers; all must call it.
    pub fn evaluate(&mut self) -> Result<f64> {
        let mut sums = [0.0_f64, 0.0];
        let (inputs, targets) = &mut self.buffers;
        for batch in 0..self.evaluation.steps().unwrap_or(0) {
            self.evaluation.batch(batch as u64, inputs, targets)?;
            let len = self.evaluation.context();
            let (x, y) = (self.stage.tokens(inputs, len)?, self.stage.tokens(targets, len)?);
            sums[0] += stage::total(&self.stage.losses(&self.params, x, &y)?)?;
            sums[1] += targets.len() as f64;
        }
        self.comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok(sums[0] / sums[1])
    }
}
