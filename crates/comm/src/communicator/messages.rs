//! Messages of bytes of any length: exchanges among all ranks, point-to-point messages, and the all-reduce
//! through a coder.

use std::sync::{Arc, Mutex};

use farflung_base::{Nanos, PeerId, Pending, Rank};

use super::{Communicator, check_word};
use crate::CommError;
use crate::coded::{Coded, CodedSlice, CodedValues, Coder, Messages, coded_exchange};
use crate::element::ReduceOp;
use crate::interpret::Interpreter;
use crate::message::{Exchange, Outgoing, RecvAny, RecvMessage, SendMessage};
use crate::service::{Service, ServiceTags, Serving};
use crate::steps::Program;
use crate::transport::Tag;

impl Communicator {
    fn exchange(&self, name: &'static str, out: Vec<Arc<Vec<u8>>>) -> Result<Exchange, CommError> {
        if out.len() != self.size() {
            let (got, want) = (out.len(), self.size());
            return Err(CommError::Argument { op: name, what: "number of messages", got, want });
        }
        let tag = self.next_tags(1)?;
        let members = Arc::clone(&self.group.members);
        Ok(Exchange::new(name, self.group.me, members, tag, check_word(name, 0, &[]), out))
    }

    /// Returns one copy of a message per rank; the copies share the bytes.
    fn to_all(&self, bytes: Vec<u8>) -> Vec<Arc<Vec<u8>>> {
        let bytes = Arc::new(bytes);
        (0..self.size()).map(|_| Arc::clone(&bytes)).collect()
    }

