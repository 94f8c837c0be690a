//! A schedule: an order of computations and all communication between ranks, checked to be free of deadlock.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use farflung_base::{Rank, StageId};

use super::lower::lower;
use super::{ComputeKind, ComputeOrder, Lowered, Lowering, Message, Op, TransferDirection};
use crate::ParallelError;

/// Lists that ranks can execute directly.
///
/// In every value of this type, sends and receives match and there is no deadlock. Every message between two
/// ranks is sent once, after it is computed, and received once, before it is used, in the same order at both
/// ends of a wire. All lists run to their end if each wire can hold [`Schedule::buffers`] messages whose
/// receive is not yet posted.
///
/// ```
/// use farflung_parallel::pipeline::{Lowering, Method, Schedule, Settings};
///
/// let order = Method::OneFOneB.order(&Settings::new(2, 2))?;
/// let schedule = Schedule::new(order, &Lowering::default())?;
/// assert_eq!(
///     schedule.to_string(),
///     "r0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0STEP1\n\
///      r1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1STEP1\n"
/// );
/// assert_eq!(schedule.buffers(), 0);
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    order: ComputeOrder,
    lists: Vec<Vec<Lowered>>,
    buffers: u32,
}

impl Schedule {
    /// Adds communication to `order`, checks the result, and finds the smallest number of buffers with which
    /// all lists run to their end.
    ///
    /// Errors: [`ParallelError::Schedule`] and [`ParallelError::Deadlock`]. Orders made by this crate's methods
    /// give neither.
    pub fn new(order: ComputeOrder, lowering: &Lowering) -> Result<Self, ParallelError> {
        let lists = lower(&order, lowering);
        Self::check(order, lists)
    }

    /// Checks lists to which communication was added elsewhere, and finds the smallest number of buffers with
    /// which they run to their end.
    ///
    /// Errors: [`ParallelError::PerRank`] if there is not one list for each rank; [`ParallelError::Schedule`]
    /// with the first invalid entry; [`ParallelError::Deadlock`] if no number of buffers is enough.
    pub fn check(order: ComputeOrder, lists: Vec<Vec<Lowered>>) -> Result<Self, ParallelError> {
        pairing(&order, &lists)?;
        let ends = |buffers| walk(&order, &lists, buffers);
        // With a buffer for every message, no send blocks. If that is not enough, no number is.
        let messages = lists.iter().map(Vec::len).max().unwrap_or_default() as u32;
        ends(messages)?;
        let (mut least, mut enough) = (0, 1);
        while enough < messages && ends(enough).is_err() {
            least = enough + 1;
            enough *= 2;
        }
        while least < enough {
            let middle = u32::midpoint(least, enough);
            if ends(middle).is_ok() { enough = middle } else { least = middle + 1 }
        }
        Ok(Self { order, lists, buffers: least })
    }

    /// Returns the order of computations.
    #[must_use]
    pub const fn order(&self) -> &ComputeOrder {
        &self.order
    }

    /// Returns the entries of each rank, in order.
    #[must_use]
    pub fn lists(&self) -> &[Vec<Lowered>] {
        &self.lists
    }

