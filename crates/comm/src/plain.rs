//! Transfers of uncoded values by a program: whole frames, reduced directly from the frame. Independent of the
//! algorithm.

use std::ops::Range;
use std::sync::Arc;

use crate::element::{Element, First};
use crate::interpret::{StepContext, StepStatus, Transfers};
use crate::non_temporal_copy::copy_part;
use crate::plans::PassThrough;
use crate::reduction::Reduction;
use crate::steps::{Merge, Program, Step};
use crate::transport::Port;
use crate::{CommError, FRAME_BYTES, Frame};

/// A buffer of `T`, and the state of a program without coded messages that works on it.
pub(crate) struct Plain<T, S> {
    data: S,
    op: Reduction<T>,
    passing: Arc<PassThrough>,
    lanes: Vec<Lane>,
}

/// Progress of a lane's current step.
#[derive(Default)]
struct Lane {
    /// Progress of each send of the step.
    sent: Vec<Progress>,
    /// Index of the receive in progress; earlier receives of the step are done.
    receive: usize,
    /// Number of completed receives of all steps so far.
    receives_done: usize,
    received: Progress,
    /// The last received frame, if the next step sends it on.
    kept: Option<ForwardedFrame>,
}

/// A received frame that is to be sent on as it is.
struct ForwardedFrame {
    part: Range<usize>,
    frame: Frame,
    /// Whether the result is only in the frame and was not copied to the buffer yet.
    only: bool,
}

/// Progress of one transfer: the number of elements moved, and whether the last frame has been moved.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    elements: usize,
    done: bool,
}

impl Progress {
    /// Returns the part of `range` for the next frame. A transfer of no elements is one empty frame.
    fn next<T>(&self, range: &Range<usize>) -> Range<usize> {
        let start = range.start + self.elements;
        start..range.end.min(start + FRAME_BYTES / size_of::<T>())
    }

    const fn pass(&mut self, frame: &Range<usize>, whole: &Range<usize>) {
        self.elements += frame.end - frame.start;
        self.done = frame.end == whole.end;
    }
}

/// Returns whether exactly these blocks are sent once, by the next step, and then overwritten before they are
/// used again.
fn passes_through(later: &[Step], blocks: &Range<usize>) -> bool {
    let touches = |other: &Range<usize>| other.start < blocks.end && blocks.start < other.end;
    let Some((next, after)) = later.split_first() else { return false };
    let mut sent = next.sends.iter().filter(|(_, range)| touches(range));
    if sent.next().is_none_or(|(_, range)| range != blocks) || sent.next().is_some() {
        return false;
    }
    let received = |step: &Step| step.recvs.iter().find(|(_, range, _)| touches(range)).cloned();
    let replaced = received(next).or_else(|| {
        let used = |step: &&Step| step.sends.iter().any(|(_, range)| touches(range));
        after.iter().take_while(|step| !used(step)).find_map(received)
    });
    replaced.is_some_and(|(_, range, merge)| range == *blocks && merge == Merge::Copy)
}

impl<T: Element, S: AsMut<[T]> + AsRef<[T]> + Send> Plain<T, S> {
    pub(crate) fn new(program: &Program, passing: Arc<PassThrough>, data: S, op: Reduction<T>) -> Self {
        let lanes = program.lanes.iter().map(|_| Lane::default()).collect();
        Self { data, op, passing, lanes }
    }

    /// Sends one frame of each transfer of the step, if the network has room; returns whether any was sent.
    fn send_some(
        &mut self,
        at: &StepContext<'_>,
        step: &Step,
        port: &mut dyn Port,
    ) -> Result<bool, CommError> {
        let mut moved = false;
        let lane = &mut self.lanes[at.lane];
        for (i, (to, blocks)) in step.sends.iter().enumerate() {
            // Two transfers to the same rank go one after the other, because frames do not say which transfer
            // they belong to.
            let waits =
                || step.sends[..i].iter().zip(&lane.sent).any(|((rank, _), sent)| rank == to && !sent.done);
            let peer = at.peer(*to);
            if lane.sent[i].done || waits() || !port.has_room(peer, at.tag) {
                continue;
            }
            let data = self.data.as_ref();
            let whole = at.program.elements(blocks, data.len());
            let part = lane.sent[i].next::<T>(&whole);
            match lane.kept.take_if(|kept| kept.part == part) {
                Some(ForwardedFrame { frame, .. }) => port.send(peer, at.tag, frame)?,
                None => port.send_bytes(peer, at.tag, at.check, bytemuck::cast_slice(&data[part.clone()]))?,
            }
            lane.sent[i].pass(&part, &whole);
            moved = true;
        }
        Ok(moved)
    }

