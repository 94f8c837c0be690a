//! Memory that a caller gives to a store.

/// Memory for the arrays of one piece, the longest of the store.
pub trait Arrays: Send + 'static {
    /// Returns the bytes of an array.
    fn array(&self, number: usize) -> &[u8];

    /// Returns the bytes of an array for writing.
    fn array_mut(&mut self, number: usize) -> &mut [u8];
}
