//! Softmax of a block of scores, and its gradient.
#![expect(
    unsafe_code,
    reason = "vector instructions and unchecked indexing; each entry point checks its bounds"
)]
#![expect(clippy::inline_always, reason = "vector code must take the target features of its caller")]

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::super::simd::simd;
use super::super::tile::{MOST_ROWS, RowFactors};
use super::super::vector::{LANES, Vector, exp2, greatest, sum};
use super::super::vmath;
use super::rows::Rows;
use super::seen::Meeting;

/// Products of a block of queries with a tile of keys, in rows `pitch` apart.
pub(super) struct Block<'a> {
    pub(super) meeting: Meeting,
    pub(super) products: &'a mut [f32],
    pub(super) pitch: usize,
    /// Factor that converts a product to an exponent of 2.
    pub(super) scale: f32,
}

impl Block<'_> {
    fn check(&self, rows: usize) {
        assert!((1..=MOST_ROWS).contains(&rows), "a block must have 1 to `MOST_ROWS` rows");
        assert!(
            (rows - 1) * self.pitch + self.meeting.padded <= self.products.len(),
            "the block is too short"
        );
    }
}

/// State of the online softmax of some queries, after the tiles processed so far.
pub(super) struct Running<'a> {
    /// Greatest product of each query.
    pub(super) tops: &'a mut [f32],
    /// Sum of exponentials of each query, relative to the exponential of its greatest product.
    pub(super) sums: &'a mut [f32],
}

impl Running<'_> {
    /// Begins without keys.
    pub(super) fn clear(&mut self) {
        self.tops.fill(f32::NEG_INFINITY);
        self.sums.fill(0.0);
    }

    /// Begins with the keys of which `lse` is the log-sum-exp, as if each query had one with that score.
    pub(super) fn resume(&mut self, lse: &[f32], score_scale: f32) {
        for ((top, sum), lse) in self.tops.iter_mut().zip(&mut *self.sums).zip(lse) {
            *top = lse / score_scale;
            *sum = if *lse == f32::NEG_INFINITY { 0.0 } else { 1.0 };
        }
    }
}

/// Returns `2^(scale x + shift)` of eight products.
#[inline(always)]
unsafe fn exponentials<L: Vector>(x: *const f32, scale: f32, shift: f32) -> L::V {
    // SAFETY: guaranteed by the caller.
    unsafe { exp2::<L, 1>([L::fma(L::load(x), L::splat(scale), L::splat(shift))])[0] }
}

simd! {
    /// Replaces products by their exponentials relative to the greatest so far, and masked ones by 0. Returns
    /// the factors with which the weighted sums of values are updated. If this tile is the `first`, the
    /// contents of `running` are not read. Where queries skip keys no tile is: `running` begins as that of no
    /// keys, or of other ones.
    pub(super) fn softmax<L: Level + Vector>(
        block: Block<'_>,
        running: Running<'_>,
        first: bool,
    ) -> [RowFactors; MOST_ROWS] {
        let Running { tops, sums } = running;
        let rows = tops.len();
        block.check(rows);
        let Block { meeting, products, pitch, scale } = block;
        let mut shares = [RowFactors { old: 0.0, new: 0.0 }; MOST_ROWS];
        // Each step runs for all rows before the next step, so that the dependency chains of the rows overlap.
        // SAFETY: the rows are in bounds in whole vectors; this function is compiled for the level.
        unsafe {
            let masked = L::splat(f32::NEG_INFINITY);
            let mut lanes = [masked; MOST_ROWS];
            for (r, lanes) in lanes[..rows].iter_mut().enumerate() {
                let s = products.as_ptr().add(r * pitch);
                for j in (0..meeting.whole).step_by(LANES) {
                    *lanes = L::max(L::load(s.add(j)), *lanes);
                }
                for j in (meeting.whole..meeting.padded).step_by(LANES) {
                    let seen = L::first(meeting.seen_of_vector(r, j), L::load(s.add(j)), masked);
                    *lanes = L::max(L::first(meeting.hidden_of_vector(r, j), masked, seen), *lanes);
                }
            }
            for r in 0..rows {
                if !meeting.sees_any(r) {
                    continue;
                }
                let before = tops[r];
                tops[r] = greatest::<L>(lanes[r]);
                if !first {
                    tops[r] = tops[r].max(before);
                    shares[r].old = sums[r] * (scale * (before - tops[r])).exp2();
                }
            }
            for (r, lanes) in lanes[..rows].iter_mut().enumerate() {
                let (s, shift) = (products.as_mut_ptr().add(r * pitch), -scale * tops[r]);
                *lanes = L::splat(0.0);
                for j in (0..meeting.whole).step_by(LANES) {
                    let e = exponentials::<L>(s.add(j), scale, shift);
                    L::store(s.add(j), e);
                    *lanes = L::add(*lanes, e);
                }
                for j in (meeting.whole..meeting.padded).step_by(LANES) {
                    let e = exponentials::<L>(s.add(j), scale, shift);
                    let e = L::first(meeting.seen_of_vector(r, j), e, L::splat(0.0));
                    let e = L::first(meeting.hidden_of_vector(r, j), L::splat(0.0), e);
                    L::store(s.add(j), e);
                    *lanes = L::add(*lanes, e);
                }
            }
            for r in 0..rows {
                if !meeting.sees_any(r) {
                    // The query attends to no key of the tile, which leaves its sum as it is.
                    shares[r] = RowFactors { old: 1.0, new: 0.0 };
                    continue;
                }
                sums[r] = shares[r].old + sum::<L>(lanes[r]);
                let new = 1.0 / sums[r];
                shares[r] = RowFactors { old: shares[r].old * new, new };
            }
        }
        shares
    }
}

