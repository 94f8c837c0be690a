//! Sizes of frames, in bytes.

/// The most bytes that one frame carries.
pub const FRAME_BYTES: usize = 256 * 1024;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 32;
