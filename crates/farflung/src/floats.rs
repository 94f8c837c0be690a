//! Numbers as the bytes of a message.

/// Returns the bytes of numbers.
pub(crate) fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Converts little-endian bytes to exactly `count` numbers; `None` for another length.
pub(crate) fn floats(bytes: &[u8], count: usize) -> Option<Vec<f32>> {
    let (words, rest) = bytes.as_chunks::<4>();
    (words.len() == count && rest.is_empty())
        .then(|| words.iter().map(|&word| f32::from_le_bytes(word)).collect())
}
