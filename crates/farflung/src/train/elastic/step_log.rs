//! What a member keeps for newcomers while it trains: a copy of its state after a certain step, and a record of
//! each step since. With local steps, the copy is of the state after a synchronisation, a record is that of a
//! synchronisation, and the first member also keeps its optimizer after the last one. All of it is among
//! its offered blobs, so newcomers fetch it in the background.

use farflung_base::{Bytes, Nanos};

use super::blobs::OfferedBlobs;
use super::fetch::Sending;
use super::membership_service::MembershipService;
use super::offers::{Growth, LISTED, Logged, Offer};
use super::step_records::StepRecords;
use crate::Result;
use crate::train::fault::{Fault, FaultyValue};
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
    /// How often all replicas have agreed, as of the last record, and the number of steps then.
    last: u64,
    last_step: u64,
    records: Vec<Logged>,
    /// Bytes of all records, and their maximum.
    bytes: u64,
    most: u64,
    /// Whether the records after the copy were dropped.
    begins_later: bool,
}

/// This member's optimizer after a synchronisation.
#[derive(Debug, Clone, Copy)]
struct KeptOptimizer {
    offer: Offer,
    /// Number of synchronisations done then.
    round: u64,
}

/// Number of optimizers that are kept: that after the last synchronisation, and the one before, which a
/// newcomer may still be fetching.
const OPTIMIZERS: usize = 2;

/// The log of this member's steps, if a newcomer needs it.
#[derive(Default)]
pub(super) struct StepLog {
    log: Option<Log>,
    /// This member's optimizers, oldest first.
    optimizers: Vec<KeptOptimizer>,
    /// How often all replicas had agreed at the last look, and the time of that.
    seen: Option<(u64, Nanos)>,
    /// Time of the last step or round.
    every: Option<Nanos>,
    /// Messages being sent to newcomers.
    telling: Vec<Sending>,
    /// Whether newcomers were told of a log.
    pub(super) is_offered: bool,
}

impl StepLog {
    /// Returns whether there is a log.
    pub(super) const fn is_kept(&self) -> bool {
        self.log.is_some()
    }

    /// Starts a log after the last step at which all replicas agreed. A test injects `fault` into the next
    /// chunk that is sent.
    ///
    /// Errors: those of the device.
    pub(super) fn begin(
        &mut self,
        blobs: &mut OfferedBlobs,
        (trainer, job): (&Trainer, &Job),
        fault: Option<Fault>,
    ) -> Result<()> {
        self.drop_log(blobs);
        let (last, step) = (trainer.agreements(), trainer.agreed_step());
        let label = blobs.put(trainer.shared_state(job)?.to_bytes());
        blobs.fault = fault;
        let most = MOST.saturating_mul(label.len).max(LEAST);
        let offer = Offer { step, label };
        self.log = Some(Log {
            offer,
            last,
            last_step: step,
            records: Vec::new(),
            bytes: 0,
            most,
            begins_later: false,
        });
        Ok(())
    }

    /// Records the step that was just done, if all replicas agree after it, and returns the message about it
    /// for newcomers. A log that lacks a step, or is too large, is dropped. Called directly after each step,
    /// even a failed one.
    ///
    /// Errors: those of the device.
    pub(super) fn after_step(
        &mut self,
        blobs: &mut OfferedBlobs,
        now: Nanos,
        (trainer, job): (&Trainer, &Job),
    ) -> Result<Option<Vec<u8>>> {
        let (count, step) = (trainer.agreements(), trainer.agreed_step());
        match self.seen {
            Some((before, _)) if before == count => {}
            // The round has begun before this member has looked.
            None if step != trainer.steps_done() => {}
            seen => {
                let one = seen.filter(|(before, _)| before + 1 == count);
                self.every = one.map(|(_, at)| now.saturating_sub(at));
                self.seen = Some((count, now));
            }
        }
        let Some(log) = self.log.as_mut().filter(|log| log.last + 1 == count) else {
            self.check(blobs, trainer);
            return Ok(None);
        };
        let rank = trainer.comm().rank().0;
        let fault = job.fault.filter(|fault| fault.is_in(rank, step, FaultyValue::Record));
        let mut record = trainer.record(job)?;
        if let Some(fault) = fault {
            record.inject_fault(fault);
        }
        let label = blobs.put(record.to_bytes());
        log.records.push(Logged { after: log.last_step, step, label });
        (log.last, log.last_step, log.bytes) = (count, step, log.bytes + label.len);
        if log.bytes > log.most {
            let bytes = Bytes(log.bytes);
            tracing::info!("no newcomer has caught up within {bytes} of recorded steps: they are dropped");
            self.drop_log(blobs);
            return Ok(None);
        }
        let newest = log.records.len().saturating_sub(LISTED);
        Ok(Some(MembershipService::logging(&log.records[newest..])))
    }

