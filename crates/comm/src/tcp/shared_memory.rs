//! How a link between two processes of one machine moves to shared memory while it is in use. All messages
//! about it are sent over the link itself, which keeps the order: frames sent before
//! [`SharedMemoryMessage::Mapped`] arrive on the socket, frames sent after it in shared memory. The socket
//! stays open, because its end shows that the peer has gone.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::control::SharedMemoryMessage;
use crate::shared::{
    Consumer, Direction, Offer, Producer, RingWaker, Segment, hand_over, receive_waker, send_waker,
};
use crate::sizes::HEADER_BYTES;
use crate::{Frame, WireError};

/// Whether processes of one machine exchange frames through shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SharedMemory {
    /// All frames go over sockets.
    #[default]
    Never,
    /// Shared memory with peers on this machine that belong to the same user and also allow it; sockets with
    /// others.
    WherePossible,
    /// Shared memory with all peers: [`join`](super::join) fails if one of them does not share it. In a growing
    /// network this is the same as [`SharedMemory::WherePossible`].
    Always,
}

/// State of the negotiation between the two processes.
#[derive(Debug, Default)]
enum Stage {
    /// Initial state: this side has not offered memory.
    #[default]
    Initial,
    /// This side has offered, and waits for the memory.
    Offered(Offer),
    /// This side has handed the memory over.
    Handed(UnixStream, Arc<Segment>),
    /// This side has mapped the memory that the peer handed over.
    Mapped(Consumer),
    Shared,
    Declined,
}

/// What this side must send and change after a message of the peer.
#[derive(Debug, Default)]
pub(super) struct Reply {
    pub(super) message: Option<SharedMemoryMessage>,
    /// If set, frames sent after `message` go through this producer.
    pub(super) producer: Option<Producer>,
    /// If set, frames are received from this consumer from now on.
    pub(super) consumer: Option<Consumer>,
}

impl Reply {
    fn message(near: SharedMemoryMessage) -> Self {
        Self { message: Some(near), ..Self::default() }
    }
}

/// One side of the negotiation.
#[derive(Debug)]
pub(super) struct Negotiation {
    stage: Stage,
    /// Doorbell of this endpoint; `None` if it does not share memory.
    bell: Option<Arc<RingWaker>>,
}

impl Negotiation {
    /// Creates the negotiation; `bell` is this endpoint's doorbell, or `None` if it must not share memory with
    /// this peer.
    pub(super) const fn new(bell: Option<Arc<RingWaker>>) -> Self {
        Self { stage: Stage::Initial, bell }
    }

    /// Returns an offer to share memory, or the message that this side does not share it, so that a peer that
    /// must share memory need not wait.
    pub(super) fn offer(&mut self) -> SharedMemoryMessage {
        let offer = self.bell.as_ref().map(|_| Offer::new());
        if let Ok(Some(offer)) = offer.transpose().inspect_err(|error| declined("offer", error)) {
            let near = SharedMemoryMessage::Offer { name: offer.name, token: offer.token };
            self.stage = Stage::Offered(offer);
            near
        } else {
            self.stage = Stage::Declined;
            SharedMemoryMessage::Declined
        }
    }

    /// Returns `true` if both sides have switched, `false` if one does not share memory, and `None` while the
    /// negotiation is running.
    pub(super) const fn outcome(&self) -> Option<bool> {
        match self.stage {
            Stage::Shared => Some(true),
            Stage::Declined => Some(false),
            _ if self.bell.is_none() => Some(false),
            _ => None,
        }
    }

