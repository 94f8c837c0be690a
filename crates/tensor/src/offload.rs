//! Tensors that wait in the host's memory while a device has better uses for its own. It refuses to know when
//! that pays.

use std::fmt;

use farflung_base::Pending;

use crate::backend::Downloaded;
use crate::{DType, Device, Result, Shape, Tensor};

/// A tensor whose values are in the host's memory, or on their way there; its buffer on the device is free for
/// others.
pub struct Offloaded(Place);

enum Place {
    /// It was in the host's memory before.
    Host(Tensor),
    Away {
        device: Device,
        dtype: DType,
        shape: Shape,
        bytes: Pending<Result<Box<dyn Downloaded>>>,
    },
}

impl Tensor {
    /// Moves the values to the host's memory, as they are once all ops before are done; nobody waits for that.
    /// Where the device's memory is the host's, nothing moves.
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
            return Offloaded(Place::Host(self));
        }
        let device = self.device().clone();
        let bytes = device.backend().start_download(raw);
        Offloaded(Place::Away { dtype: self.dtype(), shape: self.shape(), bytes, device })
    }
}

impl Offloaded {
    /// The tensor on its device again.
    ///
    /// Errors: [`crate::TensorError::OutOfMemory`]; [`crate::TensorError::Device`] if the values never came.
    pub fn restore(self) -> Result<Tensor> {
        match self.0 {
            Place::Host(tensor) => Ok(tensor),
            Place::Away { device, dtype, shape, bytes } => {
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
            Place::Host(tensor) => tensor.fmt(f),
            Place::Away { device, dtype, shape, .. } => {
                write!(f, "Offloaded({dtype} {shape} of {})", device.name())
            }
        }
    }
}
