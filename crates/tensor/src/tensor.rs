//! Tensors. A tensor is the only owner of its buffer.

use std::fmt;

use farflung_base::Pending;

use crate::backend::Storage;
use crate::op::Op;
use crate::{DType, Device, Element, Result, Shape, TensorError, View, ViewMut};

/// An array on a device: row-major, contiguous, and the only owner of its buffer. Dropping it returns the
/// buffer to the device's pool.
pub struct Tensor {
    device: Device,
    dtype: DType,
    shape: Shape,
    storage: Option<Box<dyn Storage>>,
}

impl Tensor {
    pub(crate) fn new(device: Device, dtype: DType, shape: Shape, storage: Box<dyn Storage>) -> Self {
        Self { device, dtype, shape, storage: Some(storage) }
    }

    fn storage(&self) -> &dyn Storage {
        self.storage.as_deref().expect("the storage is present until drop")
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

    /// Returns a mutable view of the whole tensor.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let storage = self.storage.as_deref().expect("the storage is present until drop");
        ViewMut::of(&self.device, storage, self.dtype, self.shape)
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
        Ok(Tensor::new(self.clone(), dtype, shape, self.backend().allocate(dtype, shape)?))
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
