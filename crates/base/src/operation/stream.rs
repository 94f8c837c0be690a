//! Queue of one sender's pieces that are on their way to their next link, in the order of arrival.

use std::collections::VecDeque;

use crate::network::InFlight;

/// A piece that is on its way to a link.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moving {
    /// Pieces are numbered in the order of their creation. The number breaks ties between pieces of one rank
    /// that arrive at the same time.
    pub(super) number: u64,
    pub(super) flight: InFlight,
    /// Number of the message.
    pub(super) message: u32,
    /// Whether this is the last piece of its message.
    pub(super) last: bool,
}

/// Pieces of one sender, ordered by the arrival of their first byte at the next link, then by number. They are
/// added nearly always in this order. The simulator's heap needs an event only for the first piece of each
/// stream.
#[derive(Debug, Default)]
pub(super) struct Stream(VecDeque<Moving>);

impl Stream {
    /// Adds a piece. Returns whether it is now the first.
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
