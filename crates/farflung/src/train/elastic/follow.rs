//! A newcomer that takes the run's state while the members train on: what it fetches next, and the replay of
//! the steps since. It has no clock and no network of its own (`waiting.rs` has).

use farflung_base::{Bytes, Nanos};
use farflung_comm::Communicator;
use farflung_parallel::plan::Replica;

use super::blobs::Label;
use super::fetching::ChunkStore;
use super::offers::{Growth, Logged, Offer, Offered, Offers};
use super::ready::{FollowProgress, Ready};
use crate::train::job::Job;
use crate::train::links;
use crate::train::trainer::{Snapshot, Trainer};
use crate::{Error, Result};

/// A member is asked for at most this part of the rate that it was measured to send at while all members sent.
/// The rest of its uplink is left for the steps.
pub(super) const SHARE: f64 = 0.5;
/// Time to wait for the offers of other members after the first one.
const OTHERS: Nanos = Nanos::from_millis(100);
/// Number of copies of the state that may be lost on the way before the newcomer takes it while all wait.
const TRIES: u32 = 3;
/// Number of times in a row that the steps to replay may have become more before the newcomer gives up.
const MAX_LAPS: u32 = 2;

/// The state of a run on a rank that is not a member yet.
pub(super) struct Followed {
    trainer: Trainer,
    /// Counters after the last step, as the members have them.
    counters: Snapshot,
}

impl std::fmt::Debug for Followed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Followed({})", self.step())
    }
}

impl Followed {
    /// Returns the number of steps done.
    pub(super) const fn step(&self) -> u64 {
        self.trainer.steps_done()
    }

    /// Replays the next step from its record.
    ///
    /// Errors: [`Error::Message`] for bytes that are not the record of that step.
    pub(super) fn replay(&mut self, bytes: &[u8]) -> Result<()> {
        let record = Snapshot::from_bytes(bytes).ok_or_else(|| wrong("does not read as one"))?;
        self.trainer.replay(&record)?;
        self.counters = record.without_values();
        Ok(())
    }

    /// Returns the state as a member would send it.
    ///
    /// Errors: those of the device.
    pub(super) fn snapshot(&self) -> Result<Snapshot> {
        Ok(self.trainer.shared_snapshot()?.counted_as(&self.counters))
    }
}

fn wrong(problem: &'static str) -> Error {
    Error::Message { message: "the record of a step".to_owned(), problem }
}

/// The rank that replays steps: alone, with the settings of the run.
pub(super) struct Replayer<'a> {
    pub(super) job: &'a Job,
    /// Contains this rank only.
    pub(super) comm: &'a Communicator,
    pub(super) slot: u32,
    pub(super) threads: usize,
    pub(super) simulated: bool,
}

impl Replayer<'_> {
    fn with(&self, snapshot: &Snapshot) -> Result<Followed> {
        let each = self.job.plan.microbatches.first().copied().unwrap_or(1);
        let machines = vec![format!("member.{}", self.slot)];
        let plan = self.job.plan.with_replicas(&[Replica::New { machines, microbatches: each }])?;
        let job = Job { failure: None, departure: None, fault: None, ..self.job.with_plan(plan)? };
        let comm = links::view_communicator(&job, job.stop.with_stop(self.comm.clone()), self.simulated)?;
        let mut trainer = Trainer::new(&job, comm, self.threads)?;
        trainer.take_snapshot(snapshot, None)?;
        Ok(Followed { trainer, counters: snapshot.without_values() })
    }
}

/// Progress of a newcomer.
#[derive(Debug)]
enum Phase {
    /// Waits for an offer. Has the time at which the first one came.
    Asks(Option<Nanos>),
    /// Fetches a copy of the state.
    Fetches(Offer),
    /// Replays steps: those that are being fetched.
    Replays(Vec<Logged>),
    /// Takes the state while all wait.
    Gave(FollowProgress),
}

/// A newcomer that follows the run.
pub(super) struct Follower<'a> {
    replayer: Replayer<'a>,
    phase: Phase,
    /// Chunks received so far.
    pub(super) store: ChunkStore,
    followed: Option<Followed>,
    tries: u32,
    /// Number of steps that were to be replayed last, and how often it has grown since.
    lap: (u64, u32),
}

/// A blob to be fetched, and the members that have it.
pub(super) type Want = Offered<Label>;

impl<'a> Follower<'a> {
    /// Creates a newcomer that follows; `alone` is where it replays steps.
    pub(super) fn new(alone: Replayer<'a>) -> Self {
        let (phase, store) = (Phase::Asks(None), ChunkStore::default());
        Self { replayer: alone, phase, store, followed: None, tries: 0, lap: (u64::MAX, 0) }
    }

    /// Returns the state that it has, once it is a member.
    pub(super) fn into_followed(self) -> Option<Followed> {
        self.followed
    }

