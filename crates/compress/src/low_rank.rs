//! Products of a matrix, or of its transpose, with a few vectors. The matrix is read once for all vectors, and
//! every sum has a fixed order.

use crate::magnitude::{magnitude, max_magnitude};
use crate::simd::{Kernel, Level};
use crate::staging::StagingBuffer;

/// Number of columns that are processed together. Their part of a few rows and vectors fits in the first-level
/// cache.
const COLUMNS: usize = 512;

/// Number of partial sums of a dot product.
const LANES: usize = 16;

/// The matrix `P Q^T`. `p` is `[rank, rows]` and `q` is `[rank, columns]`, row-major. The product is zero if
/// `p` is empty.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) p: &'a [f32],
    pub(crate) q: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Product<'_> {
    /// Writes the elements of row `i`, beginning at the column `start`.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn write(self, i: usize, start: usize, out: &mut [f32]) {
        let Self { p, q, rows, columns } = self;
        let (vectors, len) = (p.len() / rows, out.len());
        out.fill(0.0);
        add_scaled(out, vectors, |r| p[r * rows + i], |r| &q[r * columns + start..][..len]);
    }
}

/// Kernel: `M = x + (m - P Q^T)` and `p = M Q`. Returns the bits of the largest magnitude in `M`, as
/// [`max_magnitude`] does.
pub(crate) struct Project<'a> {
    pub(crate) x: &'a [f32],
    /// Previous matrix `m`, as long as `x`. If it is empty, `M = x`.
    pub(crate) m: &'a [f32],
    pub(crate) sent: Product<'a>,
    pub(crate) next_m: &'a mut [f32],
    pub(crate) next_p: &'a mut [f32],
    /// Scratch memory for partial sums.
    pub(crate) sums: &'a mut Vec<[f32; LANES]>,
    pub(crate) level: Level,
}

impl Kernel for Project<'_> {
    type Output = i32;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> i32 {
        let Self { x, m, sent, next_m, next_p, sums, level } = self;
        let Product { q, rows, columns, .. } = sent;
        let (mut staging, mut max) = (StagingBuffer::new(level, x.len(), COLUMNS), 0);
        sums.resize(q.len() / columns, [0.0; LANES]);
        for (i, next_m) in next_m.chunks_mut(columns).enumerate() {
            sums.fill([0.0; LANES]);
            for (k, next_m) in next_m.chunks_mut(COLUMNS).enumerate() {
                let start = k * COLUMNS;
                let (values, mut copy_back) = staging.target(next_m);
                let at = i * columns + start..i * columns + start + values.len();
                let x = &x[at.clone()];
                max = max.max(if m.is_empty() {
                    values.copy_from_slice(x);
                    max_magnitude(x)
                } else {
                    sent.write(i, start, values);
                    add_lost(x, &m[at], values)
                });
                add_products(values, &q[start..], columns, sums);
                copy_back.write(0, values);
            }
            for (p, sums) in next_p.chunks_mut(rows).zip(&*sums) {
                p[i] = sums.iter().sum();
            }
        }
        max
    }
}

/// Kernel: `Q = M^T P`.
pub(crate) struct ProjectBack<'a> {
    pub(crate) m: &'a [f32],
    pub(crate) p: &'a [f32],
    pub(crate) q: &'a mut [f32],
    pub(crate) columns: usize,
}

impl Kernel for ProjectBack<'_> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) {
        let Self { m, p, q, columns } = self;
        let rows = m.len() / columns;
        q.fill(0.0);
        for first in (0..rows).step_by(4) {
            for start in (0..columns).step_by(COLUMNS) {
                let part = start..columns.min(start + COLUMNS);
                for (q, p) in q.chunks_mut(columns).zip(p.chunks(rows)) {
                    let row = |k: usize| &m[(first + k) * columns..][part.clone()];
                    add_scaled(&mut q[part.clone()], 4.min(rows - first), |k| p[first + k], row);
                }
            }
        }
    }
}

/// Kernel: `out = P Q^T`. Returns the bits of the largest magnitude in it, as [`max_magnitude`] does.
pub(crate) struct Expand<'a> {
    pub(crate) product: Product<'a>,
    pub(crate) out: &'a mut [f32],
    pub(crate) level: Level,
}

impl Kernel for Expand<'_> {
    type Output = i32;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> i32 {
        let Self { product, out, level } = self;
        let (mut staging, mut max) = (StagingBuffer::new(level, out.len(), COLUMNS), 0);
        for (i, out) in out.chunks_mut(product.columns).enumerate() {
            for (k, out) in out.chunks_mut(COLUMNS).enumerate() {
                let (values, mut copy_back) = staging.target(out);
                product.write(i, k * COLUMNS, values);
                max = max.max(max_magnitude(values));
                copy_back.write(0, values);
            }
        }
        max
    }
}

/// Computes `sent = x + (m - sent)`. Returns the bits of the largest magnitude in it, as [`max_magnitude`]
/// does.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn add_lost(x: &[f32], m: &[f32], sent: &mut [f32]) -> i32 {
    let mut max = 0;
    for ((value, x), m) in sent.iter_mut().zip(x).zip(m) {
        *value = x + (m - *value);
        max = max.max(magnitude(*value));
    }
    max
}

