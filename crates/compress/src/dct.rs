//! A discrete cosine transform in front of a selection: smooth data within a chunk is concentrated in few
//! coefficients. It does not depend on the tensors' shapes.

use std::convert::Infallible;

use crate::compressor::{LARGE, Memoryless, check_finite, residual_of};
use crate::magnitude::{magnitude, max_magnitude};
use crate::simd::{Kernel, Level};
use crate::threads;
use crate::wire::CodecId;
use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State};

/// Largest side of a chunk.
pub const MAX_SIDE: u32 = 64;
/// Number of bytes before the coefficients' body.
const PREFIX: usize = 4;

/// The orthonormal DCT-II of each chunk of `side * side` consecutive elements, taken as a square, followed by
/// the codec `C`. A last chunk that is not full is not transformed.
///
/// With [`crate::Select::PerChunk`] of the same chunk and [`crate::Sign`] this is `DeMo`'s payload. It adds 4
/// bytes to the payload of `C`. The transform is orthonormal up to rounding, so it keeps the norm of an error.
/// Values are rejected if their transform or its decoded values overflow.
///
/// Source: Peng et al. 2024, "Decoupled Momentum Optimization", section 3. Differs: a square holds consecutive
/// elements, not rows and columns of the tensor.
#[derive(Debug, Clone)]
pub struct Dct<C> {
    inner: C,
    side: usize,
    level: Level,
    threads: usize,
    table: Table,
    coefficients: Vec<f32>,
    sent: Vec<f32>,
}

/// Returns the transform's matrix `A`, row by row, exactly as the wire format defines it. For devices that
/// compute the transform themselves.
#[must_use]
pub fn matrix(side: u32) -> Vec<f32> {
    Table::new(side as usize).forward
}

/// The matrix `cos[k][n]` of one side, and its transpose.
#[derive(Debug, Clone)]
struct Table {
    forward: Vec<f32>,
    inverse: Vec<f32>,
}

impl Table {
    fn new(side: usize) -> Self {
        let mut table = Self { forward: vec![0.0; side * side], inverse: vec![0.0; side * side] };
        for k in 0..side {
            let norm = (if k == 0 { 1.0 } else { 2.0 } / side as f64).sqrt();
            for n in 0..side {
                let value = (norm * cos_quarter((2 * n + 1) * k, side)) as f32;
                table.forward[k * side + n] = value;
                table.inverse[n * side + k] = value;
            }
        }
        table
    }
}

/// Returns `cos(pi m / (2 side))`, computed from its series in plain arithmetic. The bits are the same on every
/// machine, which is not true of library functions.
fn cos_quarter(m: usize, side: usize) -> f64 {
    // Reduces the angle to the first quarter, where the series is short.
    let m = m % (4 * side);
    let m = if m > 2 * side { 4 * side - m } else { m };
    let (m, sign) = if m > side { (2 * side - m, -1.0) } else { (m, 1.0) };
    let angle = std::f64::consts::FRAC_PI_2 * m as f64 / side as f64;
    let (mut term, mut sum) = (1.0, 1.0);
    for i in 1..=14 {
        term *= -angle * angle / f64::from((2 * i - 1) * 2 * i);
        sum += term;
    }
    sign * sum
}

impl<C: Memoryless> Dct<C> {
    /// Creates the codec with chunks of `side * side` elements and `inner` for their coefficients.
    ///
    /// Errors: [`CompressError::BlockSize`] unless `side` is in `1..=MAX_SIDE`.
    pub fn new(side: u32, inner: C) -> Result<Self, CompressError> {
        if !(1..=MAX_SIDE).contains(&side) {
            return Err(CompressError::BlockSize { found: side, max: MAX_SIDE });
        }
        let table = Table::new(side as usize);
        Ok(Self {
            inner,
            side: side as usize,
            level: Level::detect(),
            threads: 1,
            table,
            coefficients: Vec::new(),
            sent: Vec::new(),
        })
    }

