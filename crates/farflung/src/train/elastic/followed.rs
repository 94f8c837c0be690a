//! The state of a run on a process that is not a member yet: the whole state, or in pipelines the parts of the
//! model that it will hold.

use super::offers::{Offer, Offered, Offers};
use crate::train::trainer::{ReplayedParts, Snapshot, Trainer};
use crate::{Error, Result};

/// The state of a run on a rank that is not a member yet.
pub(super) enum Followed {
    /// The whole state.
    Whole(Box<WholeState>),
    /// Parts of the model.
    Parts(ReplayedParts),
}

/// The whole state of a run.
pub(super) struct WholeState {
    trainer: Trainer,
    /// Counters after the last step, as the members have them.
    counters: Snapshot,
    /// With local steps: number of synchronisations replayed since the optimizer was taken; `None` without it.
    optimizer: Option<u32>,
}

impl std::fmt::Debug for Followed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Followed({})", self.step())
    }
}

impl Followed {
    /// Creates the whole state from a copy, which the trainer has taken.
    pub(super) fn whole(trainer: Trainer, copy: &Snapshot) -> Self {
        Self::Whole(Box::new(WholeState { trainer, counters: copy.without_values(), optimizer: None }))
    }

    /// Returns the number of steps done.
    pub(super) const fn step(&self) -> u64 {
        match self {
            Self::Whole(whole) => whole.step(),
            Self::Parts(parts) => parts.step(),
        }
    }

    /// Replays the next step from its record.
    ///
    /// Errors: [`Error::Message`] for bytes that are not the record of that step.
    pub(super) fn replay(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Whole(whole) => whole.replay(bytes),
            Self::Parts(parts) => parts.replay(bytes),
        }
    }

    /// Takes the optimizer that the first member has after the same synchronisation.
    ///
    /// Errors: [`Error::Message`] for bytes that are not that optimizer.
    pub(super) fn take_optimizer(&mut self, bytes: &[u8]) -> Result<()> {
        let wrong =
            |problem| Error::Message { message: "the optimizer of another member".to_owned(), problem };
        match self {
            Self::Whole(whole) => {
                let optimizer = Snapshot::from_bytes(bytes).ok_or_else(|| wrong("does not read as one"))?;
                whole.trainer.take_optimizer(&optimizer)?;
                whole.optimizer = Some(0);
                Ok(())
            }
            Self::Parts(parts) => parts.take_optimizer(bytes),
        }
    }

    /// Returns the number of synchronisations replayed since the optimizer was taken; `None` without it.
    pub(super) const fn optimizer_age(&self) -> Option<u32> {
        match self {
            Self::Whole(whole) => whole.optimizer,
            Self::Parts(parts) => parts.optimizer(),
        }
    }

    /// Returns the optimizer that is to be fetched, if a member offers it and this newcomer lacks it.
    pub(super) fn lacks_optimizer(&self, offers: &Offers) -> Option<Offered<Offer>> {
        if self.optimizer_age() == Some(0) { None } else { offers.optimizer(self.step()) }
    }

    /// Returns whether the optimizer is that which a newcomer has after the next synchronisation. If no member
    /// offers a newer one, the members have not begun the next round.
    pub(super) fn has_optimizer(&self, each_step: bool, offers: &Offers) -> bool {
        each_step
            || self.optimizer_age().is_some_and(|since| since <= 1) && self.lacks_optimizer(offers).is_none()
    }

    /// Returns the whole state; `None` in pipelines.
    pub(super) fn as_whole(&mut self) -> Option<&mut WholeState> {
        match self {
            Self::Whole(whole) => Some(whole),
            Self::Parts(_) => None,
        }
    }
}

impl WholeState {
    /// Returns the number of steps done.
    pub(super) const fn step(&self) -> u64 {
        self.trainer.steps_done()
    }

    /// Replays the next step, as [`Followed::replay`] does.
    pub(super) fn replay(&mut self, bytes: &[u8]) -> Result<()> {
        let problem = "does not read as one";
        let wrong = || Error::Message { message: "the record of a step".to_owned(), problem };
        let record = Snapshot::from_bytes(bytes).ok_or_else(wrong)?;
        self.trainer.replay(&record)?;
        self.counters = record.without_values();
        self.optimizer = self.optimizer.map(|since| since.saturating_add(1));
        Ok(())
    }

    /// Returns the optimizer's state, without counters.
    ///
    /// Errors: those of the device.
    pub(super) fn optimizer(&self) -> Result<Snapshot> {
        self.trainer.optimizer()
    }

    /// Returns the state as a member would send it.
    ///
    /// Errors: those of the device.
    pub(super) fn snapshot(&self) -> Result<Snapshot> {
        Ok(self.trainer.shared_snapshot()?.counted_as(&self.counters))
    }
}