simd! {
    /// Computes the log-sum-exp of each query from its greatest product and its relative sum.
    pub(super) fn logs<L: Level>(tops: &[f32], sums: &[f32], scale: f32, lse: &mut [f32]) {
        for ((lse, top), sum) in lse.iter_mut().zip(tops).zip(sums) {
            *lse = L::mul_add(LN_2 * scale, *top, vmath::ln::<L>(*sum));
        }
    }
}

simd! {
    /// Replaces products by probabilities `p`, and gradients of probabilities `dp` by gradients of scores,
    /// `p (dp - mean)`. Masked ones become 0. `lse` is the log-sum-exp of each query.
    pub(super) fn softmax_grad<L: Level + Vector>(block: Block<'_>, dp: &mut [f32], lse: &[f32], means: &[f32]) {
        block.check(lse.len());
        let Block { meeting, products, pitch, scale } = block;
        assert!((lse.len() - 1) * pitch + meeting.padded <= dp.len(), "the block is too short");
        for (r, (lse, mean)) in lse.iter().zip(means).enumerate() {
            let shift = -LOG2_E * lse;
            // SAFETY: the row is in bounds in whole vectors; this function is compiled for the level.
            unsafe {
                let mean = L::splat(*mean);
                let (p, dp) = (products.as_mut_ptr().add(r * pitch), dp.as_mut_ptr().add(r * pitch));
                for j in (0..meeting.whole).step_by(LANES) {
                    let x = exponentials::<L>(p.add(j), scale, shift);
                    L::store(p.add(j), x);
                    L::store(dp.add(j), L::mul(x, L::sub(L::load(dp.add(j)), mean)));
                }
                for j in (meeting.whole..meeting.padded).step_by(LANES) {
                    let (seen, zero) = (meeting.seen_of_vector(r, j), L::splat(0.0));
                    let x = exponentials::<L>(p.add(j), scale, shift);
                    let d = L::mul(x, L::sub(L::load(dp.add(j)), mean));
                    let hidden = meeting.hidden_of_vector(r, j);
                    L::store(p.add(j), L::first(hidden, zero, L::first(seen, x, zero)));
                    L::store(dp.add(j), L::first(hidden, zero, L::first(seen, d, zero)));
                }
            }
        }
    }
}

simd! {
    /// Computes the inner products of the rows of two matrices.
    pub(super) fn dots<L: Level + Vector>(a: Rows<'_>, b: Rows<'_>, rows: &Range<usize>, out: &mut [f32]) {
        let (whole, width) = (a.width / LANES * LANES, a.width);
        let (x, y) = (a.span(rows), b.span(rows));
        assert!(a.width == b.width, "the rows of both matrices must have the same width");
        for (t, out) in out[..rows.len()].iter_mut().enumerate() {
            // SAFETY: the rows are in bounds; this function is compiled for the level.
            unsafe {
                let (x, y) = (x.as_ptr().add(t * a.stride), y.as_ptr().add(t * b.stride));
                let mut lanes = L::splat(0.0);
                for i in (0..whole).step_by(LANES) {
                    lanes = L::fma(L::load(x.add(i)), L::load(y.add(i)), lanes);
                }
                *out = (whole..width).fold(sum::<L>(lanes), |sum, i| L::mul_add(*x.add(i), *y.add(i), sum));
            }
        }
    }
}
