//! A pipeline schedule without communication: the computations of each rank, in order. It contains no times.

pub(super) mod flow;

use std::fmt;
use std::str::FromStr;

use farflung_base::{Rank, StageId};

use super::{Action, ComputeKind, Content, Message, Op, Placement, Updates};
use crate::ParallelError;
use flow::{ZeroDurations, flow};

/// The computations of every rank, in order.
///
/// Every value of this type can run. Each microbatch passes each stage of one copy of the model once, forward
/// and backward (or only forward if no rank has backwards), on the rank that holds the stage, and there is no
/// deadlock.
///
/// It prints one line per rank, and the text parses to an order with the same lists. The placement is derived
/// from the lists (see [`ComputeOrder::from_lists`]), and the rule for updates is not in the text. Text after
/// `#` is ignored.
///
/// ```
/// use farflung_parallel::pipeline::ComputeOrder;
///
/// let order: ComputeOrder = "
///     r0: 0F0 0F1 0B0 0B1
///     r1: 1F0 1B0 1F1 1B1    # 1F1B
/// ".parse()?;
/// assert_eq!((order.placement().ranks(), order.microbatches()), (2, 2));
/// assert_eq!(order.to_string(), "r0: 0F0 0F1 0B0 0B1\nr1: 1F0 1B0 1F1 1B1\n");
/// let stuck = "r0: 0F0 0B0 0F1 0B1\nr1: 1F0 1F1 1B0 1B1".parse::<ComputeOrder>();
/// assert_eq!(stuck.unwrap_err().to_string(), "deadlock: rank 0 waits at 0B0, rank 1 waits at 1F1");
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputeOrder {
    pub(super) placement: Placement,
    pub(super) microbatches: u32,
    pub(super) slices: u16,
    pub(super) updates: Updates,
    pub(super) lists: Vec<Vec<Op>>,
}

/// The actions done so far on one microbatch on one stage, as bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Done(u8);

impl Done {
    const FORWARD: u8 = 1;
    const RECOMPUTE: u8 = 2;
    const INPUT: u8 = 4;
    const WEIGHT: u8 = 8;

    const fn has(self, bit: u8) -> bool {
        self.0 & bit != 0
    }
}

impl ComputeOrder {
    /// Maximum of stages times microbatches times slices.
    pub const MAX_CELLS: usize = 1 << 27;
    /// Maximum of ranks. The time to build and to simulate an order grows with their square: some seconds for
    /// this many.
    pub const MAX_RANKS: u32 = 4096;

    /// Checks `lists`, one for each rank of `placement`, and creates the order.
    ///
    /// `slices` is the number of parts into which each microbatch's tokens are divided. On each stage, the
    /// forward of a slice comes after that of the previous slice, its backward after that of the next slice.
    ///
    /// Errors: [`ParallelError::Action`] with the first action that is out of range, on the wrong rank,
    /// duplicate, or before an action that it depends on; [`ParallelError::Missing`] with an action that is
    /// missing; [`ParallelError::Deadlock`]; [`ParallelError::PerRank`]; [`ParallelError::Zero`];
    /// [`ParallelError::TooLarge`]; [`ParallelError::TooManyRanks`].
    pub fn new(
        placement: Placement,
        microbatches: u32,
        slices: u16,
        lists: Vec<Vec<Op>>,
    ) -> Result<Self, ParallelError> {
        let ranks = placement.ranks() as usize;
        if lists.len() != ranks {
            return Err(ParallelError::PerRank { what: "lists", given: lists.len(), ranks });
        }
        for (field, value) in [("microbatches", microbatches), ("slices", u32::from(slices))] {
            if value == 0 {
                return Err(ParallelError::Zero { of: "the schedule".to_owned(), field });
            }
        }
        Self::check_cells(placement.stages().into(), microbatches, slices)?;
        Self::check_ranks(placement.ranks())?;
        let order = Self { placement, microbatches, slices, updates: Updates::Flush, lists };
        let forward_only = !order.actions().any(|(_, a)| a.yields_gradient());
        let mut done = vec![Done::default(); order.cells()];
        for (rank, action) in order.actions() {
            order.enter(&mut done, rank, action)?;
        }
        order.complete(&done, forward_only)?;
        flow(&order, &mut ZeroDurations)?;
        Ok(order)
    }

