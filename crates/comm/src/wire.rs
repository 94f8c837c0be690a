//! The framed header that every byte on a socket belongs to.

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 36;
