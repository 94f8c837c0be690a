//! Averages by several exchanges of values. Knows no network: a protocol says what is to be averaged, and
//! waits.

mod power_sgd;
mod spec;

use std::fmt::Debug;

use crate::{CompressError, State};

pub use power_sgd::PowerSgd;
pub use spec::ProtocolSpec;

/// A method of several exchanges for one stream of matrices. Between two of them the caller averages a buffer
/// over all ranks, which must hold equal means afterwards.
///
/// A round is prepared by [`Self::end`] and final with [`State::commit`].
///
/// ```
/// use farflung_compress::{PowerSgd, Protocol, State};
///
/// let mut method = PowerSgd::new(3, 2, 1, 7)?;
/// let (gradient, mut mean) = ([2.0, 4.0, 1.0, 2.0, -1.0, -2.0], [0.0; 6]);
/// method.begin(&gradient)?;
/// while let Some(buffer) = method.outgoing() {
///     let averaged = buffer.to_vec(); // comm.all_reduce(&mut averaged, ReduceOp::Mean)
///     method.incoming(&averaged)?;
/// }
/// method.end(&mut mean)?;
/// method.commit();
/// // A matrix of rank one comes back whole.
/// assert!(mean.iter().zip(gradient).all(|(m, g)| (m - g).abs() < 1e-5));
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
pub trait Protocol: State + Debug + Send + Sync {
    /// Elements of the buffers that are averaged in a round, in their order: the same on all ranks.
    fn exchanges(&self) -> Vec<usize>;

    /// Begins with this rank's values.
    ///
    /// Errors: [`CompressError::LengthMismatch`]; [`CompressError::NonFinite`] and [`CompressError::Overflow`]
    /// for values that the method refuses. Then nothing has begun.
    fn begin(&mut self, x: &[f32]) -> Result<(), CompressError>;

    /// What is to be averaged next; `None` when there is no more.
    fn outgoing(&self) -> Option<&[f32]>;

    /// Takes the mean of what was outgoing on all ranks.
    ///
    /// Errors: [`CompressError::LengthMismatch`]; [`CompressError::Exchange`] if nothing was outgoing.
    fn incoming(&mut self, mean: &[f32]) -> Result<(), CompressError>;

    /// Writes the mean of all ranks' values, as far as the method carried it. Prepared, until it is committed.
    ///
    /// Errors: [`CompressError::LengthMismatch`]; [`CompressError::Exchange`] if there is more to be averaged;
    /// [`CompressError::NonFinite`] and [`CompressError::Overflow`] for a mean that is refused: on all ranks
    /// alike, so it may depend on nothing but what came in.
    fn end(&mut self, out: &mut [f32]) -> Result<(), CompressError>;
}

/// The shape of a matrix, whose values lie row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixShape {
    /// Rows.
    pub rows: usize,
    /// Values of a row.
    pub columns: usize,
}

/// A protocol that has a name.
struct Row {
    name: &'static str,
    /// What its number is, for help texts.
    argument: &'static str,
    /// A protocol for matrices of a shape; `None` where it would send no less than the matrix itself.
    build: fn(u32, MatrixShape, u64) -> Option<Box<dyn Protocol>>,
}
