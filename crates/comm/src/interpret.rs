//! The one loop that runs any [`Program`] on any transport. It knows no algorithm.

use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use farflung_base::{PeerId, Rank};

use crate::communicator::{Body, progress};
use crate::element::{Element, ReduceOp};
use crate::plans::Plan;
use crate::steps::{Merge, Program, Step};
use crate::transport::{Port, Tag};
use crate::{Algorithm, CommError, FRAME_BYTES, Frame};

/// A program at work on a buffer of `T`.
pub(crate) struct Interpreter<T, S> {
    name: &'static str,
    program: Arc<Program>,
    algorithm: Option<Algorithm>,
    data: S,
    op: ReduceOp,
    check: u32,
    members: Arc<[PeerId]>,
    lanes: Vec<Lane>,
    /// Lanes before this one are over.
    first: usize,
    element: std::marker::PhantomData<T>,
}

/// How far one lane of the program is.
struct Lane {
    tag: Tag,
    /// The step it is in.
    cursor: usize,
    /// By the step's sends.
    sent: Vec<Progress>,
    /// The step's receive that is under way; those before it are done.
    receive: usize,
    received: Progress,
    /// The frame that was copied last, and where to: the next step of many programs passes it on.
    copied: Option<(Range<usize>, Frame)>,
}

/// How far one transfer is: elements moved, and whether its last frame has passed.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    elements: usize,
    done: bool,
}

impl Progress {
    /// The next frame's share of `range`. A transfer of nothing is one empty frame.
    fn next<T>(&self, range: &Range<usize>) -> Range<usize> {
        let start = range.start + self.elements;
        start..range.end.min(start + FRAME_BYTES / size_of::<T>())
    }

    const fn pass(&mut self, frame: &Range<usize>, whole: &Range<usize>) {
        self.elements += frame.end - frame.start;
        self.done = frame.end == whole.end;
    }
}

impl Lane {
    fn enter(&mut self, cursor: usize, step: Option<&Step>) {
        self.cursor = cursor;
        self.sent.clear();
        self.sent.resize(step.map_or(0, |step| step.sends.len()), Progress::default());
        self.receive = 0;
        self.received = Progress::default();
    }
}

impl<T: Element, S: AsMut<[T]> + AsRef<[T]> + Send> Interpreter<T, S> {
    /// `tag` is the first lane's; the others have the numbers after it.
    pub(crate) fn new(
        name: &'static str,
        Plan { program, algorithm }: Plan,
        data: S,
        op: ReduceOp,
        (tag, check): (Tag, u32),
        members: Arc<[PeerId]>,
    ) -> Self {
        let lane = |(i, steps): (usize, &Vec<Step>)| {
            let tag = Tag { number: tag.number.wrapping_add(i as u32), ..tag };
            let mut lane = Lane {
                tag,
                cursor: 0,
                sent: Vec::new(),
                receive: 0,
                received: Progress::default(),
                copied: None,
            };
            lane.enter(0, steps.first());
            lane
        };
        let lanes = program.lanes.iter().enumerate().map(lane).collect();
        let element = std::marker::PhantomData;
        Self { name, program, algorithm, data, op, check, members, lanes, first: 0, element }
    }

    fn peer(&self, rank: Rank) -> PeerId {
        self.members[rank.index()]
    }

    fn step(&self, lane: usize) -> Option<&Step> {
        self.program.lanes[lane].get(self.lanes[lane].cursor)
    }

    /// Sends one frame of each of the step's transfers, as far as the network has room.
    fn send_some(&mut self, lane: usize, port: &mut dyn Port) -> Result<bool, CommError> {
        let program = Arc::clone(&self.program);
        let tag = self.lanes[lane].tag;
        let mut moved = false;
        let sends = &program.lanes[lane][self.lanes[lane].cursor].sends;
        for (i, (to, blocks)) in sends.iter().enumerate() {
            let sent = &self.lanes[lane].sent;
            // Two transfers to the same rank would mix.
            let waits = || sends[..i].iter().zip(sent).any(|((rank, _), sent)| rank == to && !sent.done);
            let peer = self.peer(*to);
            if sent[i].done || waits() || !port.has_room(peer, tag) {
                continue;
            }
            let data = self.data.as_ref();
            let whole = program.elements(blocks, data.len());
            let part = sent[i].next::<T>(&whole);
            match self.lanes[lane].copied.take_if(|(range, _)| *range == part) {
                Some((_, frame)) => port.send(peer, tag, frame)?,
                None => port.send_bytes(peer, tag, self.check, bytemuck::cast_slice(&data[part.clone()]))?,
            }
            self.lanes[lane].sent[i].pass(&part, &whole);
            moved = true;
        }
        Ok(moved)
    }

