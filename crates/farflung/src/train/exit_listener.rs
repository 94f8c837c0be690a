//! Messages between the processes of a job when one of them ends. They are received at once, also while a rank
//! computes or waits for another one. Ranks of one process share their [`Stop`] instead.

use std::pin::Pin;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use farflung_base::{Nanos, Pending, Rank};
use farflung_comm::{CommError, Communicator};

use crate::Stop;

/// Tag of the messages, far from the tags of messages between stages.
const TAG: u32 = u32::MAX / 2 - 1;

/// Time limit for sending a message.
const LEAVING: Nanos = Nanos::from_millis(300);

/// Longest text that is shown, in bytes.
const TEXT: usize = 2000;

/// Message of a rank that ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ExitNotice {
    /// The rank was stopped and dropped its step.
    Stopped,
    /// The rank failed by itself.
    Failed {
        /// The rank's exit code.
        code: u8,
        /// The error's text, with its causes.
        text: String,
    },
    /// The rank lost another one.
    Lost {
        /// The rank that was lost.
        culprit: Rank,
        /// How the loss was detected.
        text: String,
    },
}

/// The first message that was received, and its sender.
#[derive(Debug)]
pub(super) struct ReceivedNotice {
    pub(super) from: Rank,
    pub(super) word: ExitNotice,
}

impl ExitNotice {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Stopped => vec![0],
            Self::Failed { code, text } => [&[1, *code], text.as_bytes()].concat(),
            Self::Lost { culprit, text } => [&[2][..], &culprit.0.to_le_bytes(), text.as_bytes()].concat(),
        }
    }

    /// Decodes a message; `None` for invalid bytes.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let shown = |text: &[u8]| String::from_utf8_lossy(&text[..text.len().min(TEXT)]).into_owned();
        match bytes {
            [0] => Some(Self::Stopped),
            [1, code, text @ ..] => Some(Self::Failed { code: *code, text: shown(text) }),
            [2, a, b, c, d, text @ ..] => {
                Some(Self::Lost { culprit: Rank(u32::from_le_bytes([*a, *b, *c, *d])), text: shown(text) })
            }
            _ => None,
        }
    }
}

type Message = Pending<Result<(Rank, Vec<u8>), CommError>>;

/// Listens for messages of ranks that end, until dropped; the first one drops the step in flight.
#[derive(Debug)]
pub(super) struct ExitListener {
    message: Arc<Mutex<Option<Message>>>,
    heard: Arc<OnceLock<ReceivedNotice>>,
}

/// Wakes the thread that receives the message. That is not done in the waker itself, whose caller may hold
/// locks that receiving needs.
struct Bell(Mutex<Sender<()>>);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        // The receiver is gone once the run has ended.
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).send(());
    }
}

impl ExitListener {
    /// Listens to all other ranks.
    pub(super) fn new(comm: &Communicator, stop: &Stop) -> Self {
        let others: Vec<Rank> = others(comm).collect();
        let mut message = comm.clone().with_deadline(Nanos::MAX).start_recv_any(&others, TAG);
        let (ring, rings) = mpsc::channel();
        let waker = Waker::from(Arc::new(Bell(Mutex::new(ring))));
        // A message that has arrived already is stored as ready.
        if let Poll::Ready(there) = Pin::new(&mut message).poll(&mut Context::from_waker(&waker)) {
            message = Pending::ready(there);
            waker.wake_by_ref();
        }
        drop(waker);
        let message = Arc::new(Mutex::new(Some(message)));
        let heard = Arc::new(OnceLock::new());
        let (awaited, hears, stop) = (Arc::clone(&message), Arc::clone(&heard), stop.clone());
        let listen = move || {
            // Without a wake-up, `recv` fails when the message is dropped, and the thread ends.
            if rings.recv().is_ok()
                && let Some(message) = awaited.lock().unwrap_or_else(PoisonError::into_inner).take()
                && let Ok((from, bytes)) = message.wait()
                && let Some(word) = ExitNotice::decode(&bytes)
                && hears.set(ReceivedNotice { from, word }).is_ok()
            {
                stop.cancel_step();
            }
        };
        // Without the thread, a rank notices the end of another one only when its next message fails.
        let _ = thread::Builder::new().name("exit-listener".to_owned()).spawn(listen);
        Self { message, heard }
    }

    /// Returns the message received so far, if any.
    pub(super) fn heard(&self) -> Option<&ReceivedNotice> {
        self.heard.get()
    }

    /// Waits up to `looks` times 10 ms for a message: a rank that ends sends its message just before it leaves.
    pub(super) fn listen(&self, mut looks: u32) -> Option<&ReceivedNotice> {
        while self.heard().is_none() && looks > 0 {
            thread::sleep(Duration::from_millis(10));
            looks -= 1;
        }
        self.heard()
    }
}

impl Drop for ExitListener {
    fn drop(&mut self) {
        // Drops the pending receive: the network closes only when no message is awaited.
        drop(self.message.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Starts to tell all other ranks why this rank ends. The messages are sent while the result is alive.
pub(super) fn start_to_tell(comm: &Communicator, word: &ExitNotice) -> Vec<Pending<Result<(), CommError>>> {
    let comm = comm.clone().with_deadline(LEAVING);
    others(&comm).map(|rank| comm.start_send(rank, TAG, word.encode())).collect()
}

/// Like [`start_to_tell`], and waits until the messages are sent.
pub(super) fn tell(comm: &Communicator, word: &ExitNotice) {
    for telling in start_to_tell(comm, word) {
        // Errors are ignored: a rank that does not get the message notices the end in another way.
        let _ = telling.wait();
    }
}

fn others(comm: &Communicator) -> impl Iterator<Item = Rank> + use<> {
    let me = comm.rank();
    (0..comm.size() as u32).map(Rank).filter(move |&rank| rank != me)
}

#[cfg(test)]
mod tests {
    use farflung_comm::memory;

    use super::*;

    #[test]
    fn words_come_back_and_others_are_none() {
        let text = "a".to_owned();
        let words = [
            ExitNotice::Stopped,
            ExitNotice::Failed { code: 2, text: text.clone() },
            ExitNotice::Lost { culprit: Rank(300), text },
        ];
        for word in words {
            assert_eq!(ExitNotice::decode(&word.encode()), Some(word));
        }
        for bytes in [&[][..], &[0, 0], &[1], &[2, 0, 0, 0], &[3]] {
            assert_eq!(ExitNotice::decode(bytes), None);
        }
        let long = [&[1, 1][..], &[b'x'; 3 * TEXT]].concat();
        assert!(
            matches!(ExitNotice::decode(&long), Some(ExitNotice::Failed { text, .. }) if text.len() == TEXT)
        );
    }

    #[test]
    fn a_word_is_heard_by_a_rank_that_waits_for_another() {
        let ranks: Vec<_> = memory::cluster(3).into_iter().map(|rank| Communicator::new(rank)).collect();
        let stop = Stop::manual();
        let hearing = ExitListener::new(&ranks[0], &stop);
        assert!(hearing.heard().is_none());
        let waits = stop.tie_step(ranks[0].clone());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| waits.recv(Rank(1), 0));
            tell(&ranks[2], &ExitNotice::Stopped);
            assert!(waiting.join().unwrap().unwrap_err().is_cancelled());
        });
        let heard = hearing.listen(100).unwrap();
        assert_eq!((heard.from, &heard.word), (Rank(2), &ExitNotice::Stopped));
    }
}
