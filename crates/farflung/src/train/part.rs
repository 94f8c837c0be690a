//! A part of the model on one rank: its parameters in all versions that microbatches still need, its gradients,
//! its optimizer, and how it is kept equal to its copies. It depends neither on other ranks' parts nor on the
//! schedule.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use farflung_optim::sync::{StepEnd, Synchroniser};
use farflung_optim::{Average, Chain, OptimError, Prepared, Shard, weigh};
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::StageCost;
use farflung_tensor::{MemoryKind, Op, Param, Tensor};
use farflung_zoo::layer::Params;
use farflung_zoo::{Input, Output, Packed, Saved, Slices, Stage, Targets};

use super::disk_state::DiskState;
use super::divided_gradients::DividedGradients;
use super::divided_weights::{DividedWeights, WeightReader};
use super::exchange::Exchange;
use super::fault::{Fault, FaultyValue};
use super::leaving::{Leaving, LeavingRanges, Reducing, contribute};
use super::zero::PartShards;
use crate::Result;

/// A part of the model with its state.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) stage: Stage,
    /// The parameters: all of them, or this rank's shard.
    pub(super) params: Tensor,
    /// How passes get the parameters, if each holder keeps a shard.
    pub(super) weights: Option<DividedWeights>,
    /// The gradients: of all parameters, or of this rank's shard of them.
    pub(super) grads: Tensor,
    /// How gradients reach the holders that keep them, if each keeps a shard.
    pub(super) divided: Option<DividedGradients>,
    pub(super) chain: Chain,
    /// Method that keeps the part equal on all its holders. `None` if the part has no parameters, or if there
    /// is only one replica and one copy of the model, except in an elastic run with local steps.
    pub(super) sync: Option<Box<dyn Synchroniser>>,
    /// Predicted times of each slice of a microbatch.
    pub(super) costs: Vec<StageCost>,
    /// Layers that are recomputed, starting from the part's input.
    pub(super) recompute: Recompute,
    /// Number of layers whose activations are kept in the host's memory.
    pub(super) offload: usize,
    /// The shards of its parameters, if its holders each update one.
    pub(super) shards: Option<PartShards>,
    /// The optimizer's state, if it is on disk.
    pub(super) disk: Option<DiskState>,
    /// Whether only this rank's shard has been updated.
    pub(super) stale: bool,
    /// This replica's own parameters, while `params` are those common to all replicas.
    pub(super) own: Option<Tensor>,
    /// Weight of this rank's gradients in a mean; 1 is an equal share.
    weight: f64,
    /// The values that replicas average, if these are not the gradients.
    contribution: Option<Tensor>,
    /// Whether `grads` contain gradients for the next update. If false, they are left over from the last
    /// update.
    pending: bool,
    reducing: Reducing,
    /// Whether a step that fails may continue with this rank's gradients: they are then copied before they are
    /// averaged, to `before`.
    keeps: bool,
    before: Option<Tensor>,
    /// Number of updates since the pipeline was last empty: the version of `params`.
    version: u32,
    older: BTreeMap<u32, Tensor>,
    /// Updates whose gradients are complete on this rank and wait for the sum of the token table's gradients.
    deferred: VecDeque<DeferredUpdate>,
    /// A spare buffer for gradients.
    spare: Option<Tensor>,
}

/// An update that was put off.
#[derive(Debug)]
struct DeferredUpdate {
    grads: Tensor,
    /// `None` on a device that only counts.
    table: Option<Exchange>,
    /// The oldest version that a later microbatch still uses.
    needed: Option<u32>,
}

/// Values that a part keeps of a microbatch between its forward and backward pass.
#[derive(Debug)]
pub(super) struct SavedMicrobatch {
    /// `None` after a forward pass that kept nothing, until the microbatch is recomputed.
    pub(super) saved: Option<Saved>,
    /// The received hidden states, if they are needed again.
    pub(super) input: Option<Tensor>,
    pub(super) version: u32,
    /// Whether it must be recomputed before its backward pass.
    pub(super) again: bool,
}

