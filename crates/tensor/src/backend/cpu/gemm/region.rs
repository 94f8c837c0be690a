//! One thread's part of a product: a rectangle of C over all of k, in blocks that fit the caches.
//!
//! For a large product, a panel of B stays in L1 cache while a block of A streams past it from L2. If all of B
//! fits a cache and there are many rows, a few rows of A are multiplied by all of B before the next rows: C is
//! then completed in memory order, and the epilogue gets whole rows.
//!
//! Full panels of B whose columns are contiguous are packed by the kernel of the first rows that use them.

use std::cell::Cell;
use std::ops::Range;

use super::super::tile::{BLOCK, LINE, Registers, Tile, Update, prefetch, prefetch_far};
use super::Epilogue;
use super::pack::{Block, pack};

/// Maximum length of a block of k: a panel of B is then 24 KiB with AVX2.
const K_BLOCK: usize = 384;
/// Elements of a packed block of A: 384 KiB of L2 cache.
const A_BLOCK: usize = 96 * 1024;
/// Number of columns whose packed panels are kept while several blocks of A are processed.
const N_BLOCK: usize = 768;
/// Maximum number of elements of B for [`by_rows`], which keeps all of B packed: it must stay in L3 cache.
const B_BLOCK: usize = 1024 * 1024;
/// Maximum number of elements of B per row of A for [`by_rows`]. Beyond it, packing all of B costs more than it
/// gains; the cost is not hidden if columns of B are not contiguous.
const B_PER_ROW: usize = 576;
/// Number of elements of B that fit in L2 cache. For a larger B, two tiles of A are multiplied by each panel
/// when it is loaded.
const B_NEAR: usize = 96 * 1024;
/// Maximum number of columns for which contiguous rows of A are read in place, because packing would not pay
/// off.
const IN_PLACE_COLUMNS: usize = 256;

/// A product as raw pointers: element (i, k) of A is at `a[i * a_strides.0 + k * a_strides.1]`; B and C
/// likewise.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) a: *const f32,
    pub(super) a_strides: (usize, usize),
    pub(super) b: *const f32,
    pub(super) b_strides: (usize, usize),
    pub(super) c: *mut f32,
    pub(super) c_stride: usize,
    pub(super) k: usize,
    pub(super) accumulate: bool,
    /// Row number that is passed to the epilogue for row 0.
    pub(super) first_row: usize,
}

impl Product {
    /// Returns how the block of k that begins at `k0` updates C.
    const fn update(&self, k0: usize) -> Update<'static> {
        if self.accumulate || k0 > 0 { Update::Add } else { Update::Overwrite }
    }
}

/// How kernels read A.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Read {
    /// In place; rows are contiguous.
    Rows,
    /// In place; columns are contiguous.
    Columns,
    /// From a packed copy, by columns.
    Packed,
}

/// Returns a block length of at most `most` that divides `whole` into nearly equal blocks, rounded up to a
/// multiple of `unit`.
fn even_block(whole: usize, most: usize, unit: usize) -> usize {
    whole.div_ceil(whole.div_ceil(most).max(1)).next_multiple_of(unit)
}

/// Division of a region into blocks, and layout of the packed blocks.
struct Blocking {
    k_block: usize,
    m_block: usize,
    n_block: usize,
    read: Read,
    /// Length of one packed panel of A, and of all panels of a block, in elements.
    a_panel: usize,
    a_len: usize,
    /// Length of one packed panel of B in elements, and number of panels that are kept.
    b_panel: usize,
    b_panels: usize,
}

impl Blocking {
    fn of<I: Registers>(a_strides: (usize, usize), k: usize, rows: usize, columns: usize) -> Self {
        // The blocks of k depend only on k, because they determine the order of the sums.
        let k_block = even_block(k, K_BLOCK, BLOCK);
        let m_block = even_block(rows, (A_BLOCK / k_block).max(I::MR), I::MR);
        let n_block = if rows <= m_block { columns } else { even_block(columns, N_BLOCK, I::NR) };
        let read = if a_strides.1 == 1 && columns <= IN_PLACE_COLUMNS {
            Read::Rows
        } else if a_strides.0 == 1 && a_strides.1 <= I::NEAR_COLUMNS {
            Read::Columns
        } else {
            Read::Packed
        };
        // One extra cache line, so that panels whose length is a power of two do not map to the same cache
        // lines.
        let a_panel = I::MR * k_block + LINE;
        let a_len = if read == Read::Packed { m_block / I::MR * a_panel + BLOCK } else { 0 };
        let b_panels = if rows <= m_block { 1 } else { n_block.div_ceil(I::NR) };
        Self { k_block, m_block, n_block, read, a_panel, a_len, b_panel: k_block * I::NR, b_panels }
    }

