//! Training in a pipeline: each rank has parts of the model, microbatches pass through them as a schedule says, and
//! several such pipelines may train side by side, each part averaging its gradients with its replicas.
//!
//! [`PipelinePlan`] is the decision as data; [`Pipelined`] carries it out, one a rank. A step is prepare, agree, commit:
//! with a flush, no part's parameters change before all ranks have said that their gradients are whole and finite.
//!
//! Copies of a part on several ranks, and the token table's two, take the same updates. Where their devices round
//! differently they are compared between steps: the pipeline is empty then, with a flush or without one, so that each copy
//! has a single version.

mod hands;
mod part;
mod plan;
#[cfg(test)]
mod tests;
mod tied;

pub use plan::{PipelinePlan, read_schedule, refusal};
pub(super) use plan::{cut, microbatches};

use std::collections::BTreeMap;

use farflung_base::{Nanos, Rank, StageId};
use farflung_comm::Communicator;
use farflung_optim::{Average, LossScale, OptimError, Prepared, loss_scale, sum_of_squares};
use farflung_parallel::pipeline::{Follower, Schedule, Updates, run};
use farflung_tensor::Tensor;
use farflung_zoo::Stage;
use farflung_zoo::weights::Weights;

use super::checkpoint::{Counters, Keeps, Named, Source};
use super::job::Job;
use super::repeat;
use super::resync::{Drift, Resync};
use super::sync::{Synced, average_config};
use super::worker::{LOSS_SCALE, StepDone, chain, named, restore_chain};
use crate::{Error, Result};
use hands::{Hands, Pass, floats, recomputed};
use part::Part;
use plan::Tie;
use tied::{Across, Tied};

/// Tags of parts that are gathered, counted down, far from those of messages between stages.
const GATHERED: u32 = u32::MAX;

/// One rank of a job whose model is cut into stages.
#[derive(Debug)]
pub struct Pipelined {
    plan: PipelinePlan,
    evaluation: Schedule,
    /// The rank in its pipeline, and which of the replicas that is.
    position: Rank,
    replica: u32,
    hands: Hands,
    /// All that hold a part, by the part's number, where others hold it too.
    holders: BTreeMap<u32, Communicator>,
    resync: Resync,
    /// Of gradients in products of 16 bits.
    scale: LossScale,
    /// All of the model, on rank 0, when it was last asked for.
    whole: Option<(Stage, Tensor)>,
    step: u64,
    /// Of each part in a step.
    updates: u64,
    /// The transport's clock when the last step's microbatches began to pass here, and when they had.
    pass: (Nanos, Nanos),
}

/// What ranks tell each other at the end of a pass: sums that are the same on all of them, in the same order.
struct Told {
    stop: bool,
    /// Squares of the gradients by part of the model.
    squares: Vec<f64>,
    /// Losses by microbatch, replica by replica.
    losses: Vec<f64>,
}

