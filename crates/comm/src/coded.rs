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

/// A rank's values in a coded reduction, which touches them through their bytes only: they may lie in a device's memory.
/// What they remember between rounds is their own affair, as is [`Coder`]'s.
pub trait CodedValues: Send {
    /// How many there are.
    fn count(&self) -> usize;

    /// Appends the encoding of the values `range`.
    ///
    /// # Errors
    /// Whatever cannot be done; the collective then fails on all ranks.
    fn encode(&mut self, phase: Phase, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError>;

    /// Decodes `bytes`, which a peer sent for the values `range`, in their place or added to them.
    ///
    /// # Errors
    /// For bytes that are not an encoding of so many values; they are untrusted.
    fn decode(&mut self, range: Range<usize>, bytes: &[u8], fold: Fold) -> Result<(), CoderError>;

    /// Divides the values `range`.
    ///
    /// # Errors
    /// As [`Self::encode`].
    fn divide(&mut self, range: Range<usize>, by: usize) -> Result<(), CoderError>;
}

/// What decoded values do with those that are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fold {
    /// They take their place.
    Replace,
    /// They are added to them.
    Add,
}

/// What a coded all-reduce of a slice gives: the reduced values, and the coder for the next time.
pub type Coded = (Vec<f32>, Box<dyn Coder>);

/// Values in this process's memory, and what encodes them.
pub(crate) struct Slice {
    data: Vec<f32>,
    coder: Box<dyn Coder>,
    /// What a message says, while it is added.
    decoded: Vec<f32>,
}

impl Slice {
    pub(crate) fn new(data: Vec<f32>, coder: Box<dyn Coder>) -> Self {
        Self { data, coder, decoded: Vec::new() }
    }

    pub(crate) fn into_parts(self) -> Coded {
        (self.data, self.coder)
    }
}

impl CodedValues for Slice {
    fn count(&self) -> usize {
        self.data.len()
    }

    fn encode(&mut self, phase: Phase, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError> {
        self.coder.encode(phase, range.clone(), &self.data[range], out)
    }

    fn decode(&mut self, range: Range<usize>, bytes: &[u8], fold: Fold) -> Result<(), CoderError> {
        let values = &mut self.data[range.clone()];
        if fold == Fold::Replace {
            return self.coder.decode(range, bytes, values);
        }
        self.decoded.resize(range.len(), 0.0);
        self.coder.decode(range, bytes, &mut self.decoded)?;
        f32::reduce(ReduceOp::Sum, values, &self.decoded, First::Into);
        Ok(())
    }

    fn divide(&mut self, range: Range<usize>, by: usize) -> Result<(), CoderError> {
        f32::divide(&mut self.data[range], by);
        Ok(())
    }
}

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

/// What is reduced, in its place.
pub(crate) struct Work<V> {
    pub(crate) place: Place,
    pub(crate) values: V,
    op: ReduceOp,
}

impl<V: CodedValues> Work<V> {
    pub(crate) fn new(place: Place, values: V, op: ReduceOp) -> Self {
        Self { place, values, op }
    }

    pub(crate) fn shard(&self, rank: usize) -> Range<usize> {
        let (n, len) = (self.place.members.len(), self.values.count());
        cut(len, rank, n)..cut(len, rank + 1, n)
    }

    fn failed(&self, source: CoderError) -> CommError {
        CommError::Coder { op: self.place.name, source: Arc::from(source) }
    }

    pub(crate) fn encode(&mut self, phase: Phase, range: Range<usize>) -> Result<Arc<Vec<u8>>, CommError> {
        let mut out = Vec::new();
        self.values.encode(phase, range, &mut out).map_err(|e| self.failed(e))?;
        if out.len() > MAX_MESSAGE {
            let Place { name: op, me, members, .. } = &self.place;
            return Err(CommError::TooLong { op, peer: members[*me], max: MAX_MESSAGE });
        }
        Ok(Arc::new(out))
    }

    /// Decodes what a peer sent for a shard.
    pub(crate) fn decode(&mut self, range: Range<usize>, bytes: &[u8], fold: Fold) -> Result<(), CommError> {
        self.values.decode(range, bytes, fold).map_err(|e| self.failed(e))
    }

    /// Encodes the sum of a shard, or its mean.
    pub(crate) fn encode_reduced(&mut self, range: Range<usize>) -> Result<Arc<Vec<u8>>, CommError> {
        if self.op == ReduceOp::Mean {
            let by = self.place.members.len();
            self.values.divide(range.clone(), by).map_err(|e| self.failed(e))?;
        }
        self.encode(Phase::Server, range)
    }
}

pub(crate) struct CodedReduce<V> {
    work: Work<V>,
    state: State,
}

impl<V: CodedValues> CodedReduce<V> {
    pub(crate) fn new(place: Place, values: V, op: ReduceOp) -> Self {
        Self { work: Work::new(place, values, op), state: State::Encode }
    }

    fn exchange(&self, out: Vec<Arc<Vec<u8>>>) -> Exchange {
        let Place { name, me, members, tag, check } = &self.work.place;
        Exchange::new(name, *me, Arc::clone(members), *tag, *check, out)
    }

    /// Decodes what all ranks sent for the own shard, in their order, reduces it, and encodes the result.
    fn reduce(&mut self, messages: &[Vec<u8>]) -> Result<Arc<Vec<u8>>, CommError> {
        let range = self.work.shard(self.work.place.me);
        for (rank, bytes) in messages.iter().enumerate() {
            let fold = if rank == 0 { Fold::Replace } else { Fold::Add };
            self.work.decode(range.clone(), bytes, fold)?;
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
                        self.work.decode(self.work.shard(rank), bytes, Fold::Replace)?;
                    }
                    return Ok(true);
                }
            }
        }
    }
}

impl<V: CodedValues + 'static> Body for CodedReduce<V> {
    type Output = V;

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
        self.work.values
    }
}
