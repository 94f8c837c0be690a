//! The run's state in memory, from members that have it to those that have not: newcomers, and survivors of a
//! loss that stand one step behind.

use farflung_base::{Bytes, Rank};
use farflung_comm::Communicator;

use super::super::trainer::{Progress, Snapshot, Trainer};
use crate::{Error, Result};

/// Tags of the state's pieces: of what all have alike, and of what one member has for itself.
const SHARED: u32 = u32::MAX / 2 - 8;
const OWN: u32 = u32::MAX / 2 - 9;

/// What is sent at a time.
const CHUNK: usize = 4 << 20;

/// Who gives the state and who takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Exchange {
    /// Those that have all that was agreed on.
    pub(super) donors: Vec<Rank>,
    /// All others.
    pub(super) takers: Vec<Rank>,
    /// How far the furthest are.
    pub(super) progress: Progress,
    /// The rank of one of these.
    pub(super) furthest: Rank,
}

impl Exchange {
    /// Of how far each rank is; nothing of one that has no state. Where all agree at each step, one that is a
    /// step behind takes it from the others. Where steps are local, one that missed an average takes that,
    /// and then the steps behind it, as all others have.
    ///
    /// `None` where nobody has any.
    pub(super) fn new(standing: &[Option<Progress>], each_step: bool) -> Option<Self> {
        let agreed = |at: Progress| if each_step { at.step } else { at.outer_step };
        let newest = standing.iter().flatten().map(|&at| agreed(at)).max()?;
        let has_all = |rank: &Rank| standing[rank.index()].is_some_and(|at| agreed(at) == newest);
        let (donors, takers): (Vec<Rank>, Vec<Rank>) =
            (0..standing.len() as u32).map(Rank).partition(has_all);
        let furthest =
            donors.iter().copied().max_by_key(|rank| (standing[rank.index()], std::cmp::Reverse(*rank)))?;
        Some(Self { donors, takers, progress: standing[furthest.index()]?, furthest })
    }
}

/// What crossed the links for those that had no state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Shared {
    /// Bytes of the state that each taker got.
    pub(super) state: Bytes,
    /// How many gave it.
    pub(super) donors: usize,
}

/// The part of so many bytes that one of several donors gives.
fn piece(len: usize, donor: usize, donors: usize) -> std::ops::Range<usize> {
    len * donor / donors..len * (donor + 1) / donors
}

/// The run's state as it came to a rank that had none, or an older one.
#[derive(Debug)]
pub(super) struct Taken {
    /// What all have alike.
    pub(super) shared: Snapshot,
    /// What is its own to the first of the donors.
    pub(super) own: Snapshot,
}

/// Has the run's state go from the donors to the takers: each donor sends its part of what all donors have
/// alike, and the first one also its optimizer's state where steps are local. All ranks call it; a donor has
/// a `trainer`.
///
/// Errors: [`Error::Message`] where the donors' states differ, or where what came does not have the hash that
/// all donors told; [`Error::PeerLost`] for a donor or a taker that is lost.
pub(super) fn share(
    trainer: Option<&Trainer>,
    comm: &Communicator,
    exchange: &Exchange,
) -> Result<(Shared, Option<Taken>)> {
    let (me, donors) = (comm.rank(), &exchange.donors);
    if exchange.takers.is_empty() {
        return Ok((Shared::default(), None));
    }
    let donor = donors.iter().position(|&rank| rank == me).zip(trainer);
    let mine = donor.map(|(_, trainer)| Ok::<_, Error>(trainer.shared_snapshot()?.to_bytes())).transpose()?;
    let own = match donor {
        Some((0, trainer)) => trainer.own_snapshot()?.to_bytes(),
        _ => Vec::new(),
    };
    // Its length and hash, of all donors.
    let told = mine.as_ref().map_or_else(Vec::new, |bytes| {
        [&(bytes.len() as u64).to_le_bytes()[..], blake3::hash(bytes).as_bytes()].concat()
    });
    let told = comm.all_gather_bytes(told)?;
    let said = |rank: &Rank| &told[rank.index()];
    let first = said(&donors[0]);
    let (len, hash) = first.split_first_chunk::<8>().ok_or_else(|| wrong("has no length"))?;
    let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| wrong("is longer than memory"))?;
    if let Some(other) = donors.iter().find(|donor| said(donor) != first) {
        tracing::error!(rank = other.0, "the state of this member differs from that of the first");
        return Err(wrong("is not the same on all members that have it"));
    }
    let pieces: Vec<_> = (0..donors.len()).map(|donor| piece(len, donor, donors.len())).collect();
    let shared = Shared { state: Bytes(len as u64), donors: donors.len() };
    if let (Some((donor, _)), Some(bytes)) = (donor, &mine) {
        for chunk in bytes[pieces[donor].clone()].chunks(CHUNK) {
            send_to_all(comm, &exchange.takers, SHARED, chunk)?;
        }
        if donor == 0 {
            send_to_all(comm, &exchange.takers, OWN, &own)?;
        }
        return Ok((shared, None));
    }
    let bytes = gather(comm, donors, &pieces)?;
    let own = comm.recv(donors[0], OWN)?;
    if blake3::hash(&bytes).as_bytes() != hash {
        return Err(wrong("does not have the hash that its members told"));
    }
    let read = |bytes: &[u8]| Snapshot::from_bytes(bytes).ok_or_else(|| wrong("does not read as one"));
    let taken = Taken { shared: read(&bytes)?, own: read(&own)? };
    Ok((shared, Some(taken)))
}

