//! A newcomer's time before it is a member: it announces itself, fetches the state in the background if it can,
//! and waits for a view that contains it. Members without a part fetch theirs in the same way (`spare.rs`).

use std::collections::BTreeMap;

use farflung_base::{Nanos, Rank};
use farflung_comm::{CommError, WaitMode};
use farflung_parallel::membership::{MemberId, View};

use super::decide::POLL_INTERVAL;
use super::fetch::{self, Arriving, Sending};
use super::fetching::{ChunkStore, Fetching, Wanted};
use super::follow::{Follower, SHARE, Want};
use super::membership_service::Outcome;
use super::offers::Offers;
use super::place::{Place, TAGS};
use super::ready::{FollowProgress, Ready};
use crate::{Error, Result, Stop};

/// Time between two attempts of a newcomer to connect to other newcomers.
const CONNECT_INTERVAL: Nanos = Nanos::from_millis(1_000);
/// Time between two announcements of a process that follows.
pub(super) const ANNOUNCE_INTERVAL: Nanos = Nanos::from_millis(250);
/// Time without any answer after which open requests are forgotten and made again.
const STALL_TIMEOUT: Nanos = Nanos::from_millis(3_000);
/// Rate of a member that has not been measured, in bytes a second.
const UNKNOWN: u64 = 64 << 10;
/// Maximum number of measurements of the links.
const MEASUREMENTS: u32 = 2;
/// Time without a connection to any member after which the run counts as gone.
const ALONE_PATIENCE: Nanos = Nanos::from_millis(1_500);
/// Time between two messages about the progress to the newcomer's user.
const REPORT_INTERVAL: Nanos = Nanos::from_millis(5_000);

/// The links to a process that follows, as it has measured them.
pub(super) struct Links {
    pub(super) ready: Ready,
    /// Bytes of the state.
    pub(super) state: u64,
    /// How often the links may be measured again.
    pub(super) again: u32,
}

/// What a newcomer has announced, and when.
struct Waiting<'a> {
    stop: &'a Stop,
    /// Time since which no member of the run is connected.
    alone_since: Option<Nanos>,
    patience: Nanos,
    until: Nanos,
    said: Option<(FollowProgress, Nanos)>,
    told: Option<(FollowProgress, Nanos)>,
    connected: usize,
    meets: Nanos,
    telling: Vec<Sending>,
}

/// How a fetch in the background ended.
enum Ended<T> {
    /// All is received.
    Whole,
    /// There is something more important than to fetch.
    For(T),
    /// Peers have come or gone, or no answer came for a while: what is missing must be requested again.
    Again,
    /// No member has it any more.
    Gone,
}

/// Tells the members how far a process is that follows, and looks for what is more important than to follow.
pub(super) type Look<'a, T> = dyn FnMut(&mut Place, &Ready) -> Result<Option<T>> + 'a;

impl Place {
    /// Announces that this newcomer is here, for a state of about `state` bytes, and waits for a view that
    /// contains it. A `follower` fetches the state meanwhile; without one, the newcomer takes it while all
    /// wait. `tell` is called with messages for the user.
    ///
    /// Errors: [`Error::Removed`] if no view contains it within `patience`; [`Error::Stopped`] after a signal;
    /// [`Error::NobodyAnswers`] if no member is connected any more; those of the follower's device.
    pub(super) fn wait_for_view(
        &mut self,
        ((patience, state), stop): ((Nanos, u64), &Stop),
        follower: Option<&mut Follower<'_>>,
        tell: &mut dyn FnMut(&str),
    ) -> Result<View> {
        let until = self.transport().now().saturating_add(patience);
        let ready = self.measure_links(state, 0);
        let mut links = Links { ready, state, again: MEASUREMENTS - 1 };
        let (connected, meets) = (0, Nanos::ZERO);
        let (said, told, telling, alone_since) = (None, None, Vec::new(), None);
        let mut waiting =
            Waiting { stop, alone_since, patience, until, said, told, connected, meets, telling };
        let mut look = |place: &mut Self, ready: &Ready| place.announce_progress(&mut waiting, ready, tell);
        let view = self.follow_until(follower, &mut links, &mut look);
        self.measured = Some(links.ready);
        view
    }

    /// Waits until `look` finds something. A follower fetches what it needs meanwhile.
    ///
    /// Errors: as [`Place::follow`].
    pub(super) fn follow_until<T>(
        &mut self,
        mut follower: Option<&mut Follower<'_>>,
        links: &mut Links,
        look: &mut Look<'_, T>,
    ) -> Result<T> {
        self.membership().awaited = true;
        let mut round = |place: &mut Self| {
            if let Some(follower) = &mut follower {
                return place.follow(follower, links, look);
            }
            let found = look(place, &links.ready)?;
            if found.is_none() {
                place.wait(POLL_INTERVAL)?;
            }
            Ok(found)
        };
        let found = loop {
            if let Some(found) = round(self).transpose() {
                break found;
            }
        };
        self.membership().awaited = false;
        found
    }

