//! What every codec is: a function from `f32` to bytes and back, with its memory beside it. Knows no transport,
//! no tensor, no threads.

use std::fmt::Debug;

use crate::magnitude::{INFINITE, max_magnitude, sum};
use crate::simd::{Kernel, Level};
use crate::values::Values;
use crate::{CompressError, Payload, PayloadRef, RoundKey, State};

/// A codec.
///
/// Laws, tested over all of them: `decompress` of what `compress` made gives finite values within the codec's
/// stated bound; the payload has exactly `max_payload` bytes for a codec of fixed rate, never more for any; the
/// same input gives the same bytes on every machine. One codec value serves one stream of vectors (one bucket,
/// one shard): a codec with memory remembers that stream's residual.
pub trait Compressor: State + Debug + Send + Sync {
    /// Encodes `x` (`[n]`) into `out`.
    ///
    /// Errors: [`CompressError::NonFinite`] (lossy codecs); [`CompressError::Overflow`] for finite values that
    /// [`Self::decompress`] would not give back as finite ones; [`CompressError::LengthChanged`] (codecs with
    /// memory). Then `out` is empty and the codec's memory is as it was.
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError>;

    /// Decodes `p`, which is untrusted, into all of `out` (`[n]`).
    ///
    /// Errors: [`CompressError::WrongCodec`], [`CompressError::CountMismatch`], [`CompressError::BodyLength`],
    /// and those that name a value which no encoder writes. Then `out` is unspecified.
    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError>;

    /// The most bytes that the payload of `len` elements can have, header included (`usize::MAX` if it would
    /// not fit in memory).
    fn max_payload(&self, len: usize) -> usize;

    /// Lets the codec use up to so many threads (0 counts as 1) where a vector is long enough. They are started
    /// in each call, and the bytes are the same for any number. A codec that does not say so works on the
    /// caller's thread.
    fn set_threads(&mut self, threads: usize) {
        let _ = threads;
    }
}

/// A codec that remembers nothing between calls, so that another codec may choose anew each time what it gets,
/// and feedback can stand around it.
///
/// Feedback is not memoryless: around feedback it would count every residual twice, and `Sparse::new(select,
/// ErrorFeedback::new(..))` would add the residual of one selection to the next. Neither compiles.
/// `ErrorFeedback::new(Sparse::new(select, ..)?)` is what is meant.
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
    /// Encodes `v = x + e` into `out` and writes what the payload lost, `v - D(C(v))`, to `next`. All are
    /// `[n]`.
    ///
    /// `e` is only read, so a failure leaves it as it was. The default makes three passes and a buffer; codecs
    /// fuse it into one pass.
    ///
    /// Errors: those of [`Compressor::compress`], [`CompressError::LengthMismatch`],
    /// [`CompressError::NonFinite`] for any codec, and [`CompressError::Overflow`] if what is lost of a value
    /// is not finite. Then `out` is empty and `next` is unspecified.
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

/// [`Memoryless::compress_residual`] for any codec, by its two other functions; `sent` is only memory.
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
    check_lost(largest, x, e, next, out)
}

/// The bits of `2^32`: what codecs make of vectors whose magnitudes are below this is finite, and so is what
/// they lose.
///
/// Of the largest magnitude, QSGD makes `2^10` times as much at most, a transform `2^6` times, its inverse as
/// much again, an unbiased mask `2^32` times: three stages stay below `2^128`. So only larger vectors are
/// looked at again after they were encoded.
pub(crate) const LARGE: i32 = (127 + 32) << 23;

/// `next = x + e`: how every residual begins that is not fused. The largest magnitude, as [`max_magnitude`]
/// gives it. If it fails, `out` is empty.
pub(crate) fn add(x: &[f32], e: &[f32], next: &mut [f32], out: &mut Payload) -> Result<i32, CompressError> {
    check_lengths(x, e, next).inspect_err(|_| out.clear())?;
    let largest = Level::detect().run(Add { x, e, next });
    if largest >= INFINITE {
        out.clear();
        return Err(first_non_finite(next));
    }
    Ok(largest)
}

/// Refuses what is lost of sums `x + e`, whose largest magnitude is given, if it is not finite. If it fails,
/// `out` is empty.
pub(crate) fn check_lost(
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
    Err(Values::Feedback { x, e, next }.refusal(0))
}

/// The error for vectors in which something is not finite.
pub(crate) fn first_non_finite(x: &[f32]) -> CompressError {
    let index = x.iter().position(|x| !x.is_finite()).expect("the caller saw one");
    CompressError::NonFinite { index, value: x[index] }
}

/// Refuses vectors that are not finite; the largest magnitude, as [`max_magnitude`] gives it.
pub(crate) fn check_finite(x: &[f32]) -> Result<i32, CompressError> {
    let largest = Level::detect().run(Largest(x));
    if largest >= INFINITE { Err(first_non_finite(x)) } else { Ok(largest) }
}

/// `next = x + e`; the largest magnitude.
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

/// The largest magnitude.
struct Largest<'a>(&'a [f32]);

impl Kernel for Largest<'_> {
    type Output = i32;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> i32 {
        max_magnitude(self.0)
    }
}

/// Refuses vectors of different lengths in one call.
pub(crate) fn check_lengths(x: &[f32], e: &[f32], next: &[f32]) -> Result<(), CompressError> {
    for (what, found) in [("the residual", e.len()), ("the next residual", next.len())] {
        if found != x.len() {
            return Err(CompressError::LengthMismatch { what, wanted: x.len(), found });
        }
    }
    Ok(())
}
