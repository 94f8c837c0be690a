//! Rows of one head, which lie apart in a buffer that holds many heads. It refuses to know what they mean.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::tile::{LINE, prefetch_far};

/// Rows to read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    data: &'a [f32],
    pub(super) stride: usize,
    pub(super) width: usize,
}

impl<'a> Rows<'a> {
    /// Rows `stride` apart; `data` begins with the first.
    pub(super) fn new(data: &'a [f32], stride: usize, width: usize) -> Self {
        Self { data, stride, width }
    }

    /// Asks for some rows, which need not be there, into the second-level cache.
    pub(super) fn fetch(&self, rows: &Range<usize>) {
        rows.clone().flat_map(|t| self.lines(t)).for_each(prefetch_far);
    }

    /// Where the cache lines of a row lie, which need not be there.
    pub(super) fn lines(&self, t: usize) -> impl Iterator<Item = *const f32> {
        let row = self.data.as_ptr().wrapping_add(t * self.stride);
        (0..self.width).step_by(LINE).map(move |j| row.wrapping_add(j))
    }

    /// From the first of some rows to the end of the last; panics unless all of them are there.
    pub(super) fn span(&self, rows: &Range<usize>) -> &'a [f32] {
        if rows.is_empty() {
            return &[];
        }
        &self.data[rows.start * self.stride..][..(rows.len() - 1) * self.stride + self.width]
    }
}

/// Rows to write.
#[derive(Debug)]
pub(super) struct RowsMut<'a> {
    data: *mut f32,
    len: usize,
    stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

impl<'a> RowsMut<'a> {
    /// Rows `stride` apart of a matrix.
    pub(super) fn new(data: &'a mut [f32], stride: usize) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), stride, owner: PhantomData }
    }

    /// Rows `stride` apart of a buffer whose other columns belong to others.
    ///
    /// # Safety
    /// The buffer is valid for `len` floats for `'a`, and nobody else uses the columns of these rows.
    #[expect(unsafe_code, reason = "several tasks write one buffer")]
    pub(super) unsafe fn shared(data: *mut f32, len: usize, stride: usize) -> Self {
        Self { data, len, stride, owner: PhantomData }
    }

    /// The rows from `t` on.
    pub(super) fn from(&mut self, t: usize) -> RowsMut<'_> {
        let skip = t * self.stride;
        let len = self.len.checked_sub(skip).expect("the row is there");
        RowsMut { data: self.data.wrapping_add(skip), len, stride: self.stride, owner: PhantomData }
    }

    /// Where the first of `rows` begins, and the stride; panics unless they are there, `width` wide.
    pub(super) fn span(&mut self, rows: usize, width: usize) -> (*mut f32, usize) {
        assert!((rows - 1) * self.stride + width <= self.len, "rows lie within their buffer");
        (self.data, self.stride)
    }
}