    /// Returns the number of floats in the packed panels of A and B.
    const fn packed(&self) -> usize {
        self.a_len + 2 * LINE + self.b_panels * self.b_panel + BLOCK
    }
}

/// Returns whether to keep all of B packed and process A row by row. Requires contiguous rows of A.
fn keeps_b(a_strides: (usize, usize), k: usize, rows: usize, columns: usize) -> bool {
    a_strides.1 == 1 && columns.saturating_mul(k) <= B_BLOCK.min(rows.saturating_mul(B_PER_ROW))
}

/// Returns the number of floats that a thread packs if it keeps all of B.
const fn packed_b<I: Registers>(k: usize, columns: usize) -> usize {
    columns.next_multiple_of(I::NR) * k + BLOCK
}

/// Returns the number of floats that a thread packs for a product with these rows and columns.
pub(super) fn packed<I: Registers>(
    a_strides: (usize, usize),
    k: usize,
    rows: usize,
    columns: usize,
) -> usize {
    if k == 0 {
        return 0;
    }
    if keeps_b(a_strides, k, rows, columns) {
        return packed_b::<I>(k, columns);
    }
    Blocking::of::<I>(a_strides, k, rows, columns).packed()
}

/// Computes the given rows and columns of C.
///
/// # Safety
/// The product's pointers must be valid for these rows and columns and all of k. Only this thread may write to
/// this part of C. The CPU must have the instructions of `I`, and the caller must enable their target features.
#[inline(always)]
pub(super) unsafe fn region<I: Registers, E: Epilogue>(
    p: &Product,
    rows: Range<usize>,
    columns: Range<usize>,
    epilogue: &E,
) {
    if p.k == 0 {
        return finish_empty::<I, E>(p, rows, columns, epilogue);
    }
    if keeps_b(p.a_strides, p.k, rows.len(), columns.len()) {
        return by_rows::<I, E>(p, rows, columns, epilogue);
    }
    let cut = Blocking::of::<I>(p.a_strides, p.k, rows.len(), columns.len());
    let Blocking { k_block, m_block, n_block, read, a_panel, a_len, b_panel, b_panels } = cut;
    let by_columns = read != Read::Rows;
    let mut scratch = Scratch::take(cut.packed());
    let a_packed = scratch.lines.as_mut_ptr().cast::<f32>();
    let b_packed = a_packed.add(a_len.next_multiple_of(LINE));

    for n0 in columns.clone().step_by(n_block.max(1)) {
        let n1 = (n0 + n_block).min(columns.end);
        for k0 in (0..p.k).step_by(k_block) {
            let k = (p.k - k0).min(k_block);
            let last = k0 + k == p.k;
            let mut tile = Tile {
                k,
                a: a_packed,
                a_stride: match read {
                    Read::Rows => p.a_strides.0,
                    Read::Columns => p.a_strides.1,
                    Read::Packed => I::MR,
                },
                b: b_packed,
                b_from: p.b,
                b_stride: p.b_strides.0,
                c: p.c,
                c_stride: p.c_stride,
                columns: 0,
                update: p.update(k0),
            };
            for m0 in rows.clone().step_by(m_block) {
                let m1 = (m0 + m_block).min(rows.end);
                let a = p.a.add(m0 * p.a_strides.0 + k0 * p.a_strides.1);
                if read == Read::Packed {
                    let (lane_stride, k_stride) = p.a_strides;
                    let block = Block { at: a, lane_stride, k_stride, lanes: m1 - m0, k };
                    pack::<I>(block, I::MR, a_panel, a_packed);
                }
                for (panel, j) in (n0..n1).step_by(I::NR).enumerate() {
                    tile.b = if b_panels == 1 { b_packed } else { b_packed.add(panel * b_panel) };
                    tile.columns = (n1 - j).min(I::NR);
                    let (k_stride, lane_stride) = p.b_strides;
                    let block = |j: usize, lanes: usize| Block {
                        at: p.b.add(k0 * k_stride + j * lane_stride),
                        lane_stride,
                        k_stride,
                        lanes,
                        k,
                    };
                    let mut ahead = Prefetcher::nothing();
                    let mut packs = false;
                    if m0 == rows.start {
                        packs = lane_stride == 1 && tile.columns == I::NR && m1 - m0 >= I::MR;
                        if packs {
                            tile.b_from = p.b.add(k0 * k_stride + j);
                        } else {
                            pack::<I>(block(j, tile.columns), I::NR, b_panel, tile.b);
                        }
                        let next = j + I::NR;
                        if next < n1 {
                            ahead = Prefetcher::new(
                                block(next, (n1 - next).min(I::NR)),
                                (m1 - m0).div_ceil(I::MR),
                            );
                        }
                    }
                    let vectors = tile.columns.div_ceil(I::LANES);
                    let full = I::kernel(I::MR, vectors, by_columns);
                    for i in (m0..m1).step_by(I::MR) {
                        ahead.some();
                        let tile_rows = (m1 - i).min(I::MR);
                        let kernel = if packs && i == m0 {
                            I::packing_kernel(by_columns)
                        } else if tile_rows == I::MR {
                            full
                        } else {
                            I::kernel(tile_rows, vectors, by_columns)
                        };
                        tile.a = if read == Read::Packed {
                            a_packed.add((i - m0) / I::MR * a_panel)
                        } else {
                            a.add((i - m0) * p.a_strides.0)
                        };
                        tile.c = p.c.add(i * p.c_stride + j);
                        if last {
                            fetch_beside::<I, E>(tile_rows, p.first_row + i, j, epilogue);
                        }
                        kernel(&tile);
                        if last {
                            finish::<I, E>(&tile, tile_rows, p.first_row + i, j, epilogue);
                        }
                    }
                }
            }
        }
    }
    scratch.put_back();
}

