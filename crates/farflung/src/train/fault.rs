//! Faults that tests and benches place in a run: one bit of one rank's values, or the failure of a rank at a
//! moment of a step. No setting and no file makes one.

use std::ops::Range;

use farflung_tensor::Tensor;

use crate::{Error, Result};

/// Which values of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultyValue {
    /// An average that it received: of gradients, or of what DiLoCo averages.
    Reduced,
    /// Its parameters.
    Parameters,
    /// Its optimizer's state.
    Moments,
    /// The first chunk of its state that it sends to another member which lacks it behind that step.
    Chunk,
}

/// A bit that changes on one rank in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// On which rank.
    pub rank: u32,
    /// In which step, counted from 1.
    pub step: u64,
    /// In which values.
    pub value: FaultyValue,
    /// Number of the element in the last tensor of a part; it counts modulo their number.
    pub element: usize,
    /// Number of the bit, from 0 for the least.
    pub bit: u32,
}

/// The moments of a step, in their order. Each has a number, so that a fault can be placed at any of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Moment {
    /// Nothing of it was done.
    Begun = 0,
    /// Its microbatches have passed, averages are there, and ranks have told what they agree on.
    Agreed = 1,
    /// The update is known; nothing has changed yet.
    Prepared = 2,
    /// Parameters, moments, residuals and counters have changed.
    Committed = 3,
    /// Replicas have met, where that was due.
    Met = 4,
}

impl Moment {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Begun, Self::Agreed, Self::Prepared, Self::Committed, Self::Met];

    /// Its place among them, from 0.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }
}

/// A rank that fails at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Which rank.
    pub rank: u32,
    /// In which step, counted from 1.
    pub step: u64,
    /// When in it.
    pub moment: Moment,
}

impl Failure {
    /// Fails if a rank's step is where it was placed.
    ///
    /// Errors: [`Error::Placed`] there.
    pub(super) fn reach(self, rank: u32, step: u64, moment: Moment) -> Result<()> {
        if self == (Self { rank, step, moment }) {
            return Err(Error::Placed { step, moment: moment.number() });
        }
        Ok(())
    }
}

/// A member that leaves in peace after a step, in a run whose members come and leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure {
    /// Which rank, while it has this number.
    pub rank: u32,
    /// The number of its step before which it asks to leave.
    pub step: u64,
}

impl Fault {
    /// Whether it is in these values of a rank in a step.
    pub(super) fn is_in(self, rank: u32, step: u64, value: FaultyValue) -> bool {
        (self.rank, self.step, self.value) == (rank, step, value)
    }

    /// Changes the bit in a range of a flat buffer.
    pub(super) fn strike(self, flat: &mut Tensor, range: Range<usize>) -> Result<()> {
        let mut values = flat.to_vec::<f32>()?;
        self.strike_values(&mut values[range]);
        Ok(flat.write(&values)?)
    }

    /// The same in values in the host's memory.
    pub(super) fn strike_values(self, values: &mut [f32]) {
        let count = values.len().max(1);
        if let Some(value) = values.get_mut(self.element % count) {
            *value = f32::from_bits(value.to_bits() ^ (1 << (self.bit % 32)));
        }
    }
}