/// Copies a tensor on its device.
pub(super) fn copy(x: &Tensor) -> Result<Tensor> {
    let mut y = x.device().empty(x.dtype(), x.shape())?;
    x.device().run(Op::Cast { x: x.view(), y: y.view_mut() })?;
    Ok(y)
}

/// The components of a new [`Part`].
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) stage: Stage,
    pub(super) params: Tensor,
    pub(super) chain: Chain,
    pub(super) sync: Option<Box<dyn Synchroniser>>,
    pub(super) costs: Vec<StageCost>,
    pub(super) recompute: Recompute,
    pub(super) offload: usize,
    pub(super) weight: f64,
    /// Whether a step that fails may continue with this rank's gradients.
    pub(super) keeps: bool,
    pub(super) shards: Option<PartShards>,
    /// Whether the shards are of gradients, too.
    pub(super) divides_gradients: bool,
    /// How passes get the parameters, if the shards are of these as well.
    pub(super) weights: Option<DividedWeights>,
    pub(super) disk: Option<DiskState>,
}

/// Returns the parameters of a version, of the newest ones and older ones.
fn version_of<'a>(
    version: u32,
    (newest, params): (u32, &'a Tensor),
    older: &'a BTreeMap<u32, Tensor>,
) -> &'a Tensor {
    if version == newest {
        return params;
    }
    older.get(&version).expect("versions that microbatches still see are kept")
}

/// Returns the parameters for a pass: from a reader if they are divided.
fn params_of<'a>(reader: Option<&'a WeightReader<'a>>, whole: &'a Tensor) -> Params<'a> {
    reader.map_or(Params::Flat(whole), |reader| Params::Units(reader))
}

impl Part {
    pub(super) fn new(made_of: Parts) -> Result<Self> {
        let Parts { stage, params, chain, sync, costs, recompute, offload, weight, keeps, .. } = made_of;
        let (shards, disk, weights) = (made_of.shards, made_of.disk, made_of.weights);
        let divides = made_of.divides_gradients;
        let divided = divides.then(|| DividedGradients::new(&stage, shards.as_ref()));
        let gradients = if divides { chain.shard().len() } else { stage.layout().len() };
        Ok(Self {
            grads: stage.device().counting_for(MemoryKind::Gradients).zeros(gradients)?,
            divided,
            stage,
            params,
            weights,
            chain,
            sync,
            costs,
            recompute,
            offload,
            shards,
            disk,
            stale: false,
            own: None,
            weight,
            contribution: None,
            pending: false,
            reducing: Reducing::No,
            keeps,
            before: None,
            version: 0,
            older: BTreeMap::new(),
            deferred: VecDeque::new(),
            spare: None,
        })
    }

    /// Returns the average of each step's gradients, if there is one.
    fn average(&mut self) -> Option<&mut Average> {
        self.sync.as_mut().and_then(|sync| sync.gradients())
    }

    /// Resets the part for an empty pipeline: microbatches start with the newest parameters, and there are no
    /// gradients.
    pub(super) fn begin(&mut self) {
        (self.pending, self.reducing, self.version, self.before) = (false, Reducing::No, 0, None);
        self.older.clear();
        self.deferred.clear();
        if let Some(divided) = &mut self.divided {
            divided.begin();
        }
        self.drop_weights();
    }

    /// Forgets what was gathered of the parameters, which have changed.
    pub(super) fn params_changed(&mut self) {
        if let Some(weights) = &mut self.weights {
            weights.changed();
        }
    }

    /// Drops what is gathered of the parameters.
    fn drop_weights(&mut self) {
        if let Some(weights) = &mut self.weights {
            weights.clear();
        }
    }

