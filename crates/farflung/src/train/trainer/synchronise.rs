//! Local steps of a replica, and its synchronisations with the others, at which they average parameters or
//! changes.

use farflung_base::StageId;
use farflung_optim::OptimError;
use farflung_optim::sync::StepEnd;
use farflung_parallel::step::{Moment, StepOp};

use super::agree::{Request, SyncVote, Voting};
use super::{StepDone, Synced, Trainer};
use crate::Result;
use crate::train::executor::Executor;
use crate::train::fault::FaultyValue;
use crate::train::part::Part;
use crate::train::spent::add_since;

impl Trainer {
    /// Ends a local step with mean loss `loss`: applies what other replicas sent, and averages over all
    /// replicas if that is due after this step.
    pub(super) fn local_step(&mut self, loss: f64, stop: bool) -> Result<StepDone> {
        let begun = self.executor.comm.now();
        let done = self.synchronise_where_due(loss, stop);
        let Executor { comm, spent, .. } = &mut self.executor;
        add_since(begun, comm, &mut spent.communicate);
        done
    }

    fn synchronise_where_due(&mut self, loss: f64, stop: bool) -> Result<StepDone> {
        self.window.push(loss);
        let (step, last) = (self.step, self.step == self.steps);
        let after = StepEnd { step, last };
        let weight = self.weight_since(after)?;
        for &op in self.list.at(Moment::Mix) {
            if let StepOp::Mix(stage) = op {
                let part = self.executor.part(stage);
                part.sync.as_mut().map_or(Ok(()), |sync| sync.mix(&mut part.params, after, weight))?;
            }
        }
        let due = self.executor.parts.values().any(|p| p.sync.as_ref().is_some_and(|s| s.is_due(after)));
        // A single replica without a method of synchronisation is synchronised after each step.
        let alone = self.replicas == 1 && self.executor.parts.values().all(|p| p.sync.is_none());
        if due || alone {
            return self.synchronise_now(stop);
        }
        self.start_exchanges(after, stop)?;
        Ok(StepDone::local(step, loss))
    }

    /// Averages over all replicas after the step that was done. If this fails, the next call of
    /// [`Trainer::step`] repeats only the average: local steps are not repeated.
    pub(super) fn synchronise_now(&mut self, stop: bool) -> Result<StepDone> {
        let window = self.window.clone();
        let met = self.synchronise_after_step(stop);
        self.unmet = met.is_err();
        if self.unmet {
            self.window = window;
        }
        met
    }

    fn synchronise_after_step(&mut self, stop: bool) -> Result<StepDone> {
        let (step, last) = (self.step, self.step == self.steps);
        let after = StepEnd { step, last };
        // A vote that was started together with an exchange is completed together with it.
        let mut meeting = Meeting { voting: self.voting.take(), found: None };
        self.meet(after, stop, &mut meeting)?;
        while self.commit_exchanged()? {
            self.meet(after, stop, &mut meeting)?;
        }
        let mut vote = meeting.found.expect("replicas vote where they meet");
        self.tell_speeds(&vote.speeds);
        self.start_exchanges(after, stop)?;
        if last {
            vote.losses.extend(self.tell_losses()?);
        }
        Ok(StepDone {
            step,
            loss: vote.losses.last().copied().unwrap_or(f64::NAN),
            losses: vote.losses,
            synced: Synced::Yes,
            stop: vote.requests.has(Request::Stop),
            change: vote.requests.has(Request::Change),
            drift: None,
            skipped: 0,
            experts: Vec::new(),
        })
    }

    /// Returns this replica's weight in a mean over the tokens of the period that ends after a step, where 1 is
    /// an equal share.
    fn weight_since(&self, after: StepEnd) -> Result<f64> {
        // A run may end within a period.
        let over = if after.last { (after.step - 1) % self.every + 1 } else { self.every };
        self.samples.weight(after.step.saturating_sub(over)..after.step)
    }

    /// Averages over all replicas, without changing the parameters, and votes unless that is done. If either
    /// fails, the average is rolled back and nothing has changed, unless others may have applied the average.
    fn meet(&mut self, after: StepEnd, stop: bool, meeting: &mut Meeting) -> Result<()> {
        let weight = self.weight_since(after)?;
        let (mut refused, mut averaged) = (None, false);
        let ops = self.list.at(Moment::Meet).to_vec();
        let met = ops.into_iter().try_for_each(|op| match op {
            StepOp::StartVote(_) if meeting.voting.is_none() && meeting.found.is_none() => {
                meeting.voting = Some(self.vote_on_window(stop)?);
                Ok(())
            }
            StepOp::FinishVote(_) => {
                if let Some(voting) = meeting.voting.take() {
                    meeting.found = Some(voting.wait()?);
                }
                Ok(())
            }
            StepOp::Exchange(stage) => self.exchange(stage, (after, weight), &mut refused),
            StepOp::TakeExchanged => self.take_exchanged(),
            StepOp::Prepare(stage) => {
                if !std::mem::replace(&mut averaged, true) {
                    self.inject_fault(FaultyValue::Reduced, self.step)?;
                }
                let part = self.executor.parts.get_mut(&stage);
                if let (None, Some(sync)) = (&refused, part.and_then(|part| part.sync.as_mut())) {
                    refused = sync.prepare().err();
                }
                Ok(())
            }
            StepOp::Agree => self.agree_to_apply(refused.take()),
            // The caller applies the averages.
            _ => Ok(()),
        });
        let met = met.and_then(|()| refused.map_or(Ok(()), |error| Err(error.into())));
        // If others may have applied the average, `Trainer::resolve_average` decides.
        if met.is_err() && !self.undecided.is_average_open() {
            self.executor.parts.values_mut().for_each(Part::rollback);
        }
        met
    }

