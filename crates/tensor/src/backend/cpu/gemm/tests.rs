//! Compares products of every form and size with f64, and checks that bits do not depend on how they are
//! computed.

use super::*;
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns reproducible numbers between -1 and 1.
fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

const ONE: Batch = Batch { count: (1, 1), a: (0, 0), b: (0, 0), c: (0, 0) };

/// Memory layout of an operand: extra elements between rows, step between elements, and whether it is
/// transposed.
#[derive(Clone, Copy, Debug)]
struct Layout {
    transposed: bool,
    gap: usize,
    step: usize,
}

const PLAIN: Layout = Layout { transposed: false, gap: 0, step: 1 };
const TRANSPOSED: Layout = Layout { transposed: true, gap: 0, step: 1 };

/// Arranges `values` (row-major, dense) in a layout, with NaN in the gaps.
fn lay_out(values: &[f32], rows: usize, cols: usize, layout: Layout) -> (Vec<f32>, usize, usize) {
    let (outer, inner) = if layout.transposed { (cols, rows) } else { (rows, cols) };
    let ld = inner * layout.step + layout.gap;
    let mut data = vec![f32::NAN; outer * ld];
    let (row_stride, col_stride) = if layout.transposed { (layout.step, ld) } else { (ld, layout.step) };
    for i in 0..rows {
        for j in 0..cols {
            data[i * row_stride + j * col_stride] = values[i * cols + j];
        }
    }
    (data, row_stride, col_stride)
}

/// Runs one product and returns C. Checks that the gaps of C are unchanged.
fn product(
    level: Isa,
    pool: &Pool,
    (m, n, k): (usize, usize, usize),
    (a, b, c): (&[f32], &[f32], &[f32]),
    layouts: (Layout, Layout),
    init: Init,
) -> Vec<f32> {
    let (a, a_row, a_col) = lay_out(a, m, k, layouts.0);
    let (b, b_row, b_col) = lay_out(b, k, n, layouts.1);
    let gap = 3;
    let (mut data, ld, _) = lay_out(c, m, n, Layout { transposed: false, gap, step: 1 });
    let out = MatMut::new(&mut data, m, n, ld);
    let (a, b) = (Mat::new(&a, m, k, a_row, a_col), Mat::new(&b, k, n, b_row, b_col));
    gemm_with(level, pool, ONE, a, b, out, init, &NoEpilogue);
    assert!(data.chunks(ld).all(|row| row[n..].iter().all(|x| x.is_nan())), "wrote between rows of C");
    data.chunks(ld).flat_map(|row| row[..n].to_vec()).collect()
}

fn assert_close(
    (m, n, k): (usize, usize, usize),
    (a, b, c): (&[f32], &[f32], &[f32]),
    init: Init,
    got: &[f32],
) {
    for i in 0..m {
        for j in 0..n {
            let sum: f64 = (0..k).map(|p| f64::from(a[i * k + p]) * f64::from(b[p * n + j])).sum();
            let want = if init == Init::Accumulate { sum + f64::from(c[i * n + j]) } else { sum };
            // Error bound for the roundings of a sum of at most k terms of magnitude 1.
            let bound = 1e-6 * (2.0 + k as f64).sqrt() * 4.0;
            let error = (f64::from(got[i * n + j]) - want).abs();
            assert!(error <= bound, "{m}x{n}x{k} at {i},{j}: {} instead of {want}", got[i * n + j]);
        }
    }
}

fn sizes() -> Vec<(usize, usize, usize)> {
    let small = [0, 1, 2, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 48, 70];
    let mut all: Vec<_> = small.iter().flat_map(|&m| small.iter().map(move |&n| (m, n))).collect();
    all.sort_unstable();
    let ks = [0, 1, 3, 4, 8, 11, 64, 70];
    let mut all: Vec<_> = all.into_iter().enumerate().map(|(i, (m, n))| (m, n, ks[i % ks.len()])).collect();
    all.extend([(0, 5, 3), (3, 5, 0), (257, 131, 385), (101, 300, 500), (521, 33, 770), (19, 785, 1000)]);
    all
}

