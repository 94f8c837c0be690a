//! A device: where tensors live and ops run. One process may hold several, of different kinds.

use std::fmt;
use std::sync::Arc;

use crate::backend::cpu::Cpu;
use crate::backend::sizes::Sizes;
use crate::backend::{Backend, OperandBytes};
use crate::op::Op;
use crate::{DType, Element, Interrupt, Precision, Result, Shape, Tensor, TensorError};

/// A handle on a backend; cloning it gives another handle on the same device.
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
    precision: Precision,
    interrupt: Interrupt,
}

impl Device {
    fn new(backend: impl Backend + 'static) -> Self {
        Self { backend: Arc::new(backend), precision: Precision::default(), interrupt: Interrupt::default() }
    }

    /// The host's processors, with `threads` threads in all; results have the same bits for any number of them.
    pub fn cpu(threads: usize) -> Result<Self> {
        Ok(Self::new(Cpu::new(threads)?))
    }

    /// A device without memory that computes nothing: tensors there have shapes and no values, and
    /// [`Device::memory`] is what they would take on a [`Device::cpu`]. For memory to be predicted by the
    /// code that is to run.
    #[must_use]
    pub fn sizes() -> Self {
        Self::new(Sizes::default())
    }

    /// A GPU through Vulkan, Metal or DirectX: the `index`-th adapter that [`Device::list`] shows as
    /// `wgpu:index`.
    #[cfg(feature = "wgpu")]
    pub fn wgpu(index: usize) -> Result<Self> {
        Ok(Self::new(crate::backend::cube::open::adapters::open_nth(index)?))
    }

    /// An NVIDIA GPU through CUDA.
    #[cfg(feature = "cuda")]
    pub fn cuda(index: usize) -> Result<Self> {
        Ok(Self::new(crate::backend::cube::open::cuda(index)?))
    }

    /// A handle on the same device whose matrix products round their operands to `precision`. Tensors made
    /// through one handle serve the other.
    #[must_use]
    pub fn with_precision(&self, precision: Precision) -> Self {
        Self { precision, ..self.clone() }
    }

    /// A handle on the same device whose ops, and those of the tensors that are made through it, fail while
    /// `interrupt` is raised.
    #[must_use]
    pub fn with_interrupt(&self, interrupt: &Interrupt) -> Self {
        Self { interrupt: interrupt.clone(), ..self.clone() }
    }

    /// What matrix products round their operands to.
    #[must_use]
    pub const fn precision(&self) -> Precision {
        self.precision
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Such as `cpu`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.backend.name()
    }

    /// A tensor whose contents are whatever its buffer held before; for results that an op writes in full.
    pub fn empty(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        Ok(Tensor::new(self.clone(), dtype, shape, self.backend.allocate(dtype, shape)?))
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
    ///
    /// Errors: [`TensorError::Interrupted`] while its [interrupt](Device::with_interrupt) is raised.
    pub fn run(&self, op: Op<'_>) -> Result<()> {
        if self.interrupt.is_raised() {
            return Err(TensorError::Interrupted);
        }
        op.check(self)?;
        self.backend.run(op, self.precision)
    }

    /// Waits for all ops started before; device errors surface here.
    pub fn fence(&self) -> Result<()> {
        self.backend.fence()
    }

    /// Bytes that tensors of this device hold now (in use or kept for reuse), and the most they ever held.
    #[must_use]
    pub fn memory(&self) -> (usize, usize) {
        self.backend.memory()
    }

    /// What products take of the host's memory beside tensors. Only [`Device::sizes`] counts it.
    #[must_use]
    pub fn operands(&self) -> OperandBytes {
        self.backend.operands()
    }

    /// Whether both handles are of the same device.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.backend, &other.backend)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.backend, f)
    }
}