    /// Whether all of `part` that the step sends has been sent.
    fn is_sent(&self, lane: usize, step: &Step, part: &Range<usize>) -> bool {
        step.sends.iter().zip(&self.lanes[lane].sent).all(|((_, blocks), sent)| {
            let whole = self.program.elements(blocks, self.data.as_ref().len());
            let left = whole.start + sent.elements..whole.end;
            sent.done || left.start >= part.end || part.start >= left.end
        })
    }

    /// Reduces or copies the next frame of this step where it is there, straight from the frame.
    fn receive_one(&mut self, lane: usize, port: &mut dyn Port) -> Result<bool, CommError> {
        let program = Arc::clone(&self.program);
        let step = &program.lanes[lane][self.lanes[lane].cursor];
        let Lane { tag, receive, received, .. } = self.lanes[lane];
        let Some((from, blocks, merge)) = step.recvs.get(receive) else { return Ok(false) };
        let whole = program.elements(blocks, self.data.as_ref().len());
        let part = received.next::<T>(&whole);
        if !self.is_sent(lane, step, &part) {
            return Ok(false);
        }
        let peer = self.peer(*from);
        let Some(frame) = port.take(peer, tag)? else { return Ok(false) };
        let want = part.len() * size_of::<T>();
        if frame.len() != want || frame.check != self.check {
            return Err(CommError::Mismatch { op: self.name, peer, want, got: frame.len() });
        }
        let values: &[T] = bytemuck::cast_slice(frame.bytes());
        let into = &mut self.data.as_mut()[part.clone()];
        match merge {
            Merge::Reduce => T::reduce(self.op, into, values),
            Merge::Copy => into.copy_from_slice(values),
        }
        let next = program.lanes[lane].get(self.lanes[lane].cursor + 1);
        let sends = next.map_or(&[][..], |step| &step.sends);
        let passed_on = *merge == Merge::Copy && sends.iter().any(|(_, sent)| sent == blocks);
        let lane = &mut self.lanes[lane];
        lane.copied = passed_on.then(|| (part.clone(), frame));
        lane.received.pass(&part, &whole);
        if lane.received.done {
            lane.receive += 1;
            lane.received = Progress::default();
        }
        Ok(true)
    }

    /// Goes on with one lane as far as it can.
    fn advance(&mut self, lane: usize, port: &mut dyn Port) -> Result<(), CommError> {
        while let Some(step) = self.step(lane) {
            let recvs = step.recvs.len();
            // One out, one in: the frames in hand stay in cache, and the network is busy both ways.
            let turn = self.send_some(lane, port)? | self.receive_one(lane, port)?;
            let state = &mut self.lanes[lane];
            if state.receive == recvs && state.sent.iter().all(|sent| sent.done) {
                let next = state.cursor + 1;
                state.enter(next, self.program.lanes[lane].get(next));
            } else if !turn {
                break;
            }
        }
        Ok(())
    }
}

impl<T: Element, S: AsMut<[T]> + AsRef<[T]> + Send> Body for Interpreter<T, S> {
    type Output = S;

    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        for lane in self.first..self.lanes.len() {
            let before = lane.checked_sub(self.program.window);
            if before.is_some_and(|before| self.step(before).is_some()) {
                break;
            }
            if let Err(e) = self.advance(lane, port) {
                return Poll::Ready(Err(e));
            }
        }
        let over = (self.first..self.lanes.len()).take_while(|&lane| self.step(lane).is_none()).count();
        self.first += over;
        if self.first < self.lanes.len() {
            return Poll::Pending;
        }
        if self.op == ReduceOp::Mean {
            T::divide(self.data.as_mut(), self.members.len());
        }
        Poll::Ready(Ok(()))
    }

    fn waits_for(&self) -> PeerId {
        let waits = |lane: usize| {
            let (step, state) = (self.step(lane)?, &self.lanes[lane]);
            let from = step.recvs.get(state.receive).map(|(from, ..)| *from);
            let unsent = step.sends.iter().zip(&state.sent).find(|(_, sent)| !sent.done);
            from.or(unsent.map(|((to, _), _)| *to))
        };
        self.peer((0..self.lanes.len()).find_map(waits).unwrap_or_default())
    }

    fn algorithm(&self) -> Option<Algorithm> {
        self.algorithm
    }

    fn progress(&self) -> u32 {
        let waits = (0..self.lanes.len()).find(|&lane| self.step(lane).is_some());
        waits.map_or(u32::MAX, |lane| progress(self.lanes[lane].tag, self.lanes[lane].cursor))
    }

    fn finish(self) -> S {
        self.data
    }
}