#[test]
fn matches_f64_for_all_sizes_transposes_and_strides() {
    let pool = Pool::new(1).unwrap();
    let odd = Layout { transposed: false, gap: 5, step: 2 };
    let odd_t = Layout { transposed: true, gap: 1, step: 3 };
    let gapped = Layout { transposed: false, gap: 7, step: 1 };
    for (m, n, k) in sizes() {
        let (a, b, c) = (numbers(m * k, 1), numbers(k * n, 2), numbers(m * n, 3));
        let operands = (&a[..], &b[..], &c[..]);
        for level in Isa::available() {
            for init in [Init::Overwrite, Init::Accumulate] {
                let run = |layouts| product(level, &pool, (m, n, k), operands, layouts, init);
                let plain = run((PLAIN, PLAIN));
                assert_close((m, n, k), operands, init, &plain);
                for layouts in [
                    (PLAIN, TRANSPOSED),
                    (TRANSPOSED, PLAIN),
                    (TRANSPOSED, TRANSPOSED),
                    (gapped, gapped),
                    (odd, odd_t),
                    (odd_t, odd),
                ] {
                    assert_eq!(bits(&run(layouts)), bits(&plain), "{level:?} {m}x{n}x{k} {layouts:?}");
                }
            }
        }
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn threads_and_vector_width_do_not_change_bits() {
    let pools: Vec<Pool> = (1..=3).map(|threads| Pool::new(threads).unwrap()).collect();
    for (m, n, k) in [(257, 131, 385), (64, 1000, 129), (1001, 70, 800), (300, 300, 300)] {
        let (a, b, c) = (numbers(m * k, 4), numbers(k * n, 5), numbers(m * n, 6));
        for layouts in [(PLAIN, PLAIN), (TRANSPOSED, TRANSPOSED)] {
            let mut fused = None;
            for level in Isa::available() {
                let run = |pool| product(level, pool, (m, n, k), (&a, &b, &c), layouts, Init::Accumulate);
                let one = bits(&run(&pools[0]));
                assert_eq!(one, bits(&run(&pools[1])));
                assert_eq!(one, bits(&run(&pools[2])));
                if level != Isa::PORTABLE {
                    assert_eq!(*fused.get_or_insert(one.clone()), one, "{level:?}");
                }
            }
        }
    }
}

#[test]
fn a_part_of_a_product_has_the_bits_of_the_whole() {
    let (m, n, k) = (50, 90, 400);
    let (a, b) = (numbers(m * k, 7), numbers(k * n, 8));
    let pool = Pool::new(1).unwrap();
    for level in Isa::available() {
        let run = |rows: Range<usize>, columns: Range<usize>| {
            let mut c = vec![0.0; rows.len() * columns.len()];
            let a = Mat::row_major(&a[rows.start * k..], rows.len(), k, k);
            let b = Mat::row_major(&b[columns.start..], k, columns.len(), n);
            let out = MatMut::new(&mut c, rows.len(), columns.len(), columns.len());
            gemm_with(level, &pool, ONE, a, b, out, Init::Overwrite, &NoEpilogue);
            c
        };
        let whole = run(0..m, 0..n);
        for (i, j) in [(0, 0), (13, 5), (49, 89), (6, 16)] {
            assert_eq!(run(i..i + 1, j..j + 1)[0].to_bits(), whole[i * n + j].to_bits());
        }
        let part = run(7..31, 3..80);
        for (i, row) in part.chunks(77).enumerate() {
            assert_eq!(bits(row), bits(&whole[(i + 7) * n + 3..][..77]));
        }
    }
}

/// Compares each element with the finished sum, counts the calls, and negates the element.
struct Probe<'a> {
    want: &'a [f32],
    calls: &'a [AtomicU32],
    columns: usize,
}

impl Epilogue for Probe<'_> {
    #[inline(always)]
    fn row<L: Vector>(&self, row: usize, col: usize, c: &mut [f32]) {
        assert!(!c.is_empty() && col + c.len() <= self.columns);
        for (j, c) in c.iter_mut().enumerate() {
            let at = row * self.columns + col + j;
            assert_eq!(c.to_bits(), self.want[at].to_bits());
            self.calls[at].fetch_add(1, Ordering::Relaxed);
            *c = -*c;
        }
    }
}

#[test]
fn the_epilogue_sees_each_finished_element_once() {
    for threads in 1..=3 {
        let pool = Pool::new(threads).unwrap();
        for level in Isa::available() {
            for (m, n, k) in [(7, 19, 0), (1, 1, 1), (13, 33, 20), (300, 45, 800), (40, 700, 129)] {
                let (a, b, c) = (numbers(m * k, 9), numbers(k * n, 10), numbers(m * n, 11));
                for init in [Init::Overwrite, Init::Accumulate] {
                    let want = product(level, &pool, (m, n, k), (&a, &b, &c), (PLAIN, PLAIN), init);
                    let calls: Vec<AtomicU32> = (0..m * n).map(|_| AtomicU32::new(0)).collect();
                    let probe = Probe { want: &want, calls: &calls, columns: n };
                    let (mut got, a, b) =
                        (c.clone(), Mat::row_major(&a, m, k, k), Mat::row_major(&b, k, n, n));
                    gemm_with(level, &pool, ONE, a, b, MatMut::new(&mut got, m, n, n), init, &probe);
                    assert!(calls.iter().all(|calls| calls.load(Ordering::Relaxed) == 1));
                    assert!(got.iter().zip(&want).all(|(got, want)| got.to_bits() == (-want).to_bits()));
                }
            }
        }
    }
}

