//! A newcomer says that it is ready once it has measured how fast each member sends to it. Members propose no
//! view with one before, and say what its state will cost them from these rates.

use std::collections::BTreeMap;
use std::fmt;

use farflung_base::{Bytes, Nanos, PeerId, Pending, Rank};
use farflung_comm::{CommError, Communicator, Look};
use farflung_parallel::membership::{MemberId, View};
use serde::{Deserialize, Serialize};

use super::fetch::TAGS;
use super::shelf::{Item, PROBE as MOST, Reply};
use crate::train::trainer::StateBytes;

/// Questions to each member, all at once.
const PROBES: u32 = 16;
/// For how long answers are waited for: they may stand behind the averages of a step.
const PATIENCE: Nanos = Nanos::from_millis(10_000);
/// The fewest bytes of a probe.
const LEAST: u32 = 256;
/// The whole of a measurement is at most this part of the state.
const PART: u64 = 16;

/// What a newcomer tells all members.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ready {
    /// Bytes a second that each member sends to it while all do; nothing of one that has not answered.
    rates: BTreeMap<MemberId, u64>,
}

impl Ready {
    /// Whether a view can have so many members.
    pub(super) fn is_sound(&self) -> bool {
        self.rates.len() <= View::MOST_MEMBERS
    }

    /// The rates of some members; `None` unless all of them are known.
    fn of(&self, members: &[MemberId]) -> Option<Vec<u64>> {
        members.iter().map(|id| self.rates.get(id).copied().filter(|&rate| rate > 0)).collect()
    }
}

/// What the state of a newcomer costs all members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::train) struct Cost {
    /// Its bytes.
    pub(in crate::train) state: u64,
    /// How long all will wait for it; none where its rates are not known.
    pub(in crate::train) predicted: Option<Nanos>,
    /// Whether it may be less: which part of the model it will have is decided later.
    pub(in crate::train) at_most: bool,
}

impl Cost {
    /// Of one that is ready, where members have told the sizes of their states and which of them can give it.
    pub(super) fn new(ready: &Ready, told: &[(MemberId, StateBytes)]) -> Self {
        let members: Vec<MemberId> = told.iter().map(|(id, _)| *id).collect();
        let rates = ready.of(&members);
        let seconds = |bytes: u64, rate: u64| bytes as f64 / rate as f64;
        let sizes = || told.iter().map(|(_, sizes)| sizes);
        let at_most = sizes().any(|sizes| sizes.is_part);
        let shared = sizes().map(|sizes| sizes.shared).max().unwrap_or(0);
        let own = sizes().map(|sizes| sizes.own).max().unwrap_or(0);
        let predicted = rates.map(|rates| {
            if at_most {
                // Its part may be one that only the slowest of them holds.
                return seconds(shared + own, rates.iter().copied().min().unwrap_or(1));
            }
            let all = seconds(shared + own, rates.iter().sum::<u64>().max(1));
            all.max(seconds(own, rates.first().copied().unwrap_or(1)))
        });
        Self { state: shared + own, predicted: predicted.map(Nanos::from_secs_f64), at_most }
    }
}

/// A newcomer that is proposed, and what its state will cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::train) struct Admission {
    /// Its endpoint.
    pub(in crate::train) peer: PeerId,
    /// The cost.
    pub(in crate::train) cost: Cost,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let about = if self.at_most { "at most" } else { "about" };
        write!(f, "{} of state", Bytes(self.state))?;
        match self.predicted {
            Some(time) => write!(f, ", {about} {time} in which all wait"),
            None => write!(f, " for which all wait; how long is not known"),
        }
    }
}

impl fmt::Display for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {} is ready to come in: it takes {}", self.peer.0, self.cost)
    }
}

/// The rate of answers of so many bytes that arrived at these times: the highest over half of them in a row.
/// Others may go over the link between them, and several may be read at once.
fn rate(arrived: &[Nanos], bytes: u32) -> Option<u64> {
    let span = (arrived.len() / 2).max(1);
    let times = arrived.windows(span + 1).map(|window| window[span].saturating_sub(window[0]));
    let least = times.filter(|&time| time > Nanos::ZERO).min()?;
    Some((span as f64 * f64::from(bytes) / least.as_secs_f64()) as u64)
}