fn wrong(problem: &'static str) -> Error {
    Error::Message { message: "the state of the run".to_owned(), problem }
}

/// The pieces of all donors, together.
fn gather(comm: &Communicator, donors: &[Rank], pieces: &[std::ops::Range<usize>]) -> Result<Vec<u8>> {
    let mut parts: Vec<Vec<u8>> = vec![Vec::new(); donors.len()];
    loop {
        // Of all donors at once, so that no link waits for another.
        let missing = |(donor, part): (usize, &Vec<u8>)| (part.len() < pieces[donor].len()).then_some(donor);
        let due: Vec<usize> = parts.iter().enumerate().filter_map(missing).collect();
        if due.is_empty() {
            return Ok(parts.concat());
        }
        let arriving: Vec<_> = due.iter().map(|&donor| comm.start_recv(donors[donor], SHARED)).collect();
        for (donor, chunk) in due.into_iter().zip(arriving) {
            let chunk = chunk.wait()?;
            if chunk.is_empty() || parts[donor].len() + chunk.len() > pieces[donor].len() {
                return Err(wrong("comes in other pieces than its length says"));
            }
            parts[donor].extend(chunk);
        }
    }
}

fn send_to_all(comm: &Communicator, takers: &[Rank], tag: u32, bytes: &[u8]) -> Result<()> {
    let sending: Vec<_> = takers.iter().map(|&rank| comm.start_send(rank, tag, bytes.to_vec())).collect();
    for sent in sending {
        sent.wait()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_are_furthest_give() {
        let at = |step, outer_step| Some(Progress { step, outer_step });
        let exchange = Exchange::new(&[at(7, 0), None, at(8, 0), at(8, 0)], true).unwrap();
        assert_eq!(exchange.donors, [Rank(2), Rank(3)]);
        assert_eq!(exchange.takers, [Rank(0), Rank(1)]);
        assert_eq!((exchange.furthest, exchange.progress.step), (Rank(2), 8));
        assert_eq!(Exchange::new(&[None, None], true), None);
    }

    #[test]
    fn with_local_steps_those_give_that_have_the_last_average() {
        let at = |step, outer_step| Some(Progress { step, outer_step });
        let exchange = Exchange::new(&[at(2, 0), at(2, 1), at(4, 1), None, at(4, 1)], false).unwrap();
        assert_eq!(exchange.donors, [Rank(1), Rank(2), Rank(4)]);
        assert_eq!(exchange.takers, [Rank(0), Rank(3)]);
        assert_eq!((exchange.furthest, exchange.progress.step), (Rank(2), 4));
    }

    #[test]
    fn pieces_cover_the_state_once() {
        for (len, donors) in [(0, 1), (10, 3), (7, 7), (5, 9)] {
            let all: Vec<usize> = (0..donors).flat_map(|donor| piece(len, donor, donors)).collect();
            assert!(all.iter().copied().eq(0..len));
        }
    }
}
