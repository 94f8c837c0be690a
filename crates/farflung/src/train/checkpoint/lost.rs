//! Ranks whose folder is lost take weights and optimizer states from a rank that holds the same parts of the
//! model.

use farflung_base::Rank;
use farflung_comm::Communicator;

use super::source::{Files, Residuals};
use super::tell;
use crate::{Error, Result};

/// Bytes of a message: each has the whole deadline for itself, over slow links too.
const PIECE: usize = 1 << 20;
/// Tag of the messages, far from those between stages.
const TAG: u32 = u32::MAX / 2;

/// What a rank goes on from, once all have something.
pub(super) struct Shared {
    pub(super) files: Files,
    /// Who took what from whom.
    pub(super) notes: Vec<String>,
    pub(super) residuals: Residuals,
}

/// What a rank has of the step to go on from.
const HAS: u64 = 0;
const NOT_YET: u64 = 1;
const LOST: u64 = 2;

/// A rank without its state, and the one that it takes a copy from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pair {
    to: Rank,
    from: Rank,
}

/// Gives each rank its files of a step: its own, or for those that have none another's. `None` where a rank had
/// not got as far as its first checkpoint and no other rank has its parts: all begin anew. Ranks of which
/// `place` is the same hold the same parts. A collective.
///
/// Errors: [`Error::NoCopy`] on all ranks, for a rank whose state nobody else holds.
pub(super) fn share(
    comm: &Communicator,
    step: u64,
    place: impl Fn(Rank) -> u32,
    mine: Option<Files>,
    not_yet: bool,
) -> Result<Option<Shared>> {
    let state = match (&mine, not_yet) {
        (Some(_), _) => HAS,
        (None, true) => NOT_YET,
        (None, false) => LOST,
    };
    let states = tell(comm, state)?;
    let mut pairs = Vec::new();
    for (to, &state) in (0..).map(Rank).zip(&states).filter(|(_, state)| **state != HAS) {
        let alike = |from: &Rank| place(*from) == place(to);
        match (0..states.len() as u32).map(Rank).find(|from| alike(from) && states[from.index()] == HAS) {
            Some(from) => pairs.push(Pair { to, from }),
            None if state == NOT_YET => return Ok(None),
            None => return Err(Error::NoCopy { rank: to, step }),
        }
    }
    let received = transfer(comm, &pairs, mine.as_ref())?;
    let note = |Pair { to, from }: &Pair| {
        format!(
            "rank {} had lost its checkpoint: it took weights and optimizer state of step {step} from rank {}, \
             and begins without a codec's residuals",
            to.0, from.0
        )
    };
    let notes = pairs.iter().map(note).collect();
    let (files, residuals) = match (mine, received) {
        (Some(files), _) => (files, Residuals::Own),
        (None, Some(files)) => (files, Residuals::Others),
        (None, None) => return Err(Error::NoCopy { rank: comm.rank(), step }),
    };
    Ok(Some(Shared { files, notes, residuals }))
}

/// Sends copies, a piece of each at a time. All ranks take part, so that nobody waits longer than for a piece.
fn transfer(comm: &Communicator, pairs: &[Pair], mine: Option<&Files>) -> Result<Option<Files>> {
    let me = comm.rank();
    let sends = pairs.iter().any(|pair| pair.from == me);
    let bytes = mine.filter(|_| sends).map(Files::to_bytes).unwrap_or_default();
    let pieces = tell(comm, bytes.len().div_ceil(PIECE) as u64)?;
    let mut received = Vec::new();
    for round in 0..pieces.iter().copied().max().unwrap_or(0) {
        for &Pair { to, from } in pairs.iter().filter(|pair| round < pieces[pair.from.index()]) {
            if from == me {
                let at = round as usize * PIECE;
                let piece = bytes[at..bytes.len().min(at + PIECE)].to_vec();
                comm.start_send(to, TAG, piece).wait()?;
            }
            if to == me {
                received.extend(comm.recv(from, TAG)?);
            }
        }
        comm.barrier()?;
    }
    let Some(&Pair { from, .. }) = pairs.iter().find(|pair| pair.to == me) else { return Ok(None) };
    let files = Files::from_bytes(&received).ok_or_else(|| Error::Message {
        message: format!("the checkpoint of rank {}", from.0),
        problem: "cannot be read",
    })?;
    Ok(Some(files))
}
