//! A newcomer's announcements. It first measures how fast each member sends to it, then fetches the state
//! while the members train on, and says how far it is. Members propose no view with a newcomer before it has
//! said that it is ready, and predict from these rates for how long they will wait for it.

use std::collections::BTreeMap;
use std::fmt;

use farflung_base::{Bytes, Nanos, PeerId, Pending, Rank};
use farflung_comm::{CommError, Communicator, WaitMode};
use farflung_parallel::membership::{MemberId, View};
use serde::{Deserialize, Serialize};

use super::arrivals::Newcomer;
use super::blobs::{BlobReply, BlobRequest, PROBE as MOST};
use super::fetch::TAGS;
use super::nonsense::{MOST_BYTES_PER_S, impossible_rate};
use crate::train::trainer::StateBytes;

/// Number of probes requested from each member, all at once.
const PROBES: u32 = 16;
/// Time to wait for all answers. It is long because answers may queue behind the averages of a step.
const PATIENCE: Nanos = Nanos::from_millis(10_000);
/// Minimum bytes of a probe.
const LEAST: u32 = 256;
/// The probes of one member are together at most one `PART`th of the state, unless `LEAST` requires more.
const PART: u64 = 16;

/// How far a newcomer is with the state of the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FollowProgress {
    /// It takes the state while all members wait. It is ready.
    #[default]
    Barrier,
    /// Its links cannot keep up with the steps, so it takes the state while all members wait. It is ready.
    TooSlow,
    /// It asks for a copy of the state that it can fetch while the members train.
    Asks,
    /// It fetches a copy of the state.
    Fetches {
        /// Number of steps done when the state was copied.
        step: u64,
        /// Bytes received.
        got: u64,
        /// Bytes of the copy.
        of: u64,
    },
    /// It replays the steps since.
    Replays {
        /// The last step replayed.
        step: u64,
        /// The newest step of which it has heard.
        newest: u64,
    },
    /// It has the state after the newest step of which it has heard. It is ready.
    Stands {
        /// The last step replayed.
        step: u64,
    },
}

impl FollowProgress {
    /// Returns whether the newcomer may be admitted.
    pub(super) const fn is_ready(self) -> bool {
        matches!(self, Self::Barrier | Self::TooSlow | Self::Stands { .. })
    }

    /// Returns the last step replayed; `None` before the state was received.
    pub(super) const fn replayed(self) -> Option<u64> {
        match self {
            Self::Replays { step, .. } | Self::Stands { step } => Some(step),
            _ => None,
        }
    }

    /// Returns whether the newcomer needs a member's copy of the state and its records of steps.
    pub(super) const fn needs_log(self) -> bool {
        !matches!(self, Self::Barrier | Self::TooSlow)
    }
}

impl fmt::Display for FollowProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Barrier => write!(f, "is ready, and takes the state while all wait"),
            Self::TooSlow => write!(f, "cannot keep up with the steps, and takes the state while all wait"),
            Self::Asks => write!(f, "asks for a copy of the state"),
            Self::Fetches { step, got, of } => {
                write!(f, "fetches the state of step {step}: {} of {}", Bytes(got), Bytes(of))
            }
            Self::Replays { step, newest } => write!(f, "has replayed to step {step} of {newest}"),
            Self::Stands { step } => write!(f, "has replayed to step {step}, and is ready"),
        }
    }
}

/// Announcement to all members of a newcomer, or of a spare that can be in a further pipeline.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ready {
    /// Bytes a second from each member to the newcomer, measured while all members send. Members that have not
    /// answered are missing.
    pub(super) rates: BTreeMap<MemberId, u64>,
    /// How far it is with the state.
    pub(super) follows: FollowProgress,
    /// The number of the view in which it is a member without a part; `None` on a newcomer.
    pub(super) spare_in: Option<u64>,
}

impl Ready {
    /// Returns the bytes a second from a member; `None` if it has not answered.
    pub(super) fn rate(&self, id: &MemberId) -> Option<u64> {
        self.rates.get(id).copied().filter(|&rate| rate > 0)
    }

    /// Returns the bytes a second from all members together.
    pub(super) fn sum(&self) -> u64 {
        together(self.rates.values().copied())
    }

