//! Messages between a rank and its neighbours: parameters without padding, or whatever else they make of them.

use std::ops::Range;

use farflung_base::{PeerId, Pending, Rank};
use farflung_comm::{CommError, Communicator};
use farflung_tensor::{Param, ParamLayout, Tensor};

use super::neighbours::Meeting;
use crate::OptimError;

/// Takes parameters out of flat buffers, without padding, and puts them back.
#[derive(Debug)]
pub(super) struct Packing {
    pieces: Vec<Range<usize>>,
    len: usize,
}

impl Packing {
    /// For flat buffers of a layout.
    pub(super) fn new(layout: &ParamLayout) -> Self {
        Self { pieces: layout.params().iter().map(Param::range).collect(), len: layout.count() }
    }

    /// Values of all parameters.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The values of a flat buffer, `[len]`.
    pub(super) fn pack(&self, flat: &Tensor) -> Result<Vec<f32>, OptimError> {
        Ok(match flat.host() {
            Some(all) => self.pack_host(all),
            None => self.pack_host(&flat.to_vec::<f32>()?),
        })
    }

    /// The same of a flat buffer's elements, padding included.
    pub(super) fn pack_host(&self, all: &[f32]) -> Vec<f32> {
        self.pieces.iter().flat_map(|piece| &all[piece.clone()]).copied().collect()
    }

    /// Writes values, `[len]`, to a flat buffer; its padding stays.
    pub(super) fn unpack(&self, values: &[f32], flat: &mut Tensor) -> Result<(), OptimError> {
        let mut start = 0;
        for piece in &self.pieces {
            let part = &values[start..start + piece.len()];
            flat.view_mut().part(piece.start, piece.len())?.write(part)?;
            start += piece.len();
        }
        Ok(())
    }
}

/// Values as bytes: f32, little-endian.
pub(super) fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The values of [`to_bytes`], `[len]`.
///
/// Errors: [`CommError::Mismatch`] with the sender for bytes of another length.
pub(super) fn from_bytes(bytes: &[u8], len: usize, from: Rank) -> Result<Vec<f32>, OptimError> {
    let (values, rest) = bytes.as_chunks::<4>();
    if values.len() != len || !rest.is_empty() {
        let (op, peer, want, got) = ("gossip", PeerId(from.0), 4 * len, bytes.len());
        return Err(CommError::Mismatch { op, peer, want, got }.into());
    }
    Ok(values.iter().map(|&value| f32::from_le_bytes(value)).collect())
}

/// Messages of a round on their way.
#[derive(Debug)]
pub(super) struct Exchange {
    leaving: Vec<Pending<Result<(), CommError>>>,
    coming: Vec<Coming>,
}

#[derive(Debug)]
struct Coming {
    from: Rank,
    weight: f64,
    bytes: Pending<Result<Vec<u8>, CommError>>,
}

/// A neighbour's message.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) from: Rank,
    /// The neighbour's part of the result.
    pub(super) weight: f64,
    pub(super) bytes: Vec<u8>,
}

/// Messages of even and odd rounds have a tag each.
const TAG: u32 = 0x6055_1900;

impl Exchange {
    /// Sends `bytes` to all whom this rank meets in a round, and receives theirs.
    pub(super) fn start(comm: &Communicator, meeting: Meeting, round: u64, bytes: &[u8]) -> Self {
        let tag = TAG + (round % 2) as u32;
        let coming = meeting.from.into_iter().map(|neighbour| {
            let from = Rank(neighbour.rank);
            Coming { from, weight: neighbour.weight, bytes: comm.start_recv(from, tag) }
        });
        let coming = coming.collect();
        let leaving = meeting.to.into_iter().map(|rank| comm.start_send(Rank(rank), tag, bytes.to_vec()));
        Self { leaving: leaving.collect(), coming }
    }

    /// Waits for all of them; they are in the order of the meeting.
    ///
    /// Errors: a neighbour that was lost.
    pub(super) fn wait(self) -> Result<Vec<Arrived>, OptimError> {
        let arrived = self.coming.into_iter().map(|coming| {
            let Coming { from, weight, bytes } = coming;
            Ok(Arrived { from, weight, bytes: bytes.wait()? })
        });
        let arrived = arrived.collect::<Result<_, OptimError>>()?;
        self.leaving.into_iter().try_for_each(Pending::wait)?;
        Ok(arrived)
    }
}