    /// Returns the bytes of every rank, in rank order. Lengths may differ.
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        const NAME: &str = "all_gather_bytes";
        self.run(NAME, self.exchange(NAME, self.to_all(bytes))?, true)
    }

    /// Starts a [`Communicator::all_gather_bytes`].
    pub fn start_all_gather_bytes(&self, bytes: Vec<u8>) -> Pending<Result<Vec<Vec<u8>>, CommError>> {
        const NAME: &str = "all_gather_bytes";
        match self.exchange(NAME, self.to_all(bytes)) {
            Ok(body) => self.start(NAME, body, true),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    /// Sends `out[j]` to rank `j`, and returns the bytes received from each rank, in rank order.
    pub fn all_to_all_bytes(&self, out: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, CommError> {
        const NAME: &str = "all_to_all_bytes";
        let out = out.into_iter().map(Arc::new).collect();
        self.run(NAME, self.exchange(NAME, out)?, true)
    }

    /// Starts a [`Communicator::all_to_all_bytes`].
    pub fn start_all_to_all_bytes(&self, out: Vec<Vec<u8>>) -> Pending<Result<Vec<Vec<u8>>, CommError>> {
        const NAME: &str = "all_to_all_bytes";
        match self.exchange(NAME, out.into_iter().map(Arc::new).collect()) {
            Ok(body) => self.start(NAME, body, true),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    /// Starts an all-reduce whose messages are encoded by `coder`, with the program [`coded_exchange`]. The
    /// result includes the coder. `op` must be a sum or a mean.
    pub fn start_all_reduce_coded(
        &self,
        data: Vec<f32>,
        op: ReduceOp,
        coder: Box<dyn Coder>,
    ) -> Pending<Result<Coded, CommError>> {
        let program = coded_exchange(self.rank(), self.size());
        let reduced = self.start_all_reduce_coded_by(program, CodedSlice::new(data, coder), op);
        reduced.map(|slice| slice.map(CodedSlice::into_parts))
    }

    /// Starts an all-reduce by any coded program, on values in any memory: a device that encodes and decodes in
    /// its own memory transfers only the encoded bytes over its bus. Ranks may hold their values in different
    /// kinds of memory. If the reduction fails, the values are dropped. All ranks must pass their programs of
    /// the same collective, as made by [`CodedAllReduce`](crate::CodedAllReduce).
    ///
    /// # Errors
    /// [`CommError::Argument`] if the program was made for another number of values; [`CommError::Unsupported`]
    /// if `op` is neither a sum nor a mean.
    pub fn start_all_reduce_coded_by<V: CodedValues + 'static>(
        &self,
        program: impl Into<Arc<Program>>,
        values: V,
        op: ReduceOp,
    ) -> Pending<Result<V, CommError>> {
        const NAME: &str = "all_reduce_coded";
        match self.coded(NAME, program.into(), values, op) {
            Ok(body) => self.start(NAME, body, true),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    fn coded<V: CodedValues>(
        &self,
        name: &'static str,
        program: Arc<Program>,
        values: V,
        op: ReduceOp,
    ) -> Result<Interpreter<Messages<V>>, CommError> {
        if !matches!(op, ReduceOp::Sum | ReduceOp::Mean) {
            return Err(CommError::Unsupported { op: name, reduction: op.name(), element: "coded f32" });
        }
        let len = values.count();
        let made_for = program.bounds.as_ref().map_or(Some(len), |bounds| bounds.last().copied());
        if made_for != Some(len) {
            let (got, want) = (made_for.unwrap_or(0), len);
            return Err(CommError::Argument { op: name, what: "length of the program", got, want });
        }
        let blocks = (program.blocks as u64).to_le_bytes();
        let check = check_word(name, len, &[&[op as u8][..], &blocks].concat());
        let tag = self.next_tags(program.lanes.len())?;
        let messages = Messages::new(&program, values, op);
        let members = Arc::clone(&self.group.members);
        Ok(Interpreter::new(name, program, None, messages, (tag, check), members))
    }

    pub(super) fn member(&self, op: &'static str, rank: Rank) -> Result<PeerId, CommError> {
        let members = &self.group.members;
        let argument = CommError::Argument {
            op,
            what: "rank (must be below the number of ranks)",
            got: rank.index(),
            want: members.len(),
        };
        members.get(rank.index()).copied().ok_or(argument)
    }

    fn outgoing(&self, to: Rank, tag: u32, data: Vec<u8>) -> Result<SendMessage, CommError> {
        let to = self.member("send", to)?;
        let tag = Tag::user(self.group.context, tag);
        let turn = self.group.send_queues.enqueue(to, tag, self.transport.waker());
        Ok(SendMessage { to, tag, out: Outgoing::new(Arc::new(data)), queue_entry: turn })
    }

    fn incoming(&self, from: Rank, tag: u32) -> Result<RecvMessage, CommError> {
        let from = self.member("recv", from)?;
        let tag = Tag::user(self.group.context, tag);
        let torn = self.group.cancelled_receives.clone();
        Ok(RecvMessage { from, tag, incoming: torn.next_receiver(from, tag), cancelled: torn })
    }

    /// Sends bytes to a rank; returns when the network has taken them. Messages work on a poisoned
    /// communicator, and a failed message does not poison it. If a send is cancelled after its first frame, the
    /// receiver gets an error.
    pub fn send(&self, to: Rank, tag: u32, data: &[u8]) -> Result<(), CommError> {
        self.run("send", self.outgoing(to, tag, data.to_vec())?, false)
    }

    /// Starts a [`Communicator::send`].
    pub fn start_send(&self, to: Rank, tag: u32, data: Vec<u8>) -> Pending<Result<(), CommError>> {
        match self.outgoing(to, tag, data) {
            Ok(body) => self.start("send", body, false),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    /// Receives bytes from a rank. Only one receive per rank and tag may run at a time. If a receive is
    /// cancelled in the middle of a message, the next receive drops the rest of that message; if the message
    /// had not begun, the next receive gets it.
    pub fn recv(&self, from: Rank, tag: u32) -> Result<Vec<u8>, CommError> {
        self.run("recv", self.incoming(from, tag)?, false)
    }

    /// Starts to answer messages from this communicator's ranks with `service`, until the result is dropped. It
    /// runs beside all other operations of this rank, and on simulated links at the time at which each message
    /// arrives. A rank may send requests to its own service. It ends by itself when all other ranks are lost.
    pub fn start_service<S: Service + ?Sized + 'static>(
        &self,
        tags: ServiceTags,
        service: &Arc<Mutex<S>>,
    ) -> Pending<Result<(), CommError>> {
        let tag = |number| Tag::user(self.group.context, number);
        let (ask, answer) = (tag(tags.ask), tag(tags.answer));
        let members = Arc::clone(&self.group.members);
        let serving =
            Serving::new(Arc::clone(service), members, (ask, answer), self.group.cancelled_receives.clone());
        self.clone().with_deadline(Nanos::MAX).start("service", serving, false)
    }

    /// Starts a [`Communicator::recv`]. If the result is dropped although the message has arrived, the message
    /// is lost: to wait again after [`Communicator::first`], keep it.
    pub fn start_recv(&self, from: Rank, tag: u32) -> Pending<Result<Vec<u8>, CommError>> {
        match self.incoming(from, tag) {
            Ok(body) => self.start("recv", body, false),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    fn incoming_any(&self, from: &[Rank], tag: u32) -> Result<RecvAny, CommError> {
        const NAME: &str = "recv_any";
        if from.is_empty() {
            return Err(CommError::Argument { op: NAME, what: "number of ranks (minimum)", got: 0, want: 1 });
        }
        let member = |&rank| Ok((rank, self.member(NAME, rank)?));
        let from = from.iter().map(member).collect::<Result<Vec<_>, CommError>>()?;
        let (tag, torn) = (Tag::user(self.group.context, tag), self.group.cancelled_receives.clone());
        let from = from.into_iter().map(|(rank, peer)| (rank, peer, torn.next_receiver(peer, tag))).collect();
        Ok(RecvAny { from, tag, cancelled: torn })
    }

    /// Receives bytes from any of these ranks, and returns the sender too. Takes the first message to arrive;
    /// if frames of several ranks have arrived already, the message of the one that is first in `from`. Lost
    /// ranks are skipped as long as another rank is left.
    pub fn recv_any(&self, from: &[Rank], tag: u32) -> Result<(Rank, Vec<u8>), CommError> {
        self.run("recv_any", self.incoming_any(from, tag)?, false)
    }

    /// Starts a [`Communicator::recv_any`]. As with [`Communicator::start_recv`], a message that has arrived is
    /// lost if the result is dropped.
    pub fn start_recv_any(&self, from: &[Rank], tag: u32) -> Pending<Result<(Rank, Vec<u8>), CommError>> {
        match self.incoming_any(from, tag) {
            Ok(body) => self.start("recv_any", body, false),
            Err(e) => Pending::ready(Err(e)),
        }
    }
}