    /// Checks the number of ranks before anything is computed for them.
    ///
    /// Errors: [`ParallelError::TooManyRanks`] for more than [`ComputeOrder::MAX_RANKS`].
    pub(super) fn check_ranks(ranks: u32) -> Result<(), ParallelError> {
        let limit = Self::MAX_RANKS;
        let (ranks, limit) = (u64::from(ranks), u64::from(limit));
        if ranks > limit { Err(ParallelError::TooManyRanks { ranks, limit }) } else { Ok(()) }
    }

    /// Checks the size of an order before anything is allocated for it.
    ///
    /// Errors: [`ParallelError::TooLarge`] if it has more than [`ComputeOrder::MAX_CELLS`] cells.
    pub(super) fn check_cells(stages: u64, microbatches: u32, slices: u16) -> Result<(), ParallelError> {
        let actions = u128::from(stages) * u128::from(microbatches) * u128::from(slices);
        let limit = Self::MAX_CELLS;
        if actions > limit as u128 { Err(ParallelError::TooLarge { actions, limit }) } else { Ok(()) }
    }

    /// Returns the order with another rule for when weights change.
    #[must_use]
    pub fn with_updates(self, updates: Updates) -> Self {
        Self { updates, ..self }
    }

    /// Returns the placement of stages on ranks.
    #[must_use]
    pub const fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the number of microbatches, over all copies of the model.
    #[must_use]
    pub const fn microbatches(&self) -> u32 {
        self.microbatches
    }

    /// Returns the number of slices of each microbatch's tokens.
    #[must_use]
    pub const fn slices(&self) -> u16 {
        self.slices
    }

    /// Returns the rule for when weights change.
    #[must_use]
    pub const fn updates(&self) -> Updates {
        self.updates
    }

    /// Returns the list of ops of each rank.
    #[must_use]
    pub fn lists(&self) -> &[Vec<Op>] {
        &self.lists
    }

    /// Iterates over all actions with their ranks, rank by rank.
    pub fn actions(&self) -> impl Iterator<Item = (Rank, Action)> {
        let ranks = (0..).map(Rank).zip(&self.lists);
        ranks.flat_map(|(rank, list)| list.iter().flat_map(Op::actions).map(move |action| (rank, action)))
    }

    /// Returns whether there are only forwards, so that nothing is trained.
    #[must_use]
    pub fn is_forward_only(&self) -> bool {
        !self.actions().any(|(_, action)| action.yields_gradient())
    }

    /// Returns stages times microbatches times slices.
    pub(super) fn cells(&self) -> usize {
        self.placement.stages() as usize * self.microbatches as usize * usize::from(self.slices)
    }

    /// Returns the index of an action's stage, microbatch and slice, below [`ComputeOrder::cells`].
    pub(super) fn cell(&self, action: Action) -> usize {
        let microbatch = action.stage.index() * self.microbatches as usize + action.microbatch as usize;
        microbatch * usize::from(self.slices) + usize::from(action.slice)
    }

    /// Returns the index of a message, below twice [`ComputeOrder::cells`].
    pub(super) fn slot(&self, message: Message) -> usize {
        let Message { from: stage, content, microbatch, slice } = message;
        let cell = self.cell(Action { stage, microbatch, slice, kind: ComputeKind::Forward });
        if content == Content::Activation { cell } else { self.cells() + cell }
    }

    /// Records an action of `rank`, or returns an error if it is invalid here.
    fn enter(&self, done: &mut [Done], rank: Rank, action: Action) -> Result<(), ParallelError> {
        let refuse = |problem| Err(ParallelError::Action { action, rank, problem });
        if action.stage.0 >= self.placement.stages()
            || action.microbatch >= self.microbatches
            || action.slice >= self.slices
        {
            return refuse("there is no such stage, microbatch or slice");
        }
        if self.placement.rank(action.stage) != rank {
            return refuse("another rank holds its stage");
        }
        let cell = self.cell(action);
        let now = done[cell];
        let last_slice = action.slice + 1 == self.slices;
        let bits = match action.kind {
            ComputeKind::Forward if now.has(Done::FORWARD) => return refuse("it comes twice"),
            ComputeKind::Forward if action.slice > 0 && !done[cell - 1].has(Done::FORWARD) => {
                return refuse("the slice before it comes later");
            }
            ComputeKind::Forward => Done::FORWARD,
            _ if !now.has(Done::FORWARD) => return refuse("its forward comes later or never"),
            ComputeKind::Recompute if now.has(Done::RECOMPUTE) => return refuse("it comes twice"),
            ComputeKind::Recompute if now.has(Done::INPUT) => return refuse("its backward comes before it"),
            ComputeKind::Recompute => Done::RECOMPUTE,
            ComputeKind::Step if !now.has(Done::WEIGHT) => {
                return refuse("its backward comes later or never");
            }
            ComputeKind::Step => 0,
            ComputeKind::BackwardWeight if now.has(Done::WEIGHT) => return refuse("it comes twice"),
            ComputeKind::BackwardWeight if !now.has(Done::INPUT) => {
                return refuse("the gradient of the input comes later or never");
            }
            ComputeKind::BackwardWeight => Done::WEIGHT,
            ComputeKind::BackwardInput | ComputeKind::Backward if now.has(Done::INPUT) => {
                return refuse("it comes twice");
            }
            ComputeKind::BackwardInput | ComputeKind::Backward
                if !last_slice && !done[cell + 1].has(Done::INPUT) =>
            {
                return refuse("the backward of the next slice comes later");
            }
            ComputeKind::BackwardInput => Done::INPUT,
            ComputeKind::Backward => Done::INPUT | Done::WEIGHT,
        };
        done[cell] = Done(now.0 | bits);
        Ok(())
    }

