//! Product of squares with a matrix: one half of a two-dimensional transform.

use cubecl::prelude::*;

use super::exact::{product, sum};

/// Computes, for each full square `X` of `x`, `A X` if `columns`, else `X A^T`, one element per unit (thread).
/// If `inverse`, `A` is transposed. Sums run in index order. Elements after the last full square are copied.
#[cube(launch)]
pub(super) fn turn(
    x: &[u32],
    matrix: &[u32],
    y: &mut [u32],
    len: u32,
    side: u32,
    zero: u32,
    #[comptime] columns: bool,
    #[comptime] inverse: bool,
) {
    let at = ABSOLUTE_POS as u32;
    let square = side * side;
    if at < len - len % square {
        let first = at - at % square;
        let row = at % square / side;
        let column = at % side;
        let mut from = first + row * side;
        let mut step = 1u32;
        let mut line = column;
        if comptime!(columns) {
            from = first + column;
            step = side;
            line = row;
        }
        let mut total = 0u32;
        for k in 0..side {
            let mut coefficient = line * side + k;
            if comptime!(inverse) {
                coefficient = k * side + line;
            }
            let term = product(matrix[coefficient as usize], x[(from + k * step) as usize], zero);
            total = sum(total, term);
        }
        y[ABSOLUTE_POS] = total;
    } else if at < len {
        y[ABSOLUTE_POS] = x[ABSOLUTE_POS];
    }
}
