//! Communicators that are made once: what has arrived for them is dropped with them. Without this, the frames
//! of operations that failed stay in the inbox for as long as the endpoint exists.

use std::sync::{Arc, OnceLock, Weak};

use super::{Communicator, Group};
use crate::transport::Transport;

/// The network in which a group's frames are dropped when the group is; unset if they are not.
#[derive(Debug, Default)]
pub(super) struct FrameOwner(OnceLock<Weak<dyn Transport>>);

impl FrameOwner {
    pub(super) fn set(&self, transport: &Arc<dyn Transport>) {
        // Set before: the group has only one network.
        let _ = self.0.set(Arc::downgrade(transport));
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.get().is_some()
    }
}

impl Communicator {
    /// Returns the communicator as one that is never made again with the same context. When its last clone and
    /// its last operation are dropped, frames of it that no operation has taken are dropped too, also those
    /// that arrive later. The same holds for communicators that are split from it.
    #[must_use]
    pub fn single_use(self) -> Self {
        self.group.frames.set(&self.transport);
        self
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(transport) = self.frames.0.get().and_then(Weak::upgrade) {
            transport.retire(self.context);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use farflung_base::{Nanos, Rank};

    use crate::{CommError, Communicator, Transport as _, memory};

    #[test]
    fn frames_that_no_operation_has_taken_are_dropped_with_the_communicator() {
        let ends = memory::cluster(2);
        let peers = [ends[0].me(), ends[1].me()];
        let of = |end: usize, context| {
            Communicator::of_members(Arc::clone(&ends[end]) as _, &peers, context).unwrap()
        };
        // The message is sent before its receiver makes the communicator anew.
        let arrives = |context, single: bool| {
            let first = of(1, context);
            let first = if single { first.single_use() } else { first };
            of(0, context).send(Rank(1), 3, b"early").unwrap();
            drop(first);
            of(0, context).send(Rank(1), 3, b"late").unwrap();
            of(1, context).with_deadline(Nanos::from_millis(1)).recv(Rank(0), 3)
        };
        assert_eq!(arrives(1, false).unwrap(), b"early");
        assert!(matches!(arrives(2, true), Err(CommError::Deadline { .. })));
    }

    #[test]
    fn what_is_split_from_it_is_used_once_too() {
        let ends = memory::cluster(2);
        let comms: Vec<_> = ends.into_iter().map(|end| Communicator::new(end).single_use()).collect();
        let (mut sender, mut receiver) = (None, None);
        std::thread::scope(|scope| {
            scope.spawn(|| sender = Some(comms[0].split(0, 0).unwrap()));
            receiver = Some(comms[1].split(0, 0).unwrap());
        });
        let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
        sender.send(Rank(1), 3, b"not received").unwrap();
        let pending = receiver.start_recv(Rank(0), 4);
        let weak = Arc::downgrade(&receiver.group);
        drop(receiver);
        assert!(weak.upgrade().is_some(), "an operation still uses it");
        drop(pending);
        assert!(weak.upgrade().is_none());
        assert!(sender.group.frames.is_set());
    }
}