    /// Returns this side's reply to a message of the peer.
    ///
    /// # Errors
    /// If the message is not allowed in this state.
    pub(super) fn receive(&mut self, near: SharedMemoryMessage) -> Result<Reply, WireError> {
        const WRONG: WireError = WireError::Malformed("message about shared memory");
        let bell = self.bell.clone();
        match (std::mem::replace(&mut self.stage, Stage::Declined), near) {
            (Stage::Initial, SharedMemoryMessage::Offer { name, token }) => {
                let handed = bell.map(|bell| hand_over(&name, &token, &bell));
                Ok(match handed {
                    Some(Ok((stream, segment))) => {
                        self.stage = Stage::Handed(stream, Arc::new(segment));
                        Reply::message(SharedMemoryMessage::Handed)
                    }
                    Some(Err(error)) => {
                        declined("hand over", &error);
                        Reply::message(SharedMemoryMessage::Declined)
                    }
                    None => Reply::message(SharedMemoryMessage::Declined),
                })
            }
            (Stage::Offered(offer), SharedMemoryMessage::Handed) => {
                let bell = bell.ok_or(WRONG)?;
                let taken = offer.accept().and_then(|(stream, segment, theirs)| {
                    send_waker(&stream, &bell)?;
                    Ok((Arc::new(segment), Arc::new(theirs)))
                });
                Ok(match taken {
                    Ok((segment, theirs)) => {
                        let (to, from) = (Direction::GuestToMaker, Direction::MakerToGuest);
                        let consumer = Consumer::new(Arc::clone(&segment), from, Arc::clone(&theirs));
                        self.stage = Stage::Mapped(consumer);
                        let producer = Some(Producer::new(segment, to, theirs));
                        Reply { producer, ..Reply::message(SharedMemoryMessage::Mapped) }
                    }
                    Err(error) => {
                        declined("map", &error);
                        Reply::message(SharedMemoryMessage::Declined)
                    }
                })
            }
            (Stage::Handed(stream, segment), SharedMemoryMessage::Mapped) => {
                // The peer has switched already: without its doorbell this side cannot continue.
                let theirs = Arc::new(receive_waker(&stream).map_err(|_| WRONG)?);
                self.stage = Stage::Shared;
                let (to, from) = (Direction::MakerToGuest, Direction::GuestToMaker);
                let consumer = Some(Consumer::new(Arc::clone(&segment), from, Arc::clone(&theirs)));
                let producer = Some(Producer::new(segment, to, theirs));
                Ok(Reply { producer, consumer, ..Reply::message(SharedMemoryMessage::Mapped) })
            }
            (Stage::Mapped(consumer), SharedMemoryMessage::Mapped) => {
                self.stage = Stage::Shared;
                Ok(Reply { consumer: Some(consumer), ..Reply::default() })
            }
            (Stage::Initial | Stage::Offered(_) | Stage::Handed(..), SharedMemoryMessage::Declined) => {
                Ok(Reply::default())
            }
            _ => Err(WRONG),
        }
    }
}

fn declined(what: &'static str, error: &std::io::Error) {
    tracing::debug!(what, %error, "cannot share memory with a peer on this machine");
}

/// Sender of frames through shared memory, with a queue of the frames that found no room.
#[derive(Debug)]
pub(super) struct SharedMemorySender {
    producer: Producer,
    queue: VecDeque<([u8; HEADER_BYTES], Option<Frame>)>,
}

impl SharedMemorySender {
    pub(super) const fn new(producer: Producer) -> Self {
        Self { producer, queue: VecDeque::new() }
    }

    /// Returns whether no frame is queued.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns whether a frame would be handed over at once. If not, the peer rings the doorbell when there is
    /// room.
    pub(super) fn has_room(&self) -> bool {
        self.queue.is_empty() && self.producer.has_room()
    }

    /// Hands a frame over if none is queued and there is room; returns whether it did.
    pub(super) fn put(&mut self, header: &[u8; HEADER_BYTES], payload: &[u8]) -> bool {
        self.queue.is_empty() && self.producer.put(header, payload)
    }

    /// Queues a frame until there is room.
    pub(super) fn wait(&mut self, header: [u8; HEADER_BYTES], frame: Option<Frame>) {
        self.queue.push_back((header, frame));
    }

    /// Hands over queued frames; returns whether all are gone and there is room for more.
    pub(super) fn flush(&mut self) -> bool {
        while let Some((header, frame)) = self.queue.front() {
            if !self.producer.put(header, frame.as_ref().map_or(&[], Frame::bytes)) {
                break;
            }
            self.queue.pop_front();
        }
        self.producer.has_room() && self.queue.is_empty()
    }
}