/// Computes a region with all of B packed; rows of A are contiguous and read in place.
#[inline(always)]
unsafe fn by_rows<I: Registers, E: Epilogue>(
    p: &Product,
    rows: Range<usize>,
    columns: Range<usize>,
    epilogue: &E,
) {
    let k_block = even_block(p.k, K_BLOCK, BLOCK);
    let width = columns.len().next_multiple_of(I::NR);
    let mut scratch = Scratch::take(packed_b::<I>(p.k, columns.len()));
    let b_packed = scratch.lines.as_mut_ptr().cast::<f32>();
    let (k_stride, lane_stride) = p.b_strides;
    // Full panels whose columns are contiguous are packed by the first tile of rows.
    let by_first = if lane_stride == 1 && rows.len() >= I::MR { columns.len() / I::NR * I::NR } else { 0 };
    if by_first < columns.len() {
        for k0 in (0..p.k).step_by(k_block) {
            let at = p.b.add(k0 * k_stride + (columns.start + by_first) * lane_stride);
            let (lanes, k) = (columns.len() - by_first, (p.k - k0).min(k_block));
            let block = Block { at, lane_stride, k_stride, lanes, k };
            pack::<I>(block, I::NR, I::NR * k, b_packed.add(width * k0 + by_first * k));
        }
    }
    let group = if width * p.k <= B_NEAR { I::MR } else { 2 * I::MR };
    for m0 in rows.clone().step_by(group) {
        let group = m0..(m0 + group).min(rows.end);
        for k0 in (0..p.k).step_by(k_block) {
            let k = (p.k - k0).min(k_block);
            for (panel, j) in columns.clone().step_by(I::NR).enumerate() {
                for i in group.clone().step_by(I::MR) {
                    let tile_rows = (group.end - i).min(I::MR);
                    let tile = Tile {
                        k,
                        a: p.a.add(i * p.a_strides.0 + k0),
                        a_stride: p.a_strides.0,
                        b: b_packed.add(width * k0 + panel * I::NR * k),
                        b_from: p.b.wrapping_add(k0 * k_stride + j),
                        b_stride: k_stride,
                        c: p.c.add(i * p.c_stride + j),
                        c_stride: p.c_stride,
                        columns: (columns.end - j).min(I::NR),
                        update: p.update(k0),
                    };
                    if k0 + k == p.k {
                        fetch_beside::<I, E>(tile_rows, p.first_row + i, j, epilogue);
                    }
                    let kernel = if i == rows.start && j < columns.start + by_first {
                        I::packing_kernel(false)
                    } else {
                        I::kernel(tile_rows, tile.columns.div_ceil(I::LANES), false)
                    };
                    kernel(&tile);
                }
            }
        }
        for row in group {
            let c = p.c.add(row * p.c_stride + columns.start);
            let c = std::slice::from_raw_parts_mut(c, columns.len());
            epilogue.row::<I::Level>(p.first_row + row, columns.start, c);
        }
    }
    scratch.put_back();
}

