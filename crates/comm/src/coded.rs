//! All-reduce through a codec: the programs, the values that they work on, and the choice among the programs.
//! Independent of the codec.
//!
//! Every rank ends with values decoded from the same bytes, or with plain copies of these values, so replicas
//! stay equal bit for bit. Source: the two-sided compression of Tang et al. 2021, "1-bit Adam", section 5.

mod choice;
mod exchange;
mod gather;
mod messages;
mod ring;
mod two_level;

use std::ops::Range;

use crate::element::{Element, First, ReduceOp};
use crate::error::CoderError;
use crate::steps::{Merge, Phase};

pub use choice::{CodedAllReduce, CodedBuffer};
pub use exchange::{coded_exchange, coded_exchange_of};
pub use gather::coded_all_gather;
pub(crate) use messages::Messages;
pub use ring::coded_ring;
pub use two_level::two_level;

/// Encodes and decodes ranges of a flat buffer. It may keep state between rounds, such as the residuals of
/// error feedback.
pub trait Coder: Send {
    /// Appends the encoding of `x`, the elements `range` of the buffer, to `out`.
    ///
    /// # Errors
    /// Any error of the coder; the collective then fails on all ranks.
    fn encode(
        &mut self,
        phase: Phase,
        range: Range<usize>,
        x: &[f32],
        out: &mut Vec<u8>,
    ) -> Result<(), CoderError>;

    /// Decodes `bytes`, which a peer sent for the elements `range`, and fills `out`.
    ///
    /// # Errors
    /// If the bytes do not encode exactly that number of elements; they are untrusted.
    fn decode(&mut self, range: Range<usize>, bytes: &[u8], out: &mut [f32]) -> Result<(), CoderError>;
}

/// The values of a rank in a coded reduction. The reduction uses only their encoded bytes, so the values may be
/// in a device's memory. Like a [`Coder`], they may keep state between rounds.
pub trait CodedValues: Send {
    /// Returns the number of values.
    fn count(&self) -> usize;

    /// Appends the encoding of the values `range` to `out`.
    ///
    /// # Errors
    /// Any error of the encoder; the collective then fails on all ranks.
    fn encode(&mut self, phase: Phase, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError>;

    /// Decodes `bytes`, which a peer sent for the values `range`. [`Merge::Copy`] replaces the values,
    /// [`Merge::Reduce`] adds to them.
    ///
    /// # Errors
    /// If the bytes do not encode exactly that number of values; they are untrusted.
    fn decode(&mut self, range: Range<usize>, bytes: &[u8], merge: Merge) -> Result<(), CoderError>;

    /// Appends the values `range` without the codec: f32, little-endian.
    ///
    /// # Errors
    /// The same as for [`Self::encode`].
    fn encode_plain(&mut self, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError>;

    /// Reads the bytes of a peer's [`Self::encode_plain`] for the values `range`. [`Merge::Copy`] replaces the
    /// values, [`Merge::Reduce`] adds to them.
    ///
    /// # Errors
    /// If the number of bytes is wrong; they are untrusted.
    fn decode_plain(&mut self, range: Range<usize>, bytes: &[u8], merge: Merge) -> Result<(), CoderError>;

    /// Divides the values `range` by `by`.
    ///
    /// # Errors
    /// The same as for [`Self::encode`].
    fn divide(&mut self, range: Range<usize>, by: usize) -> Result<(), CoderError>;
}

/// Result of a coded all-reduce of a slice: the reduced values, and the coder for the next round.
pub type Coded = (Vec<f32>, Box<dyn Coder>);

/// Values in this process's memory, and the coder that encodes them.
pub struct CodedSlice {
    data: Vec<f32>,
    coder: Box<dyn Coder>,
    /// Scratch buffer for the decoded values of one message.
    decoded: Vec<f32>,
}

impl std::fmt::Debug for CodedSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CodedSlice").field("len", &self.data.len()).finish_non_exhaustive()
    }
}

impl CodedSlice {
    /// Wraps values and their coder.
    #[must_use]
    pub fn new(data: Vec<f32>, coder: Box<dyn Coder>) -> Self {
        Self { data, coder, decoded: Vec::new() }
    }

    /// Returns the values, and the coder for the next round.
    #[must_use]
    pub fn into_parts(self) -> Coded {
        (self.data, self.coder)
    }
}

impl CodedValues for CodedSlice {
    fn count(&self) -> usize {
        self.data.len()
    }

    fn encode(&mut self, phase: Phase, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError> {
        self.coder.encode(phase, range.clone(), &self.data[range], out)
    }

    fn decode(&mut self, range: Range<usize>, bytes: &[u8], merge: Merge) -> Result<(), CoderError> {
        let values = &mut self.data[range.clone()];
        if merge == Merge::Copy {
            return self.coder.decode(range, bytes, values);
        }
        self.decoded.resize(range.len(), 0.0);
        self.coder.decode(range, bytes, &mut self.decoded)?;
        f32::reduce(ReduceOp::Sum, values, &self.decoded, First::Into);
        Ok(())
    }

    fn encode_plain(&mut self, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError> {
        out.extend_from_slice(bytemuck::cast_slice(&self.data[range]));
        Ok(())
    }

    fn decode_plain(&mut self, range: Range<usize>, bytes: &[u8], merge: Merge) -> Result<(), CoderError> {
        let values = &mut self.data[range];
        if bytes.len() != size_of_val(values) {
            return Err(format!(
                "{} uncompressed bytes do not match {} f32 values",
                bytes.len(),
                values.len()
            )
            .into());
        }
        match merge {
            Merge::Copy => bytemuck::cast_slice_mut(values).copy_from_slice(bytes),
            Merge::Reduce | Merge::ReduceLeft => {
                self.decoded.resize(values.len(), 0.0);
                bytemuck::cast_slice_mut(&mut self.decoded).copy_from_slice(bytes);
                f32::reduce(ReduceOp::Sum, values, &self.decoded, First::Into);
            }
        }
        Ok(())
    }

    fn divide(&mut self, range: Range<usize>, by: usize) -> Result<(), CoderError> {
        f32::divide(&mut self.data[range], by);
        Ok(())
    }
}
