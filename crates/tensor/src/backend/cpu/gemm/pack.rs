//! Packing of a block of A or B into panels, so that the kernel reads memory in ascending order. A panel
//! stores, for each k, `width` lanes side by side. Lanes are rows of A or columns of B.

use super::super::tile::{BLOCK, Registers};

/// A block to pack: element (lane, k) is at `lane * lane_stride + k * k_stride`.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) at: *const f32,
    pub(super) lane_stride: usize,
    pub(super) k_stride: usize,
    pub(super) lanes: usize,
    pub(super) k: usize,
}

/// Packs a block. Panel `p` starts at `p * pitch`; within it, element (lane, k) is at `k * width + lane`.
/// Missing lanes of the last panel are zero.
///
/// Unless `width` is a multiple of [`BLOCK`], the pitch must leave room for [`BLOCK`] elements after each
/// panel.
///
/// # Safety
/// `block` must be readable, and `dst` writable for all panels and [`BLOCK`] more elements; `width` must be 6
/// or a multiple of [`BLOCK`].
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

/// Packs by transposing: lanes are strided and k is contiguous.
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

/// Packs by copying: lanes are contiguous. A strip of a few k is copied over all panels, so that memory is read
/// in long rows. A strip is short enough for the associativity of L1 cache when rows are a power of two apart.
///
/// Groups of 6 lanes are copied as 8: the excess is overwritten by the next copy, or lies in the room between
/// panels.
#[inline(always)]
unsafe fn pack_along(block: Block, width: usize, pitch: usize, dst: *mut f32) {
    const STRIP: usize = 4;
    let copied = width.next_multiple_of(BLOCK);
    // Number of panels whose copies end within the row. The remaining panels, and the k after the last whole
    // strip, are packed element by element.
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

/// Packs any strides from `k0` on, element by element.
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
