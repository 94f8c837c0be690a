//! A part of the model on one rank: its parameters in all versions that microbatches still need, its gradients, its
//! optimizer. It knows neither other ranks' parts nor the schedule.

use std::collections::{BTreeMap, VecDeque};

use farflung_optim::{Average, Chain, Prepared};
use farflung_parallel::pipeline::StageCost;
use farflung_tensor::{Op, Tensor};
use farflung_zoo::block::Grads;
use farflung_zoo::{Input, Output, Saved, Slices, Stage};

use super::tied::Exchange;
use crate::Result;

/// A part with its state.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) stage: Stage,
    pub(super) params: Tensor,
    pub(super) grads: Tensor,
    pub(super) chain: Chain,
    /// Over all that hold the same part; none where this rank is the only one, or the part has no parameters.
    pub(super) average: Option<Average>,
    /// Modelled times of a microbatch, and of each slice of one.
    pub(super) cost: StageCost,
    pub(super) costs: Vec<StageCost>,
    /// Whether `grads` hold what the next update takes, rather than what the last one took.
    pending: bool,
    reducing: bool,
    /// Updates since the pipeline was empty: the version of `params`.
    version: u32,
    older: BTreeMap<u32, Tensor>,
    /// Updates whose gradients are complete here, and wait for the sum of the token table's.
    due: VecDeque<Due>,
    /// A buffer of gradients that an update has taken.
    spare: Option<Tensor>,
}

/// An update to come.
#[derive(Debug)]
struct Due {
    grads: Tensor,
    table: Exchange,
    /// The oldest version that a microbatch will still see.
    needed: Option<u32>,
}

/// What a part keeps of a microbatch.
#[derive(Debug)]
pub(super) struct Held {
    /// None between a forward of which nothing was kept and its recomputation.
    pub(super) saved: Option<Saved>,
    /// The hidden states that came in, where they are needed again.
    pub(super) input: Option<Tensor>,
    pub(super) version: u32,
}

/// A copy on the same device.
pub(super) fn copy(x: &Tensor) -> Result<Tensor> {
    let mut y = x.device().empty(x.dtype(), x.shape())?;
    x.device().run(Op::Cast { x: x.view(), y: y.view_mut() })?;
    Ok(y)
}

impl Part {
    pub(super) fn new(
        stage: Stage,
        params: Tensor,
        chain: Chain,
        average: Option<Average>,
        (cost, costs): (StageCost, Vec<StageCost>),
    ) -> Result<Self> {
        let grads = stage.zeros()?;
        let older = BTreeMap::new();
        Ok(Self {
            stage,
            params,
            grads,
            chain,
            average,
            cost,
            costs,
            pending: false,
            reducing: false,
            version: 0,
            older,
            due: VecDeque::new(),
            spare: None,
        })
    }

    /// The pipeline is empty: all that begins sees the newest parameters, and nothing is in the gradients.
    pub(super) fn begin(&mut self) {
        (self.pending, self.reducing, self.version) = (false, false, 0);
        self.older.clear();
        self.due.clear();
    }

    /// The update after the gradients so far waits for the table's sum, and the next begins.
    pub(super) fn put_off(&mut self, table: Exchange, needed: Option<u32>) -> Result<()> {
        let next = self.spare.take().map_or_else(|| self.stage.zeros(), Ok)?;
        let grads = std::mem::replace(&mut self.grads, next);
        self.due.push_back(Due { grads, table, needed });
        if let Some(average) = &mut self.average {
            average.commit();
        }
        self.pending = false;
        Ok(())
    }

    /// Takes the updates that are due until there is this version; all of them without one.
    pub(super) fn catch_up(&mut self, version: Option<u32>) -> Result<()> {
        while version.is_none_or(|version| self.version < version) {
            let Some(Due { mut grads, table, needed }) = self.due.pop_front() else { break };
            let range = self.table();
            grads.view_mut().part(range.start, range.len())?.write(&table.wait()?)?;
            std::mem::swap(&mut self.grads, &mut grads);
            let pending = self.pending;
            let prepared = Prepared::with_norm(farflung_optim::global_norm(&self.grads)?)?;
            self.commit(prepared, needed)?;
            std::mem::swap(&mut self.grads, &mut grads);
            (self.pending, self.spare) = (pending, Some(grads));
        }
        Ok(())
    }