    /// Commits the exchanged averages. Returns whether replicas meet once more after this step; the result is
    /// the same on all replicas.
    pub(super) fn commit_exchanged(&mut self) -> Result<bool> {
        self.undecided.begin();
        let mut goes_on = false;
        for &op in self.list.at(Moment::Meet) {
            let StepOp::Apply(stage) = op else { continue };
            let part = self.executor.part(stage);
            if let Some(sync) = &mut part.sync {
                sync.commit_accumulated(&mut part.params, &mut part.chain)?;
                goes_on |= sync.needs_another_exchange();
            }
        }
        Ok(goes_on)
    }

    /// Starts exchanges whose results are applied in later steps, and with them the vote on the steps so far.
    /// Both have the time of the next steps to complete.
    fn start_exchanges(&mut self, after: StepEnd, stop: bool) -> Result<()> {
        let (weight, mut departs) = (self.weight_since(after)?, false);
        for &op in self.list.at(Moment::Depart) {
            let StepOp::Depart(stage) = op else { continue };
            let part = self.executor.part(stage);
            if let Some(sync) = &mut part.sync {
                departs |= sync.start_exchanges(&part.params, after, weight)?;
            }
        }
        if departs {
            self.voting = Some(self.vote_on_window(stop)?);
        }
        Ok(())
    }

    /// Returns the mean losses over all replicas of the steps that no [`StepDone`] has reported: those since
    /// replicas last met, or since their last vote was started. A collective: all ranks must call it.
    pub(in crate::train) fn tell_losses(&mut self) -> Result<Vec<f64>> {
        let mut losses = match self.voting.take() {
            Some(voting) => voting.wait()?.losses,
            None => Vec::new(),
        };
        if !self.each_step && !self.window.is_empty() {
            losses.extend(self.vote_on_window(false)?.wait()?.losses);
        }
        Ok(losses)
    }

    /// Averages a part over its holders.
    ///
    /// Errors: those of the network. Any other is kept in `refused`: all holders of the part get it, but those
    /// of other parts continue, so this rank must continue with the collectives that it shares with them.
    fn exchange(
        &mut self,
        stage: StageId,
        (after, weight): (StepEnd, f64),
        refused: &mut Option<OptimError>,
    ) -> Result<()> {
        match self.executor.part(stage).exchange(after, weight) {
            None | Some(Ok(())) => {}
            Some(Err(error @ OptimError::Comm(_))) => return Err(error.into()),
            Some(Err(error)) => *refused = refused.take().or(Some(error)),
        }
        Ok(())
    }

    /// The first and the last part both use the token table and must take the same step, but codecs may have
    /// rounded their averages differently: both take the first part's.
    fn take_exchanged(&mut self) -> Result<()> {
        let Executor { parts, placement, tied, .. } = &mut self.executor;
        tied.take_first(parts, placement, |part| part.sync.as_mut().and_then(|sync| sync.exchanged()))?;
        let beside = |part: &mut Part| part.sync.as_mut().map_or(0, |sync| sync.exchanged_beside().len());
        let others = parts.values_mut().map(beside).max().unwrap_or(0);
        for number in 0..others {
            tied.take_first(parts, placement, |part| {
                part.sync.as_mut().and_then(|sync| sync.exchanged_beside().into_iter().nth(number))
            })?;
        }
        Ok(())
    }

    /// Tells all ranks whether this one can apply the average, and learns whether all can.
    ///
    /// Errors: on all ranks together if the next values of any part would not be finite.
    fn agree_to_apply(&mut self, refused: Option<OptimError>) -> Result<()> {
        let mut refusals = [f64::from(u8::from(refused.is_some()))];
        if refused.is_none() {
            // From here on others may apply the average, whether or not this rank receives the sum.
            self.undecided.can_average();
        }
        self.executor.comm.all_reduce(&mut refusals, farflung_comm::ReduceOp::Sum)?;
        let elsewhere = refusals[0] > 0.0;
        if elsewhere {
            self.undecided.begin();
        }
        match refused {
            Some(error) => Err(error.into()),
            None if elsewhere => {
                Err(OptimError::StepNotFinite { name: "parameters on another rank".to_owned() }.into())
            }
            None => Ok(()),
        }
    }
}

/// The vote of replicas that meet.
#[derive(Debug)]
struct Meeting {
    voting: Option<Voting<SyncVote>>,
    found: Option<SyncVote>,
}
