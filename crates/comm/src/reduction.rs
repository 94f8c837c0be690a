//! The operation of a collective: built in, or defined by the user.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::CommError;
use crate::element::{Element, First, ReduceOp, each};

/// Reduces the second slice into the first.
type Combine<T> = dyn Fn(&mut [T], &[T], First) + Send + Sync;

/// A user-defined reduction (`MPI_Op_create`): an associative function of two elements.
///
/// The first argument comes from the lower ranks. The order of ranks is kept by every algorithm, unless the
/// reduction was made with [`UserOp::commutative`]. All ranks must pass the same function under the same name;
/// different names are an error on all ranks. If the function panics, the collective fails on all ranks.
///
/// An element of several numbers is an array. Example: the product over all ranks of 2 x 2 matrices, which does
/// not commute.
///
/// ```
/// use farflung_comm::{Communicator, UserOp, memory};
///
/// let ranks = memory::cluster(3).into_iter().map(|transport| {
///     std::thread::spawn(move || {
///         let comm = Communicator::new(transport);
///         let product = UserOp::new("2 x 2 product", |[a, b, c, d]: [u64; 4], [e, f, g, h]| {
///             [a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h]
///         });
///         let mut matrix = [[[1, 1, 0, 1], [1, 0, 1, 1], [2, 0, 0, 1]][comm.rank().index()]];
///         comm.all_reduce(&mut matrix, &product).map(|()| matrix[0])
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().unwrap()?, [4, 1, 2, 1]);
/// }
/// # Ok::<(), farflung_comm::CommError>(())
/// ```
pub struct UserOp<T> {
    name: &'static str,
    commutes: bool,
    combine: Arc<Combine<T>>,
}

impl<T: Element> UserOp<T> {
    /// Creates a reduction from an associative function. The order of ranks is kept.
    #[must_use]
    pub fn new(name: &'static str, f: impl Fn(T, T) -> T + Send + Sync + 'static) -> Self {
        let combine = move |into: &mut [T], x: &[T], first| each(into, x, first, &f);
        Self { name, commutes: false, combine: Arc::new(combine) }
    }

    /// Creates a reduction from an associative and commutative function. It runs by the communicator's
    /// algorithm, which may reduce ranks in another order.
    #[must_use]
    pub fn commutative(name: &'static str, f: impl Fn(T, T) -> T + Send + Sync + 'static) -> Self {
        Self { commutes: true, ..Self::new(name, f) }
    }
}

impl<T> Clone for UserOp<T> {
    fn clone(&self) -> Self {
        Self { combine: Arc::clone(&self.combine), ..*self }
    }
}

impl<T> fmt::Debug for UserOp<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, commutes, .. } = self;
        f.debug_struct("UserOp").field("name", name).field("commutes", commutes).finish_non_exhaustive()
    }
}

/// How a collective reduces elements. A [`ReduceOp`] or a [`UserOp`] converts to it by `into`.
#[derive(Debug, Clone)]
pub enum Reduction<T> {
    /// A built-in reduction.
    BuiltIn(ReduceOp),
    /// A user-defined reduction.
    User(UserOp<T>),
}

impl<T> From<ReduceOp> for Reduction<T> {
    fn from(op: ReduceOp) -> Self {
        Self::BuiltIn(op)
    }
}

impl<T> From<UserOp<T>> for Reduction<T> {
    fn from(op: UserOp<T>) -> Self {
        Self::User(op)
    }
}

impl<T> From<&UserOp<T>> for Reduction<T> {
    fn from(op: &UserOp<T>) -> Self {
        Self::User(op.clone())
    }
}

impl<T: Element> Reduction<T> {
    /// Returns whether the order of ranks does not matter, up to rounding.
    pub(crate) const fn commutes(&self) -> bool {
        match self {
            Self::BuiltIn(_) => true,
            Self::User(op) => op.commutes,
        }
    }

    /// Returns whether the sum is divided by the number of ranks.
    pub(crate) const fn is_mean(&self) -> bool {
        matches!(self, Self::BuiltIn(ReduceOp::Mean))
    }

    /// Returns the bytes that ranks compare to check that they use the same reduction.
    pub(crate) fn facts(&self) -> Vec<u8> {
        match self {
            Self::BuiltIn(op) => vec![*op as u8],
            Self::User(op) => [&[u8::MAX, u8::from(op.commutes)], op.name.as_bytes()].concat(),
        }
    }

    /// Returns an error if the element type does not support the reduction.
    pub(crate) fn is_defined(&self, collective: &'static str) -> Result<(), CommError> {
        match self {
            Self::BuiltIn(op) => T::supports(*op, collective),
            Self::User(_) => Ok(()),
        }
    }

    /// Reduces `x` into `into`.
    pub(crate) fn reduce(
        &self,
        collective: &'static str,
        into: &mut [T],
        x: &[T],
        first: First,
    ) -> Result<(), CommError> {
        match self {
            Self::BuiltIn(op) => T::reduce(*op, into, x, first),
            Self::User(op) => {
                // The collective fails, so the partly reduced values are not used.
                catch_unwind(AssertUnwindSafe(|| (op.combine)(into, x, first)))
                    .map_err(|_| CommError::ReductionPanicked { op: collective, reduction: op.name })?;
            }
        }
        Ok(())
    }
}
