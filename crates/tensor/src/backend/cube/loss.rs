//! Softmax cross-entropy, one cube (workgroup) per row, or per row of a piece of the logits. The gradient
//! overwrites the logits.

use cubecl::prelude::*;

use super::block::{block_max, block_sum};
use super::{Cube, u32_of};
use crate::{Result, View, ViewMut};

impl Cube {
    /// Runs [`Op::LogitStats`](crate::Op::LogitStats) on logits and targets.
    pub(super) fn logit_stats(
        &self,
        [logits, targets]: [&View<'_>; 2],
        first: u32,
        to: &ViewMut<'_>,
    ) -> Result<()> {
        let (rows, cols) = (logits.shape().rows(), logits.shape().cols());
        if rows == 0 {
            return Ok(());
        }
        let ([logits, ids], to) = ([self.read(logits)?, self.read(targets)?], self.write(to)?);
        let (count, dim) = self.row_each(rows);
        let (x, t, n, c) = (logits.arg(), ids.arg(), u32_of(rows), u32_of(cols));
        stats::launch(&self.client, count, dim, x, t, to.arg(), n, c, first, self.units);
        self.write_back([logits, ids, to]);
        Ok(())
    }

    /// Runs [`Op::LogitGrad`](crate::Op::LogitGrad) on logits, targets and the logarithms of sums.
    pub(super) fn logit_grad(
        &self,
        logits: &ViewMut<'_>,
        first: u32,
        [targets, log_sums]: [&View<'_>; 2],
        weights: Option<&View<'_>>,
        scale: f32,
    ) -> Result<()> {
        let (len, cols) = (logits.shape().len(), logits.shape().cols());
        if len == 0 {
            return Ok(());
        }
        let (logits, ids, sums) = (self.write(logits)?, self.read(targets)?, self.read(log_sums)?);
        let weights = weights.map(|weights| self.read(weights)).transpose()?;
        let (count, dim) = self.each(len);
        // Without weights, the kernel reads the sums alone.
        let weight = weights.as_ref().unwrap_or(&sums).arg();
        let (x, t, s, n, c) = (logits.arg(), ids.arg(), sums.arg(), u32_of(len), u32_of(cols));
        part_grad::launch(&self.client, count, dim, x, t, weight, s, n, c, first, scale, weights.is_some());
        self.write_back([logits, ids, sums].into_iter().chain(weights));
        Ok(())
    }
}

#[cube(launch)]
pub(super) fn cross_entropy(
    logits: &mut [f32],
    targets: &[u32],
    weights: &[f32],
    losses: &mut [f32],
    rows: u32,
    cols: u32,
    scale: f32,
    #[comptime] weighted: bool,
    #[comptime] grad: bool,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    let row = CUBE_POS;
    if row < rows as usize {
        let cols = cols as usize;
        let at = row * cols;
        // An out-of-range target has been recorded by `check_ids`; read column 0 instead of out of bounds.
        let wanted = targets[row] as usize;
        let target = select(wanted < cols, wanted, 0usize);
        let mut weight = 1.0f32;
        if comptime!(weighted) {
            weight = weights[row];
        }
        let mut largest = logits[at];
        let mut i = UNIT_POS as usize;
        while i < cols {
            largest = f32::max(largest, logits[at + i]);
            i += units as usize;
        }
        let top = block_max(&mut shared, largest, units);
        let mut sum = 0.0f32;
        i = UNIT_POS as usize;
        while i < cols {
            sum += f32::exp(logits[at + i] - top);
            i += units as usize;
        }
        let total = block_sum(&mut shared, sum, units);
        if UNIT_POS == 0 {
            let loss = f32::ln(total) - (logits[at + target] - top);
            losses[row] = select(weight == 0.0, 0.0, loss * weight);
        }
        if comptime!(grad) {
            // One unit (thread) has read the target's logit above; another unit overwrites it below.
            sync_cube();
            let inverse = 1.0 / total;
            i = UNIT_POS as usize;
            while i < cols {
                let p = f32::exp(logits[at + i] - top) * inverse;
                let slope = select(i == target, p - 1.0, p) * (scale * weight);
                logits[at + i] = select(weight == 0.0, 0.0, slope);
                i += units as usize;
            }
        }
    }
}

/// Computes the statistics of a piece of each row: its largest logit, the sum of `exp(x - largest)`, and the
/// logit of the target if the piece has it.
#[cube(launch)]
pub(super) fn stats(
    logits: &[f32],
    targets: &[u32],
    stats: &mut [f32],
    rows: u32,
    cols: u32,
    first: u32,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    let row = CUBE_POS;
    if row < rows as usize {
        let cols = cols as usize;
        let at = row * cols;
        let mut largest = logits[at];
        let mut i = UNIT_POS as usize;
        while i < cols {
            largest = f32::max(largest, logits[at + i]);
            i += units as usize;
        }
        let top = block_max(&mut shared, largest, units);
        let mut sum = 0.0f32;
        i = UNIT_POS as usize;
        while i < cols {
            sum += f32::exp(logits[at + i] - top);
            i += units as usize;
        }
        let total = block_sum(&mut shared, sum, units);
        if UNIT_POS == 0 {
            // Of an id below `first` the difference wraps, so that it is not below the number of columns
            // either.
            let wanted = (targets[row] - first) as usize;
            let inside = targets[row] >= first && wanted < cols;
            let target = select(inside, wanted, 0usize);
            stats[row * 3] = top;
            stats[row * 3 + 1] = total;
            stats[row * 3 + 2] = select(inside, logits[at + target], 0.0);
        }
    }
}

/// Overwrites a piece of each row by its gradient.
#[cube(launch)]
pub(super) fn part_grad(
    logits: &mut [f32],
    targets: &[u32],
    weights: &[f32],
    log_sums: &[f32],
    len: u32,
    cols: u32,
    first: u32,
    scale: f32,
    #[comptime] weighted: bool,
) {
    let at = ABSOLUTE_POS;
    if at < len as usize {
        let cols = cols as usize;
        let row = at / cols;
        let mut weight = 1.0f32;
        if comptime!(weighted) {
            weight = weights[row];
        }
        let p = f32::exp(logits[at] - log_sums[row]);
        let hot = targets[row] >= first && (targets[row] - first) as usize == at % cols;
        let slope = select(hot, p - 1.0, p) * (scale * weight);
        logits[at] = select(weight == 0.0, 0.0, slope);
    }
}