/// Adds `vectors` vectors to `sums` in order, each multiplied by its weight. It takes four at a time, so that
/// `sums` is read and written a fourth as often.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn add_scaled<'a>(
    sums: &mut [f32],
    vectors: usize,
    weight: impl Fn(usize) -> f32,
    vector: impl Fn(usize) -> &'a [f32],
) {
    let fours = vectors / 4 * 4;
    for r in (0..fours).step_by(4) {
        let [p0, p1, p2, p3] = [weight(r), weight(r + 1), weight(r + 2), weight(r + 3)];
        let [a, b, c, d] = [vector(r), vector(r + 1), vector(r + 2), vector(r + 3)];
        for (sum, ((a, b), (c, d))) in sums.iter_mut().zip(a.iter().zip(b).zip(c.iter().zip(d))) {
            *sum = (((*sum + p0 * a) + p1 * b) + p2 * c) + p3 * d;
        }
    }
    for r in fours..vectors {
        let p = weight(r);
        sums.iter_mut().zip(vector(r)).for_each(|(sum, a)| *sum += p * a);
    }
}

/// Returns the dot product of `a` and `b`, added up in partial sums first.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [[0.0; LANES]];
    add_products(a, b, 0, &mut sums);
    sums[0].iter().sum()
}

/// Adds the products of `a` with several vectors, which begin `stride` elements apart, to the partial sums of
/// each. It takes four vectors at a time, whose sums do not depend on each other.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn add_products(a: &[f32], vectors: &[f32], stride: usize, sums: &mut [[f32; LANES]]) {
    let vector = |r: usize| vectors[r * stride..][..a.len()].as_chunks::<LANES>();
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (fours, ones) = sums.as_chunks_mut::<4>();
    let first_one = 4 * fours.len();
    for (r, sums) in fours.iter_mut().enumerate() {
        let [mut s0, mut s1, mut s2, mut s3] = *sums;
        let [(b0, rest0), (b1, rest1)] = [vector(4 * r), vector(4 * r + 1)];
        let [(b2, rest2), (b3, rest3)] = [vector(4 * r + 2), vector(4 * r + 3)];
        for (a, ((b0, b1), (b2, b3))) in a.iter().zip(b0.iter().zip(b1).zip(b2.iter().zip(b3))) {
            add(&mut s0, a, b0);
            add(&mut s1, a, b1);
            add(&mut s2, a, b2);
            add(&mut s3, a, b3);
        }
        *sums = [s0, s1, s2, s3];
        for (sums, rest) in sums.iter_mut().zip([rest0, rest1, rest2, rest3]) {
            add(sums, a_rest, rest);
        }
    }
    for (r, sums) in ones.iter_mut().enumerate() {
        let (b, rest) = vector(first_one + r);
        let mut lanes = *sums;
        for (a, b) in a.iter().zip(b) {
            add(&mut lanes, a, b);
        }
        *sums = lanes;
        add(sums, a_rest, rest);
    }
}

#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn add(lanes: &mut [f32; LANES], a: &[f32], b: &[f32]) {
    for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
        *lane += a * b;
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "sums have one order")]
mod tests {
    use farflung_base::Philox;

    use super::*;
    use crate::simd::Level;

    /// Compares with plain loops that add one product after the other; `p`, which is added up in partial sums,
    /// is compared with [`dot`], one vector at a time.
    #[test]
    fn products_are_the_plain_ones_to_the_bit() {
        for (rows, columns, rank) in [(1, 1, 1), (7, 3, 2), (9, 1000, 3), (12, 512, 4), (30, 1025, 5)] {
            let normal = |n: usize, stream| {
                let mut x = vec![0.0; n];
                Philox::new(8, stream).fill_normal(1.0, &mut x);
                x
            };
            let (x, e) = (normal(rows * columns, 1), normal(rows * columns, 2));
            let q = normal(rank * columns, 3);
            for level in [Level::detect(), Level::PORTABLE] {
                let (mut m, mut p) = (vec![1.0; rows * columns], vec![1.0; rank * rows]);
                let (mut back, mut out) = (vec![1.0; rank * columns], m.clone());
                let (sent_p, mut sums) = (normal(rank * rows, 4), Vec::new());
                let sent = Product { p: &sent_p, q: &q, rows, columns };
                let (next_m, next_p, sums) = (&mut m, &mut p, &mut sums);
                let max = level.run(Project { x: &x, m: &e, sent, next_m, next_p, sums, level });
                assert_eq!(max, max_magnitude(&m));
                level.run(ProjectBack { m: &m, p: &p, q: &mut back, columns });
                let product = Product { p: &p, q: &back, rows, columns };
                assert_eq!(level.run(Expand { product, out: &mut out, level }), max_magnitude(&out));
                for i in 0..rows {
                    for j in 0..columns {
                        let value = |p: &[f32], q: &[f32]| {
                            (0..rank).fold(0.0, |v, r| v + p[r * rows + i] * q[r * columns + j])
                        };
                        let at = i * columns + j;
                        assert_eq!(m[at], x[at] + (e[at] - value(&sent_p, &q)));
                        assert_eq!(out[at], value(&p, &back));
                    }
                    for r in 0..rank {
                        assert_eq!(
                            p[r * rows + i],
                            dot(&m[i * columns..][..columns], &q[r * columns..][..columns])
                        );
                    }
                }
                for r in 0..rank {
                    for j in 0..columns {
                        let value = (0..rows).fold(0.0, |v, i| v + p[r * rows + i] * m[i * columns + j]);
                        assert_eq!(back[r * columns + j], value);
                    }
                }
            }
        }
    }
}
