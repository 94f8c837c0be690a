//! Protocols: averages that take several exchanges of buffers. This module does not use the network; a protocol
//! returns each buffer that the caller must average.

mod power_sgd;
mod spec;

use std::fmt::Debug;

use crate::{CompressError, State};

pub use power_sgd::PowerSgd;
pub use spec::ProtocolSpec;

/// A method that averages one stream of matrices in several exchanges. In each exchange the caller averages a
/// buffer over all ranks, and must give the same mean to all ranks.
///
/// A round is prepared by [`Self::end`] and final after [`State::commit`].
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
    /// Returns the number of elements of each buffer that is averaged in a round, in order. It is the same on
    /// all ranks.
    fn exchanges(&self) -> Vec<usize>;

    /// Begins a round with this rank's values.
    ///
    /// Errors: [`CompressError::LengthMismatch`]; [`CompressError::NonFinite`] and [`CompressError::Overflow`]
    /// for values that the method rejects. After an error no round has begun.
    fn begin(&mut self, x: &[f32]) -> Result<(), CompressError>;

    /// Returns the buffer to average next, or `None` if all were averaged.
    fn outgoing(&self) -> Option<&[f32]>;

    /// Takes the mean of the last outgoing buffer over all ranks.
    ///
    /// Errors: [`CompressError::LengthMismatch`]; [`CompressError::Exchange`] if no buffer was outgoing.
    fn incoming(&mut self, mean: &[f32]) -> Result<(), CompressError>;

    /// Writes the approximate mean of all ranks' values. The round is prepared until it is committed.
    ///
    /// Errors: [`CompressError::LengthMismatch`]; [`CompressError::Exchange`] if a buffer is still to be
    /// averaged; [`CompressError::NonFinite`] and [`CompressError::Overflow`] for a mean that is rejected. The
    /// decision may depend only on the averaged buffers, so that all ranks return the same result.
    fn end(&mut self, out: &mut [f32]) -> Result<(), CompressError>;
}

/// The shape of a row-major matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixShape {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
}

/// A named protocol.
struct Row {
    name: &'static str,
    /// Meaning of the number after the name, for help texts.
    argument: &'static str,
    /// Creates the protocol for matrices of a shape. Returns `None` if it would send no fewer values than the
    /// matrix has.
    build: fn(u32, MatrixShape, u64) -> Option<Box<dyn Protocol>>,
}
