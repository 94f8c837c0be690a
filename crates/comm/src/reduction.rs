//! What a collective reduces by: an operation that is built in, or one of the user's own.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::CommError;
use crate::element::{Element, First, ReduceOp, each};

/// Reduces a slice into another.
type Combine<T> = dyn Fn(&mut [T], &[T], First) + Send + Sync;

/// A reduction of the user's own (`MPI_Op_create`): an associative function of two elements.
///
/// The first argument is of the lower ranks: unless the reduction was [made](Self::commutative) as one that
/// commutes, the order of ranks is kept, whatever the algorithm. All ranks pass the same function under the
/// same name; a name that differs is an error on all of them. One that panics fails the collective on all
/// ranks.
///
/// Values of several numbers are arrays. The product of 2 x 2 matrices, which does not commute, over all ranks:
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
    /// An associative function. The order of ranks is kept.
    #[must_use]
    pub fn new(name: &'static str, f: impl Fn(T, T) -> T + Send + Sync + 'static) -> Self {
        let combine = move |into: &mut [T], x: &[T], first| each(into, x, first, &f);
        Self { name, commutes: false, combine: Arc::new(combine) }
    }

    /// An associative function that gives the same with its arguments exchanged. It goes by the communicator's
    /// algorithm, in whose order ranks are.
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

/// How a collective reduces elements: a [`ReduceOp`] or a [`UserOp`], of which it is made by `into`.
#[derive(Debug, Clone)]
pub enum Reduction<T> {
    /// One that is built in.
    BuiltIn(ReduceOp),
    /// One of the user's own.
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
    /// Whether the result is the same in any order of the ranks, to rounding.
    pub(crate) const fn commutes(&self) -> bool {
        match self {
            Self::BuiltIn(_) => true,
            Self::User(op) => op.commutes,
        }
    }

    /// Whether the sum is divided by the number of ranks.
    pub(crate) const fn is_mean(&self) -> bool {
        matches!(self, Self::BuiltIn(ReduceOp::Mean))
    }

    /// What ranks compare of it.
    pub(crate) fn facts(&self) -> Vec<u8> {
        match self {
            Self::BuiltIn(op) => vec![*op as u8],
            Self::User(op) => [&[u8::MAX, u8::from(op.commutes)], op.name.as_bytes()].concat(),
        }
    }

    /// Whether the elements have it.
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
                // What it had reduced by then is dropped with the failed collective.
                catch_unwind(AssertUnwindSafe(|| (op.combine)(into, x, first)))
                    .map_err(|_| CommError::ReductionPanicked { op: collective, reduction: op.name })?;
            }
        }
        Ok(())
    }
}