    /// Returns what of this cannot be true; `None` if it can.
    pub(super) fn nonsense(&self) -> Option<String> {
        let (count, most) = (self.rates.len(), View::MOST_MEMBERS);
        if count > most {
            return Some(format!("rates of {count} members, expected at most {most}"));
        }
        self.rates.values().find_map(|&rate| impossible_rate(rate))
    }

    /// Returns the rates of some members; `None` unless all of them are known.
    fn of(&self, members: &[MemberId]) -> Option<Vec<u64>> {
        members.iter().map(|id| self.rates.get(id).copied().filter(|&rate| rate > 0)).collect()
    }
}

/// Cost of a newcomer's state for all members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::train) struct Cost {
    /// Bytes of the state.
    pub(in crate::train) state: u64,
    /// Predicted time for which all members wait; `None` if a rate is not known.
    pub(in crate::train) predicted: Option<Nanos>,
    /// Whether the values are upper bounds, because the newcomer's part of the model is decided later.
    pub(in crate::train) at_most: bool,
    /// What the newcomer still has to replay, if it has the state after an earlier step.
    pub(in crate::train) replays: Option<Replays>,
}

/// Number of steps or rounds that a newcomer still has to replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::train) enum Replays {
    /// Steps, if replicas agree at each step.
    Steps(u64),
    /// Rounds of local steps.
    Rounds(u64),
}

impl fmt::Display for Replays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Steps(1) => write!(f, "the last step"),
            Self::Steps(n) => write!(f, "the last {n} steps"),
            Self::Rounds(1) => write!(f, "the last round"),
            Self::Rounds(n) => write!(f, "the last {n} rounds"),
        }
    }
}

/// Adds rates. Those that others report may be of any size.
fn together(rates: impl IntoIterator<Item = u64>) -> u64 {
    rates.into_iter().fold(0, u64::saturating_add)
}

impl Cost {
    /// Computes the cost of a newcomer after `step` steps. `told` has the sizes of each member's state; the
    /// first member is the one that sends the part of the state that replicas do not share.
    pub(super) fn new(ready: &Ready, told: &[(MemberId, StateBytes)], step: u64) -> Self {
        let members: Vec<MemberId> = told.iter().map(|(id, _)| *id).collect();
        let rates = ready.of(&members);
        let seconds = |bytes: u64, rate: u64| bytes as f64 / rate as f64;
        let sizes = || told.iter().map(|(_, sizes)| sizes);
        let at_most = sizes().any(|sizes| sizes.is_part);
        let shared = sizes().map(|sizes| sizes.shared).max().unwrap_or(0);
        let own = sizes().map(|sizes| sizes.own).max().unwrap_or(0);
        let whole = shared.saturating_add(own);
        if let FollowProgress::Stands { step: at } = ready.follows {
            let record = sizes().map(|sizes| sizes.record).max().unwrap_or(0);
            let every = sizes().map(|sizes| sizes.every).max().unwrap_or(1).max(1);
            let behind = step.saturating_sub(at).div_ceil(every);
            let replays = if every == 1 { Replays::Steps(behind) } else { Replays::Rounds(behind) };
            // If the records are more than the state, it takes the state.
            let records = record.saturating_mul(behind);
            let (state, replays) = if records < whole { (records, Some(replays)) } else { (whole, None) };
            // In pipelines, only the members that hold the newcomer's part send: in the worst case the slowest.
            let sends = |rates: Vec<u64>| {
                let slowest = rates.iter().copied().min().unwrap_or(1);
                if at_most { slowest } else { together(rates).max(1) }
            };
            let predicted = rates.map(|rates| seconds(state, sends(rates)));
            let predicted = predicted.map(Nanos::from_secs_f64);
            return Self { state, predicted, at_most, replays };
        }
        let predicted = rates.map(|rates| {
            if at_most {
                // Worst case: only the slowest member holds the newcomer's part.
                return seconds(whole, rates.iter().copied().min().unwrap_or(1));
            }
            let all = seconds(whole, together(rates.iter().copied()).max(1));
            all.max(seconds(own, rates.first().copied().unwrap_or(1)))
        });
        let predicted = predicted.map(Nanos::from_secs_f64);
        Self { state: whole, predicted, at_most, replays: None }
    }
}

