//! All-reduce through a codec: a scatter-gather in which bytes are what travels. It knows no codec.
//!
//! Every rank ends with the decoding of the same bytes, so replicas stay equal bit for bit.
//! Source: the two-sided compression of Tang et al. 2021, "1-bit Adam", section 5.

use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use farflung_base::PeerId;

use crate::communicator::{Body, progress};
use crate::element::{Element, First, ReduceOp};
use crate::error::CoderError;
use crate::message::Exchange;
use crate::steps::cut;
use crate::transport::{Port, Tag};
use crate::{CommError, MAX_MESSAGE};

/// Which side of a compressed reduction encodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// A rank's own values, one call for each shard.
    Worker,
    /// The reduced values of the shard that this rank owns, one call.
    Server,
}

/// Encodes and decodes ranges of a flat buffer; keeps what it needs (error feedback) between rounds.
pub trait Coder: Send {
    /// Appends the encoding of `x`, which are the elements `range` of the buffer.
    ///
    /// # Errors
    /// Whatever the coder cannot do; the collective then fails on all ranks.
    fn encode(
        &mut self,
        phase: Phase,
        range: Range<usize>,
        x: &[f32],
        out: &mut Vec<u8>,
    ) -> Result<(), CoderError>;

    /// Decodes `bytes`, which a peer sent for the elements `range`, into all of `out`.
    ///
    /// # Errors
    /// For bytes that are not an encoding of so many elements; they are untrusted.
    fn decode(&mut self, range: Range<usize>, bytes: &[u8], out: &mut [f32]) -> Result<(), CoderError>;
}

/// What a coded all-reduce gives: the reduced values, and the coder for the next time.
pub type Coded = (Vec<f32>, Box<dyn Coder>);

enum State {
    Encode,
    Scatter(Exchange),
    Gather(Exchange),
}

/// A reduction's name, this rank among its members, and how its frames are told from others.
pub(crate) struct Place {
    pub(crate) name: &'static str,
    pub(crate) me: usize,
    pub(crate) members: Arc<[PeerId]>,
    pub(crate) tag: Tag,
    pub(crate) check: u32,
}

/// What is reduced, and what encodes it.
pub(crate) struct Work {
    pub(crate) place: Place,
    pub(crate) data: Vec<f32>,
    op: ReduceOp,
    pub(crate) coder: Box<dyn Coder>,
    /// What a message says, while it is added.
    decoded: Vec<f32>,
}

impl Work {
    pub(crate) fn new(place: Place, data: Vec<f32>, op: ReduceOp, coder: Box<dyn Coder>) -> Self {
        Self { place, data, op, coder, decoded: Vec::new() }
    }

    pub(crate) fn shard(&self, rank: usize) -> Range<usize> {
        let n = self.place.members.len();
        cut(self.data.len(), rank, n)..cut(self.data.len(), rank + 1, n)
    }

    pub(crate) fn encode(&mut self, phase: Phase, range: Range<usize>) -> Result<Arc<Vec<u8>>, CommError> {
        let Place { name, me, members, .. } = &self.place;
        let mut out = Vec::new();
        let x = &self.data[range.clone()];
        self.coder.encode(phase, range, x, &mut out).map_err(|e| failed(name, e))?;
        if out.len() > MAX_MESSAGE {
            return Err(CommError::TooLong { op: name, peer: members[*me], max: MAX_MESSAGE });
        }
        Ok(Arc::new(out))
    }

    /// Decodes what a peer sent for a shard over what is there.
    pub(crate) fn decode(&mut self, range: Range<usize>, bytes: &[u8]) -> Result<(), CommError> {
        let out = &mut self.data[range.clone()];
        self.coder.decode(range, bytes, out).map_err(|e| failed(self.place.name, e))
    }

    /// Decodes what a peer sent for a shard and adds it to what is there.
    pub(crate) fn add(&mut self, range: Range<usize>, bytes: &[u8]) -> Result<(), CommError> {
        let decoded = &mut self.decoded;
        decoded.resize(range.len(), 0.0);
        self.coder.decode(range.clone(), bytes, decoded).map_err(|e| failed(self.place.name, e))?;
        f32::reduce(ReduceOp::Sum, &mut self.data[range], decoded, First::Into);
        Ok(())
    }

    /// Encodes the sum of a shard, or its mean.
    pub(crate) fn encode_reduced(&mut self, range: Range<usize>) -> Result<Arc<Vec<u8>>, CommError> {
        if self.op == ReduceOp::Mean {
            f32::divide(&mut self.data[range.clone()], self.place.members.len());
        }
        self.encode(Phase::Server, range)
    }
}

pub(crate) struct CodedReduce {
    work: Work,
    state: State,
}

impl CodedReduce {
    pub(crate) fn new(place: Place, data: Vec<f32>, op: ReduceOp, coder: Box<dyn Coder>) -> Self {
        Self { work: Work::new(place, data, op, coder), state: State::Encode }
    }

    fn exchange(&self, out: Vec<Arc<Vec<u8>>>) -> Exchange {
        let Place { name, me, members, tag, check } = &self.work.place;
        Exchange::new(name, *me, Arc::clone(members), *tag, *check, out)
    }

    /// Decodes what all ranks sent for the own shard, in their order, reduces it, and encodes the result.
    fn reduce(&mut self, messages: &[Vec<u8>]) -> Result<Arc<Vec<u8>>, CommError> {
        let range = self.work.shard(self.work.place.me);
        for (rank, bytes) in messages.iter().enumerate() {
            if rank == 0 {
                self.work.decode(range.clone(), bytes)?;
            } else {
                self.work.add(range.clone(), bytes)?;
            }
        }
        self.work.encode_reduced(range)
    }

    fn step(&mut self, port: &mut dyn Port) -> Result<bool, CommError> {
        let n = self.work.place.members.len();
        loop {
            match &mut self.state {
                State::Encode => {
                    let encode = |j| self.work.encode(Phase::Worker, self.work.shard(j));
                    let out = (0..n).map(encode).collect::<Result<_, _>>()?;
                    self.state = State::Scatter(self.exchange(out));
                }
                State::Scatter(exchange) => {
                    if !exchange.step(port)? {
                        return Ok(false);
                    }
                    let messages = exchange.take();
                    let reduced = self.reduce(&messages)?;
                    self.state = State::Gather(self.exchange(vec![reduced; n]));
                }
                State::Gather(exchange) => {
                    if !exchange.step(port)? {
                        return Ok(false);
                    }
                    for (rank, bytes) in exchange.take().iter().enumerate() {
                        self.work.decode(self.work.shard(rank), bytes)?;
                    }
                    return Ok(true);
                }
            }
        }
    }
}

fn failed(op: &'static str, source: CoderError) -> CommError {
    CommError::Coder { op, source: Arc::from(source) }
}

impl Body for CodedReduce {
    type Output = Coded;

    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        match self.step(port) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }
    fn waits_for(&self) -> PeerId {
        match &self.state {
            State::Encode => self.work.place.members[self.work.place.me],
            State::Scatter(exchange) | State::Gather(exchange) => exchange.waits_for(),
        }
    }
    fn progress(&self) -> u32 {
        progress(self.work.place.tag, usize::from(matches!(self.state, State::Gather(_))))
    }
    fn finish(self) -> Self::Output {
        (self.work.data, self.work.coder)
    }
}