    /// The parameters of a version.
    fn at(&self, version: u32) -> &Tensor {
        if version == self.version {
            return &self.params;
        }
        self.older.get(&version).expect("versions that microbatches still see are kept")
    }

    /// Of a slice that begins at `start`, if slices leave something for each other.
    pub(super) fn forward(
        &self,
        version: u32,
        input: Input,
        start: usize,
        targets: Option<(&Tensor, f32)>,
        slices: Option<&mut Slices>,
    ) -> Result<(Output, Saved)> {
        let params = self.at(version);
        Ok(match slices {
            Some(slices) => self.stage.forward_slice(params, input, start, targets, slices)?,
            None => self.stage.forward(params, input, targets)?,
        })
    }

    pub(super) fn recompute(
        &self,
        version: u32,
        input: Input,
        saved: &mut Saved,
        slices: Option<&mut Slices>,
    ) -> Result<()> {
        let params = self.at(version);
        match slices {
            Some(slices) => self.stage.recompute_slice(params, input, saved, slices)?,
            None => self.stage.recompute(params, input, saved)?,
        }
        Ok(())
    }

    pub(super) fn backward_input(
        &self,
        version: u32,
        saved: &mut Saved,
        dy: Option<Tensor>,
        slices: Option<&mut Slices>,
    ) -> Result<Option<Tensor>> {
        let params = self.at(version);
        Ok(match slices {
            Some(slices) => self.stage.backward_input_slice(params, saved, dy, slices)?,
            None => self.stage.backward_input(params, saved, dy)?,
        })
    }

    /// Adds a microbatch's gradients of the weights.
    pub(super) fn backward_weight(&mut self, saved: Saved) -> Result<()> {
        let accumulate = std::mem::replace(&mut self.pending, true);
        let mut grads = Grads { flat: &mut self.grads, accumulate };
        Ok(self.stage.backward_weight(saved, &mut grads)?)
    }

    /// The gradients of an update are complete here: those of the other holders may come.
    pub(super) fn reduce(&mut self) -> Result<()> {
        if !std::mem::replace(&mut self.pending, true) {
            // A copy of the model that saw no microbatch adds nothing.
            self.grads = self.stage.zeros()?;
        }
        if let Some(average) = &mut self.average {
            average.start_all(&self.grads)?;
        }
        self.reducing = true;
        Ok(())
    }

    /// The gradients are those of all holders after this.
    pub(super) fn finish_reduce(&mut self) -> Result<()> {
        if !self.reducing {
            self.reduce()?;
        }
        if let Some(average) = &mut self.average {
            average.finish_all(&mut self.grads)?;
        }
        self.reducing = false;
        Ok(())
    }

    /// Takes an update that all agreed on. The version before it is kept if `needed`, the oldest that a microbatch will
    /// still see, is not newer.
    pub(super) fn commit(&mut self, prepared: Prepared, needed: Option<u32>) -> Result<()> {
        if needed.is_some_and(|needed| needed <= self.version) {
            self.older.insert(self.version, copy(&self.params)?);
        }
        if !self.stage.layout().is_empty() {
            self.chain.commit(&mut self.params, &self.grads, prepared)?;
        }
        if let Some(average) = &mut self.average {
            average.commit();
        }
        self.version += 1;
        self.older.retain(|&version, _| needed.is_some_and(|needed| needed <= version));
        self.pending = false;
        Ok(())
    }

    /// Gives an update up before it is taken.
    pub(super) fn rollback(&mut self) {
        if let Some(average) = &mut self.average {
            average.rollback();
        }
    }

    /// The elements of the token table in the flat buffers, in a part that has it.
    pub(super) fn table(&self) -> std::ops::Range<usize> {
        self.stage.layout().params()[0].range()
    }
}
