//! Tensors. A tensor is the only owner of its buffer, except while other threads read it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use farflung_base::Pending;

use crate::backend::Storage;
use crate::memory_counts::Place;
use crate::op::Op;
use crate::{DType, Device, Element, Result, Shape, TensorError, View, ViewMut};

/// An array on a device: row-major, contiguous, and the only owner of its buffer. Dropping it returns the
/// buffer to the device's pool.
pub struct Tensor {
    device: Device,
    dtype: DType,
    shape: Shape,
    /// Held by this tensor and by its [`SharedTensor`]s.
    storage: Option<Arc<Box<dyn Storage>>>,
}

/// A tensor that another thread reads: see [`Tensor::share`].
pub struct SharedTensor(Tensor);

/// Time between two looks whether a tensor is still shared.
const UNTIL_UNSHARED: Duration = Duration::from_micros(50);

impl Tensor {
    pub(crate) fn new(device: Device, dtype: DType, shape: Shape, storage: Box<dyn Storage>) -> Self {
        Self { device, dtype, shape, storage: Some(Arc::new(storage)) }
    }

    fn storage(&self) -> &dyn Storage {
        &***self.storage.as_ref().expect("the storage is present until drop")
    }

    /// Returns a handle by which another thread reads the elements while this one goes on. Whatever writes to
    /// the tensor waits until all such handles are dropped; dropping the tensor does not wait.
    ///
    /// ```
    /// use farflung_tensor::Device;
    ///
    /// let mut x = Device::cpu(1)?.tensor(&[1.0f32, 2.0], 2)?;
    /// let shared = x.share();
    /// let reader = std::thread::spawn(move || shared.host::<f32>().map(<[f32]>::to_vec));
    /// x.write(&[3.0f32, 4.0])?; // after the reader
    /// assert_eq!(reader.join().unwrap(), Some(vec![1.0, 2.0]));
    /// # Ok::<(), farflung_tensor::TensorError>(())
    /// ```
    #[must_use]
    pub fn share(&self) -> SharedTensor {
        let Self { device, dtype, shape, storage } = self;
        SharedTensor(Self { device: device.clone(), dtype: *dtype, shape: *shape, storage: storage.clone() })
    }

    /// Returns the tensor's device.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
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

    /// Returns a read-only view of the whole tensor.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        View::of(&self.device, self.storage(), self.dtype, self.shape)
    }

    /// Returns a mutable view of the whole tensor, once no other thread reads it ([`Tensor::share`]).
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let storage = self.storage.as_ref().expect("the storage is present until drop");
        // No new handle can be made meanwhile, since the tensor is borrowed exclusively.
        while Arc::strong_count(storage) > 1 {
            std::thread::sleep(UNTIL_UNSHARED);
        }
        // The count was read without an order; what the last reader did happens before what follows.
        fence(Ordering::Acquire);
        ViewMut::of(&self.device, &***storage, self.dtype, self.shape)
    }

    /// Copies the elements to the host.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.view().to_vec()
    }

    /// Starts to copy the elements to the host: see [`View::start_to_vec`].
    pub fn start_to_vec<T: Element>(&self) -> Pending<Result<Vec<T>>> {
        self.view().start_to_vec()
    }

    /// Overwrites all elements with values from the host.
    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<()> {
        self.view_mut().write(values)
    }

    /// Returns the elements in place if the device's memory is host memory and `T` is the element type.
    #[must_use]
    pub fn host<T: Element>(&self) -> Option<&[T]> {
        self.view().host()
    }

    /// Returns the elements in place for writing if the device's memory is host memory and `T` is the element
    /// type.
    #[must_use]
    pub fn host_mut<T: Element>(&mut self) -> Option<&mut [T]> {
        self.view_mut().into_host()
    }
}

/// Creation of tensors.
impl Device {
    /// Creates a tensor with unspecified contents, for results that an op overwrites completely.
    pub fn empty(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let storage = self.backend().allocate(dtype, shape)?;
        self.counts().add(Place::Device, self.kind(), storage.bytes());
        Ok(Tensor::new(self.clone(), dtype, shape, storage))
    }

    /// Creates an f32 tensor of zeros.
    pub fn zeros(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let mut t = self.empty(DType::F32, shape)?;
        self.run(Op::Fill { value: 0.0, y: t.view_mut() })?;
        Ok(t)
    }

    /// Creates a tensor with the given values.
    pub fn tensor<T: Element>(&self, values: &[T], shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.len() != values.len() {
            return Err(TensorError::ShapeMismatch {
                op: "tensor",
                lhs: Shape::from(values.len()),
                rhs: shape,
            });
        }
        let mut t = self.empty(T::DTYPE, shape)?;
        t.write(values)?;
        Ok(t)
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // The last of the tensor and its handles returns the buffer.
        if let Some(storage) = self.storage.take().and_then(Arc::into_inner) {
            self.device.counts().subtract(Place::Device, self.device.kind(), storage.bytes());
            self.device.backend().release(storage);
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {} on {})", self.dtype, self.shape, self.device.name())
    }
}

impl SharedTensor {
    /// Returns the elements in place if the device's memory is host memory and `T` is the element type.
    #[must_use]
    pub fn host<T: Element>(&self) -> Option<&[T]> {
        self.0.host()
    }
}

impl fmt::Debug for SharedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shared({:?})", self.0)
    }
}
