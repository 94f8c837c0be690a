//! The codec [`F32`], which is exact: four bytes for each element, every bit pattern kept.

use crate::cast::{Cast, Format};
use crate::chunked::Chunked;
use crate::wire::CodecId;

/// Plain `f32`, little-endian. `4n` bytes for `n` elements; the error is zero.
///
/// Without feedback, `compress` keeps NaN and infinity bit by bit. With feedback they are rejected, as by every
/// codec, since a residual must stay finite.
pub type F32 = Chunked<Cast<Binary32>>;

/// The arithmetic of [`F32`]: the identity.
#[derive(Debug, Clone, Copy)]
pub struct Binary32;

impl Format for Binary32 {
    const ID: CodecId = CodecId::F32;
    const EXACT: bool = true;
    type Bytes = [u8; 4];

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode(x: f32) -> [u8; 4] {
        x.to_le_bytes()
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(bytes: [u8; 4]) -> f32 {
        f32::from_le_bytes(bytes)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(_: [u8; 4]) -> bool {
        false
    }
}
