//! Values of one channel after the other rather than interleaved. Knows no codec.

use crate::CompressError;

/// The order `[channels, positions]` of vectors that are `[positions, channels]`.
#[derive(Debug, Clone)]
pub(super) struct Channels {
    count: usize,
    scratch: Vec<f32>,
}

impl Channels {
    /// One channel is no change.
    pub(super) fn new(count: usize) -> Self {
        Self { count, scratch: Vec::new() }
    }

    /// `x` in the order of channels.
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

    /// Where in `x`, of so many elements, the one is that [`Self::gather`] puts at `at`.
    pub(super) fn source(&self, at: usize, len: usize) -> usize {
        let positions = len / self.count;
        at % positions * self.count + at / positions
    }

    /// Lets `decode` write the order of channels, and puts it into `out` in its own.
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
