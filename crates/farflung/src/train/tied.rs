//! The token table is used twice: by the embedding in the model's first part and by the head in its last. Both
//! parts hold the table; its gradient is the sum of both parts' gradients.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::{Rank, StageId};
use farflung_parallel::pipeline::Placement;
use farflung_tensor::Tensor;

use super::exchange::{Between, Exchange, windows};
use super::part::Part;
use crate::Result;

/// The way in which this rank's gradient of the token table is added to that of the other part.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one of it on a rank")]
pub(super) enum TiedTable {
    /// This rank does not have the table, or one part has both uses.
    No,
    /// Both parts are on this rank.
    Here,
    /// The other part is on another rank.
    Across(TableExchange),
}

/// This rank's exchange of gradients of the token table with the holders of the other part. The group is this
/// rank and the one with the other part; with pools (several ranks for one part), it is one rank of the smaller
/// pool and its partners in the larger pool.
#[derive(Debug)]
pub(super) struct TableExchange {
    /// The ranks of the group with which this rank exchanges, and the number of exchanges so far: several may
    /// be in flight.
    pub(super) between: Between,
    /// This rank's stage with the table.
    pub(super) stage: StageId,
    pub(super) begun: Option<Exchange>,
}

/// A group of ranks that exchange gradients of the token table, in a placement with
/// [`TiedWeights::Across`](farflung_parallel::pipeline::TiedWeights).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TiedGroup {
    /// The ranks, in order.
    pub(super) ranks: Vec<Rank>,
    /// The messages, as pairs of sender and receiver.
    pub(super) ways: Vec<(Rank, Rank)>,
}

impl TiedGroup {
    /// Returns all groups of a placement. Each rank of the smaller of the two pools has a group with its share
    /// of the larger pool: it sends its gradient to all of that share, and the first of them sends its own
    /// back. All ranks of a pool have equal gradients by then, so each rank gets the gradients of both parts.
    pub(super) fn of(placement: &Placement) -> Vec<Self> {
        let (first, last) = (placement.holders(0), placement.holders(placement.depth() - 1));
        let (few, many) = if first.len() <= last.len() { (first, last) } else { (last, first) };
        let group = |(i, &one): (usize, &Rank)| {
            let others: Vec<Rank> = many.iter().skip(i).step_by(few.len()).copied().collect();
            let back = others.first().map(|&other| (other, one));
            let mut ranks: Vec<Rank> = others.iter().copied().chain([one]).collect();
            ranks.sort_unstable();
            Self { ranks, ways: others.into_iter().map(|other| (one, other)).chain(back).collect() }
        };
        few.iter().enumerate().map(group).collect()
    }

    /// Returns the position of a rank in the group.
    pub(super) fn place(&self, rank: Rank) -> Rank {
        Rank(self.ranks.iter().take_while(|&&other| other < rank).count() as u32)
    }

    /// Returns the ranks to which a rank sends, and the one from which it receives, as positions in the group.
    pub(super) fn partners(&self, rank: Rank) -> (Vec<Rank>, Rank) {
        let to = self.ways.iter().filter(|(from, _)| *from == rank).map(|&(_, to)| self.place(to)).collect();
        let from = self.ways.iter().find(|(_, to)| *to == rank).map_or(rank, |&(from, _)| from);
        (to, self.place(from))
    }
}

impl TableExchange {
    fn start(&mut self, part: &Part) -> Result<Exchange> {
        Exchange::start(self.next(), &part.grads, part.table_in_grads())
    }

    /// Returns the ranks of the next exchange.
    fn next(&mut self) -> Between {
        let between = self.between.clone();
        self.between.round = self.between.round.wrapping_add(1);
        between
    }
}

impl TiedTable {
    /// Starts the exchange; this rank's gradient of the table is complete.
    pub(super) fn start(&mut self, part: &Part) -> Result<()> {
        if let Self::Across(across) = self {
            across.begun = Some(across.start(part)?);
        }
        Ok(())
    }

    /// Drops the exchange, with its step.
    pub(super) fn give_up(&mut self) {
        if let Self::Across(across) = self {
            across.begun = None;
        }
    }

    /// Returns the exchange of the table's gradients, and starts it if it was not started before. `None` unless
    /// `stage` holds the table and the other part is on another rank.
    pub(super) fn exchange(&mut self, stage: StageId, part: &Part) -> Result<Option<Exchange>> {
        match self {
            Self::Across(across) if across.stage == stage => match across.begun.take() {
                Some(begun) => Ok(Some(begun)),
                None => across.start(part).map(Some),
            },
            _ => Ok(None),
        }
    }

