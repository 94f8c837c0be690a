//! Compares the samples at both ends of each boundary and removes those that differ, as after a crash between
//! the commits of two ranks, or when one of them has lost its files.

use farflung_base::Rank;
use farflung_comm::Communicator;
use farflung_parallel::pipeline::Content;

use super::{Boundaries, Coded, End};
use crate::{Error, Result};

/// The first tag, far from the tags of messages between stages, which count up from 0.
const TAG: u32 = 1 << 31;

impl Boundaries {
    /// Compares the checksums of samples below `windows` between both ends, and removes the samples that
    /// differ. Returns the number of samples that this rank removed. All ranks of the pipeline must call it;
    /// `pipeline` has them by position.
    ///
    /// Each end sends a digest of 32 bytes; if digests differ, 4 bytes per sample follow.
    pub(in crate::train) fn agree(
        &mut self,
        comm: &Communicator,
        pipeline: &[Rank],
        windows: u64,
    ) -> Result<usize> {
        let ids: Vec<u64> = (0..windows).collect();
        let mut held = Vec::new();
        for (end, coded) in self.ends.iter_mut().filter(|(_, coded)| coded.remembers) {
            let sums: Vec<u8> =
                coded.codec.checksums(&ids)?.iter().flat_map(|sum| sum.to_le_bytes()).collect();
            held.push(EndChecksums { end: *end, coded, sums });
        }
        let digest = |EndChecksums { end, coded, sums }: &EndChecksums<'_>| EndMessage {
            end: *end,
            to: coded.other,
            bytes: blake3::hash(sums).as_bytes().to_vec(),
        };
        let digests: Vec<EndMessage> = held.iter().map(digest).collect();
        let theirs = exchange(comm, pipeline, &digests)?;
        let mut same = digests.iter().zip(&theirs).map(|(mine, theirs)| mine.bytes == *theirs);
        held.retain(|_| !same.next().expect("a digest for each end"));

        let sums: Vec<EndMessage> = held
            .iter()
            .map(|held| EndMessage { end: held.end, to: held.coded.other, bytes: held.sums.clone() })
            .collect();
        let theirs = exchange(comm, pipeline, &sums)?;
        let mut forgotten = 0;
        for (EndChecksums { coded, sums, .. }, theirs) in held.into_iter().zip(theirs) {
            let pairs = sums.as_chunks::<4>().0.iter().zip(theirs.as_chunks().0);
            let differ: Vec<u64> =
                ids.iter().zip(pairs).filter(|(_, (here, there))| here != there).map(|(id, _)| *id).collect();
            coded.codec.forget(&differ)?;
            coded.codec.commit();
            forgotten += differ.len();
        }
        Ok(forgotten)
    }
}

/// An end with the checksums of its samples.
struct EndChecksums<'a> {
    end: End,
    coded: &'a mut Coded,
    sums: Vec<u8>,
}

/// A message to the holder of an end's other side.
struct EndMessage {
    end: End,
    to: Rank,
    bytes: Vec<u8>,
}

/// Sends a message for each end, and returns the messages of the other sides, which must have the same lengths.
fn exchange(comm: &Communicator, pipeline: &[Rank], mine: &[EndMessage]) -> Result<Vec<Vec<u8>>> {
    let mut sending = Vec::new();
    let mut coming = Vec::new();
    for EndMessage { end, to, bytes } in mine {
        let (other, tag) = (pipeline[to.index()], tag(*end));
        coming.push(comm.start_recv(other, tag));
        sending.push(comm.start_send(other, tag, bytes.clone()));
    }
    let mut theirs = Vec::new();
    for (told, bytes) in mine.iter().zip(coming) {
        let bytes = bytes.wait()?;
        if bytes.len() != told.bytes.len() {
            let (message, problem) =
                (format!("checksums of {}", told.end.name()), "do not match the number of windows");
            return Err(Error::Message { message, problem });
        }
        theirs.push(bytes);
    }
    sending.into_iter().try_for_each(|sending| Ok::<(), Error>(sending.wait()?))?;
    Ok(theirs)
}

/// Returns a tag that is unique for each end.
fn tag(end: End) -> u32 {
    let direction = u32::from(end.content == Content::Gradient);
    TAG | (end.from.0 << 17) | (u32::from(end.slice) << 1) | direction
}
