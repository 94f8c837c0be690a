//! Moves tensors to host memory to free device memory. When to do so is decided by the caller.

use std::fmt;

use farflung_base::Pending;

use crate::backend::Downloaded;
use crate::{DType, Device, Result, Shape, Tensor};

/// A tensor whose values are in host memory or on their way there. Its device buffer is free for reuse, unless
/// the device's memory is host memory.
pub struct Offloaded(OffloadedData);

enum OffloadedData {
    /// Device memory is host memory, so the tensor was not moved.
    Host(Tensor),
    Downloading {
        device: Device,
        dtype: DType,
        shape: Shape,
        bytes: Pending<Result<Box<dyn Downloaded>>>,
    },
}

impl Tensor {
    /// Starts to move the values to host memory and returns without waiting. The copy holds the values after
    /// all ops that were started before. On a device whose memory is host memory, nothing moves.
    ///
    /// ```
    /// let x = farflung_tensor::Device::cpu(1)?.tensor(&[1.0_f32, 2.0], 2)?;
    /// assert_eq!(x.offload().restore()?.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), farflung_tensor::TensorError>(())
    /// ```
    #[must_use]
    pub fn offload(self) -> Offloaded {
        let whole = self.view();
        let raw = whole.raw();
        if raw.host().is_some() {
            return Offloaded(OffloadedData::Host(self));
        }
        let device = self.device().clone();
        let bytes = device.backend().start_download(raw);
        Offloaded(OffloadedData::Downloading { dtype: self.dtype(), shape: self.shape(), bytes, device })
    }
}

impl Offloaded {
    /// Allocates the tensor on its device again and copies the values back, waiting for them if necessary.
    ///
    /// Errors: [`crate::TensorError::OutOfMemory`]; [`crate::TensorError::Device`] if the copy to the host
    /// failed.
    pub fn restore(self) -> Result<Tensor> {
        match self.0 {
            OffloadedData::Host(tensor) => Ok(tensor),
            OffloadedData::Downloading { device, dtype, shape, bytes } => {
                let mut tensor = device.empty(dtype, shape)?;
                device.backend().upload(bytes.wait()?.bytes(), tensor.view_mut())?;
                Ok(tensor)
            }
        }
    }
}

impl fmt::Debug for Offloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            OffloadedData::Host(tensor) => tensor.fmt(f),
            OffloadedData::Downloading { device, dtype, shape, .. } => {
                write!(f, "Offloaded({dtype} {shape} of {})", device.name())
            }
        }
    }
}
