//! How values of shards are encoded on their way between ranks.

use std::fmt;

use farflung_compress::{CodecSpec, Memoryless, Payload, PayloadRef, RoundKey};

use crate::OptimError;

/// Encodes vectors of a known length to a known number of bytes: plain f32, or by a codec of fixed rate without
/// memory.
pub struct ShardCoder {
    spec: Option<CodecSpec>,
    codec: Option<Box<dyn Memoryless>>,
    payload: Payload,
    key: RoundKey,
}

impl fmt::Debug for ShardCoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardCoder").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl ShardCoder {
    /// Returns a coder with a codec, or of plain f32. `key` is that of the first vector.
    #[must_use]
    pub fn new(spec: Option<CodecSpec>, key: RoundKey) -> Self {
        let codec = spec.map(|spec| spec.build_memoryless());
        Self { spec, codec, payload: Payload::new(), key }
    }

    /// Returns a coder of plain f32.
    #[must_use]
    pub fn plain() -> Self {
        Self::new(None, RoundKey::default())
    }

    /// Returns whether a codec encodes each vector of a length in the same number of bytes, and remembers
    /// nothing between vectors.
    #[must_use]
    pub fn takes(spec: &CodecSpec) -> bool {
        let selects = spec.select().is_some() || spec.mask().is_some() || spec.dct().is_some();
        !selects && !spec.feedback() && spec.momentum().is_none() && spec.packing().is_none()
    }

    /// Returns the codec; `None` for plain f32.
    #[must_use]
    pub const fn spec(&self) -> Option<CodecSpec> {
        self.spec
    }

    /// Returns the bytes of a vector of `len` values; none for no values.
    #[must_use]
    pub fn bytes_of(&self, len: usize) -> usize {
        match &self.codec {
            _ if len == 0 => 0,
            Some(codec) => codec.max_payload(len),
            None => len * size_of::<f32>(),
        }
    }

    /// Appends the bytes of a vector.
    ///
    /// Errors: those of the codec, for example for values that are not finite.
    pub(crate) fn encode(&mut self, values: &[f32], into: &mut Vec<u8>) -> Result<(), OptimError> {
        if values.is_empty() {
            return Ok(());
        }
        match &mut self.codec {
            Some(codec) => {
                codec.compress(values, self.key, &mut self.payload)?;
                self.key.round += 1;
                into.extend_from_slice(self.payload.as_bytes());
            }
            None => into.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        }
        Ok(())
    }

    /// Fills `values` from the bytes of a vector of this length.
    ///
    /// Errors: those of the codec for bytes that no encoder writes.
    pub(crate) fn decode(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), OptimError> {
        match &self.codec {
            _ if values.is_empty() => {}
            Some(codec) => codec.decompress(PayloadRef::parse(bytes)?, values)?,
            None => {
                let (numbers, _) = bytes.as_chunks::<4>();
                values.iter_mut().zip(numbers).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_take_the_bytes_that_were_told() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin()).collect();
        for (name, worst) in [("none", 0.0), ("bf16", 4e-3), ("int8", 5e-3), ("int4:64", 0.08)] {
            let spec = (name != "none").then(|| name.parse::<CodecSpec>().unwrap());
            assert!(spec.is_none_or(|spec| ShardCoder::takes(&spec)), "{name}");
            let mut coder = ShardCoder::new(spec, RoundKey::default());
            for len in [0, 1, 63, 256, 1000] {
                let mut bytes = Vec::new();
                coder.encode(&values[..len], &mut bytes).unwrap();
                assert_eq!(bytes.len(), coder.bytes_of(len), "{name}, {len}");
                let mut found = vec![9.0; len];
                coder.decode(&bytes, &mut found).unwrap();
                let off = found.iter().zip(&values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off <= worst, "{name}, {len}: {off}");
            }
        }
        for name in ["int8+ef", "topk:0.01/f16", "int8+zstd"] {
            assert!(name.parse::<CodecSpec>().map_or(true, |spec| !ShardCoder::takes(&spec)), "{name}");
        }
    }
}
