//! Views of tensors, which borrow parts of their buffers. The borrow checker, not a lock, ensures that no two
//! writers overlap.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use farflung_base::Pending;

use crate::backend::{BufferRange, Storage};
use crate::{DType, Device, Element, Result, Shape, TensorError};

/// A shared, read-only view of a part of a tensor.
#[derive(Clone, Copy)]
pub struct View<'a> {
    device: &'a Device,
    storage: &'a dyn Storage,
    dtype: DType,
    shape: Shape,
    start: usize,
}

/// An exclusive view of a part of a tensor. Splitting it gives disjoint views that may be written at the same
/// time.
pub struct ViewMut<'a> {
    device: &'a Device,
    storage: &'a dyn Storage,
    dtype: DType,
    shape: Shape,
    start: usize,
    exclusive: PhantomData<&'a mut f32>,
}

fn check_range(op: &'static str, start: usize, shape: Shape, len: usize) -> Result<()> {
    match start.checked_add(shape.len()) {
        Some(end) if end <= len => Ok(()),
        end => Err(TensorError::OutOfBounds { op, start, end: end.unwrap_or(usize::MAX), len }),
    }
}

fn check_dtype<T: Element>(op: &'static str, found: DType) -> Result<()> {
    if found == T::DTYPE { Ok(()) } else { Err(TensorError::DTypeMismatch { op, expected: T::DTYPE, found }) }
}

impl<'a> View<'a> {
    /// Returns a view of a whole tensor.
    pub(crate) fn of(device: &'a Device, storage: &'a dyn Storage, dtype: DType, shape: Shape) -> Self {
        View { device, storage, dtype, shape, start: 0 }
    }
}

impl<'a> ViewMut<'a> {
    /// Returns a view of a whole tensor, which the caller must have borrowed exclusively.
    pub(crate) fn of(device: &'a Device, storage: &'a dyn Storage, dtype: DType, shape: Shape) -> Self {
        ViewMut { device, storage, dtype, shape, start: 0, exclusive: PhantomData }
    }
}

macro_rules! accessors {
    () => {
        /// Returns the device of the tensor.
        #[must_use]
        pub const fn device(&self) -> &Device {
            self.device
        }

        /// Returns the element type.
        #[must_use]
        pub const fn dtype(&self) -> DType {
            self.dtype
        }

        /// Returns the shape.
        #[must_use]
        pub const fn shape(&self) -> Shape {
            self.shape
        }

        /// Returns the number of elements.
        #[must_use]
        pub fn len(&self) -> usize {
            self.shape.len()
        }

        /// Returns whether there are no elements.
        #[must_use]
        pub fn is_empty(&self) -> bool {
            self.shape.is_empty()
        }

        /// Returns a view of the same elements with another shape.
        pub fn reshape(mut self, shape: impl Into<Shape>) -> Result<Self> {
            let shape = shape.into();
            if shape.len() != self.shape.len() {
                return Err(TensorError::ShapeMismatch { op: "reshape", lhs: self.shape, rhs: shape });
            }
            self.shape = shape;
            Ok(self)
        }

        /// Returns a view of `shape.len()` elements from `start` on, with the given shape. `start` counts
        /// elements of this view.
        pub fn part(mut self, start: usize, shape: impl Into<Shape>) -> Result<Self> {
            let shape = shape.into();
            check_range("part", start, shape, self.len())?;
            self.start += start;
            self.shape = shape;
            Ok(self)
        }

        fn range(&self) -> Range<usize> {
            let size = self.dtype.size();
            self.start * size..(self.start + self.shape.len()) * size
        }
    };
}

impl<'a> View<'a> {
    accessors!();

    /// Returns the buffer and the byte range of this view, for the backend.
    pub(crate) fn raw(&self) -> BufferRange<'_> {
        BufferRange { storage: self.storage, range: self.range() }
    }

    /// Copies the elements to the host.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.start_to_vec().wait()
    }

    /// Starts to copy the elements to the host. The copy holds the values after all ops started before, and is
    /// not affected by ops started later. On a device whose memory is host memory, it is ready at once.
    pub fn start_to_vec<T: Element>(&self) -> Pending<Result<Vec<T>>> {
        if let Err(error) = check_dtype::<T>("to_vec", self.dtype) {
            return Pending::ready(Err(error));
        }
        if let Some(values) = self.host() {
            return Pending::ready(Ok(values.to_vec()));
        }
        let len = self.len();
        self.device.backend().start_download(self.raw()).map(move |read| {
            let mut out = vec![T::zeroed(); len];
            bytemuck::cast_slice_mut(&mut out).copy_from_slice(read?.bytes());
            Ok(out)
        })
    }

    /// Returns the elements in place if the device's memory is host memory and `T` is the element type.
    #[must_use]
    pub fn host<T: Element>(&self) -> Option<&'a [T]> {
        if self.dtype != T::DTYPE {
            return None;
        }
        let part = BufferRange { storage: self.storage, range: self.range() };
        part.host().map(bytemuck::cast_slice)
    }
}

impl<'a> ViewMut<'a> {
    accessors!();

    /// Returns a read-only view of the same part.
    #[must_use]
    pub const fn as_view(&self) -> View<'_> {
        View {
            device: self.device,
            storage: self.storage,
            dtype: self.dtype,
            shape: self.shape,
            start: self.start,
        }
    }

    /// Reborrows the view for a shorter lifetime.
    #[must_use]
    pub const fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut {
            device: self.device,
            storage: self.storage,
            dtype: self.dtype,
            shape: self.shape,
            start: self.start,
            exclusive: PhantomData,
        }
    }

    /// Splits into the first `at` elements and the rest, both with one dimension.
    pub fn split_at(self, at: usize) -> Result<(Self, Self)> {
        let len = self.len();
        check_range("split_at", at, Shape::from(0), len)?;
        let half = |start, len| Self {
            device: self.device,
            storage: self.storage,
            dtype: self.dtype,
            shape: Shape::from(len),
            start,
            exclusive: PhantomData,
        };
        Ok((half(self.start, at), half(self.start + at, len - at)))
    }

    /// Overwrites all elements with values from the host.
    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<()> {
        check_dtype::<T>("write", self.dtype)?;
        if values.len() != self.len() {
            return Err(TensorError::ShapeMismatch {
                op: "write",
                lhs: Shape::from(values.len()),
                rhs: self.shape,
            });
        }
        self.device.backend().upload(bytemuck::cast_slice(values), self.reborrow())
    }

    /// Returns the elements in place for writing if the device's memory is host memory and `T` is the element
    /// type.
    #[must_use]
    pub fn into_host<T: Element>(self) -> Option<&'a mut [T]> {
        if self.dtype == T::DTYPE { self.into_bytes().map(bytemuck::cast_slice_mut) } else { None }
    }

    /// Returns the bytes in place for writing if the device's memory is host memory.
    pub(crate) fn into_bytes(self) -> Option<&'a mut [u8]> {
        let part = BufferRange { storage: self.storage, range: self.range() };
        #[expect(unsafe_code, reason = "a mutable view gives access to its elements")]
        // SAFETY: no other view of these elements exists for 'a: this view was created from a `&mut Tensor` or
        // by splitting one, and it is consumed here.
        unsafe {
            part.host_mut()
        }
    }
}

impl fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({} {} on {})", self.dtype, self.shape, self.device.name())
    }
}

impl fmt::Debug for ViewMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ViewMut({} {} on {})", self.dtype, self.shape, self.device.name())
    }
}