#[test]
fn a_batch_is_the_products_one_by_one() {
    // As in attention: Q and K are [batch, time, head, dim], the scores [batch, head, time, time].
    let (batch, heads, time, dim) = (2, 3, 21, 10);
    let (q, k) = (numbers(batch * time * heads * dim, 12), numbers(batch * time * heads * dim, 13));
    let (row, per_batch) = (heads * dim, time * heads * dim);
    let mut want = vec![0.0; batch * heads * time * time];
    let one = Pool::new(1).unwrap();
    for (i, out) in want.chunks_mut(time * time).enumerate() {
        let at = i / heads * per_batch + i % heads * dim;
        let (q, k) = (Mat::row_major(&q[at..], time, dim, row), Mat::row_major(&k[at..], time, dim, row));
        gemm(&one, q, k.t(), MatMut::new(out, time, time, time), Init::Overwrite, &NoEpilogue);
    }
    for threads in 1..=3 {
        let pool = Pool::new(threads).unwrap();
        let calls: Vec<AtomicU32> = (0..want.len()).map(|_| AtomicU32::new(0)).collect();
        let probe = Probe { want: &want, calls: &calls, columns: time };
        let mut got = vec![f32::NAN; want.len()];
        let steps = Batch {
            count: (batch, heads),
            a: (per_batch, dim),
            b: (per_batch, dim),
            c: (heads * time * time, time * time),
        };
        let (q, k) = (Mat::row_major(&q, time, dim, row), Mat::row_major(&k, time, dim, row));
        gemm_batched(
            &pool,
            steps,
            q,
            k.t(),
            MatMut::new(&mut got, time, time, time),
            Init::Overwrite,
            &probe,
        );
        assert!(got.iter().zip(&want).all(|(got, want)| got.to_bits() == (-want).to_bits()));
        // And from the scores back to interleaved heads.
        let mut out = vec![f32::NAN; q.data.len()];
        let back = Batch { a: steps.c, c: steps.a, ..steps };
        let scores = Mat::row_major(&got, time, time, time);
        gemm_batched(
            &pool,
            back,
            scores,
            k,
            MatMut::new(&mut out, time, dim, row),
            Init::Overwrite,
            &NoEpilogue,
        );
        assert!(out.iter().all(|x| x.is_finite()));
    }
}

#[test]
fn what_would_leave_memory_or_overlap_is_refused() {
    let refused = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
    let data = [0.0; 12];
    assert!(!refused(&|| _ = Mat::row_major(&data, 3, 4, 4)));
    assert!(refused(&|| _ = Mat::row_major(&data, 3, 4, 5)));
    assert!(refused(&|| _ = Mat::new(&data, usize::MAX, 2, usize::MAX, 1)));
    assert!(!refused(&|| _ = Mat::new(&[], 0, 9, 9, 1)));
    assert!(refused(&|| _ = MatMut::new(&mut [0.0; 12], 3, 4, 3)));
    let pool = Pool::new(1).unwrap();
    let run = |batch: Batch| {
        let mut c = [0.0; 12];
        let a = Mat::row_major(&data, 2, 2, 2);
        gemm_batched(&pool, batch, a, a, MatMut::new(&mut c, 2, 2, 6), Init::Overwrite, &NoEpilogue);
    };
    assert!(!refused(&|| run(Batch { count: (1, 3), a: (0, 4), b: (0, 4), c: (0, 2) })));
    assert!(refused(&|| run(Batch { count: (1, 3), a: (0, 5), b: (0, 4), c: (0, 2) })), "A too short");
    assert!(refused(&|| run(Batch { count: (1, 3), a: (0, 4), b: (0, 4), c: (0, 1) })), "C overlaps");
    assert!(refused(&|| run(Batch { count: (2, 1), a: (0, 0), b: (0, 0), c: (0, 0) })), "C coincides");
}

#[test]
fn shares_cover_everything_once() {
    for (whole, unit, cuts) in [(100, 6, 3), (16, 16, 1), (1000, 16, 7), (5, 8, 1)] {
        let parts: Vec<_> = (0..cuts).map(|i| share(whole, unit, cuts, i)).collect();
        assert_eq!(parts[0].start, 0);
        assert_eq!(parts[cuts - 1].end, whole);
        assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].end % unit == 0));
    }
}
