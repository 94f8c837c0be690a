//! Both ends of each boundary find out which samples they hold alike, and forget the others: after a crash between the commits of
//! two ranks, or where one of them lost its files.

use farflung_base::Rank;
use farflung_comm::Communicator;

use super::{Boundaries, End};
use crate::{Error, Result};

/// The first tag, far from those of messages between stages, which count up from 0.
const TAG: u32 = 1 << 31;

impl Boundaries {
    /// Ends compare the checksums of samples below `windows`, and forget those that differ. All ranks of a pipeline that begins
    /// at rank `first` must call it. How many samples this rank forgot.
    ///
    /// A digest is 32 bytes an end; where digests differ, 4 bytes a sample follow.
    pub(in crate::train) fn agree(&mut self, comm: &Communicator, first: u32, windows: u64) -> Result<usize> {
        let ids: Vec<u64> = (0..windows).collect();
        let mut held = Vec::new();
        for (end, coded) in self.ends.iter_mut().filter(|(_, coded)| coded.remembers) {
            let sums: Vec<u8> =
                coded.codec.checksums(&ids)?.iter().flat_map(|sum| sum.to_le_bytes()).collect();
            held.push((*end, coded, sums));
        }
        let digest = |sums: &[u8]| blake3::hash(sums).as_bytes().to_vec();
        let mine = held.iter().map(|(end, coded, sums)| (*end, coded.other, digest(sums))).collect();
        let theirs = exchange(comm, first, mine)?;
        let differ: Vec<bool> =
            held.iter().zip(&theirs).map(|((_, _, sums), theirs)| *theirs != digest(sums)).collect();
        held = held.into_iter().zip(differ).filter(|(_, differ)| *differ).map(|(held, _)| held).collect();

        let mine = held.iter().map(|(end, coded, sums)| (*end, coded.other, sums.clone())).collect();
        let theirs = exchange(comm, first, mine)?;
        let mut forgotten = 0;
        for ((_, coded, sums), theirs) in held.into_iter().zip(theirs) {
            let words = |bytes: &[u8]| -> Vec<[u8; 4]> { bytes.as_chunks().0.to_vec() };
            let pairs = words(&sums).into_iter().zip(words(&theirs));
            let differ: Vec<u64> =
                ids.iter().zip(pairs).filter(|(_, (here, there))| here != there).map(|(id, _)| *id).collect();
            coded.codec.forget(&differ)?;
            coded.codec.commit();
            forgotten += differ.len();
        }
        Ok(forgotten)
    }
}

/// Sends bytes about each end to whoever has the other, and gives what comes back, as long.
fn exchange(comm: &Communicator, first: u32, mine: Vec<(End, Rank, Vec<u8>)>) -> Result<Vec<Vec<u8>>> {
    let mut sending = Vec::new();
    let mut coming = Vec::new();
    for (end, other, bytes) in mine {
        let (other, tag) = (Rank(first + other.0), tag(end));
        coming.push((end, bytes.len(), comm.start_recv(other, tag)));
        sending.push(comm.start_send(other, tag, bytes));
    }
    let mut theirs = Vec::new();
    for (end, len, bytes) in coming {
        let bytes = bytes.wait()?;
        if bytes.len() != len {
            let (message, problem) = (format!("checksums of {}", end.name()), "are not as many as windows");
            return Err(Error::Message { message, problem });
        }
        theirs.push(bytes);
    }
    sending.into_iter().try_for_each(|sending| Ok::<(), Error>(sending.wait()?))?;
    Ok(theirs)
}

/// A number for each end.
fn tag(end: End) -> u32 {
    let direction = u32::from(end.content == farflung_parallel::pipeline::Content::Gradient);
    TAG | (end.from.0 << 17) | (u32::from(end.slice) << 1) | direction
}