    /// Fetches what a follower needs next, and gives it to the follower. Returns what `look` has found.
    ///
    /// Errors: those of `look`, and of the follower's device.
    fn follow<T>(
        &mut self,
        follower: &mut Follower<'_>,
        links: &mut Links,
        look: &mut Look<'_, T>,
    ) -> Result<Option<T>> {
        if let Some(step) = follower.step() {
            self.membership().forget_records(step);
        }
        let offers = self.membership().offers().clone();
        self.measure_again(&offers, links);
        let wants = follower.next(&offers, &links.ready, self.transport().now());
        links.ready.follows = follower.says(&offers, u64::MAX);
        if let Some(found) = look(self, &links.ready)? {
            return Ok(Some(found));
        }
        if wants.is_empty() {
            self.wait(POLL_INTERVAL)?;
            return Ok(None);
        }
        match self.fetch_in_background(&wants, links, follower, look)? {
            Ended::Whole => follower.fetched()?,
            Ended::For(found) => return Ok(Some(found)),
            // A little later, so that a broken connection is not tried without a pause.
            Ended::Again => self.wait(POLL_INTERVAL)?,
            Ended::Gone => follower.lost(),
        }
        if follower.asks() {
            self.membership().forget_copies();
        }
        Ok(None)
    }

    /// Measures the links once more if a member that offers the state has not answered the first time: it
    /// answers newcomers only once its step has ended, which may take longer than the measurement.
    fn measure_again(&mut self, offers: &Offers, links: &mut Links) {
        let unknown = |id: &MemberId| links.ready.rate(id).is_none();
        let lacks = offers.best().is_some_and(|best| best.holders.iter().any(unknown));
        if lacks && links.again > 0 {
            let Ready { follows, spare_in, .. } = links.ready;
            let measured = self.measure_links(links.state, MEASUREMENTS - links.again);
            links.ready = Ready { follows, spare_in, ..measured };
            links.again -= 1;
        }
    }

    /// Announces how far this newcomer is, if that is due. Returns the view that contains it, if there is one.
    fn announce_progress(
        &mut self,
        waiting: &mut Waiting<'_>,
        ready: &Ready,
        tell: &mut dyn FnMut(&str),
    ) -> Result<Option<View>> {
        let follows = ready.follows;
        self.renew();
        let costs = self.membership().costs();
        if let Some(cost) = costs {
            tell(&format!("this member is ready to join: it receives {cost}"));
        }
        if self.membership().is_refused()
            && let Some(reason) = ready.nonsense()
        {
            return Err(Error::JoinRefused(format!("it has reported {reason}")));
        }
        if let Some(why) = self.membership().too_long() {
            return Err(Error::JoinRefused(why.to_string()));
        }
        let outcome = self.membership().outcome();
        if let Some(Outcome::Installed(view)) = outcome {
            return Ok(Some(view));
        }
        if let Some(signal) = waiting.stop.requested() {
            return Err(Error::Stopped(signal));
        }
        let now = self.transport().now();
        if self.has_members_connected() {
            waiting.alone_since = None;
        } else if now >= waiting.alone_since.get_or_insert(now).saturating_add(ALONE_PATIENCE) {
            let addresses: Vec<String> = self.arrivals.addresses().into_values().collect();
            return Err(Error::NobodyAnswers { addresses: addresses.join(", "), after: ALONE_PATIENCE });
        }
        if now >= waiting.until {
            let reason = format!("the members did not admit this member within {}", waiting.patience);
            return Err(Error::Removed { reason });
        }
        if now >= waiting.meets {
            // Without any member, to call them again would take the time in which the run counts as gone.
            if waiting.connected > 0 && waiting.alone_since.is_none() {
                self.arrivals.meet();
            }
            waiting.meets = now.saturating_add(CONNECT_INTERVAL);
            waiting.connected = 0;
        }
        let kind = std::mem::discriminant::<FollowProgress>;
        let is_due = |(before, at): (FollowProgress, Nanos), every| {
            kind(&before) != kind(&follows) || before != follows && now >= at.saturating_add(every)
        };
        if waiting.told.is_none_or(|told| is_due(told, REPORT_INTERVAL)) {
            if follows.needs_log() {
                tell(&format!("this member {follows}"));
            }
            waiting.told = Some((follows, now));
        }
        let repeats = waiting.said.is_none_or(|said| {
            is_due(said, ANNOUNCE_INTERVAL) || now >= said.1.saturating_add(ANNOUNCE_INTERVAL)
        });
        if repeats || waiting.connected != self.connected() {
            // Announced again and again, for peers that have connected since, and so that all hear that this
            // newcomer is not frozen.
            waiting.connected = self.connected();
            waiting.said = Some((follows, now));
            // An announcement that could not be sent yet is replaced.
            waiting.telling = self.tell_ready(ready);
        }
        Ok(None)
    }