    /// Transforms `coefficients`, a copy of `x`, and encodes them into `out`. If `large`, it also checks that
    /// the payload can be decoded.
    fn encode(
        &mut self,
        x: &[f32],
        coefficients: &mut [f32],
        large: bool,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        self.transform(coefficients, false);
        if large && let Some(at) = coefficients.iter().position(|c| !c.is_finite()) {
            let (index, what) = (self.largest_of_square(at, x), "the transform of its square");
            return Err(CompressError::Overflow { index, value: x[index], what });
        }
        let encoded = self.inner.compress(coefficients, key, out);
        encoded.map_err(|error| error.moved(|at| self.largest_of_square(at, x), x))?;
        let inner = out.codec();
        out.wrap(CodecId::DCT, [self.side as u8, inner.0, 0, 0]);
        if large {
            // The coefficients were encoded already, so their buffer can be reused.
            let decoded = self.decompress(out.view(), coefficients);
            return decoded.map_err(|error| match error {
                CompressError::Code { index: at, .. } => {
                    let (index, what) = (self.largest_of_square(at, x), "the decoded value of its square");
                    CompressError::Overflow { index, value: x[index], what }
                }
                error => error,
            });
        }
        Ok(())
    }

    /// Returns the index of the largest magnitude of `x` in the square that contains the element `at`.
    fn largest_of_square(&self, at: usize, x: &[f32]) -> usize {
        let square = self.side * self.side;
        let start = at / square * square;
        let square = &x[start..x.len().min(start + square)];
        let largest = max_magnitude(square);
        let within = square.iter().position(|x| magnitude(*x) == largest);
        start + within.expect("a square has elements")
    }

    fn transform(&self, x: &mut [f32], inverse: bool) {
        let columns = if inverse { &self.table.inverse } else { &self.table.forward };
        let rows = if inverse { &self.table.forward } else { &self.table.inverse };
        let (side, pieces) = (self.side, threads::threads_for(self.threads, x.len()));
        let each = x.len().div_ceil(side * side).div_ceil(pieces).max(1) * side * side;
        let done: Result<(), Infallible> = threads::try_each(x.chunks_mut(each), |x| {
            self.level.run(Transform { x, side, columns, rows });
            Ok(())
        });
        let Ok(()) = done;
    }
}

impl<C: Memoryless> State for Dct<C> {}

impl<C: Memoryless> Memoryless for Dct<C> {
    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        let mut sent = std::mem::take(&mut self.sent);
        let result = residual_of(self, &mut sent, x, e, next, key, out);
        self.sent = sent;
        result
    }
}

impl<C: Memoryless> Compressor for Dct<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        out.clear();
        let large = check_finite(x)? >= LARGE;
        let mut coefficients = std::mem::take(&mut self.coefficients);
        coefficients.clear();
        coefficients.extend_from_slice(x);
        let result = self.encode(x, &mut coefficients, large, key, out);
        self.coefficients = coefficients;
        result.inspect_err(|_| out.clear())
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        let body = p.open(CodecId::DCT, out.len())?;
        let Some((&[side, inner, a, b], rest)) = body.split_first_chunk::<PREFIX>() else {
            let (wanted, found) = (PREFIX as u64, body.len() as u64);
            return Err(CompressError::BodyLength { codec: CodecId::DCT, count: out.len(), wanted, found });
        };
        if usize::from(side) != self.side || (a, b) != (0, 0) {
            return Err(CompressError::Parameter {
                codec: CodecId::DCT,
                wanted: self.side as u8,
                found: side,
            });
        }
        self.inner.decompress(PayloadRef::nested(CodecId(inner), out.len(), rest), out)?;
        self.transform(out, true);
        match out.iter().position(|x| !x.is_finite()) {
            Some(index) => Err(CompressError::Code { index, code: out[index].to_bits() }),
            None => Ok(()),
        }
    }

    fn max_payload(&self, len: usize) -> usize {
        self.inner.max_payload(len).saturating_add(PREFIX)
    }

    fn set_threads(&mut self, threads: usize) {
        self.threads = threads.max(1);
        self.inner.set_threads(threads);
    }
}

/// Kernel: replaces each full square `X` of `x` by `columns X rows`. Sums are in the order of the index,
/// without fused operations.
struct Transform<'a> {
    x: &'a mut [f32],
    side: usize,
    columns: &'a [f32],
    rows: &'a [f32],
}

impl Kernel for Transform<'_> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) {
        let Self { x, side, columns, rows } = self;
        let mut half = [0.0; (MAX_SIDE * MAX_SIDE) as usize];
        for square in x.chunks_exact_mut(side * side) {
            let half = &mut half[..side * side];
            product(columns, square, half, side);
            product(half, rows, square, side);
        }
    }
}

/// Number of rows of a product that are computed together, each with `2 * LANES` columns, so that the sums stay
/// in registers.
const ROWS: usize = 4;
const LANES: usize = 8;