    /// Returns what it says to the members. `left` is the number of bytes of the copy still to be received.
    pub(super) fn says(&self, offers: &Offers, left: u64) -> FollowProgress {
        match (&self.phase, &self.followed) {
            (Phase::Asks(_), _) | (Phase::Replays(_), None) => FollowProgress::Asks,
            (Phase::Fetches(Offer { step, label }), _) => {
                FollowProgress::Fetches { step: *step, got: label.len.saturating_sub(left), of: label.len }
            }
            (Phase::Replays(lap), Some(followed)) => {
                let (step, newest) = (followed.step(), offers.newest().unwrap_or(0));
                // One step is always under way while the newest one is being fetched.
                if lap.len() <= 1 && newest <= step + 1 {
                    FollowProgress::Stands { step }
                } else {
                    FollowProgress::Replays { step, newest }
                }
            }
            (Phase::Gave(follows), _) => *follows,
        }
    }

    /// Returns what to fetch next; empty if nothing is offered. `rates` has the measured rates.
    pub(super) fn next(&mut self, offers: &Offers, ready: &Ready, now: Nanos) -> Vec<Want> {
        match &mut self.phase {
            Phase::Asks(since) => {
                let Some(best) = offers.best() else { return Vec::new() };
                let growth = offers.growth();
                if let Some(growth) = growth.filter(|&growth| !keeps_up(growth, ready.sum())) {
                    tracing::info!(
                        "the members' links to this one do not carry {} in the time of a step",
                        Bytes(growth.bytes)
                    );
                    self.phase = Phase::Gave(FollowProgress::TooSlow);
                    return Vec::new();
                }
                if now < since.get_or_insert(now).saturating_add(OTHERS) {
                    return Vec::new();
                }
                self.phase = Phase::Fetches(best.what);
                vec![Offered { what: best.what.label, holders: best.holders }]
            }
            Phase::Fetches(offer) => {
                let offer = *offer;
                let Some(best) = offers.best().filter(|best| best.what == offer) else {
                    self.lost();
                    return Vec::new();
                };
                vec![Offered { what: offer.label, holders: best.holders }]
            }
            Phase::Replays(lap) => {
                let Some(step) = self.followed.as_ref().map(Followed::step) else { return Vec::new() };
                let records = offers.after(step);
                *lap = records.iter().map(|record| record.what).collect();
                let count = lap.len() as u64;
                if count == 0 && offers.newest().is_some_and(|newest| newest > step + 1) {
                    // The record of the next step is not offered any more.
                    self.lost();
                    return Vec::new();
                }
                if count > 0 {
                    let grown = if count > 1 && count >= self.lap.0 { self.lap.1 + 1 } else { 0 };
                    self.lap = (count, grown);
                    if grown >= MAX_LAPS {
                        self.phase = Phase::Gave(FollowProgress::TooSlow);
                        return Vec::new();
                    }
                }
                records.into_iter().map(|r| Offered { what: r.what.label, holders: r.holders }).collect()
            }
            Phase::Gave(_) => Vec::new(),
        }
    }

    /// Takes what was fetched, all of what [`Follower::next`] returned.
    ///
    /// Errors: those of the device.
    pub(super) fn fetched(&mut self) -> Result<()> {
        match &mut self.phase {
            Phase::Fetches(offer) => {
                let (step, bytes) = (offer.step, self.store.take(&offer.label));
                let snapshot = bytes.and_then(|bytes| Snapshot::from_bytes(&bytes));
                let Some(snapshot) = snapshot.filter(|snapshot| snapshot.step() == step) else {
                    tracing::error!(step, "the copy of the state does not read as one");
                    self.lost();
                    return Ok(());
                };
                self.followed = Some(self.replayer.with(&snapshot)?);
                self.phase = Phase::Replays(Vec::new());
            }
            Phase::Replays(lap) => {
                for logged in std::mem::take(lap) {
                    let bytes = self.store.take(&logged.label);
                    let Some((followed, bytes)) = self.followed.as_mut().zip(bytes) else { break };
                    followed.replay(&bytes)?;
                }
            }
            Phase::Asks(_) | Phase::Gave(_) => {}
        }
        Ok(())
    }

    /// Notes that what it was fetching is not offered any more. It asks for another copy, a few times.
    pub(super) fn lost(&mut self) {
        self.tries += 1;
        self.lap = (u64::MAX, 0);
        self.followed = None;
        self.phase =
            if self.tries >= TRIES { Phase::Gave(FollowProgress::TooSlow) } else { Phase::Asks(None) };
    }

    /// Returns whether it needs the members' copies of the state anew.
    pub(super) const fn asks(&self) -> bool {
        matches!(self.phase, Phase::Asks(None))
    }
}

/// Returns whether records arrive faster than they grow, as far as both are known. `rate` is that of all
/// members together, in bytes a second.
fn keeps_up(growth: Growth, rate: u64) -> bool {
    let Some(every) = growth.every.filter(|_| rate > 0) else { return true };
    (growth.bytes as f64) < SHARE * rate as f64 * every.as_secs_f64()
}
