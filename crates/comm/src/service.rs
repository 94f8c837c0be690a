//! Messages that are answered as they come, beside whatever else a rank does: what a parameter server is made
//! of.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use farflung_base::{Nanos, PeerId, Rank};

use crate::CommError;
use crate::message::{Incoming, Outgoing, Torn};
use crate::operation::Operation;
use crate::transport::{Port, Tag};

/// Answers messages. It is called by whichever thread drives the network, one message at a time.
pub trait Service: Send {
    /// Takes a message and gives those that leave for it, to any ranks.
    fn receive(&mut self, message: Asked) -> Vec<Answer>;
}

/// A message to a [`Service`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// Its sender.
    pub from: Rank,
    /// When it was here, by the transport's clock.
    pub at: Nanos,
    /// What it says.
    pub bytes: Vec<u8>,
}

/// A message of a [`Service`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Its receiver.
    pub to: Rank,
    /// What it says.
    pub bytes: Vec<u8>,
    /// Whether it is for the receiver's own service, rather than for whoever waits there for an answer.
    pub asks: bool,
}

impl Answer {
    /// For whoever waits for an answer.
    #[must_use]
    pub const fn new(to: Rank, bytes: Vec<u8>) -> Self {
        Self { to, bytes, asks: false }
    }

    /// For the receiver's service.
    #[must_use]
    pub const fn to_service(to: Rank, bytes: Vec<u8>) -> Self {
        Self { to, bytes, asks: true }
    }
}

/// The numbers of the tags by which a service is asked and answers. No other message may have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceTags {
    /// Of messages to it.
    pub ask: u32,
    /// Of its own.
    pub answer: u32,
}

/// A service at work.
pub(crate) struct Serving<S: ?Sized> {
    service: Arc<Mutex<S>>,
    members: Arc<[PeerId]>,
    /// Ranks that may still ask, with what has come of their next message.
    asking: Vec<(Rank, Incoming)>,
    /// Answers on their way, by rank.
    answers: Vec<VecDeque<(Tag, Outgoing)>>,
    ask: Tag,
    answer: Tag,
    torn: Torn,
    /// Why a rank can ask no more.
    lost: Option<CommError>,
}

impl<S: Service + ?Sized> Serving<S> {
    /// For the members of a communicator.
    pub(crate) fn new(
        service: Arc<Mutex<S>>,
        members: Arc<[PeerId]>,
        (ask, answer): (Tag, Tag),
        torn: Torn,
    ) -> Self {
        let next = |(rank, &peer): (u32, &PeerId)| (Rank(rank), torn.next(peer, ask));
        let asking = (0..).zip(members.iter()).map(next).collect();
        let answers = members.iter().map(|_| VecDeque::new()).collect();
        Self { service, members, asking, answers, ask, answer, torn, lost: None }
    }

    /// Sends what the network takes.
    fn send(&mut self, port: &mut dyn Port) {
        for (queue, &peer) in self.answers.iter_mut().zip(self.members.iter()) {
            while let Some(first) = queue.front_mut() {
                let (tag, out) = first;
                match out.poll(port, peer, *tag, 0) {
                    Ok(true) => drop(queue.pop_front()),
                    Ok(false) => break,
                    // Whoever is gone needs no answer.
                    Err(_) => queue.clear(),
                }
            }
        }
    }

    /// Takes up one message, if one is there.
    fn take(&mut self, port: &mut dyn Port) -> Option<Asked> {
        let mut i = 0;
        while i < self.asking.len() {
            let (from, incoming) = &mut self.asking[i];
            let peer = self.members[from.index()];
            match incoming.poll(port, "service", peer, self.ask, 0) {
                Ok(true) => {
                    let bytes = std::mem::take(incoming).bytes;
                    return Some(Asked { from: *from, at: port.now(), bytes });
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
        // Alone, it waits for nobody.
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
    fn cut(&mut self, _: &mut dyn Port) {
        for (rank, incoming) in &self.asking {
            self.torn.note(self.members[rank.index()], self.ask, incoming);
        }
    }
    fn finish(self) {}
}
