//! Numbers from the bytes of a message.

/// Converts little-endian bytes to exactly `count` numbers; `None` for another length.
pub(crate) fn floats(bytes: &[u8], count: usize) -> Option<Vec<f32>> {
    let (words, rest) = bytes.as_chunks::<4>();
    (words.len() == count && rest.is_empty())
        .then(|| words.iter().map(|&word| f32::from_le_bytes(word)).collect())
}
