//! Copies a block of A or B into panels: `width` lanes side by side (rows of A, columns of B) for each k, so
//! that the kernel reads one ascending stream. It refuses to know which of the two it packs.

use super::super::tile::{BLOCK, Registers};

/// A block to be packed: element (lane, k) at `lane * lane_stride + k * k_stride`.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) at: *const f32,
    pub(super) lane_stride: usize,
    pub(super) k_stride: usize,
    pub(super) lanes: usize,
    pub(super) k: usize,
}

/// Panel `p` starts at `p * pitch`; in it, element (lane, k) is at `k * width + lane`. Lanes that the last
/// panel lacks are zero.
///
/// A pitch leaves room for [`BLOCK`] elements after a panel, unless `width` is a multiple of [`BLOCK`].
///
/// # Safety
/// `block` is readable, and `dst` writable for all panels and [`BLOCK`] elements more; `width` is 6 or a
/// multiple of [`BLOCK`].
#[inline(always)]
pub(super) unsafe fn pack<I: Registers>(block: Block, width: usize, pitch: usize, dst: *mut f32) {
    if block.k_stride == 1 && block.lane_stride != 1 {
        pack_across::<I>(block, width, pitch, dst);
    } else if block.lane_stride == 1 {
        pack_along(block, width, pitch, dst);
    } else {
        pack_any(block, 0, width, pitch, dst);
    }
}

/// Lanes are strided, k is contiguous: transposes.
#[inline(always)]
unsafe fn pack_across<I: Registers>(block: Block, width: usize, pitch: usize, dst: *mut f32) {
    let whole = block.k / BLOCK * BLOCK;
    for (p, lane) in (0..block.lanes).step_by(width).enumerate() {
        let lanes = (block.lanes - lane).min(width);
        let src = block.at.add(lane * block.lane_stride);
        let dst = dst.add(p * pitch);
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
        pack_any(panel, whole, width, pitch, dst);
    }
}

/// Lanes are contiguous: copies. Some k at a time over all panels, so that what is read is read in long rows,
/// but no more than fit the ways of the first-level cache where rows lie a power of two apart.
///
/// A lane group of 6 is copied as 8: what follows it in the panel is written next, or is the room between
/// panels.
#[inline(always)]
unsafe fn pack_along(block: Block, width: usize, pitch: usize, dst: *mut f32) {
    const STRIP: usize = 4;
    let copied = width.next_multiple_of(BLOCK);
    // Panels whose copies end within the row, and k in whole strips; the rest goes one element at a time.
    let panels = if block.lanes < copied { 0 } else { (block.lanes - copied) / width + 1 };
    let strips = block.k / STRIP * STRIP;
    for k in (0..strips).step_by(STRIP) {
        let src = block.at.add(k * block.k_stride);
        let dst = dst.add(k * width);
        for p in 0..panels {
            let (src, dst) = (src.add(p * width), dst.add(p * pitch));
            for i in 0..STRIP {
                dst.add(i * width).copy_from_nonoverlapping(src.add(i * block.k_stride), copied);
            }
        }
    }
    let whole = Block { lanes: panels * width, ..block };
    pack_any(whole, strips, width, pitch, dst);
    let last = Block { at: block.at.add(whole.lanes), lanes: block.lanes - whole.lanes, ..block };
    pack_any(last, 0, width, pitch, dst.add(panels * pitch));
}

/// Any strides, from `k0` on, one element at a time.
#[inline(always)]
unsafe fn pack_any(block: Block, k0: usize, width: usize, pitch: usize, dst: *mut f32) {
    for (p, lane) in (0..block.lanes).step_by(width).enumerate() {
        let dst = dst.add(p * pitch);
        for k in k0..block.k {
            for i in 0..width {
                let src = block.at.wrapping_add((lane + i) * block.lane_stride + k * block.k_stride);
                *dst.add(k * width + i) = if lane + i < block.lanes { *src } else { 0.0 };
            }
        }
    }
}
