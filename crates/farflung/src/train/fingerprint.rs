//! Hashes by which copies of numbers are compared.

/// Hash of numbers: blake3 of their little-endian bytes.
pub(super) fn digest<'a>(values: impl IntoIterator<Item = &'a f32>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for value in values {
        hasher.update(&value.to_le_bytes());
    }
    hasher.finalize()
}
