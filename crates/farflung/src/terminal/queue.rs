//! A queue of texts for a writer that may fail or block. It does not depend on terminals.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Limit on the queued bytes; a longer text is queued only if the queue is empty.
const ROOM: usize = 256 * 1024;

/// Time without progress after which a writer counts as blocked.
const PATIENCE: Duration = Duration::from_secs(1);

/// Queue of texts that a separate thread writes in order.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Signalled when a text was added.
    added: Condvar,
    /// Signalled when a text was written or failed.
    gone: Condvar,
}

#[derive(Debug, Default)]
struct State {
    texts: VecDeque<Vec<u8>>,
    /// Total bytes of `texts`.
    bytes: usize,
    /// Whether a text was taken out of the queue and is not written yet.
    writing: bool,
    /// Whether the writer made no progress for [`PATIENCE`]. While this is true, callers do not wait for the
    /// writer.
    stands_still: bool,
    /// Number of texts dropped since the last one that was written.
    dropped: u64,
}

impl State {
    fn has_room(&self, len: usize) -> bool {
        self.bytes == 0 || self.bytes + len <= ROOM
    }

    fn add(&mut self, text: Vec<u8>) {
        self.bytes += text.len();
        self.texts.push_back(text);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done` returns true, or until the writer is blocked.
    fn wait_until(&self, done: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while !done(&state) && !state.stands_still {
            let waited = self.gone.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner);
            state = waited.0;
            state.stands_still |= waited.1.timed_out() && !done(&state);
        }
        state
    }

    /// Writes texts forever. A text that fails is lost, and the next one is tried, since a full disk may have
    /// room again.
    fn write_out(&self, mut to: impl Write) {
        let mut state = self.lock();
        loop {
            let Some(text) = state.texts.pop_front() else {
                state = self.added.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.bytes -= text.len();
            state.writing = true;
            drop(state);
            let written = to.write_all(&text).and_then(|()| to.flush()).is_ok();
            state = self.lock();
            (state.writing, state.stands_still) = (false, false);
            if written && state.dropped > 0 {
                let dropped = std::mem::take(&mut state.dropped);
                state.add(format!("({dropped} messages were dropped: stderr was blocked)\n").into_bytes());
            }
            self.gone.notify_all();
        }
    }
}

impl Queue {
    /// Starts to write to `to`. If the system cannot start a thread, nothing is ever written.
    pub(super) fn new(to: impl Write + Send + 'static) -> Self {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name("stderr".to_owned());
        if thread.spawn(move || own.write_out(to)).is_err() {
            shared.lock().stands_still = true;
        }
        Self { shared }
    }

    /// Adds a text. Waits for room while the writer makes progress; drops the text if the writer is blocked.
    pub(super) fn put(&self, text: Vec<u8>) {
        let mut state = self.shared.wait_until(|state| state.has_room(text.len()));
        if state.has_room(text.len()) {
            state.add(text);
            self.shared.added.notify_one();
        } else {
            state.dropped += 1;
        }
    }

    /// Adds a text if there is room now, else drops it. Used for drawings, which the next drawing replaces.
    pub(super) fn offer(&self, text: Vec<u8>) {
        let mut state = self.shared.lock();
        if state.has_room(text.len()) {
            state.add(text);
            self.shared.added.notify_one();
        }
    }

    /// Waits until all texts are written, or until the writer is blocked.
    pub(super) fn flush(&self) {
        drop(self.shared.wait_until(|state| state.texts.is_empty() && !state.writing));
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A writer that waits for permission before each text, then passes it on.
    struct Slow {
        leave: Receiver<()>,
        written: Sender<Vec<u8>>,
    }

    impl Write for Slow {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            // Once the sender of permissions is dropped, this writer no longer waits.
            let _ = self.leave.recv();
            self.written.send(text.to_vec()).map_err(io::Error::other)?;
            Ok(text.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn slow() -> (Queue, Sender<()>, Receiver<Vec<u8>>) {
        let ((give, leave), (written, seen)) = (channel(), channel());
        (Queue::new(Slow { leave, written }), give, seen)
    }

    #[test]
    fn texts_are_written_in_their_order() {
        let (queue, give, seen) = slow();
        drop(give);
        let texts: Vec<Vec<u8>> = (0..5000).map(|i| format!("line {i}\n").into_bytes()).collect();
        for text in &texts {
            queue.put(text.clone());
        }
        queue.flush();
        assert_eq!(seen.try_iter().collect::<Vec<_>>(), texts);
    }

    #[test]
    fn a_writer_that_fails_loses_the_text_and_is_tried_again() {
        struct Full(Sender<Vec<u8>>, u32);
        impl Write for Full {
            fn write(&mut self, text: &[u8]) -> io::Result<usize> {
                self.1 += 1;
                if self.1 < 3 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                self.0.send(text.to_vec()).map_err(io::Error::other)?;
                Ok(text.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (written, seen) = channel();
        let queue = Queue::new(Full(written, 0));
        for text in ["a", "b", "c"] {
            queue.put(text.into());
        }
        queue.flush();
        assert_eq!(seen.try_iter().collect::<Vec<_>>(), [b"c"]);
    }

    #[test]
    fn a_writer_that_stands_still_holds_nobody_up_and_what_it_missed_is_counted() {
        let (queue, give, seen) = slow();
        let text = vec![b'x'; 1000];
        let fits = ROOM / text.len();
        // One text is being written, the queue is full, and the last three are dropped.
        for _ in 0..fits + 4 {
            queue.put(text.clone());
        }
        queue.offer(text.clone());
        queue.flush();
        assert_eq!(seen.try_iter().count(), 0);
        drop(give);
        let written = (0..fits + 2).map(|_| seen.recv_timeout(Duration::from_mins(1)).unwrap());
        let (note, texts): (Vec<_>, Vec<_>) = written.partition(|text| text[0] == b'(');
        assert_eq!(texts, vec![text; 1 + fits]);
        assert_eq!(note, [b"(3 messages were dropped: stderr was blocked)\n"]);
    }
}
