//! Copies a block of A or B into panels: `width` lanes side by side (rows of A, columns of B) for each k, so that the
//! kernel reads one ascending stream. It refuses to know which of the two it packs.

use super::isa::{BLOCK, Isa};

/// A block to be packed: element (lane, k) at `lane * lane_stride + k * k_stride`.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) at: *const f32,
    pub(super) lane_stride: usize,
    pub(super) k_stride: usize,
    pub(super) lanes: usize,
    pub(super) k: usize,
}

/// Panel `p` starts at `p * width * k`; in it, element (lane, k) is at `k * width + lane`. Lanes that the last panel
/// lacks are zero.
///
/// # Safety
/// `block` is readable, and `dst` writable for all panels and [`BLOCK`] elements more; `width` is 6 or a multiple
/// of [`BLOCK`].
#[inline(always)]
pub(super) unsafe fn pack<I: Isa>(block: Block, width: usize, dst: *mut f32) {
    if block.k_stride == 1 && block.lane_stride != 1 {
        pack_across::<I>(block, width, dst);
    } else if block.lane_stride == 1 {
        pack_along(block, width, dst);
    } else {
        pack_any(block, 0, width, dst);
    }
}

/// Lanes are strided, k is contiguous: transposes.
#[inline(always)]
unsafe fn pack_across<I: Isa>(block: Block, width: usize, dst: *mut f32) {
    let whole = block.k / BLOCK * BLOCK;
    for (p, lane) in (0..block.lanes).step_by(width).enumerate() {
        let lanes = (block.lanes - lane).min(width);
        let src = block.at.add(lane * block.lane_stride);
        let dst = dst.add(p * width * block.k);
        for k in (0..whole).step_by(BLOCK) {
            for group in (0..width).step_by(BLOCK) {
                let here = (width - group).min(BLOCK);
                let src = src.wrapping_add(group * block.lane_stride + k);
                let dst = dst.add(k * width + group);
                if group + here <= lanes {
                    I::transpose(src, block.lane_stride, here, dst, width, here);
                } else {
                    I::transpose(src, block.lane_stride, lanes.saturating_sub(group), dst, width, here);
                }
            }
        }
        let panel = Block { at: src, lanes, ..block };
        pack_any(panel, whole, width, dst);
    }
}

/// Lanes are contiguous: copies. Some k at a time over all panels, so that what is read is read in long rows, but no
/// more than fit the ways of the first-level cache where rows lie a power of two apart.
#[inline(always)]
unsafe fn pack_along(block: Block, width: usize, dst: *mut f32) {
    const STRIP: usize = 4;
    for strip in (0..block.k).step_by(STRIP) {
        let end = (strip + STRIP).min(block.k);
        for (p, lane) in (0..block.lanes).step_by(width).enumerate() {
            let lanes = (block.lanes - lane).min(width);
            let dst = dst.add(p * width * block.k);
            for k in strip..end {
                let (src, dst) = (block.at.add(lane + k * block.k_stride), dst.add(k * width));
                if lanes == width {
                    dst.copy_from_nonoverlapping(src, width);
                } else {
                    dst.copy_from_nonoverlapping(src, lanes);
                    dst.add(lanes).write_bytes(0, width - lanes);
                }
            }
        }
    }
}

/// Any strides, from `k0` on, one element at a time.
#[inline(always)]
unsafe fn pack_any(block: Block, k0: usize, width: usize, dst: *mut f32) {
    for (p, lane) in (0..block.lanes).step_by(width).enumerate() {
        let dst = dst.add(p * width * block.k);
        for k in k0..block.k {
            for i in 0..width {
                let src = block.at.wrapping_add((lane + i) * block.lane_stride + k * block.k_stride);
                *dst.add(k * width + i) = if lane + i < block.lanes { *src } else { 0.0 };
            }
        }
    }
}
