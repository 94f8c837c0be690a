//! The part of a link that sends and receives through shared memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{In, Link, Out, lock};
use crate::control::{Control, SharedMemoryMessage};
use crate::inbox::Inbox;
use crate::shared::Consumer;
use crate::sizes::HEADER_BYTES;
use crate::tcp::shared_memory::SharedMemorySender;
use crate::wire::{self, Kind, NO_TAG};
use crate::{DownReason, Frame, Pool, WireError};

/// Number of frames taken from shared memory before it is the turn of other links.
const TURN: usize = 32;

impl Link {
    /// Returns whether this side sends through shared memory.
    pub(in crate::tcp) fn shares(&self) -> bool {
        self.shares.load(Ordering::Acquire)
    }

    /// Returns `true` if both sides send through shared memory, `false` if one has declined, and `None` while
    /// that is open.
    pub(in crate::tcp) fn is_together(&self) -> Option<bool> {
        lock(&self.incoming).negotiation.outcome()
    }

    /// Offers shared memory to the peer.
    pub(in crate::tcp) fn offer(&self, pool: &Arc<Pool>) {
        if let Some(offer) = lock(&self.incoming).negotiation.offer() {
            self.say_near(&mut lock(&self.out), offer, pool);
        }
    }

    /// Handles a message of the negotiation about shared memory.
    pub(super) fn approach(
        &self,
        incoming: &mut In,
        near: SharedMemoryMessage,
        pool: &Arc<Pool>,
    ) -> Result<(), WireError> {
        let reply = incoming.negotiation.hear(near)?;
        let mut out = lock(&self.out);
        if let Some(say) = reply.say {
            self.say_near(&mut out, say, pool);
        }
        if let Some(producer) = reply.producer {
            out.near = Some(SharedMemorySender::new(producer));
            self.shares.store(true, Ordering::Release);
        }
        if let Some(consumer) = reply.consumer {
            incoming.near = Some(consumer);
        }
        Ok(())
    }

    /// Sends a message of the negotiation, always over the socket.
    fn say_near(&self, out: &mut Out, near: SharedMemoryMessage, pool: &Arc<Pool>) {
        let frame = pool.copy_of(&Control::Near(near).encode(), 0);
        let header = self.header(Kind::Control, NO_TAG, 0, frame.bytes());
        self.enqueue(out, header, Some(frame));
    }

    /// Hands a frame over, or queues it until there is room.
    pub(super) fn share(&self, out: &mut Out, header: [u8; HEADER_BYTES], frame: Option<Frame>) {
        let Some(near) = &mut out.near else { return };
        if !near.put(&header, frame.as_ref().map_or(&[], Frame::bytes)) {
            near.wait(header, frame);
            self.hungry.store(true, Ordering::SeqCst);
            near.flush();
        }
    }

    /// Returns whether frames are queued for room in shared memory.
    pub(in crate::tcp) fn has_queued(&self) -> bool {
        self.hungry.load(Ordering::SeqCst)
            && lock(&self.out).near.as_ref().is_some_and(|near| !near.is_empty())
    }

    /// Hands over queued frames; returns whether there is room again for operations that found none.
    pub(in crate::tcp) fn feed(&self) -> bool {
        if !self.hungry.load(Ordering::SeqCst) {
            return false;
        }
        let mut out = lock(&self.out);
        let fed = out.near.as_mut().is_some_and(SharedMemorySender::flush);
        if fed {
            self.hungry.store(false, Ordering::SeqCst);
        }
        fed
    }

    /// Announces that this side is about to block. Returns false if a frame has arrived.
    pub(in crate::tcp) fn sleep(&self) -> bool {
        lock(&self.incoming).near.as_ref().is_none_or(Consumer::sleep)
    }

    /// Announces that this side does not block any more.
    pub(in crate::tcp) fn wake(&self) {
        if let Some(consumer) = &lock(&self.incoming).near {
            consumer.wake();
        }
    }

    /// Moves at most [`TURN`] frames from shared memory to the inbox; returns whether there were any.
    pub(in crate::tcp) fn take_shared(&self, inbox: &Inbox, pool: &Arc<Pool>) -> bool {
        self.take_turn(&mut lock(&self.incoming), inbox, pool)
    }

    /// Takes all remaining frames of a peer that has gone.
    pub(super) fn take_all_shared(&self, incoming: &mut In, inbox: &Inbox, pool: &Arc<Pool>) {
        while self.take_turn(incoming, inbox, pool) {}
    }

    fn take_turn(&self, incoming: &mut In, inbox: &Inbox, pool: &Arc<Pool>) -> bool {
        for taken in 0..TURN {
            match self.take_next(incoming, taken == 0, inbox, pool) {
                Ok(true) => {}
                Ok(false) => return taken > 0,
                Err(error) => {
                    // Frames behind a malformed one cannot be read.
                    incoming.near = None;
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
        incoming: &mut In,
        copies: bool,
        inbox: &Inbox,
        pool: &Arc<Pool>,
    ) -> Result<bool, WireError> {
        let Some(consumer) = &mut incoming.near else { return Ok(false) };
        let wrong = |_| WireError::Malformed("position, slot or length in shared memory");
        let Some(entry) = consumer.peek().map_err(wrong)? else { return Ok(false) };
        let header = wire::decode(&entry.header)?;
        let stays = consumer.stays(&entry);
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
