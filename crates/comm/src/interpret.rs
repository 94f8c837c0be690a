//! The one loop that runs any [`Program`] on any transport. It knows no algorithm.

use std::ops::Range;
use std::task::Poll;

use farflung_base::{PeerId, Rank};

use crate::communicator::Body;
use crate::element::{Element, ReduceOp};
use crate::steps::{Merge, Program};
use crate::transport::{Port, Tag};
use crate::{CommError, FRAME_BYTES};

/// A program at work on a buffer of `T`.
pub(crate) struct Interpreter<T, S> {
    pub(crate) name: &'static str,
    pub(crate) program: Program,
    pub(crate) data: S,
    pub(crate) op: ReduceOp,
    pub(crate) check: u32,
    pub(crate) tag: Tag,
    pub(crate) members: std::sync::Arc<[PeerId]>,
    pub(crate) cursor: usize,
    pub(crate) sent: Progress,
    pub(crate) received: Progress,
    pub(crate) element: std::marker::PhantomData<T>,
}

/// How far one transfer of the current step is: elements moved, and whether its last frame has passed.
#[derive(Default)]
pub(crate) struct Progress {
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

impl<T: Element, S: AsMut<[T]> + AsRef<[T]> + Send> Interpreter<T, S> {
    fn peer(&self, rank: Rank) -> PeerId {
        self.members[rank.index()]
    }

    /// Sends the next frame of this step where there is one and the network has room.
    fn send_one(&mut self, port: &mut dyn Port) -> Result<bool, CommError> {
        let Some((to, blocks)) = &self.program.steps[self.cursor].send else {
            self.sent.done = true;
            return Ok(false);
        };
        let to = self.peer(*to);
        if self.sent.done || !port.has_room(to, self.tag) {
            return Ok(false);
        }
        let data = self.data.as_ref();
        let whole = self.program.elements(blocks, data.len());
        let part = self.sent.next::<T>(&whole);
        let bytes: &[u8] = bytemuck::cast_slice(&data[part.clone()]);
        let mut frame = port.lease(bytes.len());
        frame.bytes_mut().copy_from_slice(bytes);
        frame.check = self.check;
        port.send(to, self.tag, frame)?;
        self.sent.pass(&part, &whole);
        Ok(true)
    }

    /// Reduces or copies the next frame of this step where it is there, straight from the frame.
    fn receive_one(&mut self, port: &mut dyn Port) -> Result<bool, CommError> {
        let Some((from, blocks, merge)) = &self.program.steps[self.cursor].recv else {
            self.received.done = true;
            return Ok(false);
        };
        if self.received.done {
            return Ok(false);
        }
        let peer = self.peer(*from);
        let Some(frame) = port.take(peer, self.tag)? else { return Ok(false) };
        let data = self.data.as_mut();
        let whole = self.program.elements(blocks, data.len());
        let part = self.received.next::<T>(&whole);
        let want = part.len() * size_of::<T>();
        if frame.len() != want || frame.check != self.check {
            return Err(CommError::Mismatch { op: self.name, peer, want, got: frame.len() });
        }
        let values: &[T] = bytemuck::cast_slice(frame.bytes());
        match merge {
            Merge::Reduce => T::reduce(self.op, &mut data[part.clone()], values),
            Merge::Copy => data[part.clone()].copy_from_slice(values),
        }
        self.received.pass(&part, &whole);
        Ok(true)
    }
}

impl<T: Element, S: AsMut<[T]> + AsRef<[T]> + Send> Body for Interpreter<T, S> {
    type Output = S;

    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        while self.cursor < self.program.steps.len() {
            // One out, one in: the frames in hand stay in cache, and the network is busy both ways.
            let moved = match self.send_one(port) {
                Ok(sent) => self.receive_one(port).map(|received| sent | received),
                Err(e) => Err(e),
            };
            match moved {
                Err(e) => return Poll::Ready(Err(e)),
                Ok(_) if self.sent.done && self.received.done => {
                    self.cursor += 1;
                    self.sent = Progress::default();
                    self.received = Progress::default();
                }
                Ok(true) => {}
                Ok(false) => return Poll::Pending,
            }
        }
        if self.op == ReduceOp::Mean {
            T::divide(self.data.as_mut(), self.members.len());
        }
        Poll::Ready(Ok(()))
    }

    fn waits_for(&self) -> PeerId {
        let step = self.program.steps.get(self.cursor);
        let from = step.and_then(|s| s.recv.as_ref()).filter(|_| !self.received.done).map(|(from, ..)| *from);
        let to = step.and_then(|s| s.send.as_ref()).map(|(to, _)| *to);
        self.peer(from.or(to).unwrap_or_default())
    }

    fn finish(self) -> S {
        self.data
    }
}
