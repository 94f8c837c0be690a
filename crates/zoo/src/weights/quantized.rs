//! Types of tensors in GGUF files, some of which have blocks of values with a common scale.

use half::{bf16, f16};

use super::dtype::Dtype;

/// Values of a block, and of one of the types that have scales of scales.
const BLOCK: usize = 32;
const K_BLOCK: usize = 256;
/// Values with one scale in such a block.
const GROUP: usize = 16;

/// A type that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    F32,
    F16,
    Bf16,
    /// A scale and 32 numbers of 8 bits: `scale q`.
    Q8Zero,
    /// A scale and 32 numbers of 4 bits: `scale (q - 8)`.
    Q4Zero,
    /// A scale, a least value and 32 numbers of 4 bits: `scale q + least`.
    Q4One,
    /// 256 numbers of 6 bits, a scale of 8 bits for each 16 of them, and a scale of all: `scale s (q - 32)`.
    Q6K,
}

/// Names of types by their numbers; those without one are not in use any more.
const NAMES: [&str; 31] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
    "I16", "I32", "I64", "F64", "IQ1_M", "BF16",
];

impl Encoding {
    /// Returns the type of a number; `None` if it is not read.
    pub(super) fn of(number: u32) -> Option<Self> {
        Some(match *NAMES.get(number as usize)? {
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "Q8_0" => Self::Q8Zero,
            "Q4_0" => Self::Q4Zero,
            "Q4_1" => Self::Q4One,
            "Q6_K" => Self::Q6K,
            _ => return None,
        })
    }

    /// Returns the type that has all values of this one.
    pub(super) const fn exact(self) -> Dtype {
        match self {
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::Bf16,
            Self::F32 | Self::Q8Zero | Self::Q4Zero | Self::Q4One | Self::Q6K => Dtype::F32,
        }
    }

    /// Returns the name of a type, read or not.
    pub(super) fn name_of(number: u32) -> String {
        let name = NAMES.get(number as usize).filter(|name| !name.is_empty());
        name.map_or_else(|| format!("type {number}"), |name| (*name).to_owned())
    }

