//! Reductions within a cube (workgroup). The order of additions depends only on the number of units.

use cubecl::prelude::*;

/// Returns the sum of all units' (threads') values to every unit.
#[cube]
pub(super) fn block_sum(shared: &mut Shared<[f32]>, value: f32, #[comptime] units: u32) -> f32 {
    tree(shared, value, units, false)
}

/// Returns the maximum of all units' (threads') values to every unit.
#[cube]
pub(super) fn block_max(shared: &mut Shared<[f32]>, value: f32, #[comptime] units: u32) -> f32 {
    tree(shared, value, units, true)
}

#[cube]
fn tree(shared: &mut Shared<[f32]>, value: f32, #[comptime] units: u32, #[comptime] largest: bool) -> f32 {
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(units.ilog2()) {
        let width = comptime!((units >> (step + 1)) as usize);
        if unit < width {
            if comptime!(largest) {
                shared[unit] = f32::max(shared[unit], shared[unit + width]);
            } else {
                shared[unit] += shared[unit + width];
            }
        }
        sync_cube();
    }
    let all = shared[0];
    // Wait until all units (threads) have read the result before it is overwritten.
    sync_cube();
    all
}
