//! What a member keeps for newcomers while it trains: a copy of its state after a certain step, and a record of
//! each step since. Both are among its offered blobs, so newcomers fetch them in the background.

use farflung_base::{Bytes, Nanos};

use super::blobs::OfferedBlobs;
use super::fetch::Sending;
use super::membership_service::MembershipService;
use super::offers::{Growth, LISTED, Logged, Offer};
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
    telling: Vec<Sending>,
}

impl StepLog {
    /// Returns whether there is a log.
    pub(super) const fn is_kept(&self) -> bool {
        self.log.is_some()
    }

    /// Starts a log after the steps that the trainer has done.
    ///
    /// Errors: those of the device.
    pub(super) fn begin(&mut self, blobs: &mut OfferedBlobs, trainer: &Trainer, spoils: bool) -> Result<()> {
        self.drop_log(blobs);
        let step = trainer.steps_done();
        let label = blobs.put(trainer.shared_snapshot()?.to_bytes());
        blobs.spoils = spoils;
        let most = MOST.saturating_mul(label.len).max(LEAST);
        let offer = Offer { step, label };
        self.log = Some(Log { offer, last: step, records: Vec::new(), bytes: 0, most });
        Ok(())
    }

    /// Records the step that was just done, and returns the message about it for newcomers. A log that lacks a
    /// step, or is too large, is dropped. Called directly after each step, even a failed one.
    ///
    /// Errors: those of the device.
    pub(super) fn after_step(
        &mut self,
        blobs: &mut OfferedBlobs,
        now: Nanos,
        (trainer, job): (&Trainer, &Job),
    ) -> Result<Option<Vec<u8>>> {
        let step = trainer.steps_done();
        match self.seen {
            Some((before, _)) if before == step => {}
            seen => {
                let one = seen.filter(|(before, _)| before + 1 == step);
                self.every = one.map(|(_, at)| now.saturating_sub(at));
                self.seen = Some((step, now));
            }
        }
        let Some(log) = self.log.as_mut().filter(|log| log.last + 1 == step) else {
            self.check(blobs, trainer);
            return Ok(None);
        };
        let mut record = trainer.step_record()?;
        let rank = trainer.comm().rank().0;
        if let Some(fault) = job.fault.filter(|fault| fault.is_in(rank, step, FaultyValue::Record)) {
            record.inject_fault(fault);
        }
        let label = blobs.put(record.to_bytes());
        log.records.push(Logged { step, label });
        (log.last, log.bytes) = (step, log.bytes + label.len);
        if log.bytes > log.most {
            let bytes = Bytes(log.bytes);
            tracing::info!("no newcomer has caught up within {bytes} of recorded steps: they are dropped");
            self.drop_log(blobs);
            return Ok(None);
        }
        let newest = log.records.len().saturating_sub(LISTED);
        Ok(Some(MembershipService::logging(&log.records[newest..])))
    }

    /// Drops the log if it lacks a step: this rank has received a later state from another member.
    pub(super) fn check(&mut self, blobs: &mut OfferedBlobs, trainer: &Trainer) {
        if self.log.as_ref().is_some_and(|log| log.last != trainer.steps_done()) {
            self.drop_log(blobs);
        }
    }

    /// Returns the messages for newcomers that ask for a copy of the state; none without a log.
    pub(super) fn offers(&self, trainer: &Trainer) -> Vec<Vec<u8>> {
        let Some(log) = &self.log else { return Vec::new() };
        let growth = Growth { bytes: trainer.record_bytes(), every: self.every };
        vec![MembershipService::offering(log.offer, growth), MembershipService::logging(&log.records)]
    }

    /// Keeps messages until they are sent.
    pub(super) fn sends(&mut self, telling: Vec<Sending>) {
        self.telling.retain(|telling| !telling.is_ready());
        self.telling.extend(telling);
    }

    /// Drops the copy and the records.
    pub(super) fn drop_log(&mut self, blobs: &mut OfferedBlobs) {
        if self.log.take().is_some() {
            blobs.clear();
        }
    }

    /// Returns the records of this member's steps.
    pub(super) fn records(&self) -> &[Logged] {
        self.log.as_ref().map_or(&[], |log| &log.records)
    }
}
