//! Finds the first of several operations to complete, for callers that handle results as they arrive.

use std::task::Poll;

use farflung_base::{Nanos, PeerId, Pending};

use super::Communicator;
use crate::CommError;
use crate::transport::{Port, Task};

/// How long [`Communicator::first`] waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitMode {
    /// Does not wait: considers what has arrived by now.
    Now,
    /// Waits for the first arrival.
    UntilOne,
    /// Waits for the first arrival, at most this long.
    Within(Nanos),
}

/// Task that ends when one of `pending` is complete, or after `limit`; other operations run meanwhile.
struct FirstReady<'a, 'b, T> {
    me: PeerId,
    pending: &'a mut [&'b mut Pending<T>],
    limit: Nanos,
}

impl<T: Send> Task for FirstReady<'_, '_, T> {
    fn name(&self) -> &'static str {
        "first"
    }
    fn poll(&mut self, _: &mut dyn Port) -> Poll<()> {
        let there = self.limit > Nanos::ZERO && self.pending.iter().any(|pending| pending.is_ready());
        if there { Poll::Ready(()) } else { Poll::Pending }
    }
    fn fail(&mut self, _: CommError, _: &mut dyn Port) {}
    fn waits_for(&self) -> PeerId {
        self.me
    }
    fn limit(&self) -> Nanos {
        self.limit
    }
}

impl Communicator {
    /// Returns the index of the first operation in `pending` that is complete, with a result or an error.
    /// Waiting for it does not block. Returns `None` with [`WaitMode::Now`] if none is complete, with
    /// [`WaitMode::Within`] if none is complete in that time, and with [`WaitMode::UntilOne`] if `pending` is
    /// empty.
    ///
    /// On simulated links, "by now" means by this rank's virtual clock, independent of the progress of other
    /// ranks' threads; the first arrival is the one with the earliest virtual time.
    ///
    /// ```
    /// use farflung_base::Rank;
    /// use farflung_comm::{Communicator, WaitMode, memory};
    ///
    /// let ranks: Vec<_> = memory::cluster(3).into_iter().map(|t| Communicator::new(t)).collect();
    /// let (mut a, mut b) = (ranks[0].start_recv(Rank(1), 0), ranks[0].start_recv(Rank(2), 0));
    /// assert_eq!(ranks[0].first(&mut [&mut a, &mut b], WaitMode::Now), None);
    /// ranks[2].send(Rank(0), 0, b"hello")?;
    /// assert_eq!(ranks[0].first(&mut [&mut a, &mut b], WaitMode::UntilOne), Some(1));
    /// assert_eq!(b.wait()?, b"hello");
    /// # Ok::<(), farflung_comm::CommError>(())
    /// ```
    pub fn first<T: Send>(&self, pending: &mut [&mut Pending<T>], look: WaitMode) -> Option<usize> {
        if !pending.is_empty() {
            let limit = match look {
                WaitMode::Now => Nanos::ZERO,
                WaitMode::UntilOne => Nanos::MAX,
                WaitMode::Within(time) => time,
            };
            self.transport.run(&mut FirstReady { me: self.transport.me(), pending, limit });
        }
        pending.iter().position(|pending| pending.is_ready())
    }
}
