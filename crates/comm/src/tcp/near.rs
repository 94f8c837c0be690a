//! How a link to a process of the same machine goes over to shared memory, while it is used. Everything is said
//! over the link itself, so its order holds: what comes before [`Near::Mapped`] comes from the socket, what
//! comes after it from the memory. The socket stays, since its end says that the peer is gone.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::control::Near;
use crate::shared::{Consumer, Direction, Doorbell, Offer, Producer, Segment, give_bell, hand, take_bell};
use crate::sizes::HEADER_BYTES;
use crate::{Frame, WireError};

/// Whether processes of one machine exchange frames through memory that they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SharedMemory {
    /// All of it goes over sockets.
    #[default]
    Never,
    /// With peers that are on this machine, belong to this user, and do so too.
    WherePossible,
    /// With all peers: anything else is an error.
    Always,
}

/// How far two processes are.
#[derive(Debug, Default)]
enum Stage {
    /// No peer that this side has offered memory to.
    #[default]
    Apart,
    /// This side waits for the memory.
    Offered(Offer),
    /// This side has handed it over.
    Handed(UnixStream, Arc<Segment>),
    /// This side has mapped what the peer has handed over.
    Mapped(Consumer),
    Together,
    Declined,
}

/// What this side says and does next.
#[derive(Debug, Default)]
pub(super) struct Reply {
    pub(super) say: Option<Near>,
    /// For whatever is said after that.
    pub(super) producer: Option<Producer>,
    /// For whatever comes from now on.
    pub(super) consumer: Option<Consumer>,
}

impl Reply {
    fn say(near: Near) -> Self {
        Self { say: Some(near), ..Self::default() }
    }
}

/// One side of it.
#[derive(Debug)]
pub(super) struct Negotiation {
    stage: Stage,
    /// This endpoint's doorbell, where it shares memory at all.
    bell: Option<Arc<Doorbell>>,
}

impl Negotiation {
    /// `bell` is this endpoint's, where it shares memory with this peer if it can.
    pub(super) const fn new(bell: Option<Arc<Doorbell>>) -> Self {
        Self { stage: Stage::Apart, bell }
    }

    /// Offers memory, where that is possible.
    pub(super) fn offer(&mut self) -> Option<Near> {
        self.bell.as_ref()?;
        let offer = Offer::new().inspect_err(|error| declined("offer", error)).ok()?;
        let near = Near::Offer { name: offer.name, token: offer.token };
        self.stage = Stage::Offered(offer);
        Some(near)
    }

    /// Whether both sides have switched, or one will not; none while that is open.
    pub(super) const fn outcome(&self) -> Option<bool> {
        match self.stage {
            Stage::Together => Some(true),
            Stage::Declined => Some(false),
            _ => None,
        }
    }

    /// What follows from what the peer has said.
    ///
    /// # Errors
    /// If it makes no sense at this point.
    pub(super) fn hear(&mut self, near: Near) -> Result<Reply, WireError> {
        const WRONG: WireError = WireError::Malformed("message about shared memory");
        let bell = self.bell.clone();
        match (std::mem::replace(&mut self.stage, Stage::Declined), near) {
            (Stage::Apart, Near::Offer { name, token }) => {
                let handed = bell.map(|bell| hand(&name, &token, &bell));
                Ok(match handed {
                    Some(Ok((stream, segment))) => {
                        self.stage = Stage::Handed(stream, Arc::new(segment));
                        Reply::say(Near::Handed)
                    }
                    Some(Err(error)) => {
                        declined("hand over", &error);
                        Reply::say(Near::Declined)
                    }
                    None => Reply::say(Near::Declined),
                })
            }
            (Stage::Offered(offer), Near::Handed) => {
                let bell = bell.ok_or(WRONG)?;
                let taken = offer.accept().and_then(|(stream, segment, theirs)| {
                    give_bell(&stream, &bell)?;
                    Ok((Arc::new(segment), Arc::new(theirs)))
                });
                Ok(match taken {
                    Ok((segment, theirs)) => {
                        let (to, from) = (Direction::GuestToMaker, Direction::MakerToGuest);
                        let consumer = Consumer::new(Arc::clone(&segment), from, Arc::clone(&theirs));
                        self.stage = Stage::Mapped(consumer);
                        let producer = Some(Producer::new(segment, to, theirs));
                        Reply { producer, ..Reply::say(Near::Mapped) }
                    }
                    Err(error) => {
                        declined("map", &error);
                        Reply::say(Near::Declined)
                    }
                })
            }
            (Stage::Handed(stream, segment), Near::Mapped) => {
                // The peer has switched already: without its doorbell this side cannot go on.
                let theirs = Arc::new(take_bell(&stream).map_err(|_| WRONG)?);
                self.stage = Stage::Together;
                let (to, from) = (Direction::MakerToGuest, Direction::GuestToMaker);
                let consumer = Some(Consumer::new(Arc::clone(&segment), from, Arc::clone(&theirs)));
                let producer = Some(Producer::new(segment, to, theirs));
                Ok(Reply { producer, consumer, ..Reply::say(Near::Mapped) })
            }
            (Stage::Mapped(consumer), Near::Mapped) => {
                self.stage = Stage::Together;
                Ok(Reply { consumer: Some(consumer), ..Reply::default() })
            }
            (Stage::Apart | Stage::Offered(_) | Stage::Handed(..), Near::Declined) => Ok(Reply::default()),
            _ => Err(WRONG),
        }
    }
}

fn declined(what: &'static str, error: &std::io::Error) {
    tracing::debug!(what, %error, "no shared memory with a peer of this machine");
}

/// What goes out through shared memory, and what waits for room there.
#[derive(Debug)]
pub(super) struct NearOut {
    producer: Producer,
    queue: VecDeque<([u8; HEADER_BYTES], Option<Frame>)>,
}

impl NearOut {
    pub(super) const fn new(producer: Producer) -> Self {
        Self { producer, queue: VecDeque::new() }
    }

    /// Whether nothing waits here.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether a frame would be handed over at once; where not, the peer rings when it may be.
    pub(super) fn has_room(&self) -> bool {
        self.queue.is_empty() && self.producer.has_room()
    }

    /// Hands over, where nothing waits and there is room.
    pub(super) fn put(&mut self, header: &[u8; HEADER_BYTES], payload: &[u8]) -> bool {
        self.queue.is_empty() && self.producer.put(header, payload)
    }

    /// Lets a frame wait for room.
    pub(super) fn wait(&mut self, header: [u8; HEADER_BYTES], frame: Option<Frame>) {
        self.queue.push_back((header, frame));
    }

    /// Hands over what waits; returns whether there is room for more.
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
