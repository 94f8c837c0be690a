//! A value with its location: the element type of `MPI_MINLOC` and `MPI_MAXLOC`.

use super::{Element, First, ReduceOp, each, sealed};
use crate::CommError;

/// A value and its place: a rank, or an index of the caller's.
///
/// [`ReduceOp::Max`] and [`ReduceOp::Min`] return the greatest or least value, and the lowest place with this
/// value. If any value is NaN, the result is NaN with the lowest place of a NaN. Implemented for f32, i32 and
/// u32 with places of u32, and for f64, i64 and u64 with places of u64.
///
/// ```
/// use farflung_comm::{Communicator, Located, ReduceOp, memory};
///
/// let ranks = memory::cluster(3).into_iter().map(|transport| {
///     std::thread::spawn(move || {
///         let comm = Communicator::new(transport);
///         let loss = [0.7_f32, 0.2, 0.4][comm.rank().index()];
///         let mut best = [Located { value: loss, place: comm.rank().0 }];
///         comm.all_reduce(&mut best, ReduceOp::Min).map(|()| best[0])
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().unwrap()?, Located { value: 0.2, place: 1 });
/// }
/// # Ok::<(), farflung_comm::CommError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Located<V, P> {
    /// The value.
    pub value: V,
    /// Place of the value.
    pub place: P,
}

/// `$is_nan` checks whether a value is NaN.
macro_rules! located {
    ($value:ident, $place:ident, $code:literal, $name:literal, $is_nan:expr) => {
        const _: () = assert!(
            size_of::<$value>() == size_of::<$place>(),
            "value and place have the same size, so that there is no padding"
        );

        #[expect(unsafe_code, reason = "bytemuck cannot derive its traits for generic types")]
        // SAFETY: Two numbers of one size and alignment: all bit patterns of both are values.
        unsafe impl bytemuck::Zeroable for Located<$value, $place> {}
        #[expect(unsafe_code, reason = "bytemuck cannot derive its traits for generic types")]
        // SAFETY: Two numbers of one size and alignment in the layout of C: no padding, and all bit patterns
        // are values.
        unsafe impl bytemuck::Pod for Located<$value, $place> {}

        impl sealed::Sealed for Located<$value, $place> {}
        impl Element for Located<$value, $place> {
            const NAME: &'static str = $name;
            const CODE: u8 = $code;
            const INVALID: Self = Self { value: $value::INVALID, place: $place::MAX };

            fn reduce(op: ReduceOp, into: &mut [Self], x: &[Self], first: First) {
                let is_nan = $is_nan;
                let wins = |a: $value, b: $value| match op {
                    ReduceOp::Max => a > b,
                    ReduceOp::Min => a < b,
                    _ => unreachable!("`supports` rejects all reductions except max and min"),
                };
                each(into, x, first, |a, b| match (is_nan(a.value), is_nan(b.value)) {
                    (true, false) => a,
                    (false, true) => b,
                    (false, false) if wins(a.value, b.value) => a,
                    (false, false) if wins(b.value, a.value) => b,
                    _ if b.place < a.place => b,
                    _ => a,
                });
            }
            fn divide(_: &mut [Self], _: usize) {
                unreachable!("`supports` rejects means of located values")
            }
            fn supports(op: ReduceOp, name: &'static str) -> Result<(), CommError> {
                match op {
                    ReduceOp::Max | ReduceOp::Min => Ok(()),
                    other => Err(other.refused(name, Self::NAME)),
                }
            }
        }
    };
}
located!(f32, u32, 13, "located f32", |v: f32| v.is_nan());
located!(f64, u64, 14, "located f64", |v: f64| v.is_nan());
located!(i32, u32, 15, "located i32", |_| false);
located!(i64, u64, 16, "located i64", |_| false);
located!(u32, u32, 17, "located u32", |_| false);
located!(u64, u64, 18, "located u64", |_| false);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_place_of_the_best_value_is_told_and_a_nan_wins() {
        let at = |value: f32, place| Located { value, place };
        let one = |op, a: Located<f32, u32>, b: Located<f32, u32>| {
            let mut into = [a];
            Element::reduce(op, &mut into, &[b], First::Into);
            let mut back = [b];
            Element::reduce(op, &mut back, &[a], First::Into);
            assert_eq!((into[0].place, into[0].value.to_bits()), (back[0].place, back[0].value.to_bits()));
            into[0]
        };
        assert_eq!(one(ReduceOp::Max, at(1.0, 4), at(2.0, 7)), at(2.0, 7));
        assert_eq!(one(ReduceOp::Min, at(1.0, 4), at(2.0, 7)), at(1.0, 4));
        assert_eq!(one(ReduceOp::Min, at(1.0, 4), at(1.0, 3)), at(1.0, 3));
        assert_eq!(one(ReduceOp::Max, at(f32::NAN, 9), at(f32::INFINITY, 3)).place, 9);
        assert_eq!(one(ReduceOp::Min, at(f32::NAN, 9), at(f32::NAN, 3)).place, 3);
        let refused = Located::<u64, u64>::supports(ReduceOp::Sum, "reduce").unwrap_err().to_string();
        assert_eq!(refused, "reduce: sum is not defined for located u64");
    }
}