/// A newcomer that is proposed as a member, and the cost of its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::train) struct Admission {
    /// The newcomer's endpoint.
    pub(in crate::train) peer: PeerId,
    /// Cost of its state.
    pub(in crate::train) cost: Cost,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let about = if self.at_most { "at most" } else { "about" };
        match self.replays {
            None => write!(f, "{} of state", Bytes(self.state))?,
            Some(Replays::Steps(0) | Replays::Rounds(0)) => return write!(f, "no state any more"),
            Some(replays) => write!(f, "{} of {replays}", Bytes(self.state))?,
        }
        match self.predicted {
            Some(time) => write!(f, ", {about} {time} during which all members wait"),
            None => write!(f, " for which all members wait; the time is not known"),
        }
    }
}

impl fmt::Display for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {} is ready to join: it receives {}", self.peer.0, self.cost)
    }
}

/// Returns the rate of answers of `bytes` bytes that arrived at these times, in bytes a second: the highest
/// rate over half of them in a row. The other half may be delayed by other traffic. The rate is measured over
/// many answers because several may be read at the same moment. `None` if the times are too few or equal.
fn rate(arrived: &[Nanos], bytes: u32) -> Option<u64> {
    let span = (arrived.len() / 2).max(1);
    let times = arrived.windows(span + 1).map(|window| window[span].saturating_sub(window[0]));
    let least = times.filter(|&time| time > Nanos::ZERO).min()?;
    // Answers that were read at nearly the same moment look faster than any link.
    Some(((span as f64 * f64::from(bytes) / least.as_secs_f64()) as u64).min(MOST_BYTES_PER_S))
}