    /// Returns whether this step has sent all values of `part` that it must send.
    fn is_sent(&self, at: &StepContext<'_>, step: &Step, part: &Range<usize>) -> bool {
        step.sends.iter().zip(&self.lanes[at.lane].sent).all(|((_, blocks), sent)| {
            let whole = at.program.elements(blocks, self.data.as_ref().len());
            let left = whole.start + sent.elements..whole.end;
            sent.done || left.start >= part.end || part.start >= left.end
        })
    }

    /// Takes the next frame of this step, if it has arrived, and reduces or copies its values. Returns whether
    /// a frame had arrived.
    fn receive_one(
        &mut self,
        at: &StepContext<'_>,
        step: &Step,
        port: &mut dyn Port,
    ) -> Result<bool, CommError> {
        let Lane { receive, received, receives_done, .. } = self.lanes[at.lane];
        let Some((from, blocks, merge)) = step.recvs.get(receive) else { return Ok(false) };
        let whole = at.program.elements(blocks, self.data.as_ref().len());
        let part = received.next::<T>(&whole);
        if !self.is_sent(at, step, &part) {
            return Ok(false);
        }
        let peer = at.peer(*from);
        let Some(mut frame) = port.take(peer, at.tag)? else { return Ok(false) };
        let want = part.len() * size_of::<T>();
        if frame.len() != want || frame.check != at.check {
            return Err(CommError::Mismatch { op: at.name, peer, want, got: frame.len() });
        }
        let data = self.data.as_mut();
        let all = size_of_val(data);
        if let Some(ForwardedFrame { part, frame, only: true }) = self.lanes[at.lane].kept.take() {
            // The kept frame could not be sent on yet and is now replaced, so its values are copied to the
            // buffer.
            data[part].copy_from_slice(bytemuck::cast_slice(frame.bytes()));
        }
        let into = &mut data[part.clone()];
        let later = &at.program.lanes[at.lane][at.cursor + 1..];
        let mut passed_on = false;
        let passes = || self.passing.of(at.lane, receives_done, || passes_through(later, blocks));
        let only = *merge == Merge::Reduce && part == whole && passes();
        if only {
            self.op.reduce(at.name, bytemuck::cast_slice_mut(frame.bytes_mut()), into, First::Other)?;
            passed_on = true;
        } else {
            match merge {
                Merge::Reduce => {
                    self.op.reduce(at.name, into, bytemuck::cast_slice(frame.bytes()), First::Into)?;
                }
                Merge::ReduceLeft => {
                    self.op.reduce(at.name, into, bytemuck::cast_slice(frame.bytes()), First::Other)?;
                }
                Merge::Copy => {
                    copy_part(bytemuck::cast_slice_mut(into), frame.bytes(), all);
                    passed_on = later.first().is_some_and(|step| step.sends.iter().any(|s| s.1 == *blocks));
                }
            }
        }
        let lane = &mut self.lanes[at.lane];
        lane.kept = passed_on.then(|| ForwardedFrame { part: part.clone(), frame, only });
        lane.received.pass(&part, &whole);
        if lane.received.done {
            lane.receive += 1;
            lane.receives_done += 1;
            lane.received = Progress::default();
        }
        Ok(true)
    }
}

impl<T: Element, S: AsMut<[T]> + AsRef<[T]> + Send> Transfers for Plain<T, S> {
    type Output = S;

    fn enter(&mut self, lane: usize, step: Option<&Step>) {
        let lane = &mut self.lanes[lane];
        lane.sent.clear();
        lane.sent.resize(step.map_or(0, |step| step.sends.len()), Progress::default());
        lane.receive = 0;
        lane.received = Progress::default();
    }

    fn advance(&mut self, at: &StepContext<'_>, port: &mut dyn Port) -> Result<StepStatus, CommError> {
        let step = at.step();
        // Alternates one frame out and one in: the frames in use stay in cache, and both directions of the
        // network are busy.
        let moved = self.send_some(at, step, port)? | self.receive_one(at, step, port)?;
        let lane = &self.lanes[at.lane];
        if lane.receive == step.recvs.len() && lane.sent.iter().all(|sent| sent.done) {
            return Ok(StepStatus::Over);
        }
        Ok(if moved { StepStatus::Moved } else { StepStatus::Waits })
    }

