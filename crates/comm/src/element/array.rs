//! Arrays as elements, for example a matrix, a complex number, or a count with its mean.

use super::{Element, First, ReduceOp, sealed};
use crate::CommError;

impl<T: Element, const N: usize> sealed::Sealed for [T; N] {}

/// An array is reduced number by number. Messages never split an array, so a [`UserOp`](crate::UserOp) sees it
/// whole. An array has at most [`FRAME_BYTES`](crate::FRAME_BYTES) bytes.
impl<T: Element, const N: usize> Element for [T; N]
where
    Self: bytemuck::Pod,
{
    const NAME: &'static str = T::NAME;
    const CODE: u8 = T::CODE;
    const WIDTH: usize = {
        assert!(
            size_of::<T>() * N > 0 && size_of::<T>() * N <= crate::FRAME_BYTES,
            "an array has at least 1 byte and at most `FRAME_BYTES`"
        );
        T::WIDTH * N
    };
    const INVALID: Self = [T::INVALID; N];

    fn reduce(op: ReduceOp, into: &mut [Self], x: &[Self], first: First) {
        T::reduce(op, into.as_flattened_mut(), x.as_flattened(), first);
    }
    fn divide(x: &mut [Self], n: usize) {
        T::divide(x.as_flattened_mut(), n);
    }
    fn supports(op: ReduceOp, name: &'static str) -> Result<(), CommError> {
        T::supports(op, name)
    }
}
