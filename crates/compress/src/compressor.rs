//! The [`Compressor`] trait: a codec encodes `f32` vectors into bytes and decodes them, and may keep state
//! between calls. This module does not depend on transports, tensors or threads.

use std::fmt::Debug;

use crate::magnitude::{INFINITE, max_magnitude, sum};
use crate::simd::{Kernel, Level};
use crate::values::Values;
use crate::{CompressError, Payload, PayloadRef, RoundKey, State};

/// Encodes vectors of `f32` into bytes and decodes them again.
///
/// Tests check these laws for every codec: `decompress` of what `compress` wrote gives finite values within the
/// codec's stated bound; a codec of fixed rate writes exactly `max_payload` bytes, and no codec writes more;
/// the same input gives the same bytes on every machine. Use one codec value for each stream of vectors (one
/// bucket, one shard), since a codec with memory keeps the residual of that stream.
pub trait Compressor: State + Debug + Send + Sync {
    /// Encodes `x` (`[n]`) into `out`.
    ///
    /// Errors: [`CompressError::NonFinite`] (lossy codecs); [`CompressError::Overflow`] for finite values that
    /// [`Self::decompress`] could not return as finite values; [`CompressError::LengthChanged`] (codecs with
    /// memory). After an error `out` is empty and the codec's memory is unchanged.
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError>;

    /// Decodes the untrusted payload `p` into all of `out` (`[n]`).
    ///
    /// Errors: [`CompressError::WrongCodec`], [`CompressError::CountMismatch`], [`CompressError::BodyLength`],
    /// and the errors for values that no encoder writes. After an error the contents of `out` are unspecified.
    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError>;

    /// Returns the largest size in bytes of a payload of `len` elements, header included, or `usize::MAX` if
    /// that does not fit in memory.
    fn max_payload(&self, len: usize) -> usize;

    /// Sets the largest number of threads that the codec may use for a long vector (0 counts as 1). Threads are
    /// started in each call, and the bytes do not depend on their number. The default does nothing: the codec
    /// runs on the caller's thread.
    fn set_threads(&mut self, threads: usize) {
        let _ = threads;
    }
}

/// A codec without memory between calls. Only such codecs can be nested in a selection or wrapped in error
/// feedback.
///
/// A codec with error feedback is not `Memoryless`: a second feedback around it would count every residual
/// twice, and `Sparse::new(select, ErrorFeedback::new(..))` would add the residual of one selection to the next
/// selection, which has other elements. Neither compiles. Write `ErrorFeedback::new(Sparse::new(select, ..)?)`
/// instead.
///
/// ```compile_fail
/// use farflung_compress::{Amount, ErrorFeedback, F16, Select, Sparse};
///
/// let wrong = Sparse::new(Select::Largest(Amount::count(10)), ErrorFeedback::new(F16::new()));
/// ```
///
/// ```compile_fail
/// use farflung_compress::{Compressor, ErrorFeedback, F16};
///
/// let wrong: Box<dyn Compressor> = Box::new(ErrorFeedback::new(ErrorFeedback::new(F16::new())));
/// ```
pub trait Memoryless: Compressor {
    /// Encodes `v = x + e` into `out` and writes the compression error `v - D(C(v))` to `next`. All vectors are
    /// `[n]`.
    ///
    /// `e` is only read, so it is unchanged after an error. The default implementation makes three passes and
    /// allocates a buffer; most codecs do it in one fused pass.
    ///
    /// Errors: those of [`Compressor::compress`], [`CompressError::LengthMismatch`],
    /// [`CompressError::NonFinite`] (every codec), and [`CompressError::Overflow`] if a compression error is
    /// not finite. After an error `out` is empty and the contents of `next` are unspecified.
    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        residual_of(self, &mut Vec::new(), x, e, next, key, out)
    }
}

impl<C: Memoryless + ?Sized> Memoryless for Box<C> {
    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        (**self).compress_residual(x, e, next, key, out)
    }
}

