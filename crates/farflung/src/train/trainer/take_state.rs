//! Replaces a rank's state by values that come from other ranks or from a checkpoint.

use std::collections::BTreeMap;

use farflung_comm::Communicator;
use farflung_optim::Chain;
use farflung_optim::sync::Synchroniser;
use farflung_parallel::pipeline::ResumedStep;
use farflung_tensor::{ParamLayout, Tensor};

use super::Trainer;
use crate::train::job::Job;
use crate::train::part::Part;
use crate::train::pieces::StateKind;
use crate::train::run_state::{Get, OptimizerCounters, RunCounters, check_flat, flat_of};
use crate::{Error, Result};

/// What a part consists of that comes from elsewhere.
pub(super) struct TakingPart<'p> {
    pub(super) layout: &'p ParamLayout,
    pub(super) params: &'p mut Tensor,
    /// The optimizer, with the number of its updates; `None` if it stays.
    pub(super) chain: Option<(&'p mut Chain, u64)>,
    pub(super) sync: Option<&'p mut Box<dyn Synchroniser>>,
}

/// Replaces the state of an optimizer, which has taken `updates` updates.
///
/// Errors: [`Error::Message`] if a tensor is missing or has another length; those of the optimizer.
pub(super) fn take_optimizer(
    (layout, chain): (&ParamLayout, &mut Chain),
    updates: u64,
    get: Get<'_, '_>,
) -> Result<()> {
    let of = |(name, _): (&str, &Tensor)| {
        let flat = flat_of(layout, &StateKind::Optimizer(name.to_owned()), get)?;
        Ok::<_, Error>((name.to_owned(), flat))
    };
    let flats = chain.states().map(of).collect::<Result<BTreeMap<_, _>>>()?;
    Ok(chain.restore(updates, |name| flats.get(name).map(Vec::as_slice))?)
}

impl TakingPart<'_> {
    /// Checks that all tensors are there.
    ///
    /// Errors: [`Error::Message`] if a tensor is missing or has another length.
    fn check(&self, get: Get<'_, '_>) -> Result<()> {
        let chain = self.chain.iter().flat_map(|(chain, _)| chain.states());
        let optimizer = chain.map(|(name, _)| StateKind::Optimizer(name.to_owned()));
        let method = self.sync.iter().flat_map(|sync| sync.states());
        let method = method.map(|(name, _)| StateKind::Method(name.to_owned()));
        let kinds = std::iter::once(StateKind::Parameters).chain(optimizer).chain(method);
        kinds.into_iter().try_for_each(|kind| check_flat(self.layout, &kind, get))
    }

    /// Replaces the values. Residuals of codecs belong to the blocks of another plan, so codecs begin without
    /// any.
    ///
    /// Errors: those of [`TakingPart::check`]; those of the optimizer and of the method.
    pub(super) fn take(self, counted: &RunCounters, get: Get<'_, '_>) -> Result<()> {
        let Self { layout, params, chain, sync } = self;
        if layout.is_empty() {
            return Ok(());
        }
        params.write(&flat_of(layout, &StateKind::Parameters, get)?)?;
        if let Some((chain, updates)) = chain {
            take_optimizer((layout, chain), updates, get)?;
        }
        let Some(sync) = sync else { return Ok(()) };
        sync.on_params_set(params)?;
        let state = |name: &str| flat_of(layout, &StateKind::Method(name.to_owned()), get).ok();
        sync.restore(counted.outer_steps, &state)?;
        Ok(sync.average_mut().restore("", counted.rounds, |_| Some(&[]))?)
    }
}

fn taking(part: &mut Part, updates: Option<u64>) -> TakingPart<'_> {
    let Part { stage, params, chain, sync, .. } = part;
    let chain = updates.map(|updates| (chain, updates));
    TakingPart { layout: stage.layout(), params, chain, sync: sync.as_mut() }
}

impl Trainer {
    /// Replaces this rank's counters, parameters and states by those that `get` returns by name. Its optimizer
    /// stays unless `optimizer` has the counters of the one that `get` returns. If a tensor is missing or has
    /// another length, nothing is changed.
    ///
    /// Errors: [`Error::Message`] for such a tensor; those of the optimizer and of the method.
    pub(in crate::train) fn take_state(
        &mut self,
        (counted, optimizer): (&RunCounters, Option<&OptimizerCounters>),
        get: Get<'_, '_>,
    ) -> Result<()> {
        let updates = optimizer.map(|counters| counters.updates);
        for part in self.executor.parts.values_mut() {
            taking(part, updates).check(get)?;
        }
        for part in self.executor.parts.values_mut() {
            taking(part, updates).take(counted, get)?;
        }
        if let Some(counters) = optimizer {
            self.scale.restore(&counters.scale);
        }
        self.step = counted.step;
        self.window.clear();
        self.unmet = false;
        self.resync.restart(self.step);
        Ok(())
    }

    /// Makes this rank's trainer in the run's next plan, on the same device, with the values that `get` returns
    /// by name. If all ranks resume the step in which they lost another rank, it takes over the work of this
    /// one.
    ///
    /// Errors: those of [`Trainer::new`] and [`Trainer::take_state`].
    pub(in crate::train) fn moved_to(
        &mut self,
        (job, resumed): (&Job, Option<&ResumedStep>),
        comm: Communicator,
        counted: &RunCounters,
        get: Get<'_, '_>,
    ) -> Result<Self> {
        let device = (self.plain.clone(), self.executor.interrupt.clone());
        let mut next = Self::on(job, comm, device, resumed)?;
        next.take_state((counted, Some(&counted.optimizer)), get)?;
        if let Some(step) = resumed {
            next.resume_with(self, step);
        }
        // If all return to an earlier step, the last one is dropped, and there is nothing to record.
        if next.step == self.step {
            next.undecided.carry(self.undecided);
        }
        Ok(next)
    }
}
