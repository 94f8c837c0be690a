//! Ranks whose folder is lost get weights and optimizer states from a rank that holds the same parts of the
//! model.

use farflung_base::Rank;
use farflung_comm::Communicator;

use super::super::all_succeed::all_succeed;
use super::all_gather_u64;
use super::source::{Files, Residuals};
use crate::{Error, Result};

/// Bytes per message. Each message has the whole deadline, so that slow links are fast enough.
const PIECE: usize = 1 << 20;
/// Tag of the messages, far from the tags of messages between stages.
const TAG: u32 = u32::MAX / 2;

/// The state from which a rank continues, once all ranks have one.
pub(super) struct Shared {
    pub(super) files: Files,
    /// Notes that name each rank that got a copied state, and the rank that sent it.
    pub(super) notes: Vec<String>,
    pub(super) residuals: Residuals,
}

/// State of a rank: it has its files of the agreed step.
const HAS: u64 = 0;
const NOT_YET: u64 = 1;
const LOST: u64 = 2;

/// A rank without its state, and the rank that sends it a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pair {
    to: Rank,
    from: Rank,
}

/// What ranks have of a step.
pub(super) enum Found {
    /// The state of each rank.
    All(Box<Shared>),
    /// This rank had not yet saved its first checkpoint, and no other rank holds its parts.
    NotYet(Rank),
}

/// Returns each rank's files of a step: the rank's own files, or another rank's files for a rank that has lost
/// them. Ranks with equal `place` hold the same parts. A collective.
///
/// Errors: [`Error::NoCopy`] on all ranks, if no other rank holds the state of a rank.
pub(super) fn share(
    comm: &Communicator,
    step: u64,
    place: impl Fn(Rank) -> u32,
    mine: Option<Files>,
    not_yet: bool,
) -> Result<Found> {
    let state = match (&mine, not_yet) {
        (Some(_), _) => HAS,
        (None, true) => NOT_YET,
        (None, false) => LOST,
    };
    let states = all_gather_u64(comm, state)?;
    let mut pairs = Vec::new();
    for (to, &state) in (0..).map(Rank).zip(&states).filter(|(_, state)| **state != HAS) {
        let alike = |from: &Rank| place(*from) == place(to);
        match (0..states.len() as u32).map(Rank).find(|from| alike(from) && states[from.index()] == HAS) {
            Some(from) => pairs.push(Pair { to, from }),
            None if state == NOT_YET => return Ok(Found::NotYet(to)),
            None => return Err(Error::NoCopy { rank: to, step }),
        }
    }
    let received = transfer(comm, &pairs, mine.as_ref())?;
    let note = |Pair { to, from }: &Pair| {
        format!(
            "rank {} has no good checkpoint of step {step}: it received the weights and optimizer state from \
             rank {}, and starts without residuals of the codec",
            to.0, from.0
        )
    };
    let notes = pairs.iter().map(note).collect();
    let (files, residuals) = match (mine, received) {
        (Some(files), _) => (files, Residuals::Own),
        (None, Some(files)) => (files, Residuals::Others),
        (None, None) => return Err(Error::NoCopy { rank: comm.rank(), step }),
    };
    Ok(Found::All(Box::new(Shared { files, notes, residuals })))
}

/// Sends the copies in pieces. In each round, each copy advances by one piece and all ranks meet at a barrier,
/// so that no wait is longer than a round.
fn transfer(comm: &Communicator, pairs: &[Pair], mine: Option<&Files>) -> Result<Option<Files>> {
    let me = comm.rank();
    let sends = pairs.iter().any(|pair| pair.from == me);
    let bytes = mine.filter(|_| sends).map(Files::to_bytes).transpose();
    let bytes = all_succeed(comm, bytes)?.unwrap_or_default();
    let pieces = all_gather_u64(comm, bytes.len().div_ceil(PIECE) as u64)?;
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
        problem: "cannot be parsed",
    })?;
    Ok(Some(files))
}
