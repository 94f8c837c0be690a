//! The host's memory that an average holds between rounds.

use farflung_base::Bytes;
use farflung_tensor::{Device, Tensor};

use super::Average;
use super::bucket::Packed;
use super::bucket_reduction::BucketReduction;

impl Packed {
    /// Returns the bytes that are not in the memory of `device`, which counts its tensors itself.
    fn held(&self, device: &Device) -> usize {
        let beside = |tensor: &&Tensor| !tensor.device().same(device);
        let bytes = |tensor: &Tensor| tensor.shape().len() * tensor.dtype().size();
        match self {
            Self::Plain(values) => values.capacity() * size_of::<f32>(),
            Self::Coded(blocks) => blocks.iter().filter(beside).map(bytes).sum(),
        }
    }
}

impl Average {
    /// Returns the bytes of the host's memory that the buckets and the codecs' state take. Not counted:
    /// messages on their way, and tensors on the device of the flat buffers, which counts them
    /// ([`Device::memory_by_kind`]).
    #[must_use]
    pub fn held(&self) -> Bytes {
        let packed = self.buckets.iter().filter_map(|bucket| bucket.packed.as_ref());
        let buckets: usize = packed.map(|packed| packed.held(&self.device)).sum();
        let codecs: usize = self.reductions.iter().map(BucketReduction::held).sum();
        Bytes((buckets + codecs) as u64)
    }
}