    /// Drops the records of the steps up to `step`, which all that follow have replayed. Another that asks for
    /// the copy then needs a new log.
    pub(super) fn forget(&mut self, blobs: &mut OfferedBlobs, step: u64) {
        let Some(log) = &mut self.log else { return };
        let old = log.records.iter().take_while(|logged| logged.step <= step).count();
        for logged in log.records.drain(..old) {
            blobs.remove(&logged.label);
            log.bytes -= logged.label.len;
            log.begins_later = true;
        }
    }

    /// Returns whether the records do not begin after the copy of the state.
    pub(super) fn begins_later(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.begins_later)
    }

    /// Drops the log if it lacks a step: this rank has received a later state from another member.
    pub(super) fn check(&mut self, blobs: &mut OfferedBlobs, trainer: &Trainer) {
        if self.log.as_ref().is_some_and(|log| log.last != trainer.agreements()) {
            self.drop_log(blobs);
        }
    }

    /// Returns the messages for newcomers that ask for a copy of the state; none without a log.
    pub(super) fn offers(&self, trainer: &Trainer) -> Vec<Vec<u8>> {
        let Some(log) = &self.log else { return Vec::new() };
        let growth = Growth { bytes: trainer.record_bytes(), every: self.every };
        let mut words =
            vec![MembershipService::offering(log.offer, growth), MembershipService::logging(&log.records)];
        words.extend(self.optimizers.last().map(|kept| MembershipService::offering_optimizer(kept.offer)));
        words
    }

    /// Keeps this member's optimizer after the last synchronisation, if steps are local and a copy of it
    /// exists. Returns the message about it for newcomers, once after each synchronisation.
    ///
    /// Errors: those of the device.
    pub(super) fn keep_optimizer(
        &mut self,
        blobs: &mut OfferedBlobs,
        trainer: &Trainer,
    ) -> Result<Option<Vec<u8>>> {
        let round = trainer.agreements();
        if self.optimizers.last().is_some_and(|kept| kept.round == round) {
            return Ok(None);
        }
        let Some(optimizer) = trainer.marked_optimizer()? else { return Ok(None) };
        let offer = Offer { step: trainer.agreed_step(), label: blobs.put(optimizer.to_bytes()) };
        self.optimizers.push(KeptOptimizer { offer, round });
        if self.optimizers.len() > OPTIMIZERS {
            let old = self.optimizers.remove(0).offer.label;
            if self.optimizers.iter().all(|kept| kept.offer.label != old) {
                blobs.remove(&old);
            }
        }
        Ok(Some(MembershipService::offering_optimizer(offer)))
    }

    /// Drops the optimizers, because there is no newcomer.
    pub(super) fn drop_optimizers(&mut self, blobs: &mut OfferedBlobs) {
        for kept in self.optimizers.drain(..) {
            blobs.remove(&kept.offer.label);
        }
    }

    /// Returns what newcomers may receive from this member in a change of members: the records of its steps,
    /// and its optimizer after the synchronisation before the last one.
    pub(super) fn lend(&self, blobs: &OfferedBlobs, trainer: &Trainer) -> StepRecords {
        let before = self.optimizers.iter().find(|kept| kept.round + 1 == trainer.agreements());
        let records = self.log.as_ref().map_or(&[][..], |log| &log.records);
        StepRecords::new(records, before.map(|kept| kept.offer.label), blobs)
    }

    /// Keeps messages until they are sent.
    pub(super) fn sends(&mut self, telling: Vec<Sending>) {
        self.telling.retain(|telling| !telling.is_ready());
        self.telling.extend(telling);
    }

    /// Drops the copy and the records.
    pub(super) fn drop_log(&mut self, blobs: &mut OfferedBlobs) {
        let Some(log) = self.log.take() else { return };
        let records = log.records.iter().map(|logged| logged.label);
        records.chain([log.offer.label]).for_each(|label| blobs.remove(&label));
    }
}
