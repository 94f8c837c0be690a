//! Tests of how far stochastic rounding is unbiased: the mean of the decoded value over every possible offset.

use farflung_base::Philox;

use crate::block::{Block, Quantizer};
use crate::chunked::Chunked;
use crate::int::{Int, IntBlock};
use crate::uint::{Uint, UintBlock};
use crate::values::Values;
use crate::{Int2, Natural};

/// Returns the mean decoded value of each element of a block, over the offsets `(k + 1/2) 2^-16` of the noise.
fn means<Q: Quantizer<BITS>, const BITS: u32>(codec: &Chunked<Block<Q, BITS>>, x: &[f32]) -> Vec<f64> {
    let (largest, surveyed) = Q::survey(Values::Read(x));
    let fit = codec.chunks.quantizer.fit(f32::from_bits(largest.cast_unsigned()), surveyed, x);
    let mean = |x: &f32| {
        let decoded = |k: i32| {
            let offset = k as f32 / 65536.0 + 1.0 / 131_072.0;
            f64::from(Q::decode(&fit, Q::encode::<true>(&fit, *x, offset)))
        };
        (-32768..32768).map(decoded).sum::<f64>() / 65536.0
    };
    x.iter().map(mean).collect()
}

/// Returns blocks of normal numbers with different standard deviations and means, each with two large elements.
fn blocks() -> Vec<Vec<f32>> {
    let block = |(stream, (size, offset)): (usize, (f32, f32))| {
        let mut x = vec![0.0; 20];
        Philox::new(3, stream as u64).fill_normal(size, &mut x);
        (x[0], x[1], x[2]) = (4.0 * size, -4.0 * size, 1e-6 * size);
        for x in &mut x {
            *x += offset * size;
        }
        x
    };
    let sizes = [(1.0, 0.0), (0.77, 0.0), (1e-20, 0.0), (3e33, 0.0), (1.0, 300.0), (1.1, -1e5)];
    sizes.into_iter().enumerate().map(block).collect()
}

fn extent(x: &[f32]) -> (f64, f64) {
    let wide = || x.iter().map(|x| f64::from(*x));
    let largest = wide().map(f64::abs).fold(0.0, f64::max);
    (largest, wide().fold(f64::MIN, f64::max) - wide().fold(f64::MAX, f64::min))
}

const GRAIN: f64 = 1.0 / 131_072.0;

fn check_int<const BITS: u32>(codec: &IntBlock<BITS>, norm: bool)
where
    Int: Quantizer<BITS>,
{
    let q = f64::from((1 << (BITS - 1)) - 1);
    for x in blocks() {
        let squares = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let top = if norm { squares.sqrt() } else { extent(&x).0 };
        // Rounding the scale up to eight bits makes it at most 0.8 % larger.
        let scale = 1.008 * top / q;
        for (x, mean) in x.iter().zip(means(codec, &x)) {
            let (gap, x) = ((mean - f64::from(*x)).abs(), f64::from(x.abs()));
            assert!(gap <= GRAIN * scale + x * 2_f64.powi(-22), "{BITS} bits: {x} by {gap:e}");
        }
    }
    // Near `f32::MAX` the scale is too small for its largest element.
    let x: Vec<f32> = (0..20).map(|i| f32::MAX / (i + 1) as f32).collect();
    for (x, mean) in x.iter().zip(means(codec, &x)) {
        let missing = 1.0 - mean / f64::from(*x);
        assert!(missing.abs() < 0.004, "{BITS} bits: {x} by {missing}");
        assert!(BITS == 8 || missing > 0.0018, "{BITS} bits: {x} by {missing}");
    }
}

#[test]
fn integers_have_their_value_as_the_mean_to_the_stated_gap() {
    check_int(&IntBlock::<8>::stochastic(64).unwrap(), false);
    check_int(&IntBlock::<4>::stochastic(64).unwrap(), false);
    check_int(&IntBlock::<3>::stochastic(64).unwrap(), false);
    check_int(&IntBlock::<2>::stochastic(64).unwrap(), false);
    check_int(&IntBlock::<8>::qsgd(64).unwrap(), true);
    check_int(&IntBlock::<4>::qsgd(64).unwrap(), true);
    check_int(&IntBlock::<2>::qsgd(64).unwrap(), true);
    // The elements that TernGrad clips are biased.
    let x: Vec<f32> = (0..20).map(|i| if i == 0 { 100.0 } else { 0.1 }).collect();
    let means = means(&Int2::tern_grad(64).unwrap(), &x);
    assert!((means[1] - 0.1).abs() < 1e-3 && means[0] < 60.0, "{means:?}");
}

fn check_uint<const BITS: u32>()
where
    Uint: Quantizer<BITS>,
{
    let codec = UintBlock::<BITS>::stochastic(64).unwrap();
    for x in blocks() {
        let (largest, span) = extent(&x);
        let allowed = GRAIN * 1.008 * span / f64::from((1 << BITS) - 1) + largest * 2_f64.powi(-21);
        for (x, mean) in x.iter().zip(means(&codec, &x)) {
            let gap = (mean - f64::from(*x)).abs();
            assert!(gap <= allowed, "{BITS} bits: {x} by {gap:e} of {allowed:e}");
        }
    }
}

#[test]
fn integers_above_a_smallest_have_their_value_as_the_mean_to_the_stated_gap() {
    check_uint::<8>();
    check_uint::<4>();
    check_uint::<3>();
    check_uint::<2>();
}

#[test]
fn powers_of_two_have_their_value_as_the_mean_to_the_stated_gap() {
    for mut x in blocks() {
        x.extend([f32::MIN_POSITIVE * 0.3, f32::from_bits(3), 1.999_999_9]);
        for (x, mean) in x.iter().zip(means(&Natural::new(), &x)) {
            // The power of two below the magnitude, or the smallest normal number for subnormals.
            let below = f64::from(f32::from_bits(x.abs().to_bits() & 0x7f80_0000).max(f32::MIN_POSITIVE));
            let gap = (mean - f64::from(*x)).abs();
            assert!(gap <= GRAIN * below, "{x} by {gap:e}");
        }
    }
    let above = means(&Natural::new(), &[f32::MAX]);
    assert!((above[0] / 2_f64.powi(127) - 1.0).abs() < 1e-9, "{above:?}");
}
