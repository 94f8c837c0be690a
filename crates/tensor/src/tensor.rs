//! Tensors and views of them. A tensor owns its buffer alone; views borrow parts of it, so that who may write
//! where is settled by the compiler, not by a lock.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use farflung_base::Pending;

use crate::backend::{Part, Storage};
use crate::{DType, Device, Element, Result, Shape, TensorError};

/// An array on a device: row-major, contiguous, the only owner of its buffer. Dropping it returns the buffer to
/// the device's pool.
pub struct Tensor {
    device: Device,
    dtype: DType,
    shape: Shape,
    storage: Option<Box<dyn Storage>>,
}

/// A shared, read-only part of a tensor.
#[derive(Clone, Copy)]
pub struct View<'a> {
    device: &'a Device,
    storage: &'a dyn Storage,
    dtype: DType,
    shape: Shape,
    start: usize,
}

/// An exclusive part of a tensor. Splitting it gives disjoint parts that may be written at the same time.
pub struct ViewMut<'a> {
    device: &'a Device,
    storage: &'a dyn Storage,
    dtype: DType,
    shape: Shape,
    start: usize,
    exclusive: PhantomData<&'a mut f32>,
}

impl Tensor {
    pub(crate) fn new(device: Device, dtype: DType, shape: Shape, storage: Box<dyn Storage>) -> Self {
        Self { device, dtype, shape, storage: Some(storage) }
    }

    fn storage(&self) -> &dyn Storage {
        self.storage.as_deref().expect("present until drop")
    }

    /// Where it lives.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Its element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its shape.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// All of it, to read.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        View { device: &self.device, storage: self.storage(), dtype: self.dtype, shape: self.shape, start: 0 }
    }

    /// All of it, to write.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut {
            device: &self.device,
            storage: self.storage.as_deref().expect("present until drop"),
            dtype: self.dtype,
            shape: self.shape,
            start: 0,
            exclusive: PhantomData,
        }
    }

    /// The elements on the host, copied off the device.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.view().to_vec()
    }

    /// Starts to copy the elements off the device: see [`View::start_to_vec`].
    pub fn start_to_vec<T: Element>(&self) -> Pending<Result<Vec<T>>> {
        self.view().start_to_vec()
    }

    /// Overwrites all elements from the host.
    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<()> {
        self.view_mut().write(values)
    }

    /// The elements in place, where the device's memory is the host's.
    #[must_use]
    pub fn host<T: Element>(&self) -> Option<&[T]> {
        self.view().host()
    }

    /// The elements in place to write, where the device's memory is the host's.
    #[must_use]
    pub fn host_mut<T: Element>(&mut self) -> Option<&mut [T]> {
        self.view_mut().into_host()
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if let Some(storage) = self.storage.take() {
            self.device.backend().release(storage);
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {} on {})", self.dtype, self.shape, self.device.name())
    }
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

macro_rules! accessors {
    () => {
        /// Where it lives.
        #[must_use]
        pub const fn device(&self) -> &Device {
            self.device
        }

        /// Its element type.
        #[must_use]
        pub const fn dtype(&self) -> DType {
            self.dtype
        }

        /// Its shape.
        #[must_use]
        pub const fn shape(&self) -> Shape {
            self.shape
        }

        /// Number of elements.
        #[must_use]
        pub fn len(&self) -> usize {
            self.shape.len()
        }

        /// Whether there are no elements.
        #[must_use]
        pub fn is_empty(&self) -> bool {
            self.shape.is_empty()
        }

        /// The same elements under another shape.
        pub fn reshape(mut self, shape: impl Into<Shape>) -> Result<Self> {
            let shape = shape.into();
            if shape.len() != self.shape.len() {
                return Err(TensorError::ShapeMismatch { op: "reshape", lhs: self.shape, rhs: shape });
            }
            self.shape = shape;
            Ok(self)
        }

        /// `shape.len()` elements from `start` on (in elements of this view), as a view of that shape.
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

    /// Where this view lies in its buffer: what a backend needs.
    pub(crate) fn raw(&self) -> Part<'_> {
        Part { storage: self.storage, range: self.range() }
    }

    /// The elements on the host, copied off the device.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.start_to_vec().wait()
    }

    /// Starts to copy the elements off the device: as they are once all ops before are done, whatever is
    /// started afterwards. They are there at once where the device's memory is the host's.
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

    /// The elements in place, where the device's memory is the host's and the type is right.
    #[must_use]
    pub fn host<T: Element>(&self) -> Option<&'a [T]> {
        if self.dtype != T::DTYPE {
            return None;
        }
        let part = Part { storage: self.storage, range: self.range() };
        part.host().map(bytemuck::cast_slice)
    }
}

impl<'a> ViewMut<'a> {
    accessors!();

    /// The same part, to read.
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

    /// The same part for a shorter time.
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

    /// The first `at` elements and the rest, both flat.
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

    /// Overwrites all elements from the host.
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

    /// The elements in place to write, where the device's memory is the host's and the type is right.
    #[must_use]
    pub fn into_host<T: Element>(self) -> Option<&'a mut [T]> {
        if self.dtype == T::DTYPE { self.into_bytes().map(bytemuck::cast_slice_mut) } else { None }
    }

    /// The bytes in place to write, where the device's memory is the host's.
    pub(crate) fn into_bytes(self) -> Option<&'a mut [u8]> {
        let part = Part { storage: self.storage, range: self.range() };
        #[expect(unsafe_code, reason = "a view that may write hands out its elements")]
        // SAFETY: this view is the only one of its elements for 'a: it was made from a `&mut Tensor` or by
        // splitting, and is consumed here.
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
