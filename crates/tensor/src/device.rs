//! A device: where tensors live and ops run. One process may hold several, of different kinds.

use std::fmt;
use std::sync::Arc;

use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::op::Op;
use crate::{DType, Element, Result, Shape, Tensor, TensorError};

/// A handle on a backend; cloning it gives another handle on the same device.
#[derive(Clone)]
pub struct Device(Arc<dyn Backend>);

impl Device {
    /// The host's processors, with `threads` threads in all; results have the same bits for any number of them.
    pub fn cpu(threads: usize) -> Result<Self> {
        Ok(Self(Arc::new(Cpu::new(threads)?)))
    }

    /// A GPU through Vulkan, Metal or DirectX: the `index`-th adapter that [`Device::list`] shows as `wgpu:index`.
    #[cfg(feature = "wgpu")]
    pub fn wgpu(index: usize) -> Result<Self> {
        Ok(Self(Arc::new(crate::backend::cube::open::adapters::open_nth(index)?)))
    }

    /// An NVIDIA GPU through CUDA.
    #[cfg(feature = "cuda")]
    pub fn cuda(index: usize) -> Result<Self> {
        Ok(Self(Arc::new(crate::backend::cube::open::cuda(index)?)))
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.0
    }

    /// Such as `cpu`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// A tensor whose contents are whatever its buffer held before; for results that an op writes in full.
    pub fn empty(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        Ok(Tensor::new(self.clone(), dtype, shape, self.0.allocate(dtype, shape)?))
    }

    /// An f32 tensor of zeros.
    pub fn zeros(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let mut t = self.empty(DType::F32, shape)?;
        self.run(Op::Fill { value: 0.0, y: t.view_mut() })?;
        Ok(t)
    }

    /// A tensor with values from the host.
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

    /// Runs an op after checking its shapes, types and devices.
    pub fn run(&self, op: Op<'_>) -> Result<()> {
        op.check(self)?;
        self.0.run(op)
    }

    /// Waits for all ops started before; device errors surface here.
    pub fn fence(&self) -> Result<()> {
        self.0.fence()
    }

    /// Bytes that tensors of this device hold now (in use or kept for reuse), and the most they ever held.
    #[must_use]
    pub fn memory(&self) -> (usize, usize) {
        self.0.memory()
    }

    /// Whether both handles are of the same device.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
