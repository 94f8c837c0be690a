//! Numbers for tests of ops, and comparisons with values computed in f64.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_base::Philox;
use farflung_tensor::{Device, Tensor};

/// Returns reproducible normal numbers.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut out = vec![0.0; len];
    Philox::new(seed, len as u64).fill_normal(1.0, &mut out);
    out
}

pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Runs `work` with 1, 2 and 3 threads, asserts equal bits, and returns the result.
pub(crate) fn same_bits<const N: usize>(work: impl Fn(&Device) -> [Tensor; N]) -> [Vec<f32>; N] {
    let [one, two, three] =
        [1, 2, 3].map(|threads| work(&Device::cpu(threads).unwrap()).map(|t| t.to_vec::<f32>().unwrap()));
    for other in [two, three] {
        for (a, b) in one.iter().zip(&other) {
            assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "bits depend on the threads");
        }
    }
    one
}

/// Asserts that each element is within `tolerance` times the greatest magnitude, at least 1, of what is wanted.
#[track_caller]
pub(crate) fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1.0_f64, |m, w| m.max(w.abs()));
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!(
            (f64::from(g) - w).abs() <= tolerance * scale,
            "element {i}: {g}, expected {w}, scale {scale}"
        );
    }
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
