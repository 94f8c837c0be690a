//! Rows of one head, which are strided in a buffer of many heads.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::tile::{LINE, prefetch_far};

/// Read-only rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    data: &'a [f32],
    pub(super) stride: usize,
    pub(super) width: usize,
}

impl<'a> Rows<'a> {
    /// Creates rows `stride` apart; the first one begins at `data[0]`.
    pub(super) fn new(data: &'a [f32], stride: usize, width: usize) -> Self {
        Self { data, stride, width }
    }

    /// Returns rows that begin at the same place and are `stride` apart.
    pub(super) fn spaced(self, stride: usize) -> Self {
        Self { stride, ..self }
    }

    /// Returns the rows from `t` on.
    pub(super) fn after(self, t: usize) -> Self {
        Self { data: &self.data[t * self.stride..], ..self }
    }

    /// Prefetches some rows into L2 cache. They may be out of bounds.
    pub(super) fn fetch(&self, rows: &Range<usize>) {
        rows.clone().flat_map(|t| self.lines(t)).for_each(prefetch_far);
    }

    /// Returns the addresses of the cache lines of a row. They may be out of bounds.
    pub(super) fn lines(&self, t: usize) -> impl Iterator<Item = *const f32> {
        let row = self.data.as_ptr().wrapping_add(t * self.stride);
        (0..self.width).step_by(LINE).map(move |j| row.wrapping_add(j))
    }

    /// Returns the slice from the first of some rows to the end of the last. Panics if they are out of bounds.
    pub(super) fn span(&self, rows: &Range<usize>) -> &'a [f32] {
        if rows.is_empty() {
            return &[];
        }
        &self.data[rows.start * self.stride..][..(rows.len() - 1) * self.stride + self.width]
    }
}

/// Writable rows.
#[derive(Debug)]
pub(super) struct RowsMut<'a> {
    data: *mut f32,
    len: usize,
    stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

impl<'a> RowsMut<'a> {
    /// Creates the rows of a matrix, `stride` apart.
    pub(super) fn new(data: &'a mut [f32], stride: usize) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), stride, owner: PhantomData }
    }

    /// Creates rows of a buffer whose other columns are used by other tasks.
    ///
    /// # Safety
    /// The buffer must be valid for `len` floats for `'a`, and no other code may use the columns of these rows.
    #[expect(unsafe_code, reason = "several tasks write one buffer")]
    pub(super) unsafe fn shared(data: *mut f32, len: usize, stride: usize) -> Self {
        Self { data, len, stride, owner: PhantomData }
    }

    /// Returns rows that begin at the same place and are `stride` apart.
    pub(super) fn spaced(self, stride: usize) -> Self {
        Self { stride, ..self }
    }

    /// Returns the rows from `t` on.
    pub(super) fn from(&mut self, t: usize) -> RowsMut<'_> {
        let skip = t * self.stride;
        let len = self.len.checked_sub(skip).expect("the buffer contains the row");
        RowsMut { data: self.data.wrapping_add(skip), len, stride: self.stride, owner: PhantomData }
    }

    /// Sets `rows` rows of `width` floats to 0.
    pub(super) fn clear(&mut self, rows: usize, width: usize) {
        if rows == 0 {
            return;
        }
        let (data, stride) = self.span(rows, width);
        for row in 0..rows {
            #[expect(unsafe_code, reason = "the rows are strided in a buffer that other tasks use, too")]
            // SAFETY: in bounds, as `span` has checked, and no other code uses these columns.
            unsafe {
                std::slice::from_raw_parts_mut(data.add(row * stride), width).fill(0.0);
            }
        }
    }

    /// Returns a pointer to the first row, and the stride. Panics unless `rows` rows of `width` floats are in
    /// bounds.
    pub(super) fn span(&mut self, rows: usize, width: usize) -> (*mut f32, usize) {
        assert!((rows - 1) * self.stride + width <= self.len, "rows must lie within their buffer");
        (self.data, self.stride)
    }
}
