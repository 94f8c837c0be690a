//! A newcomer that takes the run's state while the members train on: what it fetches next, and the replay of
//! the steps since. With local steps, it takes the state after a synchronisation while the members take their
//! local steps, replays the synchronisations since, and fetches the first member's optimizer. It has no clock
//! and no network of its own (`waiting.rs` has).

use farflung_base::{Bytes, Nanos};
use farflung_comm::Communicator;

use super::blobs::Label;
use super::fetching::ChunkStore;
use super::followed::{has_optimizer, lacked_optimizer};
use super::offers::{Growth, Logged, Offer, Offered, Offers};
use super::ready::{FollowProgress, Ready};
use crate::Result;
use crate::train::job::Job;
use crate::train::run_state::RunState;
use crate::train::trainer::ReplayedParts;

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
/// The newcomer gives up following if more rounds than this have ended in a row before it could ask for the
/// optimizer.
const MAX_MISSED: u32 = 16;
/// A newcomer that is behind by less than this time, and whose links carry the records in it, is ready. Steps
/// may be so short that it is never behind by one only.
const NEAR: Nanos = Nanos::from_millis(50);
/// A newcomer that was ready stays so while it is behind by at most this number of records, and its links carry
/// them in the time of one step. Members that form a further pipeline must be ready at the same time.
const STAYS: usize = 4;

/// The rank that replays steps: alone, with the settings of the run.
pub(super) struct Replayer<'a> {
    pub(super) job: &'a Job,
    /// Contains this rank only.
    pub(super) comm: &'a Communicator,
    pub(super) threads: usize,
}

