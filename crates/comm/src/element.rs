//! The types that can be reduced, and how. Loops over slices; it knows no frames.

use std::fmt::Debug;

use crate::CommError;

/// How the ranks' values become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum, in the order of the algorithm; integers wrap.
    Sum,
    /// The sum divided by the number of ranks.
    Mean,
    /// The greatest; a NaN wins.
    Max,
    /// The least; a NaN wins.
    Min,
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for u64 {}
}

/// A type that collectives carry: `f32`, `f64`, `u64`.
pub trait Element: bytemuck::Pod + PartialEq + Debug + Send + Sync + sealed::Sealed {
    /// Its name in errors.
    const NAME: &'static str;
    /// Its number in the check word of frames.
    const CODE: u8;
    /// What a slice is filled with when a collective over it failed.
    const INVALID: Self;

    /// Reduces `x` into `into`.
    #[doc(hidden)]
    fn reduce(op: ReduceOp, into: &mut [Self], x: &[Self]);

    /// Divides by the number of ranks.
    #[doc(hidden)]
    fn divide(x: &mut [Self], n: usize);

    /// Whether the operation exists.
    #[doc(hidden)]
    fn supports(op: ReduceOp, name: &'static str) -> Result<(), CommError>;
}

macro_rules! float {
    ($t:ident, $code:literal) => {
        impl Element for $t {
            const NAME: &'static str = stringify!($t);
            const CODE: u8 = $code;
            const INVALID: Self = Self::NAN;

            fn reduce(op: ReduceOp, into: &mut [Self], x: &[Self]) {
                let pairs = into.iter_mut().zip(x);
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => pairs.for_each(|(a, b)| *a += b),
                    ReduceOp::Max => {
                        pairs.for_each(|(a, b)| *a = if a.is_nan() || *a > *b { *a } else { *b })
                    }
                    ReduceOp::Min => {
                        pairs.for_each(|(a, b)| *a = if a.is_nan() || *a < *b { *a } else { *b })
                    }
                }
            }
            fn divide(x: &mut [Self], n: usize) {
                let n = n as $t;
                for x in x {
                    *x /= n;
                }
            }
            fn supports(_: ReduceOp, _: &'static str) -> Result<(), CommError> {
                Ok(())
            }
        }
    };
}
float!(f32, 1);
float!(f64, 2);

impl Element for u64 {
    const NAME: &'static str = "u64";
    const CODE: u8 = 3;
    const INVALID: Self = Self::MAX;

    fn reduce(op: ReduceOp, into: &mut [Self], x: &[Self]) {
        let pairs = into.iter_mut().zip(x);
        match op {
            ReduceOp::Sum | ReduceOp::Mean => pairs.for_each(|(a, b)| *a = a.wrapping_add(*b)),
            ReduceOp::Max => pairs.for_each(|(a, b)| *a = (*a).max(*b)),
            ReduceOp::Min => pairs.for_each(|(a, b)| *a = (*a).min(*b)),
        }
    }
    fn divide(_: &mut [Self], _: usize) {
        unreachable!("`supports` refuses means of integers")
    }
    fn supports(op: ReduceOp, name: &'static str) -> Result<(), CommError> {
        match op {
            ReduceOp::Mean => Err(CommError::Unsupported { op: name, element: Self::NAME }),
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Min => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Element>(op: ReduceOp, mut a: Vec<T>, b: &[T]) -> Vec<T> {
        T::reduce(op, &mut a, b);
        a
    }

    #[test]
    fn a_nan_wins_and_integers_wrap() {
        for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum] {
            let got = reduced(op, vec![f32::NAN, 1.0], &[1.0, f32::NAN]);
            assert!(got.iter().all(|v| v.is_nan()), "{op:?}");
        }
        assert_eq!(reduced(ReduceOp::Max, vec![1.0, -3.0], &[2.0_f64, -4.0]), [2.0, -3.0]);
        assert_eq!(reduced(ReduceOp::Min, vec![1.0, -3.0], &[2.0_f64, -4.0]), [1.0, -4.0]);
        assert_eq!(reduced(ReduceOp::Sum, vec![u64::MAX], &[3]), [2]);
        assert!(u64::supports(ReduceOp::Mean, "all_reduce").is_err());
    }
}