impl<C: Compressor + ?Sized> Compressor for Box<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        (**self).compress(x, key, out)
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        (**self).decompress(p, out)
    }

    fn max_payload(&self, len: usize) -> usize {
        (**self).max_payload(len)
    }

    fn set_threads(&mut self, threads: usize) {
        (**self).set_threads(threads);
    }
}

/// Implements [`Memoryless::compress_residual`] by `compress` and `decompress`. `sent` is scratch memory for
/// the decoded values.
pub(crate) fn residual_of<C: Compressor + ?Sized>(
    codec: &mut C,
    sent: &mut Vec<f32>,
    x: &[f32],
    e: &[f32],
    next: &mut [f32],
    key: RoundKey,
    out: &mut Payload,
) -> Result<(), CompressError> {
    let largest = add(x, e, next, out)?;
    codec.compress(next, key, out)?;
    sent.resize(next.len(), 0.0);
    codec.decompress(out.view(), sent).inspect_err(|_| out.clear())?;
    for (next, sent) in next.iter_mut().zip(sent) {
        *next -= *sent;
    }
    check_errors(largest, x, e, next, out)
}

/// The bits of `2^32`. If all magnitudes are below this, the decoded values and the compression errors are
/// finite.
///
/// QSGD multiplies the largest magnitude by at most `2^10`, a transform by `2^6`, its inverse by `2^6` again,
/// and an unbiased mask by `2^32`, so three stages stay below `2^128`. Only vectors with larger values are
/// checked again after encoding.
pub(crate) const LARGE: i32 = (127 + 32) << 23;

/// Writes `next = x + e` and returns the bits of the largest magnitude, as [`max_magnitude`] does. Codecs that
/// do not fuse the addition begin with it.
///
/// If it fails, `out` is empty.
pub(crate) fn add(x: &[f32], e: &[f32], next: &mut [f32], out: &mut Payload) -> Result<i32, CompressError> {
    check_lengths(x, e, next).inspect_err(|_| out.clear())?;
    let largest = Level::detect().run(Add { x, e, next });
    if largest >= INFINITE {
        out.clear();
        return Err(first_non_finite(next));
    }
    Ok(largest)
}

/// Checks that the compression errors in `next` are finite. `largest` holds the bits of the largest magnitude
/// of `x + e`.
///
/// If it fails, `out` is empty.
pub(crate) fn check_errors(
    largest: i32,
    x: &[f32],
    e: &[f32],
    next: &mut [f32],
    out: &mut Payload,
) -> Result<(), CompressError> {
    if largest < LARGE || check_finite(next).is_ok() {
        return Ok(());
    }
    out.clear();
    Err(Values::Feedback { x, e, next }.value_error(0))
}

/// Returns the error for the first element that is not finite. Panics if all are finite.
pub(crate) fn first_non_finite(x: &[f32]) -> CompressError {
    let index = x.iter().position(|x| !x.is_finite()).expect("the caller found a value that is not finite");
    CompressError::NonFinite { index, value: x[index] }
}

/// Checks that all elements are finite, and returns the bits of the largest magnitude, as [`max_magnitude`]
/// does.
pub(crate) fn check_finite(x: &[f32]) -> Result<i32, CompressError> {
    let largest = Level::detect().run(Largest(x));
    if largest >= INFINITE { Err(first_non_finite(x)) } else { Ok(largest) }
}

/// Kernel: writes `next = x + e` and returns the bits of the largest magnitude.
struct Add<'a> {
    x: &'a [f32],
    e: &'a [f32],
    next: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Output = i32;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> i32 {
        sum(self.x, self.e, self.next)
    }
}

/// Kernel: returns the bits of the largest magnitude.
struct Largest<'a>(&'a [f32]);

impl Kernel for Largest<'_> {
    type Output = i32;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> i32 {
        max_magnitude(self.0)
    }
}

/// Checks that the vectors of one call have the same length.
pub(crate) fn check_lengths(x: &[f32], e: &[f32], next: &[f32]) -> Result<(), CompressError> {
    for (what, found) in [("the residual", e.len()), ("the next residual", next.len())] {
        if found != x.len() {
            return Err(CompressError::LengthMismatch { what, wanted: x.len(), found });
        }
    }
    Ok(())
}