    /// Fetches blobs from members that train. Each member is asked for no more than its share.
    fn fetch_in_background<T>(
        &mut self,
        wants: &[Want],
        links: &mut Links,
        follower: &mut Follower<'_>,
        look: &mut Look<'_, T>,
    ) -> Result<Ended<T>> {
        let (comm, ids) = self.membership_comm();
        let rank = |id: &MemberId| ids.iter().position(|peer| peer == id).map(|rank| Rank(rank as u32));
        let wanted = wants
            .iter()
            .map(|want| Wanted { label: want.what, holders: want.holders.iter().filter_map(rank).collect() });
        let wanted: Vec<Wanted> = wanted.collect();
        if wanted.iter().any(|wanted| wanted.holders.is_empty()) {
            return Ok(Ended::Gone);
        }
        let mut store = std::mem::take(&mut follower.store);
        let ended = self.fetch_from((&comm, &ids), (wanted, &mut store), links, follower, look);
        follower.store = store;
        ended
    }

    fn fetch_from<T>(
        &mut self,
        (comm, ids): (&farflung_comm::Communicator, &[MemberId]),
        (wanted, store): (Vec<Wanted>, &mut ChunkStore),
        links: &mut Links,
        follower: &Follower<'_>,
        look: &mut Look<'_, T>,
    ) -> Result<Ended<T>> {
        let patient = comm.clone().with_deadline(Nanos::MAX);
        let me = comm.rank();
        let mut fetching = Fetching::new(wanted, store);
        let mut paces = Paces::new(ids, &links.ready);
        let mut asking: Vec<Sending> = Vec::new();
        let mut came = comm.now();
        // Kept until an answer has come: one that is complete would be lost with it.
        let mut arriving: Option<Arriving> = None;
        while !fetching.is_done() {
            let offers = self.membership().offers().clone();
            links.ready.follows = follower.says(&offers, fetching.left());
            if let Some(found) = look(self, &links.ready)? {
                return Ok(Ended::For(found));
            }
            let stalls = comm.now().saturating_sub(came) >= STALL_TIMEOUT;
            if self.membership_comm().1 != ids || stalls || follower.is_outdated(&offers) {
                return Ok(Ended::Again);
            }
            let donors = fetching.donors();
            for &donor in &donors {
                while paces.may(donor, comm.now()) {
                    let Some(item) = fetching.next(donor, comm.now()) else { break };
                    paces.asked(donor, fetching.size_of(&item), comm.now());
                    asking.push(patient.start_send(donor, fetch::TAGS.ask, item.to_bytes()));
                }
            }
            asking.retain(|asking| !asking.is_ready());
            let mut answer =
                arriving.take().unwrap_or_else(|| patient.start_recv_any(&donors, fetch::TAGS.answer));
            let mut word = patient.start_recv_any(&[me], TAGS.answer);
            let pause = POLL_INTERVAL.min(paces.next(&donors, comm.now()));
            match comm.first(&mut [&mut answer, &mut word], WaitMode::Within(pause)) {
                Some(0) => match answer.wait() {
                    // Answers to requests of an earlier fetch are skipped.
                    Ok((donor, bytes)) if fetching.is_asked(donor, &bytes) => {
                        came = comm.now();
                        if fetching.arrived(donor, &bytes, came).is_err() {
                            return Ok(Ended::Gone);
                        }
                    }
                    Ok(_) | Err(CommError::CancelledBy { .. }) => {}
                    Err(_) => return Ok(Ended::Again),
                },
                found => {
                    arriving = Some(answer);
                    if found.is_some() {
                        // There is a message about members; `look` reads it.
                        drop(word.wait());
                        self.membership().has_read_notice();
                    }
                }
            }
        }
        Ok(Ended::Whole)
    }
}

/// When each member may be asked again.
struct Paces(BTreeMap<Rank, Pace>);

struct Pace {
    /// Bytes a second.
    rate: f64,
    at: Nanos,
}

impl Paces {
    fn new(ids: &[MemberId], ready: &Ready) -> Self {
        let pace = |(rank, id): (u32, &MemberId)| {
            let rate = SHARE * ready.rate(id).unwrap_or(UNKNOWN) as f64;
            (Rank(rank), Pace { rate, at: Nanos::ZERO })
        };
        Self((0..).zip(ids).map(pace).collect())
    }

    fn may(&self, donor: Rank, now: Nanos) -> bool {
        self.0.get(&donor).is_some_and(|pace| pace.at <= now)
    }

    fn asked(&mut self, donor: Rank, bytes: u64, now: Nanos) {
        let Some(pace) = self.0.get_mut(&donor) else { return };
        let takes = Nanos::from_secs_f64(bytes as f64 / pace.rate);
        pace.at = pace.at.max(now).saturating_add(takes);
    }

    /// Returns the time until the next of these donors may be asked that may not be asked now.
    fn next(&self, donors: &[Rank], now: Nanos) -> Nanos {
        let ats = donors.iter().filter_map(|donor| self.0.get(donor)).map(|pace| pace.at);
        ats.filter(|&at| at > now).min().map_or(POLL_INTERVAL, |at| at.saturating_sub(now))
    }
}