/// Prefetches the epilogue's second matrix for the rows of a tile: the cache lines of its first and last
/// column.
#[inline(always)]
unsafe fn fetch_beside<I: Registers, E: Epilogue>(rows: usize, row: usize, column: usize, epilogue: &E) {
    for i in 0..rows {
        for column in [column, column + I::NR - 1] {
            if let Some(at) = epilogue.beside(row + i, column) {
                prefetch(at);
            }
        }
    }
}

/// Calls the epilogue for the rows of a finished tile.
#[inline(always)]
unsafe fn finish<I: Registers, E: Epilogue>(
    tile: &Tile<'_>,
    rows: usize,
    row: usize,
    column: usize,
    epilogue: &E,
) {
    for i in 0..rows {
        let c = tile.c.add(i * tile.c_stride);
        // The full width is a compile-time constant here.
        if tile.columns == I::NR {
            epilogue.row::<I::Level>(row + i, column, std::slice::from_raw_parts_mut(c, I::NR));
        } else {
            epilogue.row::<I::Level>(row + i, column, std::slice::from_raw_parts_mut(c, tile.columns));
        }
    }
}

/// Handles k = 0: sets C to zero, or keeps it when accumulating. Then calls the epilogue.
#[inline(always)]
unsafe fn finish_empty<I: Registers, E: Epilogue>(
    p: &Product,
    rows: Range<usize>,
    columns: Range<usize>,
    epilogue: &E,
) {
    for i in rows {
        let c = std::slice::from_raw_parts_mut(p.c.add(i * p.c_stride + columns.start), columns.len());
        if !p.accumulate {
            c.fill(0.0);
        }
        if !c.is_empty() {
            epilogue.row::<I::Level>(p.first_row + i, columns.start, c);
        }
    }
}

/// Prefetches the memory of the next panel of B while the kernel works on this one, a few cache lines per tile.
struct Prefetcher {
    block: Block,
    /// Position of the next cache line: row in memory, and element within it.
    row: usize,
    at: usize,
    rows: usize,
    row_len: usize,
    row_stride: usize,
    lines_per_call: usize,
}

impl Prefetcher {
    const fn nothing() -> Self {
        let block = Block { at: std::ptr::null(), lane_stride: 0, k_stride: 0, lanes: 0, k: 0 };
        Self { block, row: 0, at: 0, rows: 0, row_len: 0, row_stride: 0, lines_per_call: 0 }
    }

    /// Distributes the cache lines of `block` over `calls` calls of [`Prefetcher::some`].
    fn new(block: Block, calls: usize) -> Self {
        let (rows, row_len, row_stride) = if block.lane_stride == 1 {
            (block.k, block.lanes, block.k_stride)
        } else {
            (block.lanes, block.k, block.lane_stride)
        };
        let lines_per_call = (rows * row_len.div_ceil(LINE)).div_ceil(calls);
        Self { block, row: 0, at: 0, rows, row_len, row_stride, lines_per_call }
    }

    #[inline(always)]
    unsafe fn some(&mut self) {
        for _ in 0..self.lines_per_call {
            if self.row == self.rows {
                return;
            }
            prefetch_far(self.block.at.add(self.row * self.row_stride + self.at));
            self.at += LINE;
            if self.at >= self.row_len {
                self.at = 0;
                self.row += 1;
            }
        }
    }
}

/// Aligned memory for packed panels. Each thread keeps its buffer between calls, so that repeated products do
/// not allocate.
struct Scratch {
    lines: Vec<CacheLine>,
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine(#[expect(dead_code, reason = "read and written through a pointer")] [f32; LINE]);

thread_local! {
    static SCRATCH: Cell<Vec<CacheLine>> = const { Cell::new(Vec::new()) };
}

impl Scratch {
    /// Returns at least `floats` floats. A product started inside an epilogue finds the cell empty and
    /// allocates.
    fn take(floats: usize) -> Self {
        let mut lines = SCRATCH.take();
        let need = floats.div_ceil(LINE);
        if lines.len() < need {
            lines = vec![CacheLine([0.0; LINE]); need];
        }
        Self { lines }
    }

    fn put_back(self) {
        SCRATCH.set(self.lines);
    }
}
