//! Pieces on their way over a part of a route, in the order in which they come to its end.

use std::collections::VecDeque;

use crate::network::InFlight;

/// A piece on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moving {
    /// Pieces are numbered in the order in which they were made. The number decides between pieces of one rank
    /// that come at the same time.
    pub(super) number: u64,
    pub(super) flight: InFlight,
    /// By number.
    pub(super) message: u32,
    /// Whether it is the message's last.
    pub(super) last: bool,
}

/// Pieces of one sender, ordered by when their first byte comes to the end, then by number. They nearly always
/// come in this order, so that the simulator's heap needs the first of each stream alone.
#[derive(Debug, Default)]
pub(super) struct Stream(VecDeque<Moving>);

impl Stream {
    /// Adds a piece; whether it is the first now.
    pub(super) fn put(&mut self, piece: Moving) -> bool {
        let key = |piece: &Moving| (piece.flight.head, piece.number);
        let mut at = self.0.len();
        while at > 0 && key(&self.0[at - 1]) > key(&piece) {
            at -= 1;
        }
        if at == self.0.len() {
            self.0.push_back(piece);
        } else {
            self.0.insert(at, piece);
        }
        at == 0
    }

    pub(super) fn first(&self) -> Option<&Moving> {
        self.0.front()
    }

    pub(super) fn take(&mut self) -> Option<Moving> {
        self.0.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
