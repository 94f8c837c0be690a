//! The loop that runs any [`Program`] on any transport. It does not depend on the algorithm; [`Transfers`]
//! defines how values are sent and received.

use std::sync::Arc;
use std::task::Poll;

use farflung_base::{PeerId, Rank};

use crate::operation::{Operation, progress};
use crate::steps::{Program, Step};
use crate::transport::{Port, Tag};
use crate::{Algorithm, CommError};

/// The values of a collective, and the transfers of each lane's current step.
pub(crate) trait Transfers: Send {
    type Output;

    /// Called when a step becomes the current one of a lane: the first at the start, each further one when the
    /// step before it is complete. Called with `None` when the lane has ended.
    fn enter(&mut self, lane: usize, step: Option<&Step>);

    /// Makes the transfers of a step that are possible now.
    fn advance(&mut self, at: &StepContext<'_>, port: &mut dyn Port) -> Result<StepStatus, CommError>;

    /// Returns a rank that the step waits for; `None` if it waits for no one.
    fn waits_for(&self, at: &StepContext<'_>) -> Option<Rank>;

    /// Called when all lanes have ended.
    fn end(&mut self, members: usize);

    fn finish(self) -> Self::Output;
}

/// Result of a call of [`Transfers::advance`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepStatus {
    /// The step is complete.
    Over,
    /// Frames were moved; another call may move more.
    Moved,
    /// Blocked until a frame arrives or there is room to send.
    Waits,
}

/// The position of a lane in its program, and what its transfers need.
pub(crate) struct StepContext<'a> {
    pub(crate) name: &'static str,
    pub(crate) program: &'a Program,
    pub(crate) members: &'a [PeerId],
    pub(crate) check: u32,
    pub(crate) tag: Tag,
    pub(crate) lane: usize,
    /// Index of the step in the lane.
    pub(crate) cursor: usize,
}

impl<'a> StepContext<'a> {
    pub(crate) fn peer(&self, rank: Rank) -> PeerId {
        self.members[rank.index()]
    }

    /// Returns the current step. The lane must not have ended.
    pub(crate) fn step(&self) -> &'a Step {
        &self.program.lanes[self.lane][self.cursor]
    }
}

/// A running program.
pub(crate) struct Interpreter<X> {
    name: &'static str,
    program: Arc<Program>,
    algorithm: Option<Algorithm>,
    transfers: X,
    check: u32,
    members: Arc<[PeerId]>,
    /// Tag of the first lane; lane `i` has this number plus `i`.
    tag: Tag,
    /// Index of the current step of each lane.
    cursors: Vec<usize>,
    /// Index of the first lane that has not ended; all lanes before it have.
    first: usize,
}

impl<X: Transfers> Interpreter<X> {
    /// Creates an interpreter. `tag` is that of the first lane; the other lanes use the numbers after it.
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

    fn at(&self, lane: usize) -> StepContext<'_> {
        let Self { name, program, members, check, .. } = self;
        let cursor = self.cursors[lane];
        StepContext { name, program, members, check: *check, tag: self.tag(lane), lane, cursor }
    }

    /// Runs one lane until it is blocked or has ended.
    fn advance(&mut self, lane: usize, port: &mut dyn Port) -> Result<(), CommError> {
        let tag = self.tag(lane);
        let Self { name, program, transfers, check, members, cursors, .. } = self;
        let steps = &program.lanes[lane];
        let cursor = &mut cursors[lane];
        while *cursor < steps.len() {
            let at = StepContext { name, program, members, check: *check, tag, lane, cursor: *cursor };
            match transfers.advance(&at, port)? {
                StepStatus::Over => {
                    *cursor += 1;
                    transfers.enter(lane, steps.get(*cursor));
                }
                StepStatus::Moved => {}
                StepStatus::Waits => break,
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