/// Computes `out = a b` for square matrices. Each sum is in the order of the index.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn product(a: &[f32], b: &[f32], out: &mut [f32], side: usize) {
    if !side.is_multiple_of(2 * LANES) {
        for (a, out) in a.chunks_exact(side).zip(out.chunks_exact_mut(side)) {
            out.fill(0.0);
            for (a, b) in a.iter().zip(b.chunks_exact(side)) {
                out.iter_mut().zip(b).for_each(|(out, b)| *out += a * b);
            }
        }
        return;
    }
    for (a, out) in a.chunks_exact(ROWS * side).zip(out.chunks_exact_mut(ROWS * side)) {
        let rows: [&[f32]; ROWS] = std::array::from_fn(|row| &a[row * side..][..side]);
        for column in (0..side).step_by(2 * LANES) {
            let (mut low, mut high) = ([[0.0; LANES]; ROWS], [[0.0; LANES]; ROWS]);
            for (k, b) in b.chunks_exact(side).enumerate() {
                let b = &b[column..][..2 * LANES];
                let b_low: [f32; LANES] = std::array::from_fn(|j| b[j]);
                let b_high: [f32; LANES] = std::array::from_fn(|j| b[LANES + j]);
                for row in 0..ROWS {
                    let a = rows[row][k];
                    low[row] = std::array::from_fn(|j| low[row][j] + a * b_low[j]);
                    high[row] = std::array::from_fn(|j| high[row][j] + a * b_high[j]);
                }
            }
            for ((low, high), out) in low.iter().zip(&high).zip(out.chunks_exact_mut(side)) {
                let (out_low, out_high) = out[column..][..2 * LANES].split_at_mut(LANES);
                out_low.copy_from_slice(low);
                out_high.copy_from_slice(high);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::Philox;

    use super::*;
    use crate::F32;

    #[test]
    fn the_transform_is_that_of_its_definition_and_its_own_inverse_transposed() {
        for side in [1, 2, 3, 8, 16, 20, 64] {
            let dct = Dct::new(side as u32, F32::new()).unwrap();
            let mut x = vec![0.0; side * side + 3];
            Philox::new(1, side as u64).fill_normal(1.0, &mut x);
            let mut y = x.clone();
            dct.transform(&mut y, false);
            let angle = |n: usize, k: usize| {
                let norm = (if k == 0 { 1.0 } else { 2.0 } / side as f64).sqrt();
                norm * (std::f64::consts::PI * (2 * n + 1) as f64 * k as f64 / (2 * side) as f64).cos()
            };
            for (k, l) in [(0, 0), (side - 1, 0), (side / 2, side - 1)] {
                let wanted: f64 =
                    (0..side * side).map(|i| f64::from(x[i]) * angle(i / side, k) * angle(i % side, l)).sum();
                assert!((f64::from(y[k * side + l]) - wanted).abs() < 1e-5, "{side} {k} {l}");
            }
            dct.transform(&mut y, true);
            assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 1e-5));
            assert_eq!(x[side * side..], y[side * side..]);
        }
    }

    /// The checksum was computed by an independent program that follows `WIRE.md`.
    #[test]
    fn the_matrices_are_those_of_the_wire_format() {
        let mut crc = crc32fast::Hasher::new();
        for value in (1..=MAX_SIDE).flat_map(matrix) {
            crc.update(&value.to_le_bytes());
        }
        assert_eq!(crc.finalize(), 0x548c_9508);
    }

    #[test]
    fn what_is_smooth_needs_few_coefficients() {
        let x: Vec<f32> =
            (0..4096).map(|i| ((i / 64) as f32 * 0.05).cos() + (i % 64) as f32 * 0.02).collect();
        let top =
            |k| crate::Sparse::new(crate::Select::PerChunk { chunk: 4096, kept: k }, F32::new()).unwrap();
        let error = |codec: &mut dyn Compressor| {
            let (mut payload, mut out) = (Payload::new(), vec![0.0; x.len()]);
            codec.compress(&x, RoundKey::default(), &mut payload).unwrap();
            codec.decompress(payload.view(), &mut out).unwrap();
            x.iter().zip(&out).map(|(x, o)| (x - o).powi(2)).sum::<f32>()
        };
        assert!(error(&mut Dct::new(64, top(32)).unwrap()) < 1e-3 * error(&mut top(32)));
    }
}