impl Replayer<'_> {
    /// Takes a copy of the state after `step` steps. `None` for bytes that are not one.
    ///
    /// Errors: those of the device, and of the model for the layers of another one.
    fn take(&self, bytes: &[u8], step: u64) -> Result<Option<ReplayedParts>> {
        let Some(copy) = RunState::from_bytes(bytes).filter(|copy| copy.step() == step) else {
            return Ok(None);
        };
        let device = self.job.device(0, self.threads)?;
        ReplayedParts::new((self.job, self.comm), &device, &copy).map(Some)
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
    followed: Option<ReplayedParts>,
    tries: u32,
    laps: Laps,
    /// Number of times that a round ended before the optimizer was received.
    late: u32,
    /// Number of rounds in a row that ended before it could ask for the optimizer.
    missed: u32,
    /// Number of members that offered the copy of the state when it was last requested.
    holders: usize,
    /// Bytes a second from all members together that offered the copy.
    rate: u64,
    /// Whether it was ready when it last decided what to fetch.
    stood: bool,
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
            missed: 0,
            holders: 0,
            rate: 0,
            stood: false,
        }
    }

    /// Returns the number of steps done in the state that it has; `None` without one.
    pub(super) fn step(&self) -> Option<u64> {
        self.followed.as_ref().map(ReplayedParts::step)
    }

    /// Returns the state that it has, and the chunks of what it was fetching.
    pub(super) fn into_followed(self) -> (Option<ReplayedParts>, ChunkStore) {
        (self.followed, self.store)
    }

    /// Returns what it says to the members. `left` is the number of bytes of the copy still to be received.
    pub(super) fn says(&self, offers: &Offers, left: u64) -> FollowProgress {
        match (&self.phase, &self.followed) {
            (Phase::Asks(_), _) | (Phase::Replays(_), None) => FollowProgress::Asks,
            (Phase::Gave(follows), _) => *follows,
            (Phase::Replays(_) | Phase::FetchesOptimizer(_), Some(followed)) if self.stands(offers) => {
                FollowProgress::Stands { step: followed.step() }
            }
            (Phase::Replays(_), Some(followed)) => {
                let step = followed.step();
                FollowProgress::Replays { step, newest: offers.newest().unwrap_or(step) }
            }
            (Phase::Fetches(Offer { step, label }) | Phase::FetchesOptimizer(Offer { step, label }), _) => {
                FollowProgress::Fetches { step: *step, got: label.len.saturating_sub(left), of: label.len }
            }
        }
    }

    /// Returns whether the newcomer is ready.
    fn stands(&self, offers: &Offers) -> bool {
        let lap = match &self.phase {
            Phase::Replays(lap) => &lap[..],
            Phase::FetchesOptimizer(_) => &[],
            _ => return false,
        };
        let Some(followed) = &self.followed else { return false };
        let step = followed.step();
        let is_near = self.is_near(lap, step, offers) || self.stood && self.stays_near(step, offers);
        is_near && self.has_optimizer(followed, offers)
    }

    /// Returns whether the newcomer has the optimizer that it needs, or one that is older by less than
    /// [`NEAR`]: rounds may be so short that it always lacks the newest one.
    fn has_optimizer(&self, followed: &ReplayedParts, offers: &Offers) -> bool {
        let every = offers.growth().and_then(|growth| growth.every);
        let age = followed.optimizer_age().zip(every);
        let is_recent = age.is_some_and(|(rounds, every)| every.0.saturating_mul(rounds.into()) <= NEAR.0);
        is_recent || has_optimizer(followed, self.replayer.job.averages_each_step(), offers)
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

    /// Returns whether a newcomer that was ready, and has the state after `step`, still is: see [`STAYS`].
    fn stays_near(&self, step: u64, offers: &Offers) -> bool {
        let behind: Vec<Offered<Logged>> = offers.after(step).take(STAYS + 1).collect();
        let reached = behind.last().map_or(step, |record| record.what.step);
        let bytes: u64 = behind.iter().map(|record| record.what.label.len).sum();
        behind.len() <= STAYS
            && offers.newest().is_none_or(|newest| newest <= reached)
            && offers.growth().is_some_and(|growth| keeps_up(Growth { bytes, ..growth }, self.rate))
    }

    /// Returns what to fetch next; empty if nothing is to be fetched now. `ready` has the measured rates of the
    /// members.
    pub(super) fn next(&mut self, offers: &Offers, ready: &Ready, now: Nanos) -> Vec<Want> {
        self.stood = self.stands(offers);
        let has_optimizer =
            self.followed.as_ref().is_some_and(|followed| self.has_optimizer(followed, offers));
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
                    lacked_optimizer(followed, offers).filter(|_| !self.replayer.job.averages_each_step());
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
                    self.missed = 0;
                    self.phase = Phase::FetchesOptimizer(optimizer.what);
                    return vec![Offered { what: optimizer.what.label, holders: optimizer.holders }];
                }
                if count > 0 {
                    self.laps.note(count);
                    // Here, the next round has begun before it could ask for the optimizer.
                    self.missed = if has_optimizer { 0 } else { self.missed + u32::from(count == 1) };
                    if self.laps.stalled >= MAX_LAPS || self.missed > MAX_MISSED {
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
        self.stood = false;
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
    use std::collections::BTreeSet;

    use farflung_comm::memory;
    use farflung_parallel::membership::MemberId;

    use super::super::blobs::label_of;
    use super::*;
    use crate::train::trainer::Trainer;
    use crate::{Stop, TrainConfig};

    /// Returns the job of one worker with rounds of two steps.
    fn job() -> Job {
        let config = TrainConfig {
            sync: crate::config::choice::SyncKind::of(&farflung_optim::sync::DILOCO),
            sync_every: 2,
            workers: 1,
            layers: Some(1),
            steps: 100,
            data: Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").into()),
            context: Some(8),
            batch: 1,
            ..TrainConfig::default()
        };
        Job { elastic: true, ..Job::new(config, 1, Stop::manual()).unwrap() }
    }

    /// A member that trains, and what it offers.
    struct Donor {
        trainer: Trainer,
        offers: Offers,
    }

    impl Donor {
        const ID: MemberId = MemberId::number(7);

        /// Does a round, and offers its record and the optimizer after it. Returns the record.
        fn round(&mut self, job: &Job) -> Vec<u8> {
            let after = self.trainer.agreed_step();
            for _ in 0..2 {
                self.trainer.step(false).unwrap();
            }
            let (step, record) = (self.trainer.agreed_step(), self.trainer.record(job).unwrap().to_bytes());
            assert_eq!((after + 2, self.trainer.steps_done()), (step, step));
            self.offers.log(Self::ID, &[Logged { after, step, label: label_of(&record) }]);
            self.offer_optimizer();
            record
        }

        /// Offers the optimizer, and returns it.
        fn offer_optimizer(&mut self) -> Vec<u8> {
            self.trainer.mark_round().unwrap();
            let optimizer = self.trainer.marked_optimizer().unwrap().unwrap().to_bytes();
            let step = self.trainer.agreed_step();
            self.offers.offer_optimizer(Self::ID, Offer { step, label: label_of(&optimizer) });
            optimizer
        }

        fn offer_copy(&mut self, bytes: &[u8], every: Nanos) {
            let offer = Offer { step: self.trainer.agreed_step(), label: label_of(bytes) };
            self.offers.offer(Self::ID, offer, Growth { bytes: 1, every: Some(every) });
        }
    }

    /// Calls `check` with a donor at the first step, and a follower that has its state and replays.
    fn follow(check: impl FnOnce(&Job, Donor, Follower<'_>)) {
        let (job, comm) = (job(), || Communicator::new(memory::cluster(1).remove(0)));
        let trainer = Trainer::new(&job, comm(), 1).unwrap();
        let alone = comm();
        let replayer = Replayer { job: &job, comm: &alone, threads: 1 };
        let copy = trainer.shared_state(&job).unwrap().to_bytes();
        let followed = replayer.take(&copy, 0).unwrap();
        assert!(followed.is_some());
        let follower = Follower {
            followed,
            phase: Phase::Replays(Vec::new()),
            rate: 1 << 30,
            ..Follower::new(replayer)
        };
        check(&job, Donor { trainer, offers: Offers::default() }, follower);
    }

    #[test]
    fn one_that_never_has_time_for_the_optimizer_takes_the_state_while_all_wait() {
        follow(|job, mut donor, mut follower| {
            donor.round(job);
            let ready = Ready { rates: [(Donor::ID, 1 << 30)].into(), ..Ready::default() };
            let mut fetched = 0;
            // There is always a record that it lacks when it asks what to fetch.
            while !follower.next(&donor.offers, &ready, Nanos::ZERO).is_empty() {
                let progress = follower.says(&donor.offers, 0);
                assert_eq!(progress, FollowProgress::Replays { step: 0, newest: 2 });
                fetched += 1;
                assert!(fetched < 100, "it goes on for ever");
            }
            assert_eq!(fetched, MAX_MISSED);
            assert_eq!(follower.says(&donor.offers, 0), FollowProgress::TooSlow);
        });
    }

    #[test]
    fn an_optimizer_that_is_older_by_a_moment_only_is_enough() {
        follow(|job, mut donor, mut follower| {
            let (optimizer, record) = (donor.offer_optimizer(), donor.round(job));
            let followed = follower.followed.as_mut().unwrap();
            followed.take_optimizer(&optimizer).unwrap();
            followed.replay(&record).unwrap();
            assert_eq!((followed.step(), followed.optimizer_age()), (2, Some(1)));
            assert_eq!(
                lacked_optimizer(followed, &donor.offers).unwrap().holders,
                BTreeSet::from([Donor::ID])
            );
            let mut says = |every| {
                donor.offer_copy(b"", every);
                follower.says(&donor.offers, 0)
            };
            assert_eq!(says(Nanos::from_millis(10)), FollowProgress::Stands { step: 2 });
            assert_eq!(says(Nanos::from_millis(1_000)), FollowProgress::Replays { step: 2, newest: 2 });
        });
    }

    #[test]
    fn one_that_was_ready_stays_so_while_it_is_a_few_records_behind() {
        follow(|job, mut donor, mut follower| {
            let ready = Ready::default();
            let says = |follower: &mut Follower<'_>, donor: &Donor| {
                follower.next(&donor.offers, &ready, Nanos::ZERO);
                follower.says(&donor.offers, 0)
            };
            donor.offer_copy(b"", Nanos::from_millis(1_000));
            let optimizer = donor.offer_optimizer();
            follower.followed.as_mut().unwrap().take_optimizer(&optimizer).unwrap();
            // Two rounds behind, it is not ready.
            donor.round(job);
            donor.round(job);
            assert_eq!(says(&mut follower, &donor), FollowProgress::Replays { step: 0, newest: 4 });
            // If it was ready before, it is.
            follower.stood = true;
            assert_eq!(says(&mut follower, &donor), FollowProgress::Stands { step: 0 });
            assert!(follower.stood);
            // Its links do not carry the two records in the time of a round.
            follower.rate = 1_000;
            assert_eq!(says(&mut follower, &donor), FollowProgress::Replays { step: 0, newest: 4 });
            (follower.rate, follower.stood) = (1 << 30, true);
            // Five rounds are too many.
            (0..3).for_each(|_| drop(donor.round(job)));
            assert_eq!(says(&mut follower, &donor), FollowProgress::Replays { step: 0, newest: 10 });
            assert!(!follower.stood);
        });
    }

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
