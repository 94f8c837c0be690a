//! The interface of a backend. The set of ops is small and closed; each backend implements all of them.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::ptr::NonNull;

use farflung_base::Pending;

use crate::op::Op;
use crate::{BlockCodec, BlockMask, DType, Precision, Result, Shape, View, ViewMut, Work};

pub(crate) mod cpu;
#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod sizes;

/// A buffer of a device. A backend recognises its own buffers by their type.
pub(crate) trait Storage: Any + Debug + Send + Sync {
    /// Returns the buffer's address and length if it is in host memory.
    fn host(&self) -> Option<(NonNull<u8>, usize)>;

    /// Returns the bytes that it takes on the device, rounded as the backend rounds them.
    fn bytes(&self) -> usize;
}

/// A byte range of a buffer. It is created from a view, and the kind of view decides whether it may be written.
#[derive(Debug, Clone)]
pub(crate) struct BufferRange<'a> {
    pub(crate) storage: &'a dyn Storage,
    pub(crate) range: Range<usize>,
}

/// Bytes that were copied from a device.
pub(crate) trait Downloaded: Send {
    fn bytes(&self) -> &[u8];
}

impl Downloaded for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// One device: its memory, and the implementation of the ops.
pub(crate) trait Backend: Debug + Send + Sync {
    /// Returns the device's name, such as `cpu` or `wgpu:0`.
    fn name(&self) -> &str;

    /// Allocates a buffer for `shape.len()` elements, aligned to 256 bytes. Its contents are unspecified.
    fn allocate(&self, dtype: DType, shape: Shape) -> Result<Box<dyn Storage>>;

    /// Takes a buffer back for reuse.
    fn release(&self, storage: Box<dyn Storage>);

    /// Copies bytes from the host to the device. `bytes` is as long as the view.
    fn upload(&self, bytes: &[u8], to: ViewMut<'_>) -> Result<()>;

    /// Starts to copy bytes to the host. The copy holds the values after all ops started before.
    fn start_download(&self, from: BufferRange<'_>) -> Pending<Result<Box<dyn Downloaded>>>;

    /// Starts an op whose shapes and types were checked. Operands of matrix products are rounded to
    /// `precision`.
    fn run(&self, op: Op<'_>, precision: Precision) -> Result<()>;

    /// Returns the codecs that run on the device; `None` if its memory is host memory, where the host's codecs
    /// work in place, or if it only counts buffers.
    fn codecs(&self) -> Option<&dyn Codecs> {
        None
    }

    /// Waits for all ops started before, and returns the first error among them.
    fn fence(&self) -> Result<()>;

    /// Returns the bytes currently allocated for buffers (in use or kept for reuse), and the maximum so far.
    fn memory(&self) -> (usize, usize);

    /// Returns the memory that matrix products use in addition to buffers. Zero if the backend does not count
    /// it.
    fn operands(&self) -> MatMulScratchBytes {
        MatMulScratchBytes::default()
    }

    /// Returns whether buffers have no contents.
    fn is_counting(&self) -> bool {
        false
    }

    /// Returns the sum of the costs of all ops so far. Zero if the backend does not count it.
    fn work(&self) -> Work {
        Work::default()
    }

    /// Returns the exact bytes of the buffers in use, and the maximum since the last [`Backend::reset_peak`].
    /// Zeros if the backend does not count them.
    fn in_use(&self) -> (usize, usize) {
        (0, 0)
    }

    /// Sets the maximum of [`Backend::in_use`] to the current value.
    fn reset_peak(&self) {}
}

/// Bytes of working memory that matrix products use in addition to tensor buffers. It is kept between products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MatMulScratchBytes {
    /// Packed panels of both operands; per thread.
    pub packed: usize,
    /// Copies of both operands, rounded to 16 bits but stored as f32; zero if the precision is f32.
    pub rounded: usize,
}

/// Codecs of [`crate::Codecs`], called with checked operands and non-empty vectors only.
pub(crate) trait Codecs: Debug {
    fn encode(
        &self,
        codec: BlockCodec,
        x: View<'_>,
        before: Option<View<'_>>,
        lost: Option<ViewMut<'_>>,
        out: ViewMut<'_>,
    ) -> Result<()>;

    fn decode(&self, codec: BlockCodec, body: View<'_>, y: ViewMut<'_>, verdict: ViewMut<'_>) -> Result<()>;

    /// Checks whether all elements of `x`, or of the given sum, are finite.
    fn check_finite(&self, x: View<'_>, sum: Option<Sum<'_>>, verdict: ViewMut<'_>) -> Result<()>;

    /// Writes the indices of the largest magnitudes of each chunk. `kept` is at least 1 and chunks are not
    /// empty.
    fn largest(&self, x: View<'_>, chunk: usize, kept: usize, indices: ViewMut<'_>) -> Result<()>;

    fn squares(&self, x: View<'_>, matrix: View<'_>, inverse: bool, y: ViewMut<'_>) -> Result<()>;

    fn mask(&self, mask: BlockMask, indices: ViewMut<'_>) -> Result<()>;

    fn gather(&self, x: View<'_>, indices: View<'_>, y: ViewMut<'_>) -> Result<()>;

    fn put(&self, x: View<'_>, indices: View<'_>, y: ViewMut<'_>) -> Result<()>;
}

/// The sum or the difference of a vector and a second one, and the view that receives it.
#[derive(Debug)]
pub(crate) enum Sum<'a> {
    Plus(View<'a>, ViewMut<'a>),
    Minus(View<'a>, ViewMut<'a>),
}

impl<'a> BufferRange<'a> {
    fn pointer(&self) -> Option<(*mut u8, usize)> {
        let (base, len) = self.storage.host()?;
        assert!(
            self.range.start <= self.range.end && self.range.end <= len,
            "a view must lie within its buffer"
        );
        Some((base.as_ptr().wrapping_add(self.range.start), self.range.len()))
    }

    /// Returns the bytes in place if they are in host memory.
    #[expect(unsafe_code, reason = "buffers are raw memory; they are accessed only through views")]
    pub(crate) fn host(&self) -> Option<&'a [u8]> {
        let (pointer, len) = self.pointer()?;
        // SAFETY: the range is within the buffer, whose memory is initialised and valid for 'a. Parts are read
        // only through views, and a view never overlaps a mutable one.
        Some(unsafe { std::slice::from_raw_parts(pointer, len) })
    }

    /// Returns the bytes in place for writing, if they are in host memory.
    ///
    /// # Safety
    /// The caller must hold the only view of these bytes for 'a.
    #[expect(unsafe_code, reason = "buffers are raw memory; they are accessed only through views")]
    pub(crate) unsafe fn host_mut(&self) -> Option<&'a mut [u8]> {
        let (pointer, len) = self.pointer()?;
        // SAFETY: the range is within the buffer, whose memory is initialised and valid for 'a. The caller
        // guarantees that no other view of it is in use.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
    }
}
