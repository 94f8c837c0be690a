//! Runs a collective by the network's own library, if the network has one and it was chosen.

use std::sync::Arc;
use std::task::Poll;

use farflung_base::PeerId;

use super::Communicator;
use super::call::Call;
use crate::element::Element;
use crate::native::{NativeCall, NativeKind};
use crate::operation::{Operation, progress};
use crate::reduction::Reduction;
use crate::transport::{Port, Tag, Transport};
use crate::{CommError, ReduceOp};

/// A collective that the network's library runs on a copy of the buffer.
pub(super) struct Native<T, S> {
    transport: Arc<dyn Transport>,
    call: NativeCall,
    tag: Tag,
    /// The next member. Ranks that wait report it to each other near their deadline; the member that reports
    /// nothing is the one that has not started.
    next: PeerId,
    op: Reduction<T>,
    data: S,
    number: Option<u64>,
}

impl Communicator {
    /// Returns the collective of the network's library for a call; `None` if ours runs it.
    pub(super) fn native_call<T: Element>(&self, call: &Call<T>, len: usize) -> Option<NativeCall> {
        let library = self.transport.native()?;
        let kind = call.native?;
        let is_defined = call.op.is_defined(call.name).is_ok();
        let op = match (&call.op, kind) {
            (_, NativeKind::AllGather | NativeKind::Broadcast(_)) => ReduceOp::Sum,
            (Reduction::BuiltIn(op), _) => *op,
            (Reduction::User(_), _) => return None,
        };
        let shards = (0..self.size()).map(|rank| self.shard_of(farflung_base::Rank(rank as u32), len).len());
        let call = NativeCall {
            context: self.group.context,
            kind,
            element: T::NAME,
            op,
            shards: shards.collect(),
            rank: self.group.me,
        };
        (is_defined && T::WIDTH == 1 && library.has(&call)).then_some(call)
    }

    /// Creates the operation of a collective that the network's library runs.
    pub(super) fn native<T: Element, S: AsRef<[T]> + AsMut<[T]> + Send>(
        &self,
        call: NativeCall,
        op: Reduction<T>,
        data: S,
    ) -> Result<Native<T, S>, CommError> {
        let members = &self.group.members;
        let next = members[(self.group.me + 1) % members.len()];
        let (transport, tag) = (Arc::clone(&self.transport), self.next_tags(1)?);
        Ok(Native { transport, call, tag, next, op, data, number: None })
    }
}

impl<T: Element, S: AsRef<[T]> + AsMut<[T]> + Send> Operation for Native<T, S> {
    type Output = S;

    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        let library = self.transport.native().expect("`native_call` has checked it");
        if self.number.is_none() {
            self.number = library.start(&self.call, bytemuck::cast_slice(self.data.as_ref()));
        }
        let Some(number) = self.number else { return Poll::Pending };
        if library.finish(number, bytemuck::cast_slice_mut(self.data.as_mut())) {
            if self.op.is_mean() {
                T::divide(self.data.as_mut(), self.call.shards.len());
            }
            return Poll::Ready(Ok(()));
        }
        // No frames have this tag, so this only returns the failure of the communicator or of the peer.
        match port.take(self.next, self.tag) {
            Ok(_) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
    fn waits_for(&self) -> PeerId {
        self.next
    }
    fn progress(&self) -> u32 {
        progress(self.tag, 0)
    }
    fn finish(self) -> S {
        self.data
    }
}
