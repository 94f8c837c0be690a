//! Messages between a rank and its neighbours, and packing of parameters without padding.

use std::ops::Range;

use farflung_base::{PeerId, Pending, Rank};
use farflung_comm::{CommError, Communicator};
use farflung_tensor::{Param, ParamLayout, Tensor};

use super::neighbours::Neighbours;
use crate::OptimError;

/// Packs the parameters of flat buffers without padding, and unpacks them.
#[derive(Debug)]
pub(super) struct Packing {
    pieces: Vec<Range<usize>>,
    len: usize,
}

impl Packing {
    /// Creates the packing of a layout.
    pub(super) fn new(layout: &ParamLayout) -> Self {
        Self { pieces: layout.params().iter().map(Param::range).collect(), len: layout.count() }
    }

    /// Returns the number of values of all parameters.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Returns the parameters of a flat buffer, `[len]`.
    pub(super) fn pack(&self, flat: &Tensor) -> Result<Vec<f32>, OptimError> {
        Ok(match flat.host() {
            Some(all) => self.pack_host(all),
            None => self.pack_host(&flat.to_vec::<f32>()?),
        })
    }

    /// Returns the parameters among a flat buffer's elements, which include padding.
    pub(super) fn pack_host(&self, all: &[f32]) -> Vec<f32> {
        self.pieces.iter().flat_map(|piece| &all[piece.clone()]).copied().collect()
    }

    /// Writes parameters, `[len]`, to a flat buffer; its padding stays.
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

/// Returns values as bytes: f32, little-endian.
pub(super) fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns the values that [`to_bytes`] encoded, `[len]`.
///
/// Errors: [`CommError::Mismatch`] with the sender's rank if the bytes have another length.
pub(super) fn from_bytes(bytes: &[u8], len: usize, from: Rank) -> Result<Vec<f32>, OptimError> {
    let (values, rest) = bytes.as_chunks::<4>();
    if values.len() != len || !rest.is_empty() {
        let (op, peer, want, got) = ("gossip", PeerId(from.0), 4 * len, bytes.len());
        return Err(CommError::Mismatch { op, peer, want, got }.into());
    }
    Ok(values.iter().map(|&value| f32::from_le_bytes(value)).collect())
}

/// Messages of a round in flight.
#[derive(Debug)]
pub(super) struct Exchange {
    leaving: Vec<Pending<Result<(), CommError>>>,
    coming: Vec<PendingMessage>,
}

#[derive(Debug)]
struct PendingMessage {
    from: Rank,
    weight: f64,
    bytes: Pending<Result<Vec<u8>, CommError>>,
}

/// A neighbour's message.
#[derive(Debug)]
pub(super) struct NeighbourMessage {
    pub(super) from: Rank,
    /// Weight of the neighbour in the result.
    pub(super) weight: f64,
    pub(super) bytes: Vec<u8>,
}

/// Tag of messages of even rounds; odd rounds use the next tag.
const TAG: u32 = 0x6055_1900;

impl Exchange {
    /// Sends `bytes` to all ranks of `meeting.to`, and starts to receive from all of `meeting.from`.
    pub(super) fn start(comm: &Communicator, meeting: Neighbours, round: u64, bytes: &[u8]) -> Self {
        let tag = TAG + (round % 2) as u32;
        let coming = meeting.from.into_iter().map(|neighbour| {
            let from = Rank(neighbour.rank);
            PendingMessage { from, weight: neighbour.weight, bytes: comm.start_recv(from, tag) }
        });
        let coming = coming.collect();
        let leaving = meeting.to.into_iter().map(|rank| comm.start_send(Rank(rank), tag, bytes.to_vec()));
        Self { leaving: leaving.collect(), coming }
    }

    /// Waits for all messages. Those received are returned in the order of `meeting.from`.
    ///
    /// Errors: a neighbour that was lost.
    pub(super) fn wait(self) -> Result<Vec<NeighbourMessage>, OptimError> {
        let arrived = self.coming.into_iter().map(|coming| {
            let PendingMessage { from, weight, bytes } = coming;
            Ok(NeighbourMessage { from, weight, bytes: bytes.wait()? })
        });
        let arrived = arrived.collect::<Result<_, OptimError>>()?;
        self.leaving.into_iter().try_for_each(Pending::wait)?;
        Ok(arrived)
    }
}
