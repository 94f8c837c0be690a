//! The order in which the pieces of a step's messages leave a rank.

use super::{OperationStep, SendOrder};
use crate::Bytes;

/// A piece of a message: messages are sent in pieces of at most one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Index into the step's sends.
    pub(super) send: usize,
    pub(super) bytes: Bytes,
    /// Whether this is the last piece of its message.
    pub(super) last: bool,
}

/// Returns the number of pieces of a message. An empty message is one piece.
pub(super) fn pieces_of(bytes: Bytes, frame: u64) -> u64 {
    bytes.0.div_ceil(frame).max(1)
}

/// Calls `leave` for each piece of a step's messages, in the order in which they leave.
pub(super) fn for_each_piece(step: &OperationStep, frame: u64, mut leave: impl FnMut(Piece)) {
    let mut cut = |send: usize, rest: u64| {
        leave(Piece { send, bytes: Bytes(rest.min(frame)), last: rest <= frame });
        (rest > frame).then(|| rest - frame)
    };
    if step.order == SendOrder::Sequential || step.sends.len() == 1 {
        for (send, &(_, bytes)) in step.sends.iter().enumerate() {
            let mut rest = Some(bytes.0);
            while let Some(left) = rest {
                rest = cut(send, left);
            }
        }
        return;
    }
    let before = predecessors(step);
    let mut rest: Vec<Option<u64>> = step.sends.iter().map(|&(_, bytes)| Some(bytes.0)).collect();
    let mut open = rest.len();
    while open > 0 {
        for send in 0..rest.len() {
            let Some(left) = rest[send] else { continue };
            if before[send].is_some_and(|before| rest[before].is_some()) {
                continue;
            }
            rest[send] = cut(send, left);
            open -= usize::from(rest[send].is_none());
        }
    }
}

/// For each message, returns the index of the previous message to the same rank.
fn predecessors(step: &OperationStep) -> Vec<Option<usize>> {
    let mut by_receiver: Vec<usize> = (0..step.sends.len()).collect();
    by_receiver.sort_by_key(|&send| (step.sends[send].0, send));
    let mut before = vec![None; by_receiver.len()];
    for pair in by_receiver.windows(2) {
        if step.sends[pair[0]].0 == step.sends[pair[1]].0 {
            before[pair[1]] = Some(pair[0]);
        }
    }
    before
}
