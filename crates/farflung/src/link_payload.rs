//! Payloads of a link's codec, with plain f32 for values that it cannot encode.

use farflung_compress::link::LinkCodec;
use farflung_compress::{CodecId, CompressError, Compressor as _, F32, Payload, PayloadRef, RoundKey};

/// Encodes values. Those that the codec cannot encode, since they are not finite or too large, become plain
/// f32, and the codec stores nothing of them.
pub(crate) fn encode(
    codec: &mut dyn LinkCodec,
    samples: &[u64],
    values: &[f32],
    key: RoundKey,
    payload: &mut Payload,
) -> Result<(), CompressError> {
    match codec.encode(samples, values, key, payload) {
        Err(error) if error.is_value_error() => F32::new().compress(values, key, payload),
        other => other,
    }
}

/// Decodes what [`encode`] has encoded into all of `values`.
pub(crate) fn decode(
    codec: &mut dyn LinkCodec,
    samples: &[u64],
    payload: PayloadRef<'_>,
    values: &mut [f32],
) -> Result<(), CompressError> {
    match payload.codec() {
        CodecId::F32 => F32::new().decompress(payload, values),
        _ => codec.decode(samples, payload, values),
    }
}
