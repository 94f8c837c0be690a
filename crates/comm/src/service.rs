//! Services that answer messages as they arrive, while the rank does other work; used for parameter servers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use farflung_base::{Nanos, PeerId, Rank};

use crate::CommError;
use crate::message::{CancelledReceives, Incoming, Outgoing};
use crate::operation::Operation;
use crate::transport::{Port, Tag};

/// Answers messages. The thread that drives the network calls it, for one message at a time.
pub trait Service: Send {
    /// Handles a message, and returns the messages to send because of it, to any ranks.
    fn receive(&mut self, message: Question) -> Vec<Answer>;
}

/// A message to a [`Service`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Rank that sent the message.
    pub from: Rank,
    /// Time of arrival, by the transport's clock.
    pub at: Nanos,
    /// Content of the message.
    pub bytes: Vec<u8>,
}

/// A message sent by a [`Service`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Rank that receives the message.
    pub to: Rank,
    /// Content of the message.
    pub bytes: Vec<u8>,
    /// If set, the message goes to the receiver's own service; if not, to a receive that waits for an answer.
    pub asks: bool,
}

impl Answer {
    /// Creates a message to a receive that waits for an answer.
    #[must_use]
    pub const fn new(to: Rank, bytes: Vec<u8>) -> Self {
        Self { to, bytes, asks: false }
    }

    /// Creates a message to the receiver's service.
    #[must_use]
    pub const fn to_service(to: Rank, bytes: Vec<u8>) -> Self {
        Self { to, bytes, asks: true }
    }
}

/// Tag numbers of requests and answers. No other message may use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceTags {
    /// Tag of messages to a service.
    pub ask: u32,
    /// Tag of answers.
    pub answer: u32,
}

/// A running service.
pub(crate) struct Serving<S: ?Sized> {
    service: Arc<Mutex<S>>,
    members: Arc<[PeerId]>,
    /// Ranks that may still send requests, with the part of their next message that has arrived.
    asking: Vec<(Rank, Incoming)>,
    /// Answers being sent, by rank.
    answers: Vec<VecDeque<(Tag, Outgoing)>>,
    ask: Tag,
    answer: Tag,
    torn: CancelledReceives,
    /// Error of the receive from the most recently lost rank.
    lost: Option<CommError>,
}

impl<S: Service + ?Sized> Serving<S> {
    /// Creates a service for the members of a communicator.
    pub(crate) fn new(
        service: Arc<Mutex<S>>,
        members: Arc<[PeerId]>,
        (ask, answer): (Tag, Tag),
        torn: CancelledReceives,
    ) -> Self {
        let next = |(rank, &peer): (u32, &PeerId)| (Rank(rank), torn.next_receiver(peer, ask));
        let asking = (0..).zip(members.iter()).map(next).collect();
        let answers = members.iter().map(|_| VecDeque::new()).collect();
        Self { service, members, asking, answers, ask, answer, torn, lost: None }
    }

    /// Sends answers as far as the network has room.
    fn send(&mut self, port: &mut dyn Port) {
        for (queue, &peer) in self.answers.iter_mut().zip(self.members.iter()) {
            while let Some(first) = queue.front_mut() {
                let (tag, out) = first;
                match out.poll(port, peer, *tag, 0) {
                    Ok(true) => drop(queue.pop_front()),
                    Ok(false) => break,
                    // Answers to a rank that is gone are dropped.
                    Err(_) => queue.clear(),
                }
            }
        }
    }

    /// Returns the next message that has arrived, if there is one.
    fn take(&mut self, port: &mut dyn Port) -> Option<Question> {
        let mut i = 0;
        while i < self.asking.len() {
            let (from, incoming) = &mut self.asking[i];
            let peer = self.members[from.index()];
            match incoming.poll(port, "service", peer, self.ask, 0) {
                Ok(true) => {
                    let bytes = std::mem::take(incoming).bytes;
                    return Some(Question { from: *from, at: port.now(), bytes });
                }
                Ok(false) => i += 1,
                Err(CommError::CancelledBy { .. }) => *incoming = Incoming::default(),
                Err(error) => {
                    self.lost = Some(error);
                    self.asking.remove(i);
                }
            }
        }
        None
    }
}

impl<S: Service + ?Sized> Operation for Serving<S> {
    type Output = ();

    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        while let Some(asked) = self.take(port) {
            let answers = self.service.lock().unwrap_or_else(PoisonError::into_inner).receive(asked);
            for Answer { to, bytes, asks } in answers {
                let tag = if asks { self.ask } else { self.answer };
                if let Some(queue) = self.answers.get_mut(to.index()) {
                    queue.push_back((tag, Outgoing::new(Arc::new(bytes))));
                }
            }
            self.send(port);
        }
        self.send(port);
        // Once all other ranks are lost, no request can arrive any more.
        let alone = self.asking.len() <= 1 && self.members.len() > 1;
        match self.lost.take().filter(|_| alone) {
            Some(error) => Poll::Ready(Err(error)),
            None => Poll::Pending,
        }
    }
    fn waits_for(&self) -> PeerId {
        self.asking.first().map_or(self.members[0], |(rank, _)| self.members[rank.index()])
    }
    fn needs_one(&self) -> bool {
        false
    }
    fn abandon(&mut self, _: &mut dyn Port) {
        for (rank, incoming) in &self.asking {
            self.torn.record(self.members[rank.index()], self.ask, incoming);
        }
    }
    fn finish(self) {}
}
