//! The part of a link that sends and receives through shared memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Link, ReceiveState, SendState, lock};
use crate::control::{Control, SharedMemoryMessage};
use crate::inbox::Inbox;
use crate::shared::Consumer;
use crate::sizes::HEADER_BYTES;
use crate::tcp::shared_memory::SharedMemorySender;
use crate::wire::{self, Kind, NO_TAG};
use crate::{DownReason, Frame, Pool, WireError};

/// Number of frames taken from shared memory before it is the turn of other links.
const FRAMES_PER_TURN: usize = 32;

impl Link {
    /// Returns whether this side sends through shared memory.
    pub(in crate::tcp) fn shares(&self) -> bool {
        self.shares.load(Ordering::Acquire)
    }

    /// Returns `true` if both sides send through shared memory, `false` if one has declined, and `None` while
    /// that is open.
    pub(in crate::tcp) fn negotiation_outcome(&self) -> Option<bool> {
        lock(&self.incoming).negotiation.outcome()
    }

    /// Offers shared memory to the peer, or tells it that this side does not share memory.
    pub(in crate::tcp) fn offer(&self, pool: &Arc<Pool>) {
        let offer = lock(&self.incoming).negotiation.offer();
        self.send_negotiation(&mut lock(&self.out), offer, pool);
    }

    /// Handles a message of the negotiation about shared memory.
    pub(super) fn negotiate(
        &self,
        incoming: &mut ReceiveState,
        near: SharedMemoryMessage,
        pool: &Arc<Pool>,
    ) -> Result<(), WireError> {
        let reply = incoming.negotiation.receive(near)?;
        let mut out = lock(&self.out);
        if let Some(say) = reply.message {
            self.send_negotiation(&mut out, say, pool);
        }
        if let Some(producer) = reply.producer {
            out.shared_sender = Some(SharedMemorySender::new(producer));
            self.shares.store(true, Ordering::Release);
        }
        if let Some(consumer) = reply.consumer {
            incoming.shared_consumer = Some(consumer);
        }
        Ok(())
    }

    /// Sends a message of the negotiation, always over the socket.
    fn send_negotiation(&self, out: &mut SendState, near: SharedMemoryMessage, pool: &Arc<Pool>) {
        let frame = pool.copy_of(&Control::SharedMemory(near).encode(), 0);
        let header = self.header(Kind::Control, NO_TAG, 0, frame.bytes());
        self.enqueue(out, header, Some(frame));
    }

    /// Hands a frame over, or queues it until there is room.
    pub(super) fn share(&self, out: &mut SendState, header: [u8; HEADER_BYTES], frame: Option<Frame>) {
        let Some(near) = &mut out.shared_sender else { return };
        if !near.put(&header, frame.as_ref().map_or(&[], Frame::bytes)) {
            near.wait(header, frame);
            self.waits_for_memory.store(true, Ordering::SeqCst);
            near.flush();
        }
    }

    /// Returns whether frames are queued for room in shared memory.
    pub(in crate::tcp) fn has_queued(&self) -> bool {
        self.waits_for_memory.load(Ordering::SeqCst)
            && lock(&self.out).shared_sender.as_ref().is_some_and(|near| !near.is_empty())
    }

    /// Hands over queued frames; returns whether there is room again for operations that found none.
    pub(in crate::tcp) fn flush_shared(&self) -> bool {
        if !self.waits_for_memory.load(Ordering::SeqCst) {
            return false;
        }
        let mut out = lock(&self.out);
        let fed = out.shared_sender.as_mut().is_some_and(SharedMemorySender::flush);
        if fed {
            self.waits_for_memory.store(false, Ordering::SeqCst);
        }
        fed
    }

    /// Announces that this side is about to block. Returns false if a frame has arrived.
    pub(in crate::tcp) fn sleep(&self) -> bool {
        lock(&self.incoming).shared_consumer.as_ref().is_none_or(Consumer::sleep)
    }

    /// Announces that this side does not block any more.
    pub(in crate::tcp) fn wake(&self) {
        if let Some(consumer) = &lock(&self.incoming).shared_consumer {
            consumer.wake();
        }
    }

    /// Moves at most [`FRAMES_PER_TURN`] frames from shared memory to the inbox; returns whether there were
    /// any.
    pub(in crate::tcp) fn take_shared(&self, inbox: &Inbox, pool: &Arc<Pool>) -> bool {
        self.take_turn(&mut lock(&self.incoming), inbox, pool)
    }

    /// Takes all remaining frames of a peer that has gone.
    pub(super) fn take_all_shared(&self, incoming: &mut ReceiveState, inbox: &Inbox, pool: &Arc<Pool>) {
        while self.take_turn(incoming, inbox, pool) {}
    }

    fn take_turn(&self, incoming: &mut ReceiveState, inbox: &Inbox, pool: &Arc<Pool>) -> bool {
        for taken in 0..FRAMES_PER_TURN {
            match self.take_next(incoming, taken == 0, inbox, pool) {
                Ok(true) => {}
                Ok(false) => return taken > 0,
                Err(error) => {
                    // Frames behind a malformed one cannot be read.
                    incoming.shared_consumer = None;
                    self.end(inbox, DownReason::Protocol(error));
                    return false;
                }
            }
        }
        true
    }

    /// Takes the next frame. If the frame has to be copied, to make room for the peer, it is taken only if
    /// `copies` is set: operations first look at frames that can stay in shared memory.
    fn take_next(
        &self,
        incoming: &mut ReceiveState,
        copies: bool,
        inbox: &Inbox,
        pool: &Arc<Pool>,
    ) -> Result<bool, WireError> {
        let Some(consumer) = &mut incoming.shared_consumer else { return Ok(false) };
        let wrong = |_| WireError::Malformed("position, slot or length in shared memory");
        let Some(entry) = consumer.peek().map_err(wrong)? else { return Ok(false) };
        let header = wire::decode(&entry.header)?;
        let stays = consumer.can_stay(&entry);
        if !stays && !copies {
            return Ok(false);
        }
        let frame = match consumer.take(&entry, header.length).map_err(wrong)? {
            None => pool.lease(0),
            Some(slot) if stays => pool.in_place(slot, header.length, header.check),
            Some(slot) => pool.copy_of(slot.bytes(header.length), header.check),
        };
        if header.kind == Kind::Control {
            return Err(WireError::Kind(header.kind as u8));
        }
        self.handle(incoming, &header, frame, inbox, pool)?;
        Ok(true)
    }
}
