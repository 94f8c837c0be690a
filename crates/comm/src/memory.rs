//! Endpoints within one process: frames are moved, not copied. Real time, and no model of a network.

use std::sync::Arc;
use std::time::Instant;

use farflung_base::{Nanos, PeerId};

use crate::endpoint::{Driver, Endpoint, Wake};
use crate::inbox::{BlockedFor, Inbox, WINDOW};
use crate::transport::Tag;
use crate::{DownReason, Frame, Pool};

/// An endpoint of a network within one process.
pub type Memory = Endpoint<MemoryDriver>;

/// Driver that puts frames directly into the other endpoint's inbox.
#[derive(Debug)]
pub struct MemoryDriver {
    me: PeerId,
    inboxes: Arc<[Arc<Inbox>]>,
    start: Instant,
}

/// Creates `n` endpoints within one process, `PeerId(0)` first, one for each of `n` threads.
#[must_use]
pub fn cluster(n: usize) -> Vec<Arc<Memory>> {
    let roomy = std::thread::available_parallelism().is_ok_and(|cores| n <= cores.get());
    let inbox = || if roomy { Inbox::new(n).with_spinning() } else { Inbox::new(n) };
    let inboxes: Arc<[_]> = (0..n).map(|_| Arc::new(inbox())).collect();
    let pool = Pool::new();
    let start = real_start();
    (0..n as u32)
        .map(|me| {
            let driver = MemoryDriver { me: PeerId(me), inboxes: Arc::clone(&inboxes), start };
            let inbox = Arc::clone(&inboxes[me as usize]);
            Arc::new(Endpoint::new(PeerId(me), driver, inbox, Arc::clone(&pool)))
        })
        .collect()
}

/// Returns the start of a real transport's clock.
#[expect(clippy::disallowed_methods, reason = "real transports use the real clock")]
pub(crate) fn real_start() -> Instant {
    Instant::now()
}

impl Driver for MemoryDriver {
    fn submit(&self, to: PeerId, tag: Tag, _: Nanos, mut frame: Frame) {
        frame.arrived = Nanos::ZERO;
        self.inboxes[to.index()].deliver(self.me, tag, frame);
    }
    fn has_room(&self, to: PeerId, tag: Tag) -> bool {
        self.inboxes[to.index()].queued(self.me, tag) < WINDOW
    }
    fn taken(&self, from: PeerId, _: Tag, left: usize) {
        // The queue was full before this, so its sender may be waiting for room.
        if left + 1 == WINDOW {
            self.inboxes[from.index()].signal();
        }
    }
    fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }
    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, role: BlockedFor) -> Wake {
        inbox.park(seen, role, || until.saturating_sub(self.now()), None);
        Wake::Moved
    }
    fn has_background(&self) -> bool {
        true
    }
    fn close(&self, _: &Inbox) {
        for (peer, inbox) in self.inboxes.iter().enumerate() {
            if peer != self.me.index() {
                inbox.peer_down(self.me, DownReason::Left);
            }
        }
    }
}
