//! Moves one rank's state into the run's next plan, when members have come or left.

use farflung_base::StageId;
use farflung_comm::Communicator;
use farflung_optim::sync::{METHODS, OnMemberLoss, SyncMethod};
use farflung_parallel::pipeline::{Placement, Updates};

use super::Trainer;
use super::speed::Speedometer;
use crate::train::bound_plan::BoundPlan;
use crate::train::executor::Pass;
use crate::train::job::Job;
use crate::train::part::Part;
use crate::train::plan_start::PlanStart;
use crate::{Error, Result};

impl Trainer {
    /// Checks that the plan and its method of synchronisation allow members to come and leave.
    ///
    /// Errors: [`Error::Setting`] for pipelines whose parts are not all at the same step, and for a method that
    /// cannot continue without a member, with its reason: see [`SyncMethod::on_member_loss`].
    pub(in crate::train) fn check_elastic(&self, job: &Job) -> Result<()> {
        if job.pipelines.is_some() {
            return check_pipelines(&job.plan);
        }
        let method = job.plan.outermost().method;
        if let OnMemberLoss::Unsupported(reason) = method.on_member_loss {
            return Err(refused(method.name, reason));
        }
        // The table allows the method to continue without a member, but replicas that can differ after an
        // average are rejected all the same.
        let apart =
            self.executor.parts.values().any(|p| p.sync.as_ref().is_some_and(|sync| sync.replicas_differ()));
        // A rank that missed an average copies the parameters on which the others agreed, so the method must
        // keep them.
        let agrees = |part: &Part| part.sync.as_ref().is_none_or(|sync| sync.agreed().is_some());
        let forgets = !job.averages_each_step() && !self.executor.parts.values().all(agrees);
        if apart || forgets || method.timed || method.overlaps {
            let reason = "its replicas do not all have the same parameters after an average";
            return Err(refused(method.name, reason));
        }
        Ok(())
    }

    /// Sets where the plan's numbers of steps and microbatches begin.
    pub(in crate::train) const fn begin_at(&mut self, base: PlanStart) {
        self.samples.begin_at(base);
    }

    /// Drops the step in flight, so that the rank is at its last committed step. In pools, what it has computed
    /// of the step may be kept. A step of a pipeline that others may have committed is kept until
    /// [`Trainer::resolve_vote`].
    pub(in crate::train) fn drop_step(&mut self) {
        self.voting = None;
        if self.undecided.is_open() {
            self.executor.sending.clear();
            self.executor.tied.give_up();
            return;
        }
        self.keep_work();
        self.executor.begin(Pass::Evaluation, 0);
        self.executor.sending.clear();
        self.executor.tied.give_up();
        self.executor.boundaries.rollback();
        for part in self.executor.parts.values_mut() {
            if let Some(own) = part.own.take() {
                part.params = own;
            }
            if let Some(sync) = &mut part.sync {
                sync.drop_in_flight();
            }
            part.rollback();
            part.begin();
        }
    }

