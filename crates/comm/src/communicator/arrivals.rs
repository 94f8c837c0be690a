//! Which of several messages is there first: for whoever goes on with what has arrived, not in an order of its
//! own.

use std::task::Poll;

use farflung_base::{Nanos, PeerId, Pending};

use super::Communicator;
use crate::CommError;
use crate::transport::{Port, Task};

/// Until when one looks for an arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// What has arrived by now.
    Now,
    /// The first arrival, whenever that is.
    UntilOne,
    /// The first arrival within so long.
    Within(Nanos),
}

/// Lets everything else go on: over when one of `pending` is there, or when its time is.
struct Watch<'a, 'b, T> {
    me: PeerId,
    pending: &'a mut [&'b mut Pending<T>],
    limit: Nanos,
}

impl<T: Send> Task for Watch<'_, '_, T> {
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
    /// Which of some started operations is over, the first of them if several are; it can be waited for without
    /// blocking, well or not. Under [`Look::Now`], `None` if none is; under [`Look::Within`] if none is in that
    /// time; under [`Look::UntilOne`] if there are none.
    ///
    /// On simulated links, what has arrived by now is what has arrived by this rank's clock, whatever the other
    /// ranks' threads are at; the first arrival is the one with the earliest time.
    ///
    /// ```
    /// use farflung_base::Rank;
    /// use farflung_comm::{Communicator, Look, memory};
    ///
    /// let ranks: Vec<_> = memory::cluster(3).into_iter().map(|t| Communicator::new(t)).collect();
    /// let (mut a, mut b) = (ranks[0].start_recv(Rank(1), 0), ranks[0].start_recv(Rank(2), 0));
    /// assert_eq!(ranks[0].first(&mut [&mut a, &mut b], Look::Now), None);
    /// ranks[2].send(Rank(0), 0, b"hello")?;
    /// assert_eq!(ranks[0].first(&mut [&mut a, &mut b], Look::UntilOne), Some(1));
    /// assert_eq!(b.wait()?, b"hello");
    /// # Ok::<(), farflung_comm::CommError>(())
    /// ```
    pub fn first<T: Send>(&self, pending: &mut [&mut Pending<T>], look: Look) -> Option<usize> {
        if !pending.is_empty() {
            let limit = match look {
                Look::Now => Nanos::ZERO,
                Look::UntilOne => Nanos::MAX,
                Look::Within(time) => time,
            };
            self.transport.run(&mut Watch { me: self.transport.me(), pending, limit });
        }
        pending.iter().position(|pending| pending.is_ready())
    }
}
