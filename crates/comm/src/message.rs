//! Messages of any length as frames: all frames are full but the last, so that no length is claimed and none believed.

use std::task::Poll;

use farflung_base::{PeerId, Rank};

use crate::communicator::{Body, progress};
use crate::transport::{Port, Tag};
use crate::{CommError, FRAME_BYTES};

/// The longest message of bytes that is accepted.
pub const MAX_MESSAGE: usize = 1 << 30;

/// A message on its way out.
#[derive(Default)]
pub(crate) struct Outgoing {
    pub(crate) bytes: std::sync::Arc<Vec<u8>>,
    at: usize,
    done: bool,
}

impl Outgoing {
    pub(crate) fn new(bytes: std::sync::Arc<Vec<u8>>) -> Self {
        Self { bytes, at: 0, done: false }
    }

    /// Sends what the network takes; returns whether all is sent.
    pub(crate) fn poll(
        &mut self,
        port: &mut dyn Port,
        to: PeerId,
        tag: Tag,
        check: u32,
    ) -> Result<bool, CommError> {
        while !self.done && port.has_room(to, tag) {
            let part = &self.bytes[self.at..self.bytes.len().min(self.at + FRAME_BYTES)];
            self.at += part.len();
            self.done = part.len() < FRAME_BYTES;
            port.send_bytes(to, tag, check, part)?;
        }
        Ok(self.done)
    }
}

/// A message on its way in.
#[derive(Default)]
pub(crate) struct Incoming {
    pub(crate) bytes: Vec<u8>,
    done: bool,
}

impl Incoming {
    /// Takes what is there; returns whether all is here.
    pub(crate) fn poll(
        &mut self,
        port: &mut dyn Port,
        op: &'static str,
        peer: PeerId,
        tag: Tag,
        check: u32,
    ) -> Result<bool, CommError> {
        while !self.done {
            let Some(frame) = port.take(peer, tag)? else { break };
            if frame.check != check {
                return Err(CommError::Mismatch { op, peer, want: 0, got: frame.len() });
            }
            if self.bytes.len() + frame.len() > MAX_MESSAGE {
                return Err(CommError::TooLong { op, peer, max: MAX_MESSAGE });
            }
            self.bytes.extend_from_slice(frame.bytes());
            self.done = frame.len() < FRAME_BYTES;
        }
        Ok(self.done)
    }
}

/// A message to everyone and one from everyone, all at once; the own one goes round by itself.
pub(crate) struct Exchange {
    pub(crate) name: &'static str,
    pub(crate) me: usize,
    pub(crate) members: std::sync::Arc<[PeerId]>,
    pub(crate) tag: Tag,
    pub(crate) check: u32,
    out: Vec<Outgoing>,
    incoming: Vec<Incoming>,
}

impl Exchange {
    /// `out[j]` goes to rank `j`.
    pub(crate) fn new(
        name: &'static str,
        me: usize,
        members: std::sync::Arc<[PeerId]>,
        tag: Tag,
        check: u32,
        out: Vec<std::sync::Arc<Vec<u8>>>,
    ) -> Self {
        let mut incoming: Vec<Incoming> = out.iter().map(|_| Incoming::default()).collect();
        incoming[me] = Incoming { bytes: out[me].to_vec(), done: true };
        let mut out: Vec<_> = out.into_iter().map(Outgoing::new).collect();
        out[me].done = true;
        Self { name, me, members, tag, check, out, incoming }
    }

    /// The messages of all ranks, in their order.
    pub(crate) fn take(&mut self) -> Vec<Vec<u8>> {
        self.incoming.iter_mut().map(|i| std::mem::take(&mut i.bytes)).collect()
    }

    pub(crate) fn step(&mut self, port: &mut dyn Port) -> Result<bool, CommError> {
        let n = self.members.len();
        let mut done = true;
        // Everyone starts with its neighbour, so that no one is the first target of all.
        for i in (1..n).map(|i| (self.me + i) % n) {
            done &= self.out[i].poll(port, self.members[i], self.tag, self.check)?;
        }
        for i in (1..n).map(|i| (self.me + n - i) % n) {
            done &= self.incoming[i].poll(port, self.name, self.members[i], self.tag, self.check)?;
        }
        Ok(done)
    }
}

impl Body for Exchange {
    type Output = Vec<Vec<u8>>;

    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        match self.step(port) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }
    fn waits_for(&self) -> PeerId {
        let silent = self.incoming.iter().position(|i| !i.done);
        let deaf = || self.out.iter().position(|o| !o.done);
        self.members[silent.or_else(deaf).unwrap_or(self.me)]
    }
    fn progress(&self) -> u32 {
        progress(self.tag, 0)
    }
    fn finish(mut self) -> Self::Output {
        self.take()
    }
}

/// One message to one peer.
pub(crate) struct SendMessage {
    pub(crate) to: PeerId,
    pub(crate) tag: Tag,
    pub(crate) out: Outgoing,
}

impl Body for SendMessage {
    type Output = ();
    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        match self.out.poll(port, self.to, self.tag, 0) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }
    fn waits_for(&self) -> PeerId {
        self.to
    }
    fn finish(self) {}
}

/// One message from one peer.
pub(crate) struct RecvMessage {
    pub(crate) from: PeerId,
    pub(crate) tag: Tag,
    pub(crate) incoming: Incoming,
}

impl Body for RecvMessage {
    type Output = Vec<u8>;
    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        match self.incoming.poll(port, "recv", self.from, self.tag, 0) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }
    fn waits_for(&self) -> PeerId {
        self.from
    }
    fn finish(self) -> Vec<u8> {
        self.incoming.bytes
    }
}

/// One message from whichever peer's comes first. As long as one of them can still send, the loss of another is no
/// failure.
pub(crate) struct RecvAny {
    /// With what has come of each; from the first frame on, one alone.
    pub(crate) from: Vec<(Rank, PeerId, Incoming)>,
    pub(crate) tag: Tag,
}

impl Body for RecvAny {
    type Output = (Rank, Vec<u8>);
    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        let (mut gone, mut lost) = (None, 0);
        for i in 0..self.from.len() {
            let (_, peer, incoming) = &mut self.from[i];
            match incoming.poll(port, "recv_any", *peer, self.tag, 0) {
                Ok(done) if done || !incoming.bytes.is_empty() => {
                    let first = self.from.swap_remove(i);
                    self.from = vec![first];
                    return if done { Poll::Ready(Ok(())) } else { Poll::Pending };
                }
                Ok(_) => {}
                Err(e) => {
                    gone = gone.or(Some(e));
                    lost += 1;
                }
            }
        }
        match gone {
            Some(e) if lost == self.from.len() => Poll::Ready(Err(e)),
            _ => Poll::Pending,
        }
    }
    fn waits_for(&self) -> PeerId {
        self.from[0].1
    }
    fn finish(mut self) -> Self::Output {
        let (rank, _, incoming) = self.from.swap_remove(0);
        (rank, incoming.bytes)
    }
}