    /// Returns the values and the bytes of a block.
    const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8Zero => (BLOCK, 2 + BLOCK),
            Self::Q4Zero => (BLOCK, 2 + BLOCK / 2),
            Self::Q4One => (BLOCK, 4 + BLOCK / 2),
            Self::Q6K => (K_BLOCK, K_BLOCK / 2 + K_BLOCK / 4 + K_BLOCK / GROUP + 2),
        }
    }

    /// Returns the bytes of so many values; `None` if they are no whole blocks.
    pub(super) fn bytes(self, values: u64) -> Option<u64> {
        let (count, bytes) = self.block();
        values.is_multiple_of(count as u64).then(|| (values / count as u64).saturating_mul(bytes as u64))
    }

    /// The names of the types that are read.
    pub(super) const READ: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1 or Q6_K";

    /// Decodes whole blocks.
    pub(super) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let (count, size) = self.block();
        for (block, out) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(count)) {
            let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
            // The low halves of all bytes come first, then the high ones.
            let nibbles = |from: usize| {
                let low = block[from..].iter().map(|byte| f32::from(byte & 0xF));
                low.chain(block[from..].iter().map(|byte| f32::from(byte >> 4)))
            };
            match self {
                Self::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
                Self::F16 => out[0] = half(0),
                Self::Bf16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
                Self::Q8Zero => {
                    let scale = half(0);
                    for (out, byte) in out.iter_mut().zip(&block[2..]) {
                        *out = scale * f32::from(byte.cast_signed());
                    }
                }
                Self::Q4Zero => {
                    let scale = half(0);
                    out.iter_mut().zip(nibbles(2)).for_each(|(out, q)| *out = scale * (q - 8.0));
                }
                Self::Q4One => {
                    let (scale, least) = (half(0), half(2));
                    out.iter_mut().zip(nibbles(4)).for_each(|(out, q)| *out = scale * q + least);
                }
                Self::Q6K => {
                    let (low, rest) = block.split_at(K_BLOCK / 2);
                    let (high, rest) = rest.split_at(K_BLOCK / 4);
                    let scale = half(K_BLOCK / 2 + K_BLOCK / 4 + K_BLOCK / GROUP);
                    for (at, out) in out.iter_mut().enumerate() {
                        // Each half of the block has 64 bytes of low halves and 32 bytes of upper bits.
                        let (part, at_part) = (at / 128, at % 128);
                        let low = low[part * 64 + at_part % 64] >> (4 * (at_part / 64)) & 0xF;
                        let high = high[part * 32 + at_part % 32] >> (2 * (at_part / 32)) & 3;
                        let group = f32::from(rest[at / GROUP].cast_signed());
                        *out = scale * group * (f32::from(high << 4 | low) - 32.0);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_decoded_by_their_definitions() {
        let half = |x: f32| f16::from_f32(x).to_le_bytes();
        let decode = |encoding: Encoding, bytes: &[u8]| {
            let mut out = vec![0.0; BLOCK];
            assert_eq!(encoding.bytes(BLOCK as u64), Some(bytes.len() as u64));
            encoding.decode(bytes, &mut out);
            out
        };
        let eight: Vec<u8> = half(0.5).into_iter().chain((0..32_u8).map(|i| i.wrapping_sub(16))).collect();
        assert_eq!(
            decode(Encoding::Q8Zero, &eight),
            (0..32_u8).map(|i| 0.5 * (f32::from(i) - 16.0)).collect::<Vec<_>>()
        );
        // Byte i has i in its low half and 15 - i in its high half.
        let halves = (0..16_u8).map(|i| (15 - i) << 4 | i);
        let four: Vec<u8> = half(2.0).into_iter().chain(halves.clone()).collect();
        let q: Vec<f32> = (0..16_u8).chain((0..16).rev()).map(f32::from).collect();
        assert_eq!(decode(Encoding::Q4Zero, &four), q.iter().map(|q| 2.0 * (q - 8.0)).collect::<Vec<_>>());
        let one: Vec<u8> = half(2.0).into_iter().chain(half(-3.0)).chain(halves).collect();
        assert_eq!(decode(Encoding::Q4One, &one), q.iter().map(|q| 2.0 * q - 3.0).collect::<Vec<_>>());
        // As ggml's reference has it: four values from one byte of upper bits.
        let (low, high): (Vec<u8>, Vec<u8>) = (
            (0..128_u8).map(|i| i.wrapping_mul(37)).collect(),
            (0..64_u8).map(|i| i.wrapping_mul(91)).collect(),
        );
        let scales: Vec<i8> = (0..16).map(|i| 3 * i - 20).collect();
        let six = low
            .iter()
            .chain(&high)
            .copied()
            .chain(scales.iter().map(|s| s.cast_unsigned()))
            .chain(half(0.25));
        let mut out = vec![0.0; K_BLOCK];
        Encoding::Q6K.decode(&six.collect::<Vec<u8>>(), &mut out);
        for part in 0..2 {
            let (ql, qh, sc) = (&low[64 * part..], &high[32 * part..], &scales[8 * part..]);
            for l in 0..32 {
                for (quarter, q) in [
                    (ql[l] & 0xF) | (qh[l] & 3) << 4,
                    (ql[l + 32] & 0xF) | (qh[l] >> 2 & 3) << 4,
                    (ql[l] >> 4) | (qh[l] >> 4 & 3) << 4,
                    (ql[l + 32] >> 4) | (qh[l] >> 6 & 3) << 4,
                ]
                .into_iter()
                .enumerate()
                {
                    let expected = 0.25 * f32::from(sc[l / 16 + 2 * quarter]) * (f32::from(q) - 32.0);
                    assert_eq!(out[128 * part + 32 * quarter + l].to_bits(), expected.to_bits());
                }
            }
        }
        assert_eq!((Encoding::Q6K.bytes(512), Encoding::Q6K.bytes(32)), (Some(420), None));
        assert_eq!((Encoding::Q4One.bytes(31), Encoding::F16.bytes(31)), (None, Some(62)));
        assert_eq!(
            (Encoding::of(8), Encoding::of(12), Encoding::of(99)),
            (Some(Encoding::Q8Zero), None, None)
        );
        assert_eq!((Encoding::name_of(12), Encoding::name_of(99)), ("Q4_K".to_owned(), "type 99".to_owned()));
    }
}
