//! Hashes by which copies of numbers are compared.

/// Numbers that are hashed at a time.
const CHUNK: usize = 4096;

/// Hash of numbers: blake3 of their little-endian bytes.
pub(super) fn digest<'a>(values: impl IntoIterator<Item = &'a f32>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = Vec::with_capacity(4 * CHUNK);
    // The hash of many bytes at once is several times as fast as that of a few.
    for value in values {
        bytes.extend_from_slice(&value.to_le_bytes());
        if bytes.len() == 4 * CHUNK {
            hasher.update(&bytes);
            bytes.clear();
        }
    }
    hasher.update(&bytes);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_blake3_of_the_bytes() {
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7] {
            let values: Vec<f32> = (0..len).map(|i| i as f32 * 0.37 - 5.0).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(digest(&values), blake3::hash(&bytes), "{len}");
        }
    }
}
