//! Sizes of frames, in bytes.

/// Maximum number of bytes in the payload of a frame.
pub const FRAME_BYTES: usize = 256 * 1024;

/// Number of bytes in a frame's header.
pub const HEADER_BYTES: usize = 32;
