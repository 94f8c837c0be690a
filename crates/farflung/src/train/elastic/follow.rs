//! A newcomer that takes the run's state while the members train on: what it fetches next, and the replay of
//! the steps since. With local steps, it takes the state after a synchronisation while the members take their
//! local steps, replays the synchronisations since, and fetches the first member's optimizer. It has no clock
//! and no network of its own (`waiting.rs` has).

use farflung_base::{Bytes, Nanos};
use farflung_comm::Communicator;
use farflung_parallel::plan::Replica;

use super::blobs::Label;
use super::fetching::ChunkStore;
use super::followed::Followed;
use super::offers::{Growth, Logged, Offer, Offered, Offers};
use super::ready::{FollowProgress, Ready};
use crate::Result;
use crate::train::job::Job;
use crate::train::links;
use crate::train::trainer::{PartCopy, ReplayedParts, Snapshot, Trainer};

/// A member is asked for at most this part of the rate that it was measured to send at while all members sent.
/// The rest of its uplink is left for the steps.
pub(super) const SHARE: f64 = 0.5;
/// Time to wait for the offers of other members after the first one.
const OTHERS: Nanos = Nanos::from_millis(100);
/// Number of failed attempts to fetch a copy of the state after which the newcomer takes it while all wait.
const TRIES: u32 = 3;
/// Number of steps whose records are fetched at a time.
const LAP: usize = 64;
/// The newcomer gives up following if the number of steps to replay has not fallen below its least so far this
/// many times in a row.
const MAX_LAPS: u32 = 4;
/// The newcomer gives up following if more rounds than this have ended before it had the optimizer.
const MAX_LATE: u32 = 2;
/// A newcomer that is behind by less than this time, and whose links carry the records in it, is ready. Steps
/// may be so short that it is never behind by one only.
const NEAR: Nanos = Nanos::from_millis(50);

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
    /// Takes a copy of the state after `step` steps. `None` for bytes that are not one.
    ///
    /// Errors: those of the device, and of the model for the layers of another one.
    fn take(&self, bytes: &[u8], step: u64) -> Result<Option<Followed>> {
        if self.job.pipelines.is_some() {
            let copy = PartCopy::from_bytes(bytes).filter(|copy| copy.step() == step);
            let parts = |copy| {
                let device = self.job.device(0, self.threads)?;
                ReplayedParts::new((self.job, self.comm), &device, &copy)
            };
            return Ok(copy.map(parts).transpose()?.map(Followed::Parts));
        }
        let snapshot = Snapshot::from_bytes(bytes).filter(|snapshot| snapshot.step() == step);
        snapshot.map(|snapshot| self.with(&snapshot)).transpose()
    }

    fn with(&self, snapshot: &Snapshot) -> Result<Followed> {
        let each = self.job.plan.microbatches.first().copied().unwrap_or(1);
        let machines = vec![format!("member.{}", self.slot)];
        let plan = self.job.plan.with_replicas(&[Replica::New { machines, microbatches: each }])?;
        let job = Job { failure: None, departure: None, fault: None, ..self.job.with_plan(plan)? };
        let comm = links::view_communicator(&job, job.stop.with_stop(self.comm.clone()), self.simulated)?;
        let mut trainer = Trainer::new(&job, comm, self.threads)?;
        trainer.take_snapshot(snapshot, None)?;
        Ok(Followed::whole(trainer, snapshot))
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
    /// Fetches the first member's optimizer.
    FetchesOptimizer(Offer),
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
    laps: Laps,
    /// Number of times that a round ended before the optimizer was received.
    late: u32,
    /// Number of members that offered the copy of the state when it was last requested.
    holders: usize,
    /// Bytes a second from all members together that offered the copy.
    rate: u64,
}

/// How the number of steps to be replayed has changed since a copy of the state was taken.
#[derive(Debug, Clone, Copy)]
struct Laps {
    least: u64,
    /// How many times in a row it has not fallen below its least.
    stalled: u32,
}

impl Laps {
    const NONE: Self = Self { least: u64::MAX, stalled: 0 };

    /// Notes the number of steps to be replayed now. One step is always under way.
    const fn note(&mut self, count: u64) {
        if count < self.least || count <= 1 {
            *self = Self { least: count, stalled: 0 };
        } else {
            self.stalled += 1;
        }
    }
}

/// A blob to be fetched, and the members that have it.
pub(super) type Want = Offered<Label>;

impl<'a> Follower<'a> {
    /// Creates a newcomer that follows; `alone` is where it replays steps.
    pub(super) fn new(alone: Replayer<'a>) -> Self {
        let (phase, store) = (Phase::Asks(None), ChunkStore::default());
        Self {
            replayer: alone,
            phase,
            store,
            followed: None,
            tries: 0,
            laps: Laps::NONE,
            late: 0,
            holders: 0,
            rate: 0,
        }
    }

