//! Hashes with which copies of numbers are compared.

use farflung_tensor::Tensor;
use farflung_zoo::Stage;

/// Hashes numbers incrementally.
#[derive(Debug, Default)]
pub(super) struct Hasher(blake3::Hasher);

impl Hasher {
    /// Adds numbers, as little-endian bytes.
    pub(super) fn update(&mut self, values: &[f32]) {
        if cfg!(target_endian = "little") {
            self.0.update(bytemuck::cast_slice(values));
        } else {
            for value in values {
                self.0.update(&value.to_le_bytes());
            }
        }
    }

    /// Returns the hash in hexadecimal.
    pub(super) fn finish(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}

/// Returns the BLAKE3 hash of the little-endian bytes of the numbers.
pub(super) fn digest(values: &[f32]) -> blake3::Hash {
    let mut hasher = Hasher::default();
    hasher.update(values);
    hasher.0.finalize()
}

/// Returns the hash of a stage's parameters, without padding; of a shard of them, with it.
pub(super) fn of_params(stage: &Stage, params: &Tensor) -> crate::Result<blake3::Hash> {
    let all = params.to_vec::<f32>()?;
    let is_whole = all.len() == stage.layout().len();
    let elements = stage.layout().params().iter().filter(|_| is_whole).flat_map(|p| &all[p.range()]);
    let elements: Vec<f32> = elements.copied().collect();
    Ok(digest(if is_whole { &elements } else { &all }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_blake3_of_the_bytes() {
        for len in [0, 1, 255, 256, 257, 5000] {
            let values: Vec<f32> = (0..len).map(|i| i as f32 * 0.37 - 5.0).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(digest(&values), blake3::hash(&bytes), "{len}");
            let mut pieces = Hasher::default();
            values.chunks(1000).for_each(|piece| pieces.update(piece));
            assert_eq!(pieces.finish(), blake3::hash(&bytes).to_hex().to_string(), "{len}");
        }
    }
}
