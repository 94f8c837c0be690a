//! The one loop that runs any [`Program`] on any transport. It depends on no algorithm; how values travel is
//! behind [`Transfers`].

use std::sync::Arc;
use std::task::Poll;

use farflung_base::{PeerId, Rank};

use crate::operation::{Operation, progress};
use crate::steps::{Program, Step};
use crate::transport::{Port, Tag};
use crate::{Algorithm, CommError};

/// The values of a collective, and the transfers of the steps that its lanes are in.
pub(crate) trait Transfers: Send {
    type Output;

    /// A lane begins a step, or has ended.
    fn enter(&mut self, lane: usize, step: Option<&Step>);

    /// Moves what can move now.
    fn turn(&mut self, at: &At<'_>, port: &mut dyn Port) -> Result<Turn, CommError>;

    /// Whose part of the step is missing.
    fn waits_for(&self, at: &At<'_>) -> Option<Rank>;

    /// All lanes have ended.
    fn end(&mut self, members: usize);

    fn finish(self) -> Self::Output;
}

/// What a turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The step is done.
    Over,
    /// Another turn may move more.
    Moved,
    /// Nothing can move until something comes, or there is room.
    Waits,
}

/// Where a lane is, and what is needed to go on from there.
pub(crate) struct At<'a> {
    pub(crate) name: &'static str,
    pub(crate) program: &'a Program,
    pub(crate) members: &'a [PeerId],
    pub(crate) check: u32,
    pub(crate) tag: Tag,
    pub(crate) lane: usize,
    /// The step.
    pub(crate) cursor: usize,
}

impl<'a> At<'a> {
    pub(crate) fn peer(&self, rank: Rank) -> PeerId {
        self.members[rank.index()]
    }

    /// The step. Only of lanes that have not ended.
    pub(crate) fn step(&self) -> &'a Step {
        &self.program.lanes[self.lane][self.cursor]
    }
}

/// A program at work.
pub(crate) struct Interpreter<X> {
    name: &'static str,
    program: Arc<Program>,
    algorithm: Option<Algorithm>,
    transfers: X,
    check: u32,
    members: Arc<[PeerId]>,
    /// The first lane's; the others have the numbers after it.
    tag: Tag,
    /// The step that each lane is in.
    cursors: Vec<usize>,
    /// Lanes before this one are over.
    first: usize,
}

impl<X: Transfers> Interpreter<X> {
    /// `tag` is the first lane's; the others have the numbers after it.
    pub(crate) fn new(
        name: &'static str,
        program: Arc<Program>,
        algorithm: Option<Algorithm>,
        mut transfers: X,
        (tag, check): (Tag, u32),
        members: Arc<[PeerId]>,
    ) -> Self {
        for (lane, steps) in program.lanes.iter().enumerate() {
            transfers.enter(lane, steps.first());
        }
        let cursors = vec![0; program.lanes.len()];
        Self { name, program, algorithm, transfers, check, members, tag, cursors, first: 0 }
    }

    fn is_over(&self, lane: usize) -> bool {
        self.cursors[lane] == self.program.lanes[lane].len()
    }

    fn tag(&self, lane: usize) -> Tag {
        Tag { number: self.tag.number.wrapping_add(lane as u32), ..self.tag }
    }

    fn at(&self, lane: usize) -> At<'_> {
        let Self { name, program, members, check, .. } = self;
        let cursor = self.cursors[lane];
        At { name, program, members, check: *check, tag: self.tag(lane), lane, cursor }
    }

    /// Goes on with one lane as far as it can.
    fn advance(&mut self, lane: usize, port: &mut dyn Port) -> Result<(), CommError> {
        let tag = self.tag(lane);
        let Self { name, program, transfers, check, members, cursors, .. } = self;
        let steps = &program.lanes[lane];
        let cursor = &mut cursors[lane];
        while *cursor < steps.len() {
            let at = At { name, program, members, check: *check, tag, lane, cursor: *cursor };
            match transfers.turn(&at, port)? {
                Turn::Over => {
                    *cursor += 1;
                    transfers.enter(lane, steps.get(*cursor));
                }
                Turn::Moved => {}
                Turn::Waits => break,
            }
        }
        Ok(())
    }
}

impl<X: Transfers> Operation for Interpreter<X> {
    type Output = X::Output;

    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        for lane in self.first..self.cursors.len() {
            let before = lane.checked_sub(self.program.window);
            if before.is_some_and(|before| !self.is_over(before)) {
                break;
            }
            if let Err(e) = self.advance(lane, port) {
                return Poll::Ready(Err(e));
            }
        }
        let over = (self.first..self.cursors.len()).take_while(|&lane| self.is_over(lane)).count();
        self.first += over;
        if self.first < self.cursors.len() {
            return Poll::Pending;
        }
        self.transfers.end(self.members.len());
        Poll::Ready(Ok(()))
    }

    fn waits_for(&self) -> PeerId {
        let waits =
            |lane: usize| if self.is_over(lane) { None } else { self.transfers.waits_for(&self.at(lane)) };
        self.members[(0..self.cursors.len()).find_map(waits).unwrap_or_default().index()]
    }

    fn algorithm(&self) -> Option<Algorithm> {
        self.algorithm
    }

    fn progress(&self) -> u32 {
        let waits = (0..self.cursors.len()).find(|&lane| !self.is_over(lane));
        waits.map_or(u32::MAX, |lane| progress(self.tag(lane), self.cursors[lane]))
    }

    fn finish(self) -> X::Output {
        self.transfers.finish()
    }
}