    /// Returns the number of steps done in the state that it has; `None` without one.
    pub(super) fn step(&self) -> Option<u64> {
        self.followed.as_ref().map(Followed::step)
    }

    /// Returns the state that it has, and the chunks of what it was fetching.
    pub(super) fn into_followed(self) -> (Option<Followed>, ChunkStore) {
        (self.followed, self.store)
    }

    /// Returns what it says to the members. `left` is the number of bytes of the copy still to be received.
    pub(super) fn says(&self, offers: &Offers, left: u64) -> FollowProgress {
        match (&self.phase, &self.followed) {
            (Phase::Asks(_), _) | (Phase::Replays(_), None) => FollowProgress::Asks,
            (Phase::Fetches(Offer { step, label }) | Phase::FetchesOptimizer(Offer { step, label }), _) => {
                FollowProgress::Fetches { step: *step, got: label.len.saturating_sub(left), of: label.len }
            }
            (Phase::Replays(lap), Some(followed)) => {
                let step = followed.step();
                if self.is_near(lap, step, offers)
                    && followed.has_optimizer(self.replayer.job.averages_each_step(), offers)
                {
                    FollowProgress::Stands { step }
                } else {
                    FollowProgress::Replays { step, newest: offers.newest().unwrap_or(step) }
                }
            }
            (Phase::Gave(follows), _) => *follows,
        }
    }

    /// Returns whether the newcomer lacks so little that the members may wait for it: the records of `lap` are
    /// being fetched, and it has the state after `step`.
    fn is_near(&self, lap: &[Logged], step: u64, offers: &Offers) -> bool {
        let behind: Vec<Offered<Logged>> = offers.after(step).take(LAP + 1).collect();
        let reached = behind.last().map_or(step, |record| record.what.step);
        if offers.newest().is_some_and(|newest| newest > reached) {
            return false;
        }
        // One step is always under way while the newest one is being fetched.
        if lap.len() <= 1 && behind.len() <= 1 {
            return true;
        }
        let time = |every: Nanos| every.0.saturating_mul(behind.len() as u64);
        let bytes: u64 = behind.iter().map(|record| record.what.label.len).sum();
        let carried = (self.rate as f64 * NEAR.as_secs_f64()) as u64;
        offers.growth().and_then(|growth| growth.every).is_some_and(|every| time(every) <= NEAR.0)
            && bytes <= carried
    }

    /// Returns what to fetch next; empty if nothing is to be fetched now. `ready` has the measured rates of the
    /// members.
    pub(super) fn next(&mut self, offers: &Offers, ready: &Ready, now: Nanos) -> Vec<Want> {
        match &mut self.phase {
            Phase::Asks(since) => {
                let Some(best) = offers.best() else { return Vec::new() };
                let growth = offers.growth();
                // In pipelines, only members that hold the newcomer's part offer it.
                let rate = if self.replayer.job.pipelines.is_some() {
                    best.holders.iter().filter_map(|id| ready.rate(id)).sum()
                } else {
                    ready.sum()
                };
                self.rate = rate;
                let waits = now < since.get_or_insert(now).saturating_add(OTHERS);
                if waits && self.replayer.job.pipelines.is_some() {
                    return Vec::new();
                }
                if let Some(growth) = growth.filter(|&growth| !keeps_up(growth, rate)) {
                    tracing::info!(
                        "the members' links to this one do not carry {} in the time of a step",
                        Bytes(growth.bytes)
                    );
                    self.phase = Phase::Gave(FollowProgress::TooSlow);
                    return Vec::new();
                }
                if waits {
                    return Vec::new();
                }
                self.phase = Phase::Fetches(best.what);
                self.holders = best.holders.len();
                vec![Offered { what: best.what.label, holders: best.holders }]
            }
            Phase::Fetches(offer) => {
                let (what, holders) = (offer.label, offers.holders(*offer));
                if holders.is_empty() {
                    self.lost();
                    return Vec::new();
                }
                self.holders = holders.len();
                vec![Offered { what, holders }]
            }
            Phase::Replays(lap) => {
                let Some(followed) = &self.followed else { return Vec::new() };
                let step = followed.step();
                let mut records: Vec<Offered<Logged>> = offers.after(step).collect();
                let count = records.len() as u64;
                records.truncate(LAP);
                *lap = records.iter().map(|record| record.what).collect();
                if count == 0 && (offers.is_empty() || offers.newest().is_some_and(|newest| newest > step)) {
                    // The record of the next step is not offered any more.
                    self.lost();
                    return Vec::new();
                }
                let lacks =
                    followed.lacks_optimizer(offers).filter(|_| !self.replayer.job.averages_each_step());
                if let Some(optimizer) = lacks.filter(|_| count == 0) {
                    let holder = optimizer.holders.first().and_then(|id| ready.rate(id)).unwrap_or(0);
                    let growth =
                        offers.growth().map(|growth| Growth { bytes: optimizer.what.label.len, ..growth });
                    if self.late > MAX_LATE || growth.is_some_and(|growth| !keeps_up(growth, holder)) {
                        tracing::info!(
                            "the first member's link does not carry its optimizer in the time of a round"
                        );
                        self.phase = Phase::Gave(FollowProgress::TooSlow);
                        return Vec::new();
                    }
                    self.phase = Phase::FetchesOptimizer(optimizer.what);
                    return vec![Offered { what: optimizer.what.label, holders: optimizer.holders }];
                }
                if count > 0 {
                    self.laps.note(count);
                    if self.laps.stalled >= MAX_LAPS {
                        self.phase = Phase::Gave(FollowProgress::TooSlow);
                        return Vec::new();
                    }
                }
                records.into_iter().map(|r| Offered { what: r.what.label, holders: r.holders }).collect()
            }
            Phase::FetchesOptimizer(offer) => {
                let offer = *offer;
                let Some(now) = offers.optimizer(offer.step).filter(|now| now.what == offer) else {
                    self.phase = Phase::Replays(Vec::new());
                    return Vec::new();
                };
                if self.is_outdated(offers) {
                    self.late += 1;
                    self.phase = Phase::Replays(Vec::new());
                    return Vec::new();
                }
                vec![Offered { what: offer.label, holders: now.holders }]
            }
            Phase::Gave(_) => Vec::new(),
        }
    }

