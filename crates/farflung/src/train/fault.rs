//! Faults that tests and benches inject into a run: a flipped bit in one rank's values, or the failure of a
//! rank at a moment of a step. They cannot be set by settings or files.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_tensor::Tensor;

use crate::{Error, Result};

/// The values of a rank in which a bit is flipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultyValue {
    /// An average that the rank received: of gradients, or of what replicas average after local steps.
    Reduced,
    /// The rank's parameters.
    Parameters,
    /// The first state buffer of the rank's optimizer.
    Moments,
    /// The first chunk of its state that the rank sends to another member after that step.
    Chunk,
    /// The record of that step that it keeps for newcomers.
    Record,
    /// The times of a microbatch that it tells the others after that step and all later ones.
    StepTime,
}

/// A bit that is flipped on one rank in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The rank.
    pub rank: u32,
    /// The step, from 1.
    pub step: u64,
    /// The values.
    pub value: FaultyValue,
    /// Index of the element in the last tensor of a part or record, or of a word of four bytes in a chunk,
    /// modulo the length.
    pub element: usize,
    /// Index of the bit in the element; 0 is the least significant.
    pub bit: u32,
}

/// The moments of a step, in order, at which a failure can be injected. Their numbers appear in
/// [`Error::InjectedFailure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Moment {
    /// Nothing of the step is done.
    Begun = 0,
    /// All microbatches have passed, averages have arrived, and ranks have exchanged their votes.
    Agreed = 1,
    /// The update is computed, but parameters and states have not changed yet.
    Prepared = 2,
    /// Parameters, moments, residuals and counters have changed.
    Committed = 3,
    /// Replicas have synchronised, if that was due.
    Met = 4,
}

impl Moment {
    /// All moments.
    pub const ALL: [Self; 5] = [Self::Begun, Self::Agreed, Self::Prepared, Self::Committed, Self::Met];

    /// Returns the moment's index, from 0.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }
}

/// A failure that is injected into a rank at a moment of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The rank.
    pub rank: u32,
    /// The step, from 1.
    pub step: u64,
    /// The moment.
    pub moment: Moment,
}

impl Failure {
    /// Fails if this is the injected failure's rank, step and moment.
    ///
    /// Errors: [`Error::InjectedFailure`] at that moment.
    pub(super) fn fail_if_due(self, rank: u32, step: u64, moment: Moment) -> Result<()> {
        if self == (Self { rank, step, moment }) {
            return Err(Error::InjectedFailure { step, moment: moment.number() });
        }
        Ok(())
    }
}

/// A member that a test makes leave, in a run whose members join and leave. It asks to leave before a step, and
/// leaves after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure {
    /// The rank that leaves, by its number at that step.
    pub rank: u32,
    /// The step before which it asks.
    pub step: u64,
}

impl Fault {
    /// Returns whether the fault is in these values of a rank in a step.
    pub(super) fn is_in(self, rank: u32, step: u64, value: FaultyValue) -> bool {
        (self.rank, self.step, self.value) == (rank, step, value)
    }

    /// Returns whether the fault is in these values of a rank in a step, if it is in all steps from its own on.
    pub(super) fn is_in_all_since(self, rank: u32, step: u64, value: FaultyValue) -> bool {
        step >= self.step && self.is_in(rank, self.step, value)
    }

    /// Flips the bit in a range of a flat buffer on the device.
    pub(super) fn flip_bit(self, flat: &mut Tensor, range: Range<usize>) -> Result<()> {
        let mut values = flat.to_vec::<f32>()?;
        self.flip_bit_in_values(&mut values[range]);
        Ok(flat.write(&values)?)
    }

    /// Flips the bit in values in the host's memory.
    pub(super) fn flip_bit_in_values(self, values: &mut [f32]) {
        let count = values.len().max(1);
        if let Some(value) = values.get_mut(self.element % count) {
            *value = f32::from_bits(value.to_bits() ^ (1 << (self.bit % 32)));
        }
    }

    /// Flips the bit in a number of eight bytes.
    pub(super) fn flip_bit_in_number(self, number: f64) -> f64 {
        f64::from_bits(number.to_bits() ^ (1 << (self.bit % 64)))
    }

    /// Flips the bit in the last of some tensors.
    pub(super) fn flip_bit_in_last(self, tensors: &mut BTreeMap<String, Vec<f32>>) {
        if let Some(last) = tensors.values_mut().next_back() {
            self.flip_bit_in_values(last);
        }
    }

    /// Flips the bit in bytes, which are words of four bytes, little-endian. The last one may be shorter.
    pub(super) fn flip_bit_in_bytes(self, bytes: &mut [u8]) {
        let count = bytes.len().div_ceil(4).max(1);
        if let Some(word) = bytes.chunks_mut(4).nth(self.element % count) {
            let bit = self.bit as usize % (8 * word.len());
            word[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