impl Pipelined {
    /// A rank at step 0 of a job.
    ///
    /// Errors: those of [`PipelinePlan::new`]; [`Error::Setting`] where the ranks' settings are not the same.
    pub fn new(job: &Job, comm: Communicator, threads: usize) -> Result<Self> {
        let plan = PipelinePlan::new(job)?;
        let placement = plan.placement().clone();
        let (rank, ranks) = (comm.rank().0, placement.ranks());
        let (position, replica) = (Rank(rank % ranks), rank / ranks);
        same_schedule(&comm, &plan)?;
        let scale = job.config.loss_scale.start(job.config.precision);
        if scale.is_dynamic() && plan.updates() != Updates::Flush {
            return Err(Error::Setting {
                field: "loss-scale",
                value: "auto".to_owned(),
                expected: format!(
                    "a number in {}: under {} no step can be tried again",
                    job.config.precision, plan.name
                ),
            });
        }

        let device = job.device(comm.rank().index(), threads)?;
        let holders = groups(&comm, &placement, plan.replicas, position)?;
        let tied = tie(&comm, &placement, plan.replicas, position)?;
        let copies = !holders.is_empty() || Tie::of(&placement) == Tie::Across;
        let resync = Resync::new(job, &comm, device.name(), copies)?;
        let updates = match plan.updates() {
            Updates::Flush => 1,
            _ => u64::from(plan.microbatches() / plan.per_update()),
        };
        let (slices, by_slice) = (plan.slices.len(), plan.cost.by_slice(plan.schedule.order())?);
        let mut parts = BTreeMap::new();
        for stage in placement.stages_of(position) {
            let number = placement.part(stage);
            let model = Stage::new(job.model, plan.layers[number as usize].clone(), &device)?;
            let params = match &job.config.init_from {
                Some(folder) => model.load(&mut Weights::open(folder)?)?,
                None => model.init(job.config.seed)?,
            };
            if job.config.deterministic {
                repeat::check(&model, &params, job.config.batch)?;
            }
            let average = match holders.get(&number) {
                Some(group) if !model.layout().is_empty() => {
                    Some(Average::new(group.clone(), model.device(), model.layout(), average_config(job))?)
                }
                _ => None,
            };
            let chain = chain(&job.config, &device, &model, updates)?;
            let costs = by_slice[stage.index() * slices..][..slices].to_vec();
            let costs = (plan.cost.stages[number as usize], costs);
            parts.insert(stage, Part::new(model, params, chain, average, costs)?);
        }

        let (sampler, evaluation) = (job.sampler(replica as usize)?, job.evaluation(replica as usize)?);
        let group = plan.replicas * placement.copies() as usize;
        let tokens = sampler.shard().batch * sampler.context() * plan.replicas;
        let order = plan.schedule.order();
        let hands = Hands {
            comm,
            first: replica * ranks,
            device,
            updates: plan.updates(),
            microbatches: plan.microbatches(),
            parts,
            tied,
            dim: job.model.dim,
            scale: loss_scale(group, (tokens as u64) * u64::from(plan.per_update())),
            recompute: job.config.recompute,
            offload: job.config.offload,
            slices: plan.slices.clone(),
            again: recomputed(order),
            pass: Pass::Evaluation,
            losses: Vec::new(),
            held: BTreeMap::new(),
            carried: BTreeMap::new(),
            sending: Vec::new(),
            placement,
            sampler,
            evaluation,
        };
        let held_out = hands.evaluation.steps().unwrap_or(0).max(1) as u32;
        let evaluation = plan.forwards(held_out)?;
        Ok(Self {
            plan,
            evaluation,
            position,
            replica,
            hands,
            holders,
            resync,
            scale,
            whole: None,
            step: 0,
            updates,
            pass: (Nanos::ZERO, Nanos::ZERO),
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
        &self.hands.comm
    }

    /// What it carries out.
    #[must_use]
    pub const fn plan(&self) -> &PipelinePlan {
        &self.plan
    }

    /// Its parts of the model, each with its parameters.
    pub fn params(&self) -> impl Iterator<Item = (&Stage, &Tensor)> {
        self.hands.parts.values().map(|part| (&part.stage, &part.params))
    }

    /// The transport's clock when the last step's microbatches began to pass here, and when all had: what the simulator
    /// predicts. What ranks agree on afterwards is not in it.
    #[must_use]
    pub const fn last_pass(&self) -> (Nanos, Nanos) {
        self.pass
    }

    /// One pass of a step's microbatches through the pipeline, and the update; where stages do not wait for each other,
    /// their updates.
    ///
    /// With a flush, a step whose gradients overflow in f16 is computed again with a smaller loss scale, and one that fails anywhere before all ranks agreed leaves parameters and moments as they were.
    pub fn step(&mut self, stop: bool) -> Result<StepDone> {
        let told = loop {
            let told = self.pass(stop)?;
            if self.plan.updates() != Updates::Flush {
                break told;
            }
            match Prepared::with_norm(told.squares.iter().sum::<f64>().sqrt()) {
                Ok(prepared) => {
                    for part in self.hands.parts.values_mut() {
                        part.commit(prepared, None)?;
                    }
                    break told;
                }
                Err(OptimError::NotFinite { .. }) if self.scale.overflowed() => {
                    self.hands.parts.values_mut().for_each(Part::rollback);
                }
                Err(error) => return Err(error.into()),
            }
        };
        self.scale.taken();
        self.step += 1;
        let shard = self.hands.sampler.shard();
        let tokens = told.losses.len() * shard.batch * self.hands.sampler.context();
        let loss = told.losses.iter().sum::<f64>() / tokens as f64;
        let drift = self.compare()?;
        Ok(StepDone { step: self.step, loss, synced: Synced::Yes, stop: told.stop, drift })
    }

    /// Compares what several ranks hold, and makes it equal, where that is due.
    fn compare(&mut self) -> Result<Option<Drift>> {
        let Hands { comm, parts, placement, tied, .. } = &mut self.hands;
        let Some(mut comparison) = self.resync.after_step(self.step, comm) else { return Ok(None) };
        for (number, part) in by_number(parts, placement) {
            let all = 0..part.stage.layout().len();
            if let Some(holders) = self.holders.get(&number).filter(|_| !all.is_empty()) {
                comparison.mend(holders, &mut part.params, all)?;
            }
        }
        // The table is the same in all pipelines now, and its two users in each may differ: on one rank they take the same
        // updates on the same device.
        if let Tied::Across(Across { pair, stage, .. }) = tied {
            let part = parts.get_mut(stage).expect("it is this rank's user of the table");
            let table = part.table();
            comparison.mend(pair, &mut part.params, table)?;
        }
        comparison.done().map(Some)
    }

    /// A step's microbatches, forward and back; what ranks then tell each other.
    fn pass(&mut self, stop: bool) -> Result<Told> {
        for part in self.hands.parts.values_mut() {
            part.stage.set_gradient_scale(self.scale.get());
        }
        let microbatches = self.plan.microbatches();
        let first = self.step * u64::from(microbatches);
        self.hands.begin(Pass::Training { first }, microbatches);
        let begun = self.hands.comm.now();
        match self.plan.arrivals {
            Some(rule) => Follower::new(&self.plan.schedule, self.position, rule)?.run(&mut self.hands)?,
            None => run(&self.plan.schedule, self.position, &mut self.hands)?,
        }
        self.pass = (begun, self.hands.comm.now());
        self.hands.sent()?;
        if self.plan.updates() == Updates::Flush {
            let Hands { parts, placement, tied, .. } = &mut self.hands;
            by_number(parts, placement).into_iter().try_for_each(|(_, part)| part.finish_reduce())?;
            tied.finish(parts, placement)?;
        }
        self.hands.parts.values_mut().try_for_each(|part| part.catch_up(None))?;
        self.tell(stop)
    }

    /// Mean loss of the held-out batches in nats, shared out among the replicas; all must call it.
    pub fn evaluate(&mut self) -> Result<f64> {
        let microbatches = self.evaluation.order().microbatches();
        self.hands.begin(Pass::Evaluation, microbatches);
        run(&self.evaluation, self.position, &mut self.hands)?;
        self.hands.sent()?;
        let losses = self.tell(false)?.losses;
        let shard = self.hands.evaluation.shard();
        let tokens = losses.len() * shard.batch * self.hands.evaluation.context();
        Ok(losses.iter().sum::<f64>() / tokens as f64)
    }

    /// Everyone's losses and squares, in one message from each to each.
    fn tell(&self, stop: bool) -> Result<Told> {
        let Hands { comm, parts, placement, losses, .. } = &self.hands;
        let (depth, replicas) = (placement.depth() as usize, self.plan.replicas);
        let mut mine = vec![f64::from(u8::from(stop))];
        mine.resize(1 + depth, 0.0);
        for (&stage, part) in parts {
            // Each part counts once, and the table that two parts hold with the first.
            if self.replica == 0 && stage.0 < placement.depth() {
                let len = part.grads.shape().len();
                let twice = depth > 1 && placement.is_last(stage);
                let start = if twice { part.stage.layout().params()[1].start } else { 0 };
                mine[1 + placement.part(stage) as usize] =
                    if len == 0 { 0.0 } else { sum_of_squares(&part.grads, start..len)? };
            }
        }
        mine.extend(losses);
        let bytes = mine.iter().flat_map(|v| v.to_le_bytes()).collect();
        let all = comm.all_gather_bytes(bytes)?;
        let mut told =
            Told { stop: false, squares: vec![0.0; depth], losses: vec![0.0; losses.len() * replicas] };
        for (rank, bytes) in all.iter().enumerate() {
            let (words, rest) = bytes.as_chunks::<8>();
            if words.len() != mine.len() || !rest.is_empty() {
                let problem = "is not what ranks tell each other at a pass's end";
                return Err(Error::Message { message: format!("rank {rank}'s message"), problem });
            }
            let words: Vec<f64> = words.iter().map(|&word| f64::from_le_bytes(word)).collect();
            told.stop |= words[0] > 0.0;
            told.squares.iter_mut().zip(&words[1..]).for_each(|(sum, word)| *sum += word);
            // In the order of one process that has all microbatches.
            let replica = rank / placement.ranks() as usize;
            for (m, loss) in words[1 + depth..].iter().enumerate() {
                told.losses[m * replicas + replica] += loss;
            }
        }
        Ok(told)
    }

    /// All of the model's parameters on rank 0, where they come from the first replica's ranks; all must call it.
    pub fn gather_params(&mut self) -> Result<Option<Tensor>> {
        self.gather(|part| &part.params)
    }

    /// All of the model's gradients of the last step on rank 0, averaged over replicas, in the layout of the whole
    /// model; all must call it.
    pub fn gather_grads(&mut self) -> Result<Option<Tensor>> {
        self.gather(|part| &part.grads)
    }

    /// Puts a flat buffer of each part together. Nobody leaves before all of it is there.
    fn gather(&self, of: impl Fn(&Part) -> &Tensor) -> Result<Option<Tensor>> {
        let whole = self.put_together(of)?;
        self.hands.comm.barrier()?;
        Ok(whole)
    }

    fn put_together(&self, of: impl Fn(&Part) -> &Tensor) -> Result<Option<Tensor>> {
        let Hands { comm, parts, placement, device, .. } = &self.hands;
        if self.replica > 0 {
            return Ok(None);
        }
        let stages = (0..placement.depth()).map(StageId);
        if comm.rank().0 > 0 {
            for stage in stages.filter(|stage| parts.contains_key(stage)) {
                let values = of(&parts[&stage]).to_vec::<f32>()?;
                let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                comm.start_send(Rank(0), GATHERED - stage.0, bytes).wait()?;
            }
            return Ok(None);
        }
        let config = *self.hands.parts.values().next().expect("a rank has a stage").stage.config();
        let whole = Stage::whole(config, device)?;
        let mut all = whole.zeros()?;
        for stage in stages {
            let there = Stage::new(config, self.plan.layers[stage.index()].clone(), device)?;
            let values = if let Some(part) = parts.get(&stage) {
                of(part).to_vec::<f32>()?
            } else {
                let bytes = comm.recv(placement.rank(stage), GATHERED - stage.0)?;
                floats(&bytes, there.layout().len()).ok_or_else(|| Error::Message {
                    message: format!("part {stage} of the model"),
                    problem: "is not as long as its parameters",
                })?
            };
            for param in there.layout().params() {
                let to = &whole.layout().params()[whole.layout().find(&param.name)?];
                all.view_mut().part(to.start, to.shape.len())?.write(&values[param.range()])?;
            }
        }
        Ok(Some(all))
    }

    /// The tensors of some flat buffers of each part, behind a prefix; what two parts share, once.
    fn tensors<'a>(
        &'a self,
        of: impl Fn(&'a Part) -> Result<Vec<(String, &'a Tensor)>>,
    ) -> Result<Vec<Named>> {
        let mut all: BTreeMap<String, Named> = BTreeMap::new();
        for part in self.hands.parts.values() {
            for (prefix, flat) in of(part)? {
                let tensors = named(&part.stage, flat, |name| format!("{prefix}{name}"))?;
                all.extend(tensors.into_iter().map(|n| (n.name.clone(), n)));
            }
        }
        Ok(all.into_values().collect())
    }

    /// Has the whole model on rank 0; all must call it.
    pub(super) fn gather_whole(&mut self) -> Result<()> {
        let params = self.gather_params()?;
        self.whole = match params {
            Some(params) => {
                let config = *self.hands.parts.values().next().expect("a rank has a stage").stage.config();
                Some((Stage::whole(config, &self.hands.device)?, params))
            }
            None => None,
        };
        Ok(())
    }

    /// The whole model as it was last gathered, on rank 0.
    pub(super) fn gathered(&self) -> Option<(&Stage, &Tensor)> {
        self.whole.as_ref().map(|(stage, params)| (stage, params))
    }
}

impl Keeps for Pipelined {
    fn comm(&self) -> &Communicator {
        &self.hands.comm
    }
    fn parts(&self) -> Vec<(usize, usize)> {
        let part = |&stage: &StageId| {
            let layers = &self.plan.layers[self.hands.placement.part(stage) as usize];
            (layers.start, layers.end)
        };
        self.hands.parts.keys().map(part).collect()
    }
    fn counters(&self) -> Counters {
        let average = self.hands.parts.values().find_map(|part| part.average.as_ref());
        Counters { step: self.step, outer_step: 0, rounds: average.map_or(0, Average::round) }
    }
    fn weights(&self) -> Result<Vec<Named>> {
        match &self.whole {
            Some((stage, params)) => named(stage, params, str::to_owned),
            None => self.tensors(|part| Ok(vec![(String::new(), &part.params)])),
        }
    }
    fn states(&self) -> Result<Vec<Named>> {
        let mut states = self.tensors(|part| {
            Ok(part.chain.states().map(|(name, state)| (format!("chain.{name}/"), state)).collect())
        })?;
        states.push(Named {
            name: LOSS_SCALE.to_owned(),
            shape: vec![2],
            values: self.scale.save().to_vec(),
        });
        for (stage, part) in &self.hands.parts {
            let saved = part.average.as_ref().map(|a| a.save(&format!("average.{stage}."))).transpose()?;
            let flat = |(name, values): (String, Vec<f32>)| Named { name, shape: vec![values.len()], values };
            states.extend(saved.into_iter().flatten().map(flat));
        }
        Ok(states)
    }
    fn restore(&mut self, from: &Source) -> Result<()> {
        let updates = from.step() * self.updates;
        for (stage, part) in &mut self.hands.parts {
            let layout = part.stage.layout();
            part.params.write(&from.weights(layout)?)?;
            restore_chain(&mut part.chain, layout, from, updates)?;
            if let Some(average) = part.average.as_mut().filter(|_| from.own) {
                average.restore(&format!("average.{stage}."), from.rounds(), |name| from.state(name))?;
            }
        }
        self.scale.restore(from.state(LOSS_SCALE).unwrap_or_default());
        self.step = from.step();
        self.resync.restart(self.step);
        Ok(())
    }
}

/// Ranks that were started with other settings are told at once, rather than wait for what never comes.
fn same_schedule(comm: &Communicator, plan: &PipelinePlan) -> Result<()> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(plan.schedule.to_string().as_bytes());
    hasher.update(format!("{:?}", plan.layers).as_bytes());
    let mine = hasher.finalize().as_bytes().to_vec();
    let all = comm.all_gather_bytes(mine.clone())?;
    match all.iter().position(|theirs| *theirs != mine) {
        None => Ok(()),
        Some(rank) => Err(Error::Setting {
            field: "schedule",
            value: plan.name.clone(),
            expected: format!("the same pipeline settings as on rank {rank}"),
        }),
    }
}