    /// Returns whether what to fetch has changed since [`Follower::next`]: the members have begun another
    /// round, or more of them offer the copy. With local steps they offer it at different times.
    pub(super) fn is_outdated(&self, offers: &Offers) -> bool {
        match self.phase {
            Phase::FetchesOptimizer(offer) => offers.after(offer.step).next().is_some(),
            Phase::Fetches(offer) => offers.holders(offer).len() > self.holders,
            _ => false,
        }
    }

    /// Takes what was fetched, all of what [`Follower::next`] returned.
    ///
    /// Errors: those of the device.
    pub(super) fn fetched(&mut self) -> Result<()> {
        match &mut self.phase {
            Phase::Fetches(offer) => {
                let (step, bytes) = (offer.step, self.store.take(&offer.label));
                let followed = match bytes {
                    Some(bytes) => self.replayer.take(&bytes, step)?,
                    None => None,
                };
                if followed.is_none() {
                    tracing::error!(step, "the copy of the state does not read as one");
                    self.lost();
                    return Ok(());
                }
                self.followed = followed;
                self.phase = Phase::Replays(Vec::new());
            }
            Phase::Replays(lap) => {
                for logged in std::mem::take(lap) {
                    let bytes = self.store.take(&logged.label);
                    let Some((followed, bytes)) = self.followed.as_mut().zip(bytes) else { break };
                    followed.replay(&bytes)?;
                }
            }
            Phase::FetchesOptimizer(offer) => {
                let bytes = self.store.take(&offer.label);
                self.phase = Phase::Replays(Vec::new());
                if let Some((followed, bytes)) = self.followed.as_mut().zip(bytes) {
                    followed.take_optimizer(&bytes)?;
                }
            }
            Phase::Asks(_) | Phase::Gave(_) => {}
        }
        Ok(())
    }

    /// Notes that what it was fetching is not offered any more. It asks for another copy, a few times.
    pub(super) fn lost(&mut self) {
        if let Phase::FetchesOptimizer(_) = self.phase {
            // A member will offer its optimizer after the next round.
            self.late += 1;
            self.phase = Phase::Replays(Vec::new());
            return;
        }
        self.tries += 1;
        self.laps = Laps::NONE;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_that_get_no_shorter_are_counted_however_they_vary() {
        let stalled = |counts: &[u64]| {
            let mut laps = Laps::NONE;
            for &count in counts {
                laps.note(count);
            }
            laps.stalled
        };
        assert_eq!(stalled(&[50, 20, 8, 3, 2]), 0);
        // One lap is longer than the one before, and the newcomer gets nearer all the same.
        assert_eq!(stalled(&[50, 20, 25, 8]), 0);
        // It falls now and then, but never below what it was.
        assert_eq!(stalled(&[50, 60, 55, 70, 65]), 4);
        assert_eq!(stalled(&[9, 1, 1, 1, 1, 1]), 0);
    }
}