    /// Returns the number of messages that each wire must accept before their receives are posted. 0: each send
    /// may block until its receive is posted.
    #[must_use]
    pub const fn buffers(&self) -> u32 {
        self.buffers
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (rank, list) in self.lists.iter().enumerate() {
            write!(f, "r{rank}:")?;
            for entry in list {
                write!(f, " {entry}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

fn fault(rank: Rank, entry: Lowered, problem: &'static str) -> ParallelError {
    ParallelError::Schedule { rank, entry, problem }
}

/// Checks that a rank holds the stage of an entry.
fn here(order: &ComputeOrder, rank: Rank, entry: Lowered, stage: StageId) -> Result<(), ParallelError> {
    let placement = order.placement();
    if stage.0 < placement.stages() && placement.rank(stage) == rank {
        return Ok(());
    }
    Err(fault(rank, entry, "another rank holds its stage"))
}

/// Checks that the computations are those of the order, and that sends and receives match on every wire.
fn pairing(order: &ComputeOrder, lists: &[Vec<Lowered>]) -> Result<(), ParallelError> {
    let ranks = order.placement().ranks() as usize;
    if lists.len() != ranks {
        return Err(ParallelError::PerRank { what: "lists", given: lists.len(), ranks });
    }
    let mut wires: BTreeMap<(Rank, Rank), Wire> = BTreeMap::new();
    for (rank, list) in (0..).map(Rank).zip(lists) {
        one_rank(order, rank, list, &mut wires)?;
    }
    for ((_, to), wire) in wires {
        let mut sent = wire.sent.into_iter();
        for message in wire.received {
            let problem = match sent.next() {
                Some(next) if next == message => continue,
                Some(_) => "messages are sent in another order",
                None => "no rank sends it",
            };
            return Err(fault(to, message.receive(), problem));
        }
        // No message can remain without a receive: the computation that needs the message was checked to have
        // one.
    }
    Ok(())
}

/// The messages from one rank to another, in the order of the sender and in that of the receiver.
#[derive(Default)]
struct Wire {
    sent: Vec<Message>,
    received: Vec<Message>,
}

/// Checks that a rank's list has its computations in order, sends their outputs and receives their inputs.
fn one_rank(
    order: &ComputeOrder,
    rank: Rank,
    list: &[Lowered],
    wires: &mut BTreeMap<(Rank, Rank), Wire>,
) -> Result<(), ParallelError> {
    let placement = order.placement();
    let mut ops = order.lists()[rank.index()].iter();
    // Outputs not yet sent, and receives not yet used.
    let (mut made, mut awaited): (Vec<Message>, Vec<Message>) = (Vec::new(), Vec::new());
    let take = |from: &mut Vec<Message>, message| {
        from.iter().position(|&m| m == message).map(|at| from.swap_remove(at))
    };
    for &entry in list {
        match entry {
            // A step may be part of the order or added by lowering.
            Lowered::Compute(Op::Run(action))
                if action.kind == ComputeKind::Step && ops.as_slice().first() != Some(&action.into()) =>
            {
                here(order, rank, entry, action.stage)?;
            }
            Lowered::Compute(op) => {
                if ops.next() != Some(&op) {
                    return Err(fault(rank, entry, "it is not the next computation of the order"));
                }
                for action in op.actions() {
                    let crossing = |message: &Message| message.wire(placement).is_some();
                    if let Some(message) = Message::taken_by(action, placement).filter(crossing)
                        && take(&mut awaited, message).is_none()
                    {
                        return Err(fault(rank, entry, "its input is not received before it"));
                    }
                    made.extend(Message::made_by(action, placement).filter(crossing));
                }
            }
            Lowered::Move { stage, .. } => {
                here(order, rank, entry, stage)?;
                let Some((way, message)) = entry.message(placement) else {
                    if entry.is_message() {
                        return Err(fault(rank, entry, "there is no stage at the other end"));
                    }
                    continue;
                };
                let Some(wire) = message.wire(placement) else {
                    return Err(fault(rank, entry, "sender and receiver are the same rank"));
                };
                let wire = wires.entry(wire).or_default();
                match way {
                    TransferDirection::Send if take(&mut made, message).is_none() => {
                        return Err(fault(
                            rank,
                            entry,
                            "its message was not computed yet, or was sent already",
                        ));
                    }
                    TransferDirection::Send => wire.sent.push(message),
                    TransferDirection::Receive => {
                        awaited.push(message);
                        wire.received.push(message);
                    }
                }
            }
        }
    }
    if let Some(&op) = ops.next() {
        return Err(fault(rank, Lowered::Compute(op), "it is missing"));
    }
    if let Some(message) = made.first() {
        return Err(fault(rank, message.send(), "it is missing"));
    }
    match awaited.first() {
        Some(message) => Err(fault(rank, message.receive(), "no computation uses it")),
        None => Ok(()),
    }
}

/// Runs the lists without durations. A send blocks while `buffers` messages on its wire have no posted receive
/// (with 0 buffers: until its own receive is posted). A computation waits until its inputs are sent.
fn walk(order: &ComputeOrder, lists: &[Vec<Lowered>], buffers: u32) -> Result<(), ParallelError> {
    let placement = order.placement();
    let mut at = vec![0; lists.len()];
    // For each wire: number of messages sent, and number of receives posted.
    let mut counts: BTreeMap<(Rank, Rank), (u64, u64)> = BTreeMap::new();
    let mut is_sent = vec![false; 2 * order.cells()];
    let mut ready: VecDeque<usize> = (0..lists.len()).collect();
    while let Some(rank) = ready.pop_front() {
        while let Some(entry) = lists[rank].get(at[rank]) {
            if let Lowered::Compute(op) = entry {
                let mut needs = op.actions().filter_map(|a| Message::taken_by(a, placement));
                if needs.any(|m| m.wire(placement).is_some() && !is_sent[order.slot(m)]) {
                    break;
                }
            }
            if let Some((way, message)) = entry.message(placement)
                && let Some((from, to)) = message.wire(placement)
            {
                let (sent, awaited) = counts.entry((from, to)).or_default();
                match way {
                    TransferDirection::Send if *sent >= *awaited + u64::from(buffers) => break,
                    TransferDirection::Send => {
                        *sent += 1;
                        is_sent[order.slot(message)] = true;
                        ready.push_back(to.index());
                    }
                    TransferDirection::Receive => {
                        *awaited += 1;
                        ready.push_back(from.index());
                    }
                }
            }
            at[rank] += 1;
        }
    }
    let waiting: Vec<(Rank, Lowered)> =
        (0..lists.len()).filter_map(|rank| Some((Rank(rank as u32), *lists[rank].get(at[rank])?))).collect();
    if waiting.is_empty() { Ok(()) } else { Err(ParallelError::Deadlock { waiting }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Method, Settings};

    fn refused(order: &ComputeOrder, text: &[&str]) -> String {
        let list = |line: &&str| line.split_whitespace().map(|e| e.parse().unwrap()).collect();
        Schedule::check(order.clone(), text.iter().map(list).collect()).unwrap_err().to_string()
    }

    #[test]
    fn lists_that_do_not_fit_are_refused_by_entry() {
        let order = Method::GPipe.order(&Settings::new(2, 1)).unwrap();
        let one = "0F0 0SEND_F0 0RECV_B0 0B0";
        let two = "1RECV_F0 1F0 1B0 1SEND_B0";
        let good: Vec<Vec<Lowered>> =
            [one, two].map(|l| l.split_whitespace().map(|e| e.parse().unwrap()).collect()).to_vec();
        assert_eq!(Schedule::check(order.clone(), good).unwrap().buffers(), 0);
        let refused = |a: &str, b: &str| refused(&order, &[a, b]);
        assert!(refused("0F0 0RECV_B0 0B0", two).contains("0SEND_F0: it is missing"));
        assert!(refused("0SEND_F0 0F0 0RECV_B0 0B0", two).contains("not computed yet"));
        assert!(refused("0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", two).contains("not computed yet"));
        assert!(refused("0F0 0SEND_F0 0B0 0RECV_B0", two).contains("its input is not received"));
        assert!(refused("0F0 0SEND_F0 0RECV_B0 0RECV_B0 0B0", two).contains("no computation uses it"));
        assert!(refused("0B0 0RECV_B0 0F0", two).contains("not the next"));
        assert!(refused("0F0 0SEND_F0", two).contains("0B0: it is missing"));
        assert!(refused("0F0 0SEND_B0", two).contains("no stage at the other end"));
        assert!(refused("0F0 1SEND_F0", two).contains("another rank"));
        assert!(refused("0F0 9SEND_F0", two).contains("another rank"));
        assert!(refused("0F0 0SEND_F0 0RECV_B0 0B0 1STEP0", two).contains("another rank"));
        assert!(refused("0F0 0SEND_F7 0SEND_F0 0RECV_B0 0B0", two).contains("not computed yet"));
    }

    /// Both ranks have the same two messages, but in different orders.
    #[test]
    fn a_wire_has_one_order() {
        let order = Method::GPipe.order(&Settings::new(2, 2)).unwrap();
        let one = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B1 0B0";
        let crossed = "1RECV_F1 1RECV_F0 1F0 1F1 1B1 1SEND_B1 1B0 1SEND_B0";
        assert!(
            refused(&order, &[one, crossed]).contains("rank 1, 1RECV_F1: messages are sent in another order")
        );
    }

    /// Each rank sends before it posts a receive: with one buffer the lists run to their end, without a buffer
    /// they deadlock.
    #[test]
    fn buffers_are_counted() {
        let order: ComputeOrder = "r0: 0F0 3F1 0B0 3B1\nr1: 2F1 1F0 1B0 2B1".parse().unwrap();
        let entries = |text: &str| text.split_whitespace().map(|e| e.parse().unwrap()).collect();
        let lists = vec![
            entries("0F0 0SEND_F0 3RECV_F1 3F1 3B1 3SEND_B1 0RECV_B0 0B0"),
            entries("2F1 2SEND_F1 1RECV_F0 1F0 1B0 1SEND_B0 2RECV_B1 2B1"),
        ];
        let order_of_lists: ComputeOrder = "r0: 0F0 3F1 3B1 0B0\nr1: 2F1 1F0 1B0 2B1".parse().unwrap();
        assert_eq!(Schedule::check(order_of_lists, lists).unwrap().buffers(), 1);
        // With receives posted one computation ahead, they need at most one buffer too.
        let lowered = Schedule::new(order, &Lowering::default()).unwrap();
        assert!(lowered.buffers() <= 1);
    }
}