    /// Checks that each microbatch passed all stages of exactly one copy of the model.
    fn complete(&self, done: &[Done], forward_only: bool) -> Result<(), ParallelError> {
        let last = if forward_only { ComputeKind::Forward } else { ComputeKind::Backward };
        let needed = if forward_only { Done::FORWARD } else { Done::FORWARD | Done::INPUT | Done::WEIGHT };
        let depth = self.placement.depth();
        for microbatch in 0..self.microbatches {
            let mut owner = None;
            for copy in 0..self.placement.copies() {
                let first = Action::forward(copy * depth, microbatch);
                if !done[self.cell(first)].has(Done::FORWARD) {
                    continue;
                }
                if owner.is_some() {
                    let rank = self.placement.rank(first.stage);
                    let problem = "its microbatch goes through two copies of the model";
                    return Err(ParallelError::Action { action: first, rank, problem });
                }
                owner = Some(copy);
            }
            let owner = owner.ok_or(ParallelError::Missing { action: Action::forward(0, microbatch) })?;
            for stage in 0..self.placement.stages() {
                for slice in 0..self.slices {
                    let stage = StageId(stage);
                    let action = Action { stage, slice, ..Action::forward(0, microbatch) };
                    let now = done[self.cell(action)];
                    if stage.0 / depth != owner && now.has(Done::FORWARD) {
                        let (rank, problem) = (
                            self.placement.rank(stage),
                            "its microbatch goes through another copy of the model",
                        );
                        return Err(ParallelError::Action { action, rank, problem });
                    }
                    if stage.0 / depth == owner && now.0 & needed != needed {
                        let kind = match now {
                            _ if !now.has(Done::FORWARD) => ComputeKind::Forward,
                            _ if now.has(Done::INPUT) => ComputeKind::BackwardWeight,
                            _ => last,
                        };
                        return Err(ParallelError::Missing { action: Action { kind, ..action } });
                    }
                }
            }
        }
        Ok(())
    }

    /// Creates an order from lists of unknown origin. The placement and the sizes are derived from the lists.
    ///
    /// If stage 0 processes only some of the microbatches and the number of stages is even, the stages are
    /// taken to be two copies of the model.
    ///
    /// Errors: [`ParallelError::Incomplete`] if there are too few actions; otherwise as [`Placement::new`] and
    /// [`ComputeOrder::new`].
    pub fn from_lists(lists: Vec<Vec<Op>>) -> Result<Self, ParallelError> {
        let all = || lists.iter().flatten().flat_map(Op::actions);
        let count = all().count();
        let (mut stages, mut microbatches, mut slices) = (0_u64, 0_u64, 0_u64);
        for action in all() {
            stages = stages.max(u64::from(action.stage.0) + 1);
            microbatches = microbatches.max(u64::from(action.microbatch) + 1);
            slices = slices.max(u64::from(action.slice) + 1);
        }
        let mut at_the_input: Vec<u32> = all()
            .filter(|a| a.stage == StageId(0) && a.kind == ComputeKind::Forward)
            .map(|a| a.microbatch)
            .collect();
        at_the_input.sort_unstable();
        at_the_input.dedup();
        let halves = at_the_input.len() as u64 != microbatches && stages.is_multiple_of(2);
        let copies = if halves { 2 } else { 1 };
        // The numbers in a file may be wrong. So the number of forwards is checked before memory for stages
        // times microbatches is allocated.
        let forwards = u128::from(stages) * u128::from(microbatches) * u128::from(slices) / copies;
        if forwards > count as u128 || count == 0 {
            return Err(ParallelError::Incomplete { stages, microbatches, actions: count });
        }
        let mut rank_of = vec![None; stages as usize];
        for (rank, list) in (0..).map(Rank).zip(&lists) {
            for action in list.iter().flat_map(Op::actions) {
                rank_of[action.stage.index()].get_or_insert(rank);
            }
        }
        let rank_of = rank_of
            .into_iter()
            .zip(0..)
            .map(|(rank, stage)| rank.ok_or(ParallelError::Missing { action: Action::forward(stage, 0) }));
        let placement = Placement::new(rank_of.collect::<Result<_, _>>()?, copies as u32)?;
        let slices = u16::try_from(slices).map_err(|_| ParallelError::TooMany {
            what: "slices of a microbatch",
            found: u128::from(slices),
            limit: usize::from(u16::MAX),
        })?;
        Self::new(placement, microbatches as u32, slices, lists)
    }
}

