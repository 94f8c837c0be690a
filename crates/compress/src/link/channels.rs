//! Reorders interleaved channels so that the values of each channel are together.

use crate::CompressError;

/// Converts vectors from `[positions, channels]` to `[channels, positions]` and back.
#[derive(Debug, Clone)]
pub(super) struct Channels {
    count: usize,
    scratch: Vec<f32>,
}

impl Channels {
    /// Creates the conversion for `count` channels. With one channel it does nothing.
    pub(super) fn new(count: usize) -> Self {
        Self { count, scratch: Vec::new() }
    }

    /// Returns `x` as `[channels, positions]`.
    pub(super) fn gather<'a>(&'a mut self, x: &'a [f32]) -> &'a [f32] {
        if self.count == 1 {
            return x;
        }
        self.scratch.resize(x.len(), 0.0);
        let positions = x.len() / self.count;
        for (position, row) in x.chunks(self.count).enumerate() {
            for (channel, x) in row.iter().enumerate() {
                self.scratch[channel * positions + position] = *x;
            }
        }
        &self.scratch
    }

    /// Returns the index in `x`, which has `len` elements, of the element that [`Self::gather`] puts at `at`.
    pub(super) fn source(&self, at: usize, len: usize) -> usize {
        let positions = len / self.count;
        at % positions * self.count + at / positions
    }

    /// Lets `decode` write a vector `[channels, positions]`, and copies it to `out` as `[positions, channels]`.
    pub(super) fn scatter(
        &mut self,
        out: &mut [f32],
        decode: impl FnOnce(&mut [f32]) -> Result<(), CompressError>,
    ) -> Result<(), CompressError> {
        if self.count == 1 {
            return decode(out);
        }
        self.scratch.resize(out.len(), 0.0);
        decode(&mut self.scratch)?;
        let positions = out.len() / self.count;
        for (position, row) in out.chunks_mut(self.count).enumerate() {
            for (channel, x) in row.iter_mut().enumerate() {
                *x = self.scratch[channel * positions + position];
            }
        }
        Ok(())
    }
}