    fn waits_for(&self, at: &StepContext<'_>) -> Option<farflung_base::Rank> {
        let (step, lane) = (at.step(), &self.lanes[at.lane]);
        let from = step.recvs.get(lane.receive).map(|(from, ..)| *from);
        let unsent = step.sends.iter().zip(&lane.sent).find(|(_, sent)| !sent.done);
        from.or(unsent.map(|((to, _), _)| *to))
    }

    fn end(&mut self, members: usize) {
        if self.op.is_mean() {
            T::divide(self.data.as_mut(), members);
        }
    }

    fn finish(self) -> S {
        self.data
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::Poll;

    use farflung_base::{Nanos, PeerId, Rank};

    use super::*;
    use crate::ReduceOp;
    use crate::interpret::Interpreter;
    use crate::operation::Operation as _;
    use crate::plans::Plan;
    use crate::ring::{ring, ring_reduce_scatter};
    use crate::transport::{Channel, Tag};
    use crate::{Pool, recursive_doubling};

    #[test]
    fn what_a_ring_only_passes_on_is_known_and_no_more() {
        let passed = |program: &Program| -> Vec<bool> {
            let lane = &program.lanes[0];
            (0..lane.len()).map(|at| passes_through(&lane[at + 1..], &lane[at].recvs[0].1)).collect()
        };
        // The result of the last of three reductions stays on this rank, and so do the gathered blocks.
        assert_eq!(passed(&ring(Rank(1), 4)), [true, true, false, false, false, false]);
        assert_eq!(passed(&ring_reduce_scatter(Rank(1), 4)), [false; 3]);
        assert_eq!(passed(&recursive_doubling(Rank(0), 4)), [false; 2]);
        assert_eq!(passed(&ring(Rank(0), 2)), [false; 2]);
    }

    /// A network that takes frames only if `room` is set.
    struct Slow {
        room: bool,
        coming: VecDeque<Frame>,
        sent: Vec<Vec<f32>>,
    }

    impl Port for Slow {
        fn me(&self) -> PeerId {
            PeerId(0)
        }
        fn now(&self) -> Nanos {
            Nanos::ZERO
        }
        fn has_room(&mut self, _: PeerId, _: Tag) -> bool {
            self.room
        }
        fn send(&mut self, to: PeerId, tag: Tag, frame: Frame) -> Result<(), CommError> {
            self.send_bytes(to, tag, frame.check, frame.bytes())
        }
        fn send_bytes(&mut self, _: PeerId, _: Tag, _: u32, bytes: &[u8]) -> Result<(), CommError> {
            self.sent.push(bytemuck::cast_slice(bytes).to_vec());
            Ok(())
        }
        fn take(&mut self, _: PeerId, _: Tag) -> Result<Option<Frame>, CommError> {
            Ok(self.coming.pop_front())
        }
        fn suspicion(&self, _: u64, _: PeerId) -> Option<(PeerId, u32)> {
            None
        }
    }

    #[test]
    fn what_is_passed_on_is_not_lost_where_there_is_no_room_for_it_yet() {
        let (next, last) = (Rank(1), Rank(2));
        let steps = vec![
            Step::recv(last, 0..1, Merge::Reduce),
            Step::send(next, 0..1).and_recv(last, 1..2, Merge::Copy),
            Step::recv(last, 0..1, Merge::Copy),
        ];
        for early in [false, true] {
            let pool = Pool::new();
            let frame = |value: f32| pool.copy_of(bytemuck::bytes_of(&[value; 2]), 9);
            let mut port = Slow { room: false, coming: VecDeque::from([frame(5.0)]), sent: Vec::new() };
            let tag = Tag { context: 0, channel: Channel::Collective, number: 0 };
            let members: Arc<[PeerId]> = (0..3).map(PeerId).collect();
            let plan = Plan::from(Program::new(2, steps.clone()));
            let Plan { program, passing, .. } = plan;
            let plain = Plain::new(&program, passing, vec![1.0_f32; 4], ReduceOp::Sum.into());
            let mut body = Interpreter::new("test", program, None, plain, (tag, 9), members);
            assert!(body.poll(&mut port).is_pending());
            // The next frame arrives before or after there is room.
            if early {
                port.coming.push_back(frame(7.0));
                assert!(body.poll(&mut port).is_pending());
            }
            port.room = true;
            assert!(body.poll(&mut port).is_pending());
            assert_eq!(port.sent, [[6.0, 6.0]]);
            if !early {
                port.coming.push_back(frame(7.0));
            }
            port.coming.push_back(frame(8.0));
            assert!(matches!(body.poll(&mut port), Poll::Ready(Ok(()))));
            assert_eq!((body.finish(), port.sent.len()), (vec![8.0, 8.0, 7.0, 7.0], 1));
        }
    }
}
