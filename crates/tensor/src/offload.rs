//! Moves tensors to host memory to free device memory. When to do so is decided by the caller.

use std::fmt;

use farflung_base::Pending;

use crate::backend::Downloaded;
use crate::memory_counts::Place;
use crate::{DType, Device, Result, Shape, Tensor};

/// A tensor whose values are in host memory or on their way there. Its device buffer is free for reuse, unless
/// the device's memory is host memory.
pub struct Offloaded(OffloadedData);

enum OffloadedData {
    /// Device memory is host memory, so the tensor was not moved.
    Host(Tensor),
    Downloading {
        host: HostBytes,
        dtype: DType,
        shape: Shape,
        bytes: Pending<Result<Box<dyn Downloaded>>>,
    },
}

/// Bytes of the host's memory, counted while they hold a tensor of a device.
struct HostBytes {
    device: Device,
    bytes: usize,
}

impl HostBytes {
    fn new(device: Device, bytes: usize) -> Self {
        device.counts().add(Place::Host, device.kind(), bytes);
        Self { device, bytes }
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        self.device.counts().subtract(Place::Host, self.device.kind(), self.bytes);
    }
}

impl Tensor {
    /// Starts to move the values to host memory and returns without waiting. The copy holds the values after
    /// all ops that were started before. On a device whose memory is host memory, nothing moves; one that only
    /// counts counts as the host.
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
        if raw.host().is_some() || self.device().is_counting() {
            return Offloaded(OffloadedData::Host(self));
        }
        let host = HostBytes::new(self.device().clone(), raw.range.len());
        let bytes = host.device.backend().start_download(raw);
        Offloaded(OffloadedData::Downloading { dtype: self.dtype(), shape: self.shape(), bytes, host })
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
            OffloadedData::Downloading { host, dtype, shape, bytes } => {
                let mut tensor = host.device.empty(dtype, shape)?;
                host.device.backend().upload(bytes.wait()?.bytes(), tensor.view_mut())?;
                Ok(tensor)
            }
        }
    }
}

impl fmt::Debug for Offloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            OffloadedData::Host(tensor) => tensor.fmt(f),
            OffloadedData::Downloading { host, dtype, shape, .. } => {
                write!(f, "Offloaded({dtype} {shape} of {})", host.device.name())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::{Bytes, MemoryByKind};

    use super::HostBytes;
    use crate::Device;

    #[test]
    fn bytes_on_the_host_count_until_they_are_dropped() {
        let device = Device::cpu(1).unwrap();
        drop(HostBytes::new(device.clone(), 60));
        let away = MemoryByKind { activations: Bytes(60), ..MemoryByKind::default() };
        assert_eq!((device.offloaded_by_kind(), device.in_use_by_kind()), (away, MemoryByKind::default()));
        device.reset_peak();
        assert_eq!(device.offloaded_by_kind(), MemoryByKind::default());
        let hidden = device.zeros(5).unwrap().offload();
        assert_eq!(
            (device.offloaded_by_kind(), device.in_use_by_kind().activations.0),
            (MemoryByKind::default(), 4096)
        );
        drop(hidden);
    }
}
