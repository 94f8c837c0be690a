//! What a member keeps for newcomers while it trains: a copy of its state after a certain step, and a record of
//! each step since. Both are on its shelf, so newcomers fetch them in the background.

use std::sync::Arc;

use farflung_base::{Bytes, Nanos, PeerId, Pending};
use farflung_comm::CommError;
use farflung_parallel::membership::MemberId;

use super::keeper::Keeper;
use super::offers::{Growth, LISTED, Logged, Offer};
use super::place::Place;
use super::ready::Follows;
use super::shelf::{Blob, Shelf};
use crate::Result;
use crate::train::fault::FaultyValue;
use crate::train::job::Job;
use crate::train::trainer::Trainer;

/// The records may have this many times the bytes of the state. A newcomer whose links carry records in two
/// thirds of a step's time catches up within that, if the optimizer keeps two values for each parameter.
const MOST: u64 = 2;
/// Bytes of records that are always kept, however small the state is: steps of small models are short.
const LEAST: u64 = 64 << 20;

/// A copy of the state, and the records of the steps since.
struct Log {
    offer: Offer,
    /// The last step that is recorded.
    last: u64,
    records: Vec<Logged>,
    /// Bytes of all records, and their maximum.
    bytes: u64,
    most: u64,
}

/// The log of this member's steps, if a newcomer needs it.
#[derive(Default)]
pub(super) struct StepLog {
    log: Option<Log>,
    /// Number of steps done at the last look, and the time of that.
    seen: Option<(u64, Nanos)>,
    /// Time of the last step.
    every: Option<Nanos>,
    /// Messages being sent to newcomers.
    telling: Vec<Pending<std::result::Result<(), CommError>>>,
}

impl StepLog {
    /// Returns whether there is a log.
    pub(super) const fn is_kept(&self) -> bool {
        self.log.is_some()
    }

    /// Starts a log after the steps that the trainer has done.
    ///
    /// Errors: those of the device.
    pub(super) fn begin(&mut self, place: &mut Place, trainer: &Trainer, spoils: bool) -> Result<()> {
        self.drop_log(place);
        let step = trainer.steps_done();
        let bytes = trainer.shared_snapshot()?.to_bytes();
        let mut shelf = place.shelf();
        let label = shelf.put(bytes);
        shelf.spoils = spoils;
        drop(shelf);
        let most = MOST.saturating_mul(label.len).max(LEAST);
        let offer = Offer { step, label };
        self.log = Some(Log { offer, last: step, records: Vec::new(), bytes: 0, most });
        self.look(place, trainer);
        Ok(())
    }

    /// Records the step that was just done, and tells newcomers of it. A log that lacks a step, or is too large,
    /// is dropped. Called directly after each step, even a failed one.
    ///
    /// Errors: those of the device.
    pub(super) fn after_step(&mut self, place: &mut Place, trainer: &Trainer, job: &Job) -> Result<()> {
        let (step, now) = (trainer.steps_done(), place.transport().now());
        if let Some((before, at)) = self.seen.filter(|(before, _)| *before != step) {
            self.every = (before + 1 == step).then(|| now.saturating_sub(at));
        }
        if self.seen.is_none_or(|(before, _)| before != step) {
            self.seen = Some((step, now));
        }
        let Some(log) = self.log.as_mut().filter(|log| log.last + 1 == step) else {
            self.check(place, trainer);
            return Ok(());
        };
        let mut record = trainer.step_record()?;
        let rank = trainer.comm().rank().0;
        if let Some(fault) = job.fault.filter(|fault| fault.is_in(rank, step, FaultyValue::Record)) {
            record.suffer(fault);
        }
        let label = place.shelf().put(record.to_bytes());
        log.records.push(Logged { step, label });
        (log.last, log.bytes) = (step, log.bytes + label.len);
        if log.bytes > log.most {
            tracing::info!(
                "no newcomer has caught up within {} of recorded steps: they are dropped",
                Bytes(log.bytes)
            );
            self.drop_log(place);
            return Ok(());
        }
        let words = Keeper::logging(log.newest());
        let followers: Vec<_> = place.followers().into_iter().map(|(peer, id, _)| (peer, id)).collect();
        self.tell(place, &followers, &words);
        Ok(())
    }

    /// Drops the log if it lacks a step: this rank has received a later state from another member.
    pub(super) fn check(&mut self, place: &Place, trainer: &Trainer) {
        if self.log.as_ref().is_some_and(|log| log.last != trainer.steps_done()) {
            self.drop_log(place);
        }
    }

    /// Offers the copy to newcomers that ask for one, and drops the log if no newcomer needs it. Called between
    /// two steps.
    pub(super) fn look(&mut self, place: &mut Place, trainer: &Trainer) {
        self.check(place, trainer);
        self.telling.retain(|telling| !telling.is_ready());
        let Some(log) = &self.log else { return };
        let followers = place.followers();
        if followers.is_empty() {
            self.drop_log(place);
            return;
        }
        let asking = followers.into_iter().filter(|(.., follows)| *follows == Follows::Asks);
        let asking: Vec<_> = asking.map(|(peer, id, _)| (peer, id)).collect();
        let growth = Growth { bytes: trainer.record_bytes(), every: self.every };
        let (offer, records) = (Keeper::offering(log.offer, growth), Keeper::logging(&log.records));
        self.tell(place, &asking, &offer);
        self.tell(place, &asking, &records);
    }

    fn tell(&mut self, place: &Place, whom: &[(PeerId, MemberId)], words: &[u8]) {
        self.telling.extend(place.tell_others(whom, words));
    }

    fn drop_log(&mut self, place: &Place) {
        if self.log.take().is_some() {
            place.shelf().clear();
        }
    }

    /// Returns the records of this member's steps.
    pub(super) fn records(&self) -> &[Logged] {
        self.log.as_ref().map_or(&[], |log| &log.records)
    }
}

impl Log {
    fn newest(&self) -> &[Logged] {
        &self.records[self.records.len().saturating_sub(LISTED)..]
    }
}

/// Records of steps that a member can send to others, with their bytes.
#[derive(Debug, Default)]
pub(super) struct Lent(Vec<(Logged, Arc<Blob>)>);

impl Lent {
    /// Takes the records that are on a shelf.
    pub(super) fn new(records: &[Logged], shelf: &Shelf) -> Self {
        let lend = |&logged: &Logged| Some((logged, shelf.lend(&logged.label)?));
        Self(records.iter().filter_map(lend).collect())
    }

    /// Returns the records.
    pub(super) fn records(&self) -> Vec<Logged> {
        self.0.iter().map(|(logged, _)| *logged).collect()
    }

    /// Puts the records on another shelf.
    pub(super) fn put_on(self, shelf: &mut Shelf) {
        for (logged, blob) in self.0 {
            shelf.borrow(&logged.label, blob);
        }
    }
}
