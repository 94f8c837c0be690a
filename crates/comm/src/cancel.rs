//! Cancels waiting operations from another thread. Operations that can be cancelled poll the switch.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

/// A switch that cancels operations from any thread: the operations of every communicator that was given the
/// switch by [`Communicator::with_cancel`](crate::Communicator::with_cancel). Clones share one switch. It
/// cannot be turned off.
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
    /// Wakers of endpoints whose threads must check the switch.
    wakers: Mutex<Vec<Waker>>,
    /// Other switches: if one of them is on, this switch counts as on too.
    others: Vec<Cancel>,
}

impl Cancel {
    /// Creates a switch that is off.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Turns the switch on: cancels running operations, and those that are started later.
    pub fn cancel(&self) {
        self.0.on.store(true, Ordering::Release);
        let wakers = self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        wakers.iter().for_each(Waker::wake_by_ref);
    }

    /// Returns whether the switch is on.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.on.load(Ordering::Acquire) || self.0.others.iter().any(Self::is_cancelled)
    }

    /// Returns a switch that is on if it was cancelled itself, or if this one or the other is on.
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

    /// Adds a waker to wake when the switch is turned on.
    pub(crate) fn tell(&self, waker: &Waker) {
        let mut wakers = self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        if !wakers.iter().any(|other| other.will_wake(waker)) {
            wakers.push(waker.clone());
        }
        drop(wakers);
        self.0.others.iter().for_each(|other| other.tell(waker));
    }
}
