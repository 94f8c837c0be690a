//! Element types of collectives, and their reductions, as loops over slices. Independent of frames.

mod array;
mod located;

pub use located::Located;

use std::fmt::{self, Debug};

use half::{bf16, f16};

use crate::CommError;

/// The operation that reduces the ranks' values to one. MPI's names are in brackets.
///
/// Integers wrap. 16-bit floats are widened to f32, reduced, and rounded to nearest (ties to even) after each
/// reduction of two values, because 16 bits are sent. `Max` and `Min` return NaN if any value is NaN. For
/// [`Located`] values they also return the place of the value (`MPI_MAXLOC`, `MPI_MINLOC`); other operations
/// are not defined for these. A [`UserOp`](crate::UserOp) is a reduction defined by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum, in the order of the algorithm (`MPI_SUM`).
    Sum,
    /// Sum divided by the number of ranks; floats only, not in scans. Not in MPI.
    Mean,
    /// Maximum value (`MPI_MAX`).
    Max,
    /// Minimum value (`MPI_MIN`).
    Min,
    /// Product, in the order of the algorithm (`MPI_PROD`).
    Product,
    /// Bitwise and; integers only (`MPI_BAND`).
    And,
    /// Bitwise or; integers only (`MPI_BOR`).
    Or,
    /// Bitwise exclusive or; integers only (`MPI_BXOR`).
    Xor,
    /// 1 if all values are non-zero, else 0; integers only (`MPI_LAND`).
    LogicalAnd,
    /// 1 if any value is non-zero, else 0; integers only (`MPI_LOR`).
    LogicalOr,
    /// 1 if an odd number of values are non-zero, else 0; integers only (`MPI_LXOR`).
    LogicalXor,
}

impl ReduceOp {
    /// All operations.
    pub const ALL: [Self; 11] = [
        Self::Sum,
        Self::Mean,
        Self::Max,
        Self::Min,
        Self::Product,
        Self::And,
        Self::Or,
        Self::Xor,
        Self::LogicalAnd,
        Self::LogicalOr,
        Self::LogicalXor,
    ];