/// Measures how fast all others send to this rank, all at the same time, with probes that are small beside a
/// state of so many bytes.
pub(super) fn measured(comm: &Communicator, ids: &[MemberId], state: u64) -> Ready {
    let others: Vec<Rank> = (0..comm.size() as u32).map(Rank).filter(|&rank| rank != comm.rank()).collect();
    let wished = state / (PART * u64::from(PROBES));
    let len = u32::try_from(wished).unwrap_or(MOST).clamp(LEAST, MOST);
    let comm = comm.clone().with_deadline(Nanos::MAX);
    let mut seen: BTreeMap<Rank, Vec<Nanos>> = others.iter().map(|&rank| (rank, Vec::new())).collect();
    let mut sending: Vec<Pending<Result<(), CommError>>> = Vec::new();
    for number in 0..PROBES {
        // One of each in turn.
        let asked = Item::Probe { len, number }.to_bytes();
        sending.extend(others.iter().map(|&rank| comm.start_send(rank, TAGS.ask, asked.clone())));
    }
    let until = comm.now().saturating_add(PATIENCE);
    loop {
        let open: Vec<Rank> =
            others.iter().copied().filter(|rank| seen[rank].len() < PROBES as usize).collect();
        let left = until.saturating_sub(comm.now());
        if open.is_empty() || left == Nanos::ZERO {
            break;
        }
        let mut next = comm.start_recv_any(&open, TAGS.answer);
        if comm.first(&mut [&mut next], Look::Within(left)).is_none() {
            break;
        }
        // Whoever is lost has no rate.
        let Ok((rank, bytes)) = next.wait() else { break };
        let is_probe = |reply: &Reply| {
            let right = reply.bytes.as_ref().is_some_and(|bytes| bytes.len() as u64 == u64::from(len));
            matches!(reply.item, Item::Probe { .. }) && right
        };
        if Reply::from_bytes(&bytes).as_ref().is_some_and(is_probe) {
            seen.entry(rank).or_default().push(comm.now());
        }
    }
    let rate = |(rank, seen): (&Rank, &Vec<Nanos>)| Some((*ids.get(rank.index())?, rate(seen, len)?));
    Ready { rates: seen.iter().filter_map(rate).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(shared: u64, own: u64, is_part: bool) -> Vec<(MemberId, StateBytes)> {
        (0..3).map(|n| (MemberId::number(n), StateBytes { shared, own, is_part })).collect()
    }

    fn rates(rates: &[u64]) -> Ready {
        let named = |(n, &rate): (usize, &u64)| (MemberId::number(n as u32), rate);
        Ready { rates: rates.iter().enumerate().map(named).collect() }
    }

    #[test]
    fn a_rate_is_that_of_the_half_that_came_fastest() {
        let at = |millis: &[u64]| millis.iter().map(|&ms| Nanos::from_millis(ms)).collect::<Vec<_>>();
        assert_eq!(rate(&at(&[10, 20, 30, 40]), 1000), Some(100_000));
        // Something else was sent between them.
        assert_eq!(rate(&at(&[10, 20, 500, 510, 520]), 1000), Some(100_000));
        // Two of them were read at once.
        assert_eq!(rate(&at(&[10, 10, 20, 20, 30]), 1000), Some(200_000));
        for none in [&[][..], &[5], &[5, 5, 5]] {
            assert_eq!(rate(&at(none), 1000), None);
        }
    }

    #[test]
    fn a_state_costs_its_bytes_over_the_sum_of_the_rates() {
        let ready = rates(&[10_000_000, 5_000_000, 5_000_000]);
        let cost = |told: &[_]| Cost::new(&ready, told);
        let ddp = cost(&told(60_000_000, 0, false));
        assert_eq!((ddp.state, ddp.predicted), (60_000_000, Some(Nanos::from_millis(3_000))));
        assert_eq!(ddp.to_string(), "60 MB of state, about 3s in which all wait");
        // What the first one alone has comes from it alone.
        let local = cost(&told(10_000_000, 40_000_000, false));
        assert_eq!(local.predicted, Some(Nanos::from_millis(4_000)));
        // A part may be that of the slowest.
        let part = cost(&told(20_000_000, 0, true));
        assert_eq!(part.to_string(), "20 MB of state, at most 4s in which all wait");
        // One whose rate is not known.
        let cost = Cost::new(&rates(&[1, 1]), &told(5, 0, false));
        assert_eq!(cost.predicted, None);
        assert_eq!(cost.to_string(), "5 B of state for which all wait; how long is not known");
    }
}
