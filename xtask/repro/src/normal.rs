//! Normal deviates as inputs of codecs.

/// Returns `len` normal deviates with a standard deviation of 1e-3.
pub(crate) fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut x = vec![0.0; len];
    farflung::base::Philox::new(seed, 0).fill_normal(1e-3, &mut x);
    x
}