/// Measures how fast all other ranks send to this one at the same time. `peers` are the processes by rank. The
/// probes are small compared with a state of `state` bytes. `time` counts the measurements of this process:
/// late answers to an earlier one are skipped.
pub(super) fn measured(comm: &Communicator, peers: &[Newcomer], state: u64, time: u32) -> Ready {
    let others: Vec<Rank> = (0..comm.size() as u32).map(Rank).filter(|&rank| rank != comm.rank()).collect();
    let wished = state / (PART * u64::from(PROBES));
    let len = u32::try_from(wished).unwrap_or(MOST).clamp(LEAST, MOST);
    let comm = comm.clone().with_deadline(Nanos::MAX);
    let mut seen: BTreeMap<Rank, Vec<Nanos>> = others.iter().map(|&rank| (rank, Vec::new())).collect();
    let mut sending: Vec<Pending<Result<(), CommError>>> = Vec::new();
    let first = time * PROBES;
    for number in first..first + PROBES {
        // Request one probe from each member in turn.
        let asked = BlobRequest::Probe { len, number }.to_bytes();
        sending.extend(others.iter().map(|&rank| comm.start_send(rank, TAGS.ask, asked.clone())));
    }
    let until = comm.now().saturating_add(PATIENCE);
    loop {
        let is_open = |(_, seen): &(&Rank, &Vec<Nanos>)| seen.len() < PROBES as usize;
        let open: Vec<Rank> = seen.iter().filter(is_open).map(|(&rank, _)| rank).collect();
        let left = until.saturating_sub(comm.now());
        if open.is_empty() || left == Nanos::ZERO {
            break;
        }
        let mut next = comm.start_recv_any(&open, TAGS.answer);
        if comm.first(&mut [&mut next], WaitMode::Within(left)).is_none() {
            break;
        }
        let (rank, bytes) = match next.wait() {
            Ok(answer) => answer,
            // A lost rank gets no rate, and the others are measured without it.
            Err(error) => {
                let lost = peers.iter().position(|peer| Some(peer.peer) == error.peer());
                match lost.and_then(|rank| seen.remove(&Rank(rank as u32))) {
                    Some(_) => continue,
                    None => break,
                }
            }
        };
        let is_probe = |reply: &BlobReply| {
            let right = reply.bytes.as_ref().is_some_and(|bytes| bytes.len() as u64 == u64::from(len));
            matches!(reply.item, BlobRequest::Probe { number, .. } if number >= first) && right
        };
        if BlobReply::from_bytes(&bytes).as_ref().is_some_and(is_probe) {
            seen.entry(rank).or_default().push(comm.now());
        }
    }
    let rate = |(rank, seen): (&Rank, &Vec<Nanos>)| Some((peers.get(rank.index())?.id, rate(seen, len)?));
    Ready { rates: seen.iter().filter_map(rate).collect(), ..Ready::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(shared: u64, own: u64, is_part: bool) -> Vec<(MemberId, StateBytes)> {
        (0..3)
            .map(|n| (MemberId::number(n), StateBytes { shared, own, is_part, record: shared / 3, every: 1 }))
            .collect()
    }

    fn rates(rates: &[u64]) -> Ready {
        let named = |(n, &rate): (usize, &u64)| (MemberId::number(n as u32), rate);
        Ready { rates: rates.iter().enumerate().map(named).collect(), ..Ready::default() }
    }

    #[test]
    fn a_rate_is_that_of_the_half_that_came_fastest() {
        let at = |millis: &[u64]| millis.iter().map(|&ms| Nanos::from_millis(ms)).collect::<Vec<_>>();
        assert_eq!(rate(&at(&[10, 20, 30, 40]), 1000), Some(100_000));
        // Other traffic delayed the third answer.
        assert_eq!(rate(&at(&[10, 20, 500, 510, 520]), 1000), Some(100_000));
        // Pairs of answers were read at the same moment.
        assert_eq!(rate(&at(&[10, 10, 20, 20, 30]), 1000), Some(200_000));
        assert_eq!(rate(&[Nanos(5), Nanos(6), Nanos(7)], 1_000_000), Some(MOST_BYTES_PER_S));
        for none in [&[][..], &[5], &[5, 5, 5]] {
            assert_eq!(rate(&at(none), 1000), None);
        }
    }

    #[test]
    fn a_state_costs_its_bytes_over_the_sum_of_the_rates() {
        let ready = rates(&[10_000_000, 5_000_000, 5_000_000]);
        let cost = |told: &[_]| Cost::new(&ready, told, 9);
        let ddp = cost(&told(60_000_000, 0, false));
        assert_eq!((ddp.state, ddp.predicted), (60_000_000, Some(Nanos::from_millis(3_000))));
        assert_eq!(ddp.to_string(), "60 MB of state, about 3s during which all members wait");
        // A replica's own state comes from the first member only.
        let local = cost(&told(10_000_000, 40_000_000, false));
        assert_eq!(local.predicted, Some(Nanos::from_millis(4_000)));
        // The newcomer's part may be held by the slowest member only.
        let part = cost(&told(20_000_000, 0, true));
        assert_eq!(part.to_string(), "20 MB of state, at most 4s during which all members wait");
        // Rates that no link has are no reason to stop.
        let lies = Cost::new(&rates(&[u64::MAX, u64::MAX, 1]), &told(5, 0, false), 9);
        assert_eq!(lies.predicted, Some(Nanos::ZERO));
        // The rate of one member is not known.
        let cost = Cost::new(&rates(&[1, 1]), &told(5, 0, false), 9);
        assert_eq!(cost.predicted, None);
        assert_eq!(cost.to_string(), "5 B of state for which all members wait; the time is not known");
    }

    #[test]
    fn one_that_has_followed_costs_the_steps_that_it_lacks() {
        let mut ready = rates(&[10_000_000, 5_000_000, 5_000_000]);
        let mut cost = |at| {
            ready.follows = FollowProgress::Stands { step: at };
            Cost::new(&ready, &told(60_000_000, 0, false), 9)
        };
        assert_eq!((cost(8).state, cost(8).predicted), (20_000_000, Some(Nanos::from_millis(1_000))));
        assert_eq!(cost(8).to_string(), "20 MB of the last step, about 1s during which all members wait");
        assert_eq!(cost(7).to_string(), "40 MB of the last 2 steps, about 2s during which all members wait");
        assert_eq!(cost(9).to_string(), "no state any more");
        assert_eq!(cost(6).to_string(), "60 MB of state, about 3s during which all members wait");
        // With local steps, the records are those of rounds.
        let mut rounds = told(60_000_000, 40_000_000, false);
        for (_, sizes) in &mut rounds {
            sizes.every = 4;
        }
        ready.follows = FollowProgress::Stands { step: 8 };
        let cost = Cost::new(&ready, &rounds, 16);
        assert_eq!(cost.to_string(), "40 MB of the last 2 rounds, about 2s during which all members wait");
    }
}