impl fmt::Display for ComputeOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (rank, list) in self.lists.iter().enumerate() {
            write!(f, "r{rank}:")?;
            for op in list {
                write!(f, " {op}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl FromStr for ComputeOrder {
    type Err = ParallelError;

    /// Parses lines such as `r0: 0F0 0F1 0B0 0B1`, with the ranks in order.
    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let mut lists = Vec::new();
        for (line, text) in (1..).zip(text.lines()) {
            let text = text.split('#').next().unwrap_or_default().trim();
            if text.is_empty() {
                continue;
            }
            let fault = |cause| ParallelError::ScheduleLine { line, cause: Box::new(cause) };
            let ops = text
                .strip_prefix(&format!("r{}:", lists.len()))
                .ok_or_else(|| fault(ParallelError::RankLabel { rank: Rank(lists.len() as u32) }))?;
            let ops = ops.split_whitespace().map(str::parse).collect::<Result<Vec<Op>, _>>();
            lists.push(ops.map_err(fault)?);
        }
        Self::from_lists(lists)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        text.parse::<ComputeOrder>().unwrap_err().to_string()
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(refused("").contains("too few for a schedule"));
        assert!(refused("r0: 0F0 0B0 0B0").contains("rank 0, 0B0: it comes twice"));
        assert!(refused("r0: 0F0 0W0 0I0").contains("0W0: the gradient of the input comes later"));
        assert!(refused("r0: 0B0 0F0").contains("its forward comes later"));
        assert!(refused("r0: 0F0 0F1 0B0").contains("0B1 is missing"));
        assert!(refused("r0: 0F0 0F1 0I0 0B1").contains("0W0 is missing"));
        assert!(refused("r0: 0F0 1F0 0B0\nr1: 2F0 2B0 1B0").contains("another rank holds its stage"));
        assert!(refused("r0: 0F0 0F7").contains("8 microbatches"));
        assert!(refused("r0: 0F0 4294967295F4294967295").contains("4294967296 stages"));
        assert!(refused("r0: 0F0\nr2: 1F0").contains("line 2"));
        assert!(refused("r0: 0F0 0X0").contains("line 1: `0X0`"));
        assert!(refused("r0: 0F0.1 0F0").contains("the slice before it comes later"));
        assert!(refused("r0: 0F0 0F0.1 0B0 0B0.1").contains("next slice"));
        assert!(refused("r0: 0F0 0B0 0R0").contains("its backward comes before it"));
        assert!(refused("r0: 0F0 0STEP0 0B0").contains("backward"));
        assert!(refused("r0: 0F0 1F0 2F0\nr1: 2F1").contains("too few for a schedule"));
        assert!(
            refused("r0: 0F0 1F0 2F0 0F1 1F1\nr1: 2F1").contains("2 entries, expected 1, one for each rank")
        );
    }

    #[test]
    fn two_copies_are_seen() {
        let order: ComputeOrder = "r0: 0F0 3F1 3B1 0B0\nr1: 2F1 1F0 1B0 2B1".parse().unwrap();
        assert_eq!(order.placement(), &Placement::both_ways(2));
        assert!(refused("r0: 0F0 3F1 3B1 0B0\nr1: 2F1 1F0 1B0 2B1 1F1 1B1").contains("another copy"));
    }

    #[test]
    fn forwards_alone_are_an_order() {
        let order: ComputeOrder = "r0: 0F0 0F1\nr1: 1F0 1F1".parse().unwrap();
        assert!(order.is_forward_only());
    }
}