    /// Trains the local steps up to `step`, after this rank has copied the parameters on which the others last
    /// agreed. The average after these steps is taken later, together with the others.
    ///
    /// Errors: those of a step that is not done.
    pub(in crate::train) fn catch_up(&mut self, step: u64) -> Result<()> {
        while self.step < step {
            let before = self.step;
            match self.step(false) {
                Ok(_) => {}
                // The step is done. Only the average after it failed, as it did on the other ranks.
                Err(_) if self.step > before => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Moves this rank into the run's next plan. Parameters, optimizer and counters are moved unchanged. The
    /// method of synchronisation is made anew and its state restored. Residuals of codecs belong to the blocks
    /// of the old plan: they are dropped, on all ranks.
    ///
    /// Errors: those of [`Trainer::new`], and of the method.
    pub(in crate::train) fn carry_over(&mut self, job: &Job, comm: Communicator) -> Result<()> {
        *self = self.carried(job, comm)?;
        Ok(())
    }

    /// Returns this rank's trainer in the run's next plan, as [`Trainer::carry_over`] does, with the parts of
    /// this one. After an error of [`Trainer::new`] this one still has its parts; after another result it has
    /// none, and must not be used again.
    ///
    /// Errors: as [`Trainer::carry_over`].
    pub(in crate::train) fn carried(&mut self, job: &Job, comm: Communicator) -> Result<Self> {
        self.drop_step();
        let rounds = self.counters().rounds;
        let device = (self.plain.clone(), self.executor.interrupt.clone());
        let mut next = Self::on(job, comm, device, None)?;
        // If microbatches can take several routes through the ranks, a part may have a different stage in the
        // next plan. Parts are therefore matched by their numbers.
        let number = |placement: &Placement, stage: &StageId| placement.part(*stage);
        let by_number = next.executor.placement.clone();
        for (stage, part) in std::mem::take(&mut self.executor.parts) {
            let own = number(&self.executor.placement, &stage);
            let mut parts = next.executor.parts.iter_mut();
            if let Some((_, into)) = parts.find(|(stage, _)| number(&by_number, stage) == own) {
                take_over(into, part, rounds)?;
            }
        }
        next.step = self.step;
        next.scale = self.scale;
        next.window = std::mem::take(&mut self.window);
        next.unmet = self.unmet;
        next.speed = self.speed.take().map(Speedometer::carried).filter(|_| next.speed.is_some());
        next.resync.restart(next.step);
        next.undecided.carry(self.undecided);
        // Pipelines that finish a round may still return to the last average.
        next.mark = self.mark.take().filter(|_| job.pipelines.is_some() && !next.each_step);
        Ok(next)
    }
}

/// Returns the names of the methods that can continue without a member, as a list in words.
fn survivors() -> String {
    let goes_on = |row: &&SyncMethod| row.on_member_loss == OnMemberLoss::MeanOfOthers;
    let names: Vec<&str> = METHODS.iter().filter(goes_on).map(|row| row.name).collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => names.concat(),
    }
}

/// Checks that members of the plan's pipelines can come and leave.
///
/// Errors: [`Error::Setting`] for a method that cannot continue without a member, with its reason, and if the
/// parts of a pipeline are not all at the same step.
pub(in crate::train) fn check_pipelines(plan: &BoundPlan) -> Result<()> {
    let method = plan.outermost().method;
    if let OnMemberLoss::Unsupported(reason) = method.on_member_loss {
        return Err(refused(method.name, reason));
    }
    if plan.updates() != Updates::Flush {
        let expected = "a schedule with a flush: only then are all parts of the model at the same step";
        let (field, value) = ("schedule", plan.pipeline.schedule.to_string());
        return Err(Error::Setting { field, value, expected: expected.to_owned() });
    }
    Ok(())
}

/// Returns the error for a method with which members cannot join and leave, for this reason.
fn refused(method: &str, reason: &str) -> Error {
    let expected = format!("{} in a run whose members may join and leave: {reason}", survivors());
    Error::Setting { field: "sync", value: method.to_owned(), expected }
}

/// Moves the parameters, the optimizer and the state of the method into the same part of the next plan.
/// `rounds` is the number of rounds of averages so far.
fn take_over(into: &mut Part, from: Part, rounds: u64) -> Result<()> {
    let Part { params, chain, sync, .. } = from;
    if let Some(next) = &mut into.sync {
        let agreed = sync.as_ref().and_then(|sync| sync.agreed()).unwrap_or(&params);
        next.on_params_set(agreed)?;
        if let Some(before) = &sync {
            let mut states = std::collections::BTreeMap::new();
            for (name, state) in before.states() {
                states.insert(name.to_owned(), state.to_vec::<f32>()?);
            }
            next.restore(before.steps(), &|name| states.get(name).cloned())?;
            next.average_mut().restore("", rounds, |_| Some(&[]))?;
        }
    }
    into.params = params;
    into.chain = chain;
    Ok(())
}
