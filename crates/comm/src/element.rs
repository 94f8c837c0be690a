//! The types that can be reduced, and how. Loops over slices; it knows no frames.

use std::fmt::Debug;

use half::{bf16, f16};

use crate::CommError;

/// How the ranks' values become one.
///
/// Integers wrap. Floats of 16 bits are widened to f32, reduced, and rounded to the nearest (ties to even) at each
/// reduction of two values, since 16 bits are what travels. In `Max` and `Min` a NaN wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum, in the order of the algorithm.
    Sum,
    /// The sum divided by the number of ranks; floats only.
    Mean,
    /// The greatest.
    Max,
    /// The least.
    Min,
    /// The product, in the order of the algorithm.
    Product,
}

mod sealed {
    pub trait Sealed {}
}

/// A type that collectives carry: floats of 16, 32 and 64 bits, and integers of 8 to 64.
pub trait Element: bytemuck::Pod + PartialEq + Debug + Send + Sync + sealed::Sealed {
    /// Its name in errors.
    const NAME: &'static str;
    /// Its number in the check word of frames.
    const CODE: u8;
    /// What a slice is filled with when a collective over it failed.
    const INVALID: Self;

    /// Reduces `x` into `into`, the values of `first` being the first operand.
    #[doc(hidden)]
    fn reduce(op: ReduceOp, into: &mut [Self], x: &[Self], first: First);

    /// Divides by the number of ranks.
    #[doc(hidden)]
    fn divide(x: &mut [Self], n: usize);

    /// Whether the operation exists.
    #[doc(hidden)]
    fn supports(op: ReduceOp, name: &'static str) -> Result<(), CommError>;
}

/// The first operand of a reduction: of two zeros, or two NaN, it matters.
#[derive(Debug, Clone, Copy)]
#[doc(hidden)]
pub enum First {
    /// What is reduced into.
    Into,
    /// The other.
    Other,
}

/// Reduces pair by pair.
fn each<T: Copy>(into: &mut [T], x: &[T], first: First, f: impl Fn(T, T) -> T) {
    match first {
        First::Into => into.iter_mut().zip(x).for_each(|(a, b)| *a = f(*a, *b)),
        First::Other => into.iter_mut().zip(x).for_each(|(a, b)| *a = f(*b, *a)),
    }
}

/// `$wide` is what is reduced in.
macro_rules! float {
    ($t:ident, $code:literal, $wide:ident, $widen:expr, $narrow:expr) => {
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const NAME: &'static str = stringify!($t);
            const CODE: u8 = $code;
            const INVALID: Self = Self::NAN;

            fn reduce(op: ReduceOp, into: &mut [Self], x: &[Self], first: First) {
                let (widen, narrow) = ($widen, $narrow);
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => {
                        each(into, x, first, |a, b| narrow(widen(a) + widen(b)))
                    }
                    ReduceOp::Product => each(into, x, first, |a, b| narrow(widen(a) * widen(b))),
                    ReduceOp::Max => each(into, x, first, |a, b| if a.is_nan() || a > b { a } else { b }),
                    ReduceOp::Min => each(into, x, first, |a, b| if a.is_nan() || a < b { a } else { b }),
                }
            }
            fn divide(x: &mut [Self], n: usize) {
                let (widen, narrow) = ($widen, $narrow);
                let n = n as $wide;
                for x in x {
                    *x = narrow(widen(*x) / n);
                }
            }
            fn supports(_: ReduceOp, _: &'static str) -> Result<(), CommError> {
                Ok(())
            }
        }
    };
}
float!(f32, 1, f32, |a: f32| a, |a: f32| a);
float!(f64, 2, f64, |a: f64| a, |a: f64| a);
float!(f16, 4, f32, |a: f16| a.to_f32(), f16::from_f32);
float!(bf16, 5, f32, |a: bf16| a.to_f32(), bf16::from_f32);

macro_rules! integer {
    ($t:ident, $code:literal) => {
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const NAME: &'static str = stringify!($t);
            const CODE: u8 = $code;
            const INVALID: Self = Self::MAX;

            fn reduce(op: ReduceOp, into: &mut [Self], x: &[Self], first: First) {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => each(into, x, first, Self::wrapping_add),
                    ReduceOp::Product => each(into, x, first, Self::wrapping_mul),
                    ReduceOp::Max => each(into, x, first, Ord::max),
                    ReduceOp::Min => each(into, x, first, Ord::min),
                }
            }
            fn divide(_: &mut [Self], _: usize) {
                unreachable!("`supports` refuses means of integers")
            }
            fn supports(op: ReduceOp, name: &'static str) -> Result<(), CommError> {
                match op {
                    ReduceOp::Mean => Err(CommError::Unsupported { op: name, element: Self::NAME }),
                    ReduceOp::Sum | ReduceOp::Max | ReduceOp::Min | ReduceOp::Product => Ok(()),
                }
            }
        }
    };
}
integer!(u64, 3);
integer!(i8, 6);
integer!(i16, 7);
integer!(i32, 8);
integer!(i64, 9);
integer!(u8, 10);
integer!(u16, 11);
integer!(u32, 12);

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Element>(op: ReduceOp, mut a: Vec<T>, b: &[T]) -> Vec<T> {
        T::reduce(op, &mut a, b, First::Into);
        a
    }

    #[test]
    fn a_nan_wins_and_integers_wrap() {
        for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum, ReduceOp::Product] {
            let got = reduced(op, vec![f32::NAN, 1.0], &[1.0, f32::NAN]);
            assert!(got.iter().all(|v| v.is_nan()), "{op:?}");
            let got = reduced(op, vec![bf16::NAN, bf16::ONE], &[bf16::ONE, bf16::NAN]);
            assert!(got.iter().all(|v| v.is_nan()), "{op:?}");
        }
        assert_eq!(reduced(ReduceOp::Max, vec![1.0, -3.0], &[2.0_f64, -4.0]), [2.0, -3.0]);
        assert_eq!(reduced(ReduceOp::Min, vec![1.0, -3.0], &[2.0_f64, -4.0]), [1.0, -4.0]);
        assert_eq!(reduced(ReduceOp::Sum, vec![u64::MAX], &[3]), [2]);
        assert_eq!(reduced(ReduceOp::Sum, vec![100_i8], &[100]), [-56]);
        assert_eq!(reduced(ReduceOp::Product, vec![16_u8, 3], &[16, 5]), [0, 15]);
        assert_eq!(reduced(ReduceOp::Min, vec![i32::MIN], &[4]), [i32::MIN]);
        assert!(u64::supports(ReduceOp::Mean, "all_reduce").is_err());
    }

    #[test]
    fn sixteen_bits_are_rounded_once_a_reduction_to_even() {
        // Next to 2048 f16 has steps of 2: 2049 is a tie, 2051 is one the other way.
        let a = vec![f16::from_f32(2048.0), f16::from_f32(2050.0)];
        let sum = reduced(ReduceOp::Sum, a, &[f16::ONE, f16::ONE]);
        assert_eq!(sum, [f16::from_f32(2048.0), f16::from_f32(2052.0)]);
        assert_eq!(reduced(ReduceOp::Sum, vec![f16::MAX], &[f16::MAX]), [f16::INFINITY]);
        let mut mean = [bf16::from_f32(7.0)];
        bf16::divide(&mut mean, 2);
        assert_eq!(mean, [bf16::from_f32(3.5)]);
    }
}