type Placement = farflung_parallel::pipeline::Placement;

/// A communicator for each part of this rank that others hold too: replicas, or the other copy of the model.
fn groups(
    comm: &Communicator,
    placement: &Placement,
    replicas: usize,
    position: Rank,
) -> Result<BTreeMap<u32, Communicator>> {
    let mut groups = BTreeMap::new();
    if replicas == 1 && placement.copies() == 1 {
        return Ok(groups);
    }
    // A rank may hold several parts: one split for each part, of those that hold it.
    for part in 0..placement.depth() {
        let holds = placement.stages_of(position).any(|stage| placement.part(stage) == part);
        let group = comm.split(u32::from(holds), comm.rank().0)?;
        if holds {
            groups.insert(part, group);
        }
    }
    Ok(groups)
}

/// A rank's parts with their numbers, in the order in which all ranks meet over them: two copies of the model have their
/// stages in opposite orders, and would wait for each other.
fn by_number<'a>(parts: &'a mut BTreeMap<StageId, Part>, placement: &Placement) -> Vec<(u32, &'a mut Part)> {
    let mut parts: Vec<_> = parts.iter_mut().map(|(&stage, part)| (placement.part(stage), part)).collect();
    parts.sort_by_key(|(number, _)| *number);
    parts
}

/// How this rank's users of the token table meet.
fn tie(comm: &Communicator, placement: &Placement, replicas: usize, position: Rank) -> Result<Tied> {
    let user = |&stage: &StageId| placement.is_first(stage) || placement.is_last(stage);
    let mine = placement.stages_of(position).find(user);
    Ok(match Tie::of(placement) {
        Tie::Whole => Tied::No,
        Tie::Local => mine.map_or(Tied::No, |_| Tied::Here),
        Tie::Across => {
            let replica = comm.rank().0 / placement.ranks();
            let pair = comm.split(mine.map_or(0, |_| 1 + replica), comm.rank().0)?;
            let early = replicas == 1;
            mine.map_or(Tied::No, |stage| Tied::Across(Across { pair, stage, early, round: 0, begun: None }))
        }
    })
}
