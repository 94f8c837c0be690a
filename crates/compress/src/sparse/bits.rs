//! Reads and writes numbers of any width in a stream of bits, lowest bit first.

use crate::CompressError;

/// Appends numbers to a buffer of bytes.
pub(super) struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    held: u64,
    count: u32,
}

impl<'a> BitWriter<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, held: 0, count: 0 }
    }

    /// Appends the low `width` bits (at most 33) of `value`. The other bits must be 0.
    pub(super) fn push(&mut self, value: u64, width: u32) {
        // Fewer than 32 bits are pending here, so the value fits.
        self.held |= value << self.count;
        self.count += width;
        self.spill();
        self.spill();
    }

    pub(super) fn push_zeros(&mut self, mut count: u32) {
        while count > 32 {
            self.push(0, 32);
            count -= 32;
        }
        self.push(0, count);
    }

    fn spill(&mut self) {
        if self.count >= 32 {
            self.out.extend_from_slice(&(self.held as u32).to_le_bytes());
            self.held >>= 32;
            self.count -= 32;
        }
    }

    /// Writes the pending bits, padded with zeros to a byte.
    pub(super) fn finish(self) {
        let bytes = self.held.to_le_bytes();
        self.out.extend_from_slice(&bytes[..self.count.div_ceil(8) as usize]);
    }
}

/// Reads what [`BitWriter`] wrote, from untrusted bytes.
pub(super) struct BitReader<'a> {
    rest: &'a [u8],
    held: u64,
    count: u32,
}

const SHORT: CompressError = CompressError::Indices { why: "end too early" };

impl<'a> BitReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, held: 0, count: 0 }
    }

    fn refill(&mut self) {
        if self.count < 32 {
            if let Some((four, rest)) = self.rest.split_first_chunk() {
                self.held |= u64::from(u32::from_le_bytes(*four)) << self.count;
                (self.rest, self.count) = (rest, self.count + 32);
                return;
            }
            while let Some((byte, rest)) = self.rest.split_first().filter(|_| self.count < 32) {
                self.held |= u64::from(*byte) << self.count;
                (self.rest, self.count) = (rest, self.count + 8);
            }
        }
    }

    /// Reads a number of `width` bits, at most 32.
    pub(super) fn take(&mut self, width: u32) -> Result<u64, CompressError> {
        self.refill();
        if self.count < width {
            return Err(SHORT);
        }
        let value = self.held & ((1 << width) - 1);
        self.held >>= width;
        self.count -= width;
        Ok(value)
    }

    /// Reads zeros up to the next one bit, which is consumed too, and returns the number of zeros.
    pub(super) fn zeros(&mut self) -> Result<u32, CompressError> {
        let mut zeros = 0;
        loop {
            self.refill();
            let here = self.held.trailing_zeros();
            if here < self.count {
                self.held = self.held >> here >> 1;
                self.count -= here + 1;
                return Ok(zeros + here);
            }
            if self.count == 0 {
                return Err(SHORT);
            }
            zeros += self.count;
            (self.held, self.count) = (0, 0);
        }
    }

    /// Checks that no whole byte is left and that the padding is zero.
    pub(super) fn end(&self) -> Result<(), CompressError> {
        if self.rest.is_empty() && self.count < 8 && self.held == 0 {
            return Ok(());
        }
        Err(CompressError::Indices { why: "are followed by extra bits" })
    }
}
