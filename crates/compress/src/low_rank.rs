//! Products of a matrix with a few vectors, and back: the matrix is read once for all of them. Every sum has one order. Knows
//! no method.

use crate::chunked::{INFINITE, max_magnitude, sum};
use crate::simd::{Kernel, Stream};

/// Columns that are worked on together: their part of a few rows and vectors stays in the first cache.
const COLUMNS: usize = 512;

/// `M = x + e`, row by row, and `P = M Q`; whether something in `M` is not finite. `P` and `Q` have a row for each vector.
pub(crate) struct Project<'a> {
    pub(crate) x: &'a [f32],
    /// As long as `x`, or empty.
    pub(crate) e: &'a [f32],
    pub(crate) m: &'a mut [f32],
    pub(crate) q: &'a [f32],
    pub(crate) p: &'a mut [f32],
    pub(crate) columns: usize,
}

impl Kernel for Project<'_> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, e, m, q, p, columns } = self;
        let (rows, mut max) = (x.len() / columns, 0);
        for (i, (x, m)) in x.chunks(columns).zip(m.chunks_mut(columns)).enumerate() {
            max = max.max(if e.is_empty() {
                m.copy_from_slice(x);
                max_magnitude(m)
            } else {
                sum(x, &e[i * columns..][..columns], m)
            });
            for (p, q) in p.chunks_mut(rows).zip(q.chunks(columns)) {
                p[i] = dot(m, q);
            }
        }
        max >= INFINITE
    }
}

/// `Q = M^T P`.
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
        // Four rows at a time are added in their order, so that sums are read and written a fourth as often.
        for (i, four) in m.chunks(4 * columns).enumerate() {
            for start in (0..columns).step_by(COLUMNS) {
                let part = start..columns.min(start + COLUMNS);
                for (q, p) in q.chunks_mut(columns).zip(p.chunks(rows)) {
                    let (q, p) = (&mut q[part.clone()], &p[4 * i..]);
                    let row = |k: usize| &four[k * columns..][part.clone()];
                    if four.len() == 4 * columns {
                        let rows = row(0).iter().zip(row(1)).zip(row(2).iter().zip(row(3)));
                        for (q, ((a, b), (c, d))) in q.iter_mut().zip(rows) {
                            *q = (((*q + p[0] * a) + p[1] * b) + p[2] * c) + p[3] * d;
                        }
                    } else {
                        for (k, p) in p.iter().enumerate() {
                            q.iter_mut().zip(row(k)).for_each(|(q, m)| *q += p * m);
                        }
                    }
                }
            }
        }
    }
}

/// `out = P Q^T` and `next = M - out`; whether something in them is not finite.
pub(crate) struct Expand<'a> {
    pub(crate) p: &'a [f32],
    pub(crate) q: &'a [f32],
    pub(crate) m: &'a [f32],
    pub(crate) out: &'a mut [f32],
    pub(crate) next: &'a mut [f32],
    pub(crate) columns: usize,
    pub(crate) stream: Option<Stream>,
}

impl Kernel for Expand<'_> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let Self { p, q, m, out, next, columns, stream } = self;
        let (rows, mut max) = (m.len() / columns, 0);
        let (mut values, mut lost) = ([0.0; COLUMNS], [0.0; COLUMNS]);
        let write = |from: &[f32], to: &mut [f32]| match &stream {
            Some(stream) => stream.copy(from, to),
            None => to.copy_from_slice(from),
        };
        let each = m.chunks(columns).zip(out.chunks_mut(columns)).zip(next.chunks_mut(columns));
        for (i, ((m, out), next)) in each.enumerate() {
            for start in (0..columns).step_by(COLUMNS) {
                let part = start..columns.min(start + COLUMNS);
                let (values, lost) = (&mut values[..part.len()], &mut lost[..part.len()]);
                values.fill(0.0);
                for (p, q) in p.chunks(rows).zip(q.chunks(columns)) {
                    let (p, q) = (p[i], &q[part.clone()]);
                    values.iter_mut().zip(q).for_each(|(value, q)| *value += p * q);
                }
                let m = &m[part.clone()];
                lost.iter_mut().zip(m).zip(&*values).for_each(|((lost, m), value)| *lost = m - value);
                max = max.max(max_magnitude(values)).max(max_magnitude(lost));
                write(values, &mut out[part.clone()]);
                write(lost, &mut next[part]);
            }
        }
        max >= INFINITE
    }
}

/// A sum of products in 16 lanes, then over the lanes.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += a * b;
    }
    lanes.into_iter().sum()
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "sums have one order")]
mod tests {
    use farflung_base::Philox;

    use super::*;
    use crate::simd::Level;

    /// One product after the other, as it is written down.
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
                let (mut back, mut out, mut next) = (vec![1.0; rank * columns], m.clone(), m.clone());
                let refused = level.run(Project { x: &x, e: &e, m: &mut m, q: &q, p: &mut p, columns });
                assert!(!refused);
                level.run(ProjectBack { m: &m, p: &p, q: &mut back, columns });
                let (p, q, stream) = (&p[..], &back[..], None);
                let expand = Expand { p, q, m: &m, out: &mut out, next: &mut next, columns, stream };
                assert!(!level.run(expand));
                for i in 0..rows {
                    for j in 0..columns {
                        let at = i * columns + j;
                        assert_eq!(m[at], x[at] + e[at]);
                        let value = (0..rank).fold(0.0, |v, r| v + p[r * rows + i] * q[r * columns + j]);
                        assert_eq!((out[at], next[at]), (value, m[at] - value));
                    }
                }
                for r in 0..rank {
                    for j in 0..columns {
                        let value = (0..rows).fold(0.0, |v, i| v + p[r * rows + i] * m[i * columns + j]);
                        assert_eq!(q[r * columns + j], value);
                    }
                }
            }
            let mut m = vec![0.0; rows * columns];
            let mut p = vec![0.0; rank * rows];
            let x = vec![f32::INFINITY; rows * columns];
            assert!(Level::detect().run(Project { x: &x, e: &[], m: &mut m, q: &q, p: &mut p, columns }));
        }
    }
}
