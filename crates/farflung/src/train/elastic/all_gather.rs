//! A value of each member, sent to all members.

use farflung_base::PeerId;
use farflung_comm::Communicator;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Sends a value to all members, and returns the values of all, by rank.
///
/// Errors: a member that is lost meanwhile, or whose value cannot be parsed: see [`nonsense_of`].
pub(super) fn all_gather<T: Serialize + DeserializeOwned>(all: &Communicator, mine: &T) -> Result<Vec<T>> {
    let bytes = postcard::to_stdvec(mine).expect("numbers and texts are plain data");
    let told = all.all_gather_bytes(bytes)?;
    let read = |(bytes, &peer): (&Vec<u8>, &PeerId)| {
        let unreadable = |_| Error::PeerLost { peer, source: Box::new(Nonsense) };
        postcard::from_bytes(bytes).map_err(unreadable)
    };
    told.iter().zip(all.members()).map(read).collect()
}

/// A member has sent a value that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("it has sent a state that cannot be parsed")]
struct Nonsense;

/// Returns the member that has sent a value that cannot be parsed, if an error says so. The others continue
/// without it.
pub(super) fn nonsense_of(error: &Error) -> Option<PeerId> {
    match error {
        Error::PeerLost { peer, source } if source.is::<Nonsense>() => Some(*peer),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use farflung_comm::memory;

    use super::*;

    #[test]
    fn a_member_whose_value_is_not_one_is_named() {
        let ends = memory::cluster(3);
        let found = std::thread::scope(|scope| {
            let ranks: Vec<_> = ends.iter().map(|end| Communicator::new(end.clone())).collect();
            let ranks = ranks.into_iter().enumerate().map(|(rank, comm)| {
                scope.spawn(move || {
                    if rank == 1 {
                        comm.all_gather_bytes(vec![0xff; 20]).unwrap();
                        return None;
                    }
                    nonsense_of(&all_gather(&comm, &7_u32).unwrap_err())
                })
            });
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(found, [Some(PeerId(1)), None, Some(PeerId(1))]);
    }
}