    /// Puts off the update with the gradients so far until the table's sum arrives, and starts the next one.
    pub(super) fn defer_update(&mut self, table: Option<Exchange>, needed: Option<u32>) -> Result<()> {
        let next = self.spare.take().map_or_else(|| self.zero_gradients(), Ok)?;
        let grads = std::mem::replace(&mut self.grads, next);
        self.deferred.push_back(DeferredUpdate { grads, table, needed });
        if let Some(average) = self.average() {
            average.commit();
        }
        (self.pending, self.reducing) = (false, Reducing::No);
        Ok(())
    }

    /// Waits for the table's sum of the oldest update that was put off, and applies the update.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        let Some(DeferredUpdate { mut grads, table, needed }) = self.deferred.pop_front() else {
            return Ok(());
        };
        if let Some(table) = table {
            table.add_to(&mut grads)?;
        }
        std::mem::swap(&mut self.grads, &mut grads);
        let pending = self.pending;
        let prepared = Prepared::with_norm(farflung_optim::global_norm(&self.grads)?)?;
        self.commit(prepared, needed)?;
        std::mem::swap(&mut self.grads, &mut grads);
        (self.pending, self.spare) = (pending, Some(grads));
        Ok(())
    }

    /// Returns zeros for the gradients of all parameters.
    fn zero_gradients(&self) -> Result<Tensor> {
        Ok(self.grads.device().zeros(self.stage.layout().len())?)
    }

    fn at(&self, version: u32) -> &Tensor {
        version_of(version, (self.version, &self.params), &self.older)
    }

    /// Returns what gives passes the parameters, if they are divided. `advance`: see
    /// [`DividedWeights::reader`].
    fn reader<'a>(&'a self, advance: &'a dyn Fn(u64, u64)) -> Option<WeightReader<'a>> {
        self.weights.as_ref().map(|weights| weights.reader(&self.params, advance))
    }

    /// Runs the forward pass of a microbatch, or of a slice that begins at position `start`. `slices` is the
    /// state that slices pass on to each other. `advance`: see [`DividedWeights::reader`].
    pub(super) fn forward(
        &self,
        (version, advance): (u32, &dyn Fn(u64, u64)),
        input: impl Into<Packed>,
        start: usize,
        targets: Option<Targets<'_>>,
        slices: Option<&mut Slices>,
    ) -> Result<(Output, Saved)> {
        let reader = self.reader(advance);
        let params = params_of(reader.as_ref(), self.at(version));
        Ok(match slices {
            Some(slices) => self.stage.forward_slice(params, input, start, targets, slices)?,
            None => self.stage.forward(params, input, targets)?,
        })
    }

    pub(super) fn recompute(
        &self,
        (version, advance): (u32, &dyn Fn(u64, u64)),
        input: Input,
        saved: &mut Saved,
        slices: Option<&mut Slices>,
    ) -> Result<()> {
        let reader = self.reader(advance);
        let params = params_of(reader.as_ref(), self.at(version));
        match slices {
            Some(slices) => self.stage.recompute_slice(params, input, saved, slices)?,
            None => self.stage.recompute(params, input, saved)?,
        }
        Ok(())
    }

    pub(super) fn backward_input(
        &self,
        (version, advance): (u32, &dyn Fn(u64, u64)),
        saved: &mut Saved,
        dy: Option<Tensor>,
        slices: Option<&mut Slices>,
    ) -> Result<Option<Tensor>> {
        let reader = self.reader(advance);
        let params = params_of(reader.as_ref(), self.at(version));
        Ok(match slices {
            Some(slices) => self.stage.backward_input_slice(params, saved, dy, slices)?,
            None => self.stage.backward_input(params, saved, dy)?,
        })
    }

    /// Runs a microbatch's whole backward pass. Calls `passed` with each range of the gradients that is final
    /// for the microbatch. If the average is open, the range then leaves.
    pub(super) fn backward(
        &mut self,
        version: u32,
        saved: Saved,
        dy: Option<Tensor>,
        passed: impl Fn(&Range<usize>),
    ) -> Result<Option<Tensor>> {
        let accumulate = std::mem::replace(&mut self.pending, true);
        let shared = self.table();
        let Self { stage, params, weights, older, version: newest, .. } = self;
        // A range takes its time when it is final.
        let reader = weights.as_ref().map(|weights| weights.reader(params, &|_, _| ()));
        let params = params_of(reader.as_ref(), version_of(version, (*newest, params), older));
        let ranges =
            LeavingRanges::new(self.reducing, &mut self.sync, &self.chain, &mut self.contribution, shared);
        let (mut grads, mut leaving) = Leaving::new(&mut self.divided, (&mut self.grads, accumulate), ranges);
        let dx = stage.backward(params, saved, dy, &mut grads, |range, grads| {
            passed(&range);
            leaving.leave(range, grads);
        })?;
        leaving.result()?;
        Ok(dx)
    }

    /// Adds a microbatch's gradients of the weights. Calls `passed` as [`Part::backward`] does.
    pub(super) fn backward_weight(&mut self, saved: Saved, passed: impl Fn(&Range<usize>)) -> Result<()> {
        let accumulate = std::mem::replace(&mut self.pending, true);
        let shared = self.table();
        let ranges =
            LeavingRanges::new(self.reducing, &mut self.sync, &self.chain, &mut self.contribution, shared);
        let (mut grads, mut leaving) = Leaving::new(&mut self.divided, (&mut self.grads, accumulate), ranges);
        self.stage.backward_weight(saved, &mut grads, |range, grads| {
            passed(&range);
            leaving.leave(range, grads);
        })?;
        leaving.result()
    }

    /// Opens the average of this update: the ranges of the next backward pass leave as they become final.
    pub(super) fn open_reduce(&mut self) -> Result<()> {
        self.make_room()?;
        if let Some(average) = self.average() {
            average.open();
        }
        self.reducing = Reducing::Ranges;
        Ok(())
    }

    /// Returns whether gradients leave while a backward pass computes them.
    pub(super) fn leaves(&self) -> bool {
        self.reducing == Reducing::Ranges || self.divided.is_some()
    }

    /// Starts the average with the other holders. This rank's gradients of the update must be complete.
    pub(super) fn reduce(&mut self) -> Result<()> {
        if self.reducing != Reducing::No {
            return Ok(());
        }
        if !std::mem::replace(&mut self.pending, true) {
            // A copy of the model without microbatches contributes zeros.
            self.grads = self.grads.device().zeros(self.grads.shape().len())?;
        }
        if self.keeps {
            self.before = Some(copy(&self.grads)?);
        }
        if self.average().is_some() {
            weigh(&mut self.grads, self.weight)?;
        }
        let shared = self.table();
        self.make_room()?;
        if let Some(average) = self.sync.as_mut().and_then(|sync| sync.gradients()) {
            let leaves = match &mut self.contribution {
                Some(into) => {
                    contribute(&self.chain, &self.grads, 0..self.grads.shape().len(), &shared, into)?;
                    &*into
                }
                None => &self.grads,
            };
            average.start_all(leaves)?;
        }
        self.reducing = Reducing::All;
        Ok(())
    }

    /// Returns this rank's own gradients of a step that is dropped, before any average.
    ///
    /// Errors: no memory for other gradients in their place.
    pub(super) fn take_own_gradients(&mut self) -> Result<Tensor> {
        if let Some(before) = self.before.take() {
            return Ok(before);
        }
        let zeros = self.zero_gradients()?;
        Ok(std::mem::replace(&mut self.grads, zeros))
    }

    /// Continues a step with the gradients that this rank had. `None`: it had none.
    pub(super) fn continue_with(&mut self, grads: Option<Tensor>) {
        self.pending = grads.is_some();
        if let Some(grads) = grads {
            self.grads = grads;
        }
    }

    /// Makes a buffer for the values that replicas average in this step, if these are not the gradients.
    fn make_room(&mut self) -> Result<()> {
        match (self.chain.contributes(), &self.contribution) {
            (true, None) => self.contribution = Some(self.zero_gradients()?),
            (false, Some(_)) => self.contribution = None,
            _ => {}
        }
        Ok(())
    }

    /// Replaces the gradients, which must be complete, by the chain's contribution. Does nothing if gradients
    /// are averaged: the contribution was averaged then.
    pub(super) fn contribute_alone(&mut self) -> Result<()> {
        if self.average().is_some() || !self.chain.contributes() {
            return Ok(());
        }
        self.make_room()?;
        let Some(into) = &mut self.contribution else { return Ok(()) };
        self.chain.contribute(&self.grads, 0..self.grads.shape().len(), 1.0, into)?;
        std::mem::swap(&mut self.grads, into);
        Ok(())
    }

    /// Completes the average; the gradients are then those of all holders.
    pub(super) fn finish_reduce(&mut self) -> Result<()> {
        self.reduce()?;
        if let Some(average) = self.sync.as_mut().and_then(|sync| sync.gradients()) {
            average.finish_all(&mut self.grads)?;
        }
        if let Some(divided) = &mut self.divided {
            divided.finish(&mut self.grads)?;
        }
        self.reducing = Reducing::No;
        Ok(())
    }

    /// Applies an update. With a flush, all ranks have agreed on it. `needed` is the oldest version that a
    /// later microbatch still uses; the version before the update is kept if `needed` is not newer.
    pub(super) fn commit(&mut self, prepared: Prepared, needed: Option<u32>) -> Result<()> {
        if needed.is_some_and(|needed| needed <= self.version) {
            self.older.insert(self.version, copy(&self.params)?);
        }
        if !self.stage.layout().is_empty() {
            self.chain.commit(&mut self.params, &self.grads, prepared)?;
        }
        if let Some(average) = self.average() {
            average.commit();
        }
        self.stale = self.shards.is_some() && self.weights.is_none();
        self.params_changed();
        self.before = None;
        self.version += 1;
        self.older.retain(|&version, _| needed.is_some_and(|needed| needed <= version));
        self.pending = false;
        Ok(())
    }

    /// Fills the parameters with the shards that the other holders have updated. A collective of the holders.
    pub(super) fn gather_parameters(&mut self) -> Result<()> {
        if let Some(shards) = self.shards.as_ref().filter(|_| self.weights.is_none()) {
            shards.gather(&mut self.params)?;
        }
        self.stale = false;
        Ok(())
    }

    /// Returns all of its parameters. A collective of the holders, if each has a shard.
    pub(super) fn whole_params(&self) -> Result<Tensor> {
        if self.weights.is_some() { self.gathered(&self.params) } else { copy(&self.params) }
    }

    /// Returns all of its averaged gradients: a step leaves each holder those of its shard. A collective of the
    /// holders.
    pub(super) fn whole_grads(&self) -> Result<Tensor> {
        self.gathered(&self.grads)
    }

    /// Returns all of a flat buffer of which a holder has its shard alone, or up to date.
    fn gathered(&self, buffer: &Tensor) -> Result<Tensor> {
        let Some(shards) = &self.shards else { return copy(buffer) };
        let mut whole = if buffer.shape().len() == self.stage.layout().len() {
            copy(buffer)?
        } else {
            let (mut whole, values) = (self.stage.zeros()?, buffer.to_vec::<f32>()?);
            for piece in self.chain.shard().pieces() {
                let mut part = whole.view_mut().part(piece.flat.start, piece.flat.len())?;
                part.write(&values[piece.own()])?;
            }
            whole
        };
        shards.gather(&mut whole)?;
        Ok(whole)
    }

    /// Sets whether [`Part::is_sound`] is asked after the next pass.
    pub(super) fn watch(&mut self, wanted: bool) {
        if let Some(divided) = &mut self.divided {
            divided.watch(wanted);
        }
    }

    /// Returns whether the gradients of this rank are finite, before they are averaged.
    pub(super) fn is_sound(&self) -> bool {
        match &self.divided {
            Some(divided) => divided.is_sound(),
            None => farflung_optim::global_norm(&self.grads).is_ok_and(f64::is_finite),
        }
    }

    /// Returns the places in `grads` of what this rank updates of a range of the flat buffers.
    pub(super) fn own_gradients(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let pieces = self.chain.shard().within(range);
        let places = pieces.map(|piece| if self.divided.is_some() { piece.own() } else { piece.flat });
        Shard::new(places).ranges().to_vec()
    }

    /// Flips the bit that a test requests, in the last tensor.
    pub(super) fn inject_fault(&mut self, fault: Fault) -> Result<()> {
        let Some(range) = self.stage.layout().params().last().map(Param::range) else { return Ok(()) };
        let averaged = self.sync.as_mut().and_then(|sync| sync.exchanged());
        match (fault.value, averaged) {
            (FaultyValue::Parameters, _) if self.weights.is_some() => {
                let own = self.own_gradients(&range);
                own.into_iter().try_for_each(|range| fault.flip_bit(&mut self.params, range))
            }
            (FaultyValue::Parameters, _) => fault.flip_bit(&mut self.params, range),
            (FaultyValue::Reduced, Some(averaged)) => fault.flip_bit(averaged, range),
            (FaultyValue::Reduced, None) if self.divided.is_some() => {
                let own = self.own_gradients(&range);
                own.into_iter().try_for_each(|range| fault.flip_bit(&mut self.grads, range))
            }
            (FaultyValue::Reduced, None) => fault.flip_bit(&mut self.grads, range),
            (FaultyValue::Chunk | FaultyValue::Record | FaultyValue::StepTime, _) => Ok(()),
            (FaultyValue::Moments, _) => {
                let mut states = BTreeMap::new();
                for (name, state) in self.chain.states() {
                    states.insert(name.to_owned(), state.to_vec::<f32>()?);
                }
                let held = self.chain.shard().within(&range).next();
                if let (Some(held), Some(state)) = (held, states.values_mut().next()) {
                    fault.flip_bit_in_values(&mut state[held.own()]);
                }
                let step = self.chain.step();
                Ok(self.chain.restore(step, |name| states.get(name).map(Vec::as_slice))?)
            }
        }
    }

    /// Returns the gradients, if they were averaged by a method that also has local steps.
    pub(super) fn averaged_gradients(&mut self) -> Option<&mut Tensor> {
        let averaged = self.sync.as_ref().is_some_and(|sync| sync.averages_gradients());
        averaged.then_some(&mut self.grads)
    }

    /// Averages over all holders when replicas synchronise; parameters do not change yet.
    pub(super) fn exchange(&mut self, after: StepEnd, weight: f64) -> Option<Result<(), OptimError>> {
        let Self { sync, params, chain, .. } = self;
        sync.as_mut().map(|sync| sync.exchange_accumulated(params, chain, after, weight))
    }

    /// Drops an update that was not committed.
    pub(super) fn rollback(&mut self) {
        if let Some(sync) = &mut self.sync {
            sync.rollback();
        }
    }

    /// Returns the elements of the token table in the flat buffers of a part that shares it with another part;
    /// empty for other parts.
    pub(super) fn table(&self) -> Range<usize> {
        self.stage.shared_table().unwrap_or_default()
    }

    /// Returns the place in the gradients of what this rank has of such a table.
    pub(super) fn table_in_grads(&self) -> Range<usize> {
        match &self.divided {
            Some(_) => self.own_gradients(&self.table()).into_iter().next().unwrap_or_default(),
            None => self.table(),
        }
    }

    /// Returns the first element of the flat buffers behind such a table.
    pub(super) fn behind_table(&self) -> usize {
        let next = self.stage.layout().params().get(1).map_or(self.params.shape().len(), |next| next.start);
        if self.stage.shared_table().is_some() { next } else { 0 }
    }
}
