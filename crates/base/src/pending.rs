//! The result of an asynchronous operation. The caller starts the operation, computes, and then waits.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The operation behind a [`Pending`] value. Dropping it before it is done cancels it.
pub trait PendingOp<T>: Send {
    /// Returns the value if it is ready; otherwise arranges a wake-up. Must not block.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<T>;

    /// Blocks the calling thread until the value is ready. Where possible, this thread drives the operation.
    fn wait(self: Box<Self>) -> T;

    /// Returns whether the value is known to be ready, without polling.
    fn is_ready(&self) -> bool {
        false
    }
}

enum State<T> {
    Ready(Option<T>),
    Running(Box<dyn PendingOp<T>>),
}

/// A value of type `T`, ready now or later. It is a [`Future`] and also has a blocking [`wait`](Pending::wait).
///
/// Dropping it cancels the operation that produces the value.
#[must_use = "dropping a Pending cancels it; call `wait` or await it"]
pub struct Pending<T>(State<T>);

impl<T> Pending<T> {
    /// Creates a value that is ready.
    pub const fn ready(value: T) -> Self {
        Self(State::Ready(Some(value)))
    }

    /// Creates a value that `op` will produce.
    pub fn new(op: impl PendingOp<T> + 'static) -> Self {
        Self(State::Running(Box::new(op)))
    }

    /// Returns whether `wait` would return without blocking, as far as is known without polling.
    pub fn is_ready(&self) -> bool {
        match &self.0 {
            State::Ready(_) => true,
            State::Running(op) => op.is_ready(),
        }
    }

    /// Blocks until the value is ready, and returns it.
    ///
    /// # Panics
    /// If the value was already taken by awaiting it as a future.
    pub fn wait(self) -> T {
        match self.0 {
            State::Ready(value) => value.expect("a Pending returns its value only once"),
            State::Running(op) => op.wait(),
        }
    }
}

impl<T: 'static> Pending<T> {
    /// Applies `f` to the value when it is ready.
    pub fn map<U>(self, f: impl FnOnce(T) -> U + Send + 'static) -> Pending<U> {
        match self.0 {
            State::Ready(value) => Pending::ready(f(value.expect("a Pending returns its value only once"))),
            State::Running(op) => Pending::new(Map { op: Some(op), f: Some(f) }),
        }
    }
}

impl<T: Unpin> Future for Pending<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match &mut self.0 {
            State::Ready(value) => Poll::Ready(value.take().expect("a Pending returns its value only once")),
            State::Running(op) => {
                let value = std::task::ready!(op.poll(cx));
                self.0 = State::Ready(None);
                Poll::Ready(value)
            }
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_ready() { "Pending(ready)" } else { "Pending(running)" })
    }
}

struct Map<T, F> {
    op: Option<Box<dyn PendingOp<T>>>,
    f: Option<F>,
}

impl<T, U, F: FnOnce(T) -> U + Send> PendingOp<U> for Map<T, F> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<U> {
        let op = self.op.as_mut().expect("polled after it was done");
        let value = std::task::ready!(op.poll(cx));
        self.op = None;
        Poll::Ready((self.f.take().expect("polled after it was done"))(value))
    }

    fn wait(mut self: Box<Self>) -> U {
        let value = self.op.take().expect("waited after it was done").wait();
        (self.f.take().expect("waited after it was done"))(value)
    }

    fn is_ready(&self) -> bool {
        self.op.as_ref().is_some_and(|op| op.is_ready())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::task::Waker;

    struct FromChannel(mpsc::Receiver<u32>);

    impl PendingOp<u32> for FromChannel {
        fn poll(&mut self, _: &mut Context<'_>) -> Poll<u32> {
            self.0.try_recv().map_or(Poll::Pending, Poll::Ready)
        }
        fn wait(self: Box<Self>) -> u32 {
            self.0.recv().unwrap()
        }
    }

    #[test]
    fn waits_maps_and_polls() {
        assert_eq!(Pending::ready(2).map(|x| x + 1).wait(), 3);
        let (tx, rx) = mpsc::channel();
        let mut p = Pending::new(FromChannel(rx)).map(|x| x * 2);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut p).poll(&mut cx).is_pending());
        tx.send(21).unwrap();
        assert_eq!(Pin::new(&mut p).poll(&mut cx), Poll::Ready(42));
        let (tx, rx) = mpsc::channel();
        let p = Pending::new(FromChannel(rx)).map(|x| x + 1);
        std::thread::spawn(move || tx.send(1).unwrap());
        assert_eq!(p.wait(), 2);
    }
}
