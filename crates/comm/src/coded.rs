//! All-reduce through a codec: a scatter-gather in which bytes are what travels. It knows no codec.
//!
//! Every rank ends with the decoding of the same bytes, so replicas stay equal bit for bit.
//! Source: the two-sided compression of Tang et al. 2021, "1-bit Adam", section 5.

use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use farflung_base::PeerId;

use crate::communicator::{Body, progress};
use crate::element::{Element, ReduceOp};
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

pub(crate) struct CodedReduce {
    pub(crate) name: &'static str,
    data: Vec<f32>,
    op: ReduceOp,
    coder: Box<dyn Coder>,
    me: usize,
    members: Arc<[PeerId]>,
    tag: Tag,
    check: u32,
    state: State,
}

impl CodedReduce {
    #[expect(clippy::too_many_arguments, reason = "one call site, which has them all at hand")]
    pub(crate) fn new(
        name: &'static str,
        data: Vec<f32>,
        op: ReduceOp,
        coder: Box<dyn Coder>,
        me: usize,
        members: Arc<[PeerId]>,
        tag: Tag,
        check: u32,
    ) -> Self {
        Self { name, data, op, coder, me, members, tag, check, state: State::Encode }
    }

    fn shard(&self, rank: usize) -> Range<usize> {
        let n = self.members.len();
        cut(self.data.len(), rank, n)..cut(self.data.len(), rank + 1, n)
    }

    fn exchange(&self, out: Vec<Arc<Vec<u8>>>) -> Exchange {
        Exchange::new(self.name, self.me, Arc::clone(&self.members), self.tag, self.check, out)
    }

    fn encode(&mut self, phase: Phase, range: Range<usize>) -> Result<Arc<Vec<u8>>, CommError> {
        let mut out = Vec::new();
        let x = &self.data[range.clone()];
        self.coder.encode(phase, range, x, &mut out).map_err(|e| failed(self.name, e))?;
        if out.len() > MAX_MESSAGE {
            let peer = self.members[self.me];
            return Err(CommError::TooLong { op: self.name, peer, max: MAX_MESSAGE });
        }
        Ok(Arc::new(out))
    }

    /// Decodes what all ranks sent for the own shard, in their order, reduces it, and encodes the result.
    fn reduce(&mut self, messages: &[Vec<u8>]) -> Result<Arc<Vec<u8>>, CommError> {
        let range = self.shard(self.me);
        let mut decoded = vec![0.0; range.len()];
        for (rank, bytes) in messages.iter().enumerate() {
            self.coder.decode(range.clone(), bytes, &mut decoded).map_err(|e| failed(self.name, e))?;
            let own = &mut self.data[range.clone()];
            if rank == 0 {
                own.copy_from_slice(&decoded);
            } else {
                f32::reduce(ReduceOp::Sum, own, &decoded);
            }
        }
        if self.op == ReduceOp::Mean {
            f32::divide(&mut self.data[range.clone()], messages.len());
        }
        self.encode(Phase::Server, range)
    }

    fn step(&mut self, port: &mut dyn Port) -> Result<bool, CommError> {
        loop {
            match &mut self.state {
                State::Encode => {
                    let shards = (0..self.members.len()).map(|j| self.shard(j)).collect::<Vec<_>>();
                    let out = shards
                        .into_iter()
                        .map(|shard| self.encode(Phase::Worker, shard))
                        .collect::<Result<_, _>>()?;
                    self.state = State::Scatter(self.exchange(out));
                }
                State::Scatter(exchange) => {
                    if !exchange.step(port)? {
                        return Ok(false);
                    }
                    let messages = exchange.take();
                    let reduced = self.reduce(&messages)?;
                    self.state = State::Gather(self.exchange(vec![reduced; self.members.len()]));
                }
                State::Gather(exchange) => {
                    if !exchange.step(port)? {
                        return Ok(false);
                    }
                    for (rank, bytes) in exchange.take().iter().enumerate() {
                        let range = self.shard(rank);
                        let out = &mut self.data[range.clone()];
                        self.coder.decode(range, bytes, out).map_err(|e| failed(self.name, e))?;
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
            State::Encode => self.members[self.me],
            State::Scatter(exchange) | State::Gather(exchange) => exchange.waits_for(),
        }
    }
    fn progress(&self) -> u32 {
        progress(self.tag, usize::from(matches!(self.state, State::Gather(_))))
    }
    fn finish(self) -> Self::Output {
        (self.data, self.coder)
    }
}