    /// Replaces the table's gradient by the sum of both parts' gradients; all gradients must be complete.
    pub(super) fn finish(
        &mut self,
        parts: &mut BTreeMap<StageId, Part>,
        placement: &Placement,
    ) -> Result<()> {
        match self {
            Self::No => {}
            Self::Here => {
                let find = |wanted: fn(&Placement, StageId) -> bool| {
                    parts.keys().copied().find(|&stage| wanted(placement, stage))
                };
                let users = (find(Placement::is_last), find(Placement::is_first));
                let (Some(head), Some(embedding)) = users else { return Ok(()) };
                for window in windows(&(0..parts[&head].table_in_grads().len())) {
                    let mut sum = table(&parts[&head], &window)?;
                    let more = table(&parts[&embedding], &window)?;
                    sum.iter_mut().zip(more).for_each(|(sum, part)| *sum += part);
                    for stage in [head, embedding] {
                        write(parts, stage, &window, &sum)?;
                    }
                }
            }
            Self::Across(TableExchange { stage, .. }) => {
                let stage = *stage;
                let part = parts.get_mut(&stage).expect("the table's user is on this rank");
                if let Some(exchange) = self.exchange(stage, part)? {
                    exchange.add_to(&mut part.grads)?;
                }
            }
        }
        Ok(())
    }
}

impl TiedTable {
    /// Copies the table's range of a buffer from the first part to the last; does nothing if the parts have no
    /// such buffer.
    pub(super) fn take_first(
        &mut self,
        parts: &mut BTreeMap<StageId, Part>,
        placement: &Placement,
        mut buffer: impl FnMut(&mut Part) -> Option<&mut Tensor>,
    ) -> Result<()> {
        match self {
            Self::No => Ok(()),
            Self::Here => {
                let find = |wanted: fn(&Placement, StageId) -> bool| {
                    parts.keys().copied().find(|&stage| wanted(placement, stage))
                };
                let users = (find(Placement::is_first), find(Placement::is_last));
                let (Some(embedding), Some(head)) = users else { return Ok(()) };
                let part = parts.get_mut(&embedding).expect("it was found");
                let range = part.table();
                let Some(from) = buffer(part) else { return Ok(()) };
                let values = from.view().part(range.start, range.len())?.to_vec::<f32>()?;
                let part = parts.get_mut(&head).expect("it was found");
                let range = part.table();
                match buffer(part) {
                    Some(to) => Ok(to.view_mut().part(range.start, range.len())?.write(&values)?),
                    None => Ok(()),
                }
            }
            Self::Across(across) => {
                let part = parts.get_mut(&across.stage).expect("the table's user is on this rank");
                let range = part.table();
                let Some(buffer) = buffer(part) else { return Ok(()) };
                let between = across.next();
                if placement.is_first(across.stage) {
                    between.give(buffer, &range)
                } else {
                    between.take(buffer, &range)
                }
            }
        }
    }
}

/// Returns a window of a part's gradient of the table.
fn table(part: &Part, window: &Range<usize>) -> Result<Vec<f32>> {
    let start = part.table_in_grads().start + window.start;
    Ok(part.grads.view().part(start, window.len())?.to_vec::<f32>()?)
}

fn write(
    parts: &mut BTreeMap<StageId, Part>,
    stage: StageId,
    window: &Range<usize>,
    sum: &[f32],
) -> Result<()> {
    let part = parts.get_mut(&stage).expect("the table's users are on this rank");
    let start = part.table_in_grads().start + window.start;
    Ok(part.grads.view_mut().part(start, window.len())?.write(sum)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_of_the_table_hears_one_of_the_others() {
        // Pairs of numbers: the ranks of the first stage, and the ranks of the last stage.
        for (first, last) in [(1, 1), (1, 3), (2, 2), (2, 5), (3, 1), (4, 3)] {
            let ways = |i: u32| [Rank(i % first), Rank(first + i % last)];
            let placement = Placement::new((0..first * last).flat_map(ways).collect(), first * last).unwrap();
            let groups = TiedGroup::of(&placement);
            assert_eq!(groups.len() as u32, first.min(last));
            let mut all: Vec<Rank> = groups.iter().flat_map(|group| group.ranks.clone()).collect();
            all.sort_unstable();
            assert_eq!(all, (0..first + last).map(Rank).collect::<Vec<_>>());
            for group in &groups {
                for &rank in &group.ranks {
                    let (to, from) = group.partners(rank);
                    let other = group.ranks[from.index()];
                    assert_ne!(other.0 < first, rank.0 < first, "{first} {last}: {rank:?} takes {other:?}'s");
                    // The sender must have the receiver among its targets.
                    assert!(group.partners(other).0.contains(&group.place(rank)));
                    assert!(to.iter().all(|to| (group.ranks[to.index()].0 < first) != (rank.0 < first)));
                }
            }
        }
    }
}
