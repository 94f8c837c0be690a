//! Gather and scatter of embedding rows. The scatter sums the contributions to each row in token order, for any
//! number of threads.

use super::parts::rows_per_task;
use super::pool::Pool;
use super::positions::Positions;

/// Computes `y[i] = table[tokens[i] - first] + positions[position of i]`, or without positions. Tokens that
/// have no row add nothing.
pub(super) fn forward(
    pool: &Pool,
    (tokens, first): (&[u32], u32),
    at: Positions<'_>,
    table: &[f32],
    positions: Option<&[f32]>,
    y: &mut [f32],
) {
    let cols = y.len().checked_div(tokens.len()).unwrap_or(0);
    let rows = rows_per_task(cols);
    pool.for_chunks([(y, rows * cols)], |t, [y]| {
        for (r, y) in y.chunks_exact_mut(cols).enumerate() {
            let i = t * rows + r;
            let row = tokens[i].checked_sub(first).and_then(|row| (row as usize).checked_mul(cols));
            let token = row.and_then(|at| table.get(at..at + cols));
            let Some(positions) = positions else {
                match token {
                    Some(token) => y.copy_from_slice(token),
                    None => y.fill(0.0),
                }
                continue;
            };
            let Some(token) = token else {
                y.copy_from_slice(&positions[at.of(i) * cols..][..cols]);
                continue;
            };
            let position = &positions[at.of(i) * cols..][..cols];
            for ((y, a), b) in y.iter_mut().zip(token).zip(position) {
                *y = a + b;
            }
        }
    });
}

/// Adds the gradients `dy` to the rows that were gathered.
pub(super) fn backward(
    pool: &Pool,
    (tokens, first): (&[u32], u32),
    at: Positions<'_>,
    dy: &[f32],
    d_table: &mut [f32],
    d_positions: Option<&mut [f32]>,
) {
    /// Number of table rows that one task writes.
    const ROWS_PER_TASK: usize = 1024;
    /// Number of rows of positions that one task writes, unless all sequences have the same positions.
    const POSITIONS_PER_TASK: usize = 64;
    let cols = dy.len().checked_div(tokens.len()).unwrap_or(0);
    let add = |to: &mut [f32], i: usize| {
        for (t, d) in to.iter_mut().zip(&dy[i * cols..][..cols]) {
            *t += d;
        }
    };
    pool.for_chunks([(d_table, ROWS_PER_TASK * cols)], |t, [rows]| {
        let owned = t * ROWS_PER_TASK..t * ROWS_PER_TASK + rows.len() / cols;
        for (i, &token) in tokens.iter().enumerate() {
            let Some(row) = token.checked_sub(first).map(|row| row as usize) else { continue };
            if owned.contains(&row) {
                add(&mut rows[(row - owned.start) * cols..][..cols], i);
            }
        }
    });
    let Some(d_positions) = d_positions else { return };
    let own = match at {
        Positions::From { start, len, documents: None } => {
            let own = &mut d_positions[start * cols..(start + len) * cols];
            pool.for_chunks([(own, cols)], |p, [row]| {
                for i in (p..tokens.len()).step_by(len) {
                    add(row, i);
                }
            });
            return;
        }
        Positions::From { start, len, documents: Some(_) } => &mut d_positions[..(start + len) * cols],
        Positions::At(_) => d_positions,
    };
    // Tokens are anywhere, so each task looks at all of them.
    pool.for_chunks([(own, POSITIONS_PER_TASK * cols)], |t, [rows]| {
        let owned = t * POSITIONS_PER_TASK..t * POSITIONS_PER_TASK + rows.len() / cols;
        for i in 0..tokens.len() {
            let position = at.of(i);
            if owned.contains(&position) {
                add(&mut rows[(position - owned.start) * cols..][..cols], i);
            }
        }
    });
}
