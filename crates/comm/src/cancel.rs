//! Ending what waits, from another thread. It knows no operation: those that may be ended ask it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

/// A switch that ends operations, from any thread: those of every communicator that was given it with
/// [`Communicator::with_cancel`](crate::Communicator::with_cancel). Clones are the same switch. It stays on.
///
/// ```
/// use farflung_base::Rank;
/// use farflung_comm::{Cancel, CommError, Communicator, memory};
///
/// let cancel = Cancel::new();
/// let ranks: Vec<_> = memory::cluster(2).into_iter().map(|t| Communicator::new(t)).collect();
/// let comm = ranks[0].clone().with_cancel(&cancel);
/// std::thread::scope(|scope| {
///     let waits = scope.spawn(|| comm.recv(Rank(1), 0));
///     cancel.cancel();
///     assert!(matches!(waits.join(), Ok(Err(CommError::Cancelled { op: "recv" }))));
/// });
/// ```
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<Switch>);

#[derive(Debug, Default)]
struct Switch {
    on: AtomicBool,
    /// The endpoints whose threads have to look.
    wakers: Mutex<Vec<Waker>>,
    /// Those that count as this one.
    others: Vec<Cancel>,
}

impl Cancel {
    /// A switch that is off.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends what is under way and what is still to be started.
    pub fn cancel(&self) {
        self.0.on.store(true, Ordering::Release);
        let wakers = self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        wakers.iter().for_each(Waker::wake_by_ref);
    }

    /// Whether it is on.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.on.load(Ordering::Acquire) || self.0.others.iter().any(Self::is_cancelled)
    }

    /// A switch that is on where it, this one or the other is.
    ///
    /// ```
    /// use farflung_comm::Cancel;
    ///
    /// let (stop, lost) = (Cancel::new(), Cancel::new());
    /// let either = stop.or(&lost);
    /// assert!(!either.is_cancelled());
    /// lost.cancel();
    /// assert!(either.is_cancelled() && !stop.is_cancelled());
    /// ```
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(Arc::new(Switch { others: vec![self.clone(), other.clone()], ..Switch::default() }))
    }

    /// From now on `waker` is told.
    pub(crate) fn tell(&self, waker: &Waker) {
        let mut wakers = self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        if !wakers.iter().any(|other| other.will_wake(waker)) {
            wakers.push(waker.clone());
        }
        drop(wakers);
        self.0.others.iter().for_each(|other| other.tell(waker));
    }
}
