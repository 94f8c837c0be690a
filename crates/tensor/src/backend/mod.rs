//! What a device must be able to do. The set of ops is closed and small; each backend interprets all of it.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::ptr::NonNull;

use farflung_base::Pending;

use crate::op::Op;
use crate::{BlockCodec, DType, DrawnMask, Precision, Result, Shape, View, ViewMut};

pub(crate) mod cpu;
#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod sizes;

/// A buffer of a device; a backend knows its own by their type.
pub(crate) trait Storage: Any + Debug + Send + Sync {
    /// Its bytes, where they are in the host's memory.
    fn host(&self) -> Option<(NonNull<u8>, usize)>;
}

/// A byte range of a buffer. Whoever holds one got it from a view, which says whether it may be written.
#[derive(Debug, Clone)]
pub(crate) struct Part<'a> {
    pub(crate) storage: &'a dyn Storage,
    pub(crate) range: Range<usize>,
}

/// Bytes that came from a device.
pub(crate) trait Downloaded: Send {
    fn bytes(&self) -> &[u8];
}

impl Downloaded for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// One device: memory, and an interpreter of ops.
pub(crate) trait Backend: Debug + Send + Sync {
    /// Such as `cpu`, `wgpu:0`.
    fn name(&self) -> &str;

    /// A buffer of at least `bytes` bytes, aligned to 256; its contents are whatever was there.
    fn allocate(&self, dtype: DType, shape: Shape) -> Result<Box<dyn Storage>>;

    /// Takes a buffer back for reuse.
    fn release(&self, storage: Box<dyn Storage>);

    /// Host to device, as many bytes as the view has.
    fn upload(&self, bytes: &[u8], to: ViewMut<'_>) -> Result<()>;

    /// Device to host: the bytes as they are once all ops started before are done.
    fn start_download(&self, from: Part<'_>) -> Pending<Result<Box<dyn Downloaded>>>;

    /// Starts an op whose shapes and types were checked; the operands of products are rounded to `precision`.
    fn run(&self, op: Op<'_>, precision: Precision) -> Result<()>;

    /// Codecs of vectors there; none where the memory is the host's, whose own codecs then work in place.
    fn codecs(&self) -> Option<&dyn Codecs> {
        None
    }

    /// Returns when all ops started before are done, with the first error among them.
    fn fence(&self) -> Result<()>;

    /// Bytes held in buffers now, in use or kept for reuse, and the most there ever were.
    fn memory(&self) -> (usize, usize);

    /// What products take beside buffers, where the backend counts it.
    fn operands(&self) -> OperandBytes {
        OperandBytes::default()
    }
}

/// Bytes beside a device's buffers in which operands of products are copied. They are kept between products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OperandBytes {
    /// Of each thread: panels of both operands.
    pub packed: usize,
    /// Both operands rounded to 16 bits, where the precision is not f32.
    pub rounded: usize,
}

/// Codecs whose operands were checked, of vectors that are not empty: see [`crate::Codecs`].
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

    /// Whether all of `x` is finite, or of its sum.
    fn look(&self, x: View<'_>, sum: Option<Sum<'_>>, verdict: ViewMut<'_>) -> Result<()>;

    /// At least one of each chunk, which is not empty.
    fn largest(&self, x: View<'_>, chunk: usize, kept: usize, indices: ViewMut<'_>) -> Result<()>;

    fn squares(&self, x: View<'_>, matrix: View<'_>, inverse: bool, y: ViewMut<'_>) -> Result<()>;

    fn mask(&self, mask: DrawnMask, indices: ViewMut<'_>) -> Result<()>;

    fn gather(&self, x: View<'_>, indices: View<'_>, y: ViewMut<'_>) -> Result<()>;

    fn put(&self, x: View<'_>, indices: View<'_>, y: ViewMut<'_>) -> Result<()>;
}

/// The sum of a vector and another one, or their difference, and where it goes.
#[derive(Debug)]
pub(crate) enum Sum<'a> {
    Plus(View<'a>, ViewMut<'a>),
    Minus(View<'a>, ViewMut<'a>),
}

impl<'a> Part<'a> {
    fn pointer(&self) -> Option<(*mut u8, usize)> {
        let (base, len) = self.storage.host()?;
        assert!(
            self.range.start <= self.range.end && self.range.end <= len,
            "views stay within their buffer"
        );
        Some((base.as_ptr().wrapping_add(self.range.start), self.range.len()))
    }

    /// The bytes in place, where they are in the host's memory.
    #[expect(unsafe_code, reason = "buffers are raw memory; views guard them")]
    pub(crate) fn host(&self) -> Option<&'a [u8]> {
        let (pointer, len) = self.pointer()?;
        // SAFETY: the range lies within the buffer, whose memory is initialised and lives for 'a; a part is
        // read only through a view, and views never overlap one that may be written.
        Some(unsafe { std::slice::from_raw_parts(pointer, len) })
    }

    /// The bytes in place, to write.
    ///
    /// # Safety
    /// The caller holds the only view of these bytes for 'a.
    #[expect(unsafe_code, reason = "buffers are raw memory; views guard them")]
    pub(crate) unsafe fn host_mut(&self) -> Option<&'a mut [u8]> {
        let (pointer, len) = self.pointer()?;
        // SAFETY: the range lies within the buffer, whose memory is initialised and lives for 'a; the caller
        // promises that no other view of it is in use.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
    }
}