    /// Returns the name used in errors.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Max => "max",
            Self::Min => "min",
            Self::Product => "product",
            Self::And => "and",
            Self::Or => "or",
            Self::Xor => "xor",
            Self::LogicalAnd => "logical and",
            Self::LogicalOr => "logical or",
            Self::LogicalXor => "logical xor",
        }
    }

    /// Returns the error for an element type that does not support the operation.
    const fn refused(self, op: &'static str, element: &'static str) -> CommError {
        CommError::Unsupported { op, reduction: self.name(), element }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// An element type of collectives: floats of 16, 32 and 64 bits, integers of 8 to 64 bits, [`Located`] values,
/// and arrays of any of these.
pub trait Element: bytemuck::Pod + PartialEq + Debug + Send + Sync + sealed::Sealed {
    /// Name used in errors.
    const NAME: &'static str;
    /// Number that identifies the type; part of the check word of frames.
    const CODE: u8;
    /// Number of scalars in one element: the length of an array. Part of the check word of frames unless it is
    /// 1.
    #[doc(hidden)]
    const WIDTH: usize = 1;
    /// Value that fills a buffer after a collective on it has failed.
    const INVALID: Self;

    /// Reduces `x` into `into`, element by element; `first` says which of them is the first operand.
    #[doc(hidden)]
    fn reduce(op: ReduceOp, into: &mut [Self], x: &[Self], first: First);

    /// Divides by the number of ranks. Called only for types that support [`ReduceOp::Mean`].
    #[doc(hidden)]
    fn divide(x: &mut [Self], n: usize);

    /// Returns an error if the type does not support the operation.
    #[doc(hidden)]
    fn supports(op: ReduceOp, name: &'static str) -> Result<(), CommError>;
}

/// Which slice of a reduction holds the first operand. The order of operands matters for zeros of different
/// sign, for two NaN values, and for a [`UserOp`](crate::UserOp).
#[derive(Debug, Clone, Copy)]
#[doc(hidden)]
pub enum First {
    /// The slice that is reduced into.
    Into,
    /// The other slice.
    Other,
}

/// Reduces the slices element by element with `f`.
pub(crate) fn each<T: Copy>(into: &mut [T], x: &[T], first: First, f: impl Fn(T, T) -> T) {
    match first {
        First::Into => into.iter_mut().zip(x).for_each(|(a, b)| *a = f(*a, *b)),
        First::Other => into.iter_mut().zip(x).for_each(|(a, b)| *a = f(*b, *a)),
    }
}

/// `$wide` is the type in which values are reduced.
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
                    ReduceOp::And
                    | ReduceOp::Or
                    | ReduceOp::Xor
                    | ReduceOp::LogicalAnd
                    | ReduceOp::LogicalOr
                    | ReduceOp::LogicalXor => {
                        unreachable!("`supports` rejects bitwise and logical reductions of floats")
                    }
                }
            }
            fn divide(x: &mut [Self], n: usize) {
                let (widen, narrow) = ($widen, $narrow);
                let n = n as $wide;
                for x in x {
                    *x = narrow(widen(*x) / n);
                }
            }
            fn supports(op: ReduceOp, name: &'static str) -> Result<(), CommError> {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Max | ReduceOp::Min | ReduceOp::Product => {
                        Ok(())
                    }
                    bits => Err(bits.refused(name, Self::NAME)),
                }
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
                    ReduceOp::And => each(into, x, first, |a, b| a & b),
                    ReduceOp::Or => each(into, x, first, |a, b| a | b),
                    ReduceOp::Xor => each(into, x, first, |a, b| a ^ b),
                    ReduceOp::LogicalAnd => each(into, x, first, |a, b| Self::from(a != 0 && b != 0)),
                    ReduceOp::LogicalOr => each(into, x, first, |a, b| Self::from(a != 0 || b != 0)),
                    ReduceOp::LogicalXor => each(into, x, first, |a, b| Self::from((a != 0) != (b != 0))),
                }
            }
            fn divide(_: &mut [Self], _: usize) {
                unreachable!("`supports` rejects means of integers")
            }
            fn supports(op: ReduceOp, name: &'static str) -> Result<(), CommError> {
                match op {
                    ReduceOp::Mean => Err(op.refused(name, Self::NAME)),
                    _ => Ok(()),
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
    fn bits_and_truths_are_those_of_integers() {
        let reduced = |op| reduced(op, vec![0b1100_u8, 0, 7, 0], &[0b1010, 4, 0, 0]);
        assert_eq!(reduced(ReduceOp::And), [0b1000, 0, 0, 0]);
        assert_eq!(reduced(ReduceOp::Or), [0b1110, 4, 7, 0]);
        assert_eq!(reduced(ReduceOp::Xor), [0b0110, 4, 7, 0]);
        assert_eq!(reduced(ReduceOp::LogicalAnd), [1, 0, 0, 0]);
        assert_eq!(reduced(ReduceOp::LogicalOr), [1, 1, 1, 0]);
        assert_eq!(reduced(ReduceOp::LogicalXor), [0, 1, 1, 0]);
        for op in ReduceOp::ALL {
            let of_numbers = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product].contains(&op);
            assert_eq!(f16::supports(op, "scan").is_ok(), of_numbers || op == ReduceOp::Mean, "{op}");
            assert_eq!(i8::supports(op, "scan").is_ok(), op != ReduceOp::Mean, "{op}");
        }
        let refused = f32::supports(ReduceOp::Xor, "scan").unwrap_err().to_string();
        assert_eq!(refused, "scan: xor is not defined for f32");
    }

    #[test]
    fn sixteen_bits_are_rounded_once_a_reduction_to_even() {
        // At 2048, f16 has steps of 2: 2049 is a tie that rounds down to even, 2051 a tie that rounds up to
        // even.
        let a = vec![f16::from_f32(2048.0), f16::from_f32(2050.0)];
        let sum = reduced(ReduceOp::Sum, a, &[f16::ONE, f16::ONE]);
        assert_eq!(sum, [f16::from_f32(2048.0), f16::from_f32(2052.0)]);
        assert_eq!(reduced(ReduceOp::Sum, vec![f16::MAX], &[f16::MAX]), [f16::INFINITY]);
        let mut mean = [bf16::from_f32(7.0)];
        bf16::divide(&mut mean, 2);
        assert_eq!(mean, [bf16::from_f32(3.5)]);
    }
}
