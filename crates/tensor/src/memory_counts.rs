//! Counts the buffers of a device's tensors by what they are used for.

use std::sync::{Mutex, MutexGuard, PoisonError};

use farflung_base::{Bytes, MemoryByKind, MemoryKind};

/// Where the values of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Device,
    /// Moved to the host's memory, to free device memory.
    Host,
}

/// The bytes in one place.
#[derive(Debug, Default)]
struct Count {
    now: MemoryByKind,
    now_total: u64,
    /// The bytes when their sum was largest since the last reset.
    at_peak: MemoryByKind,
    peak_total: u64,
    /// The most bytes of each kind since the last reset, at whatever time.
    most: MemoryByKind,
}

impl Count {
    fn add(&mut self, kind: MemoryKind, bytes: u64) {
        self.now.of_mut(kind).0 += bytes;
        self.now_total += bytes;
        let most = self.most.of_mut(kind);
        *most = (*most).max(self.now.of(kind));
        if self.now_total > self.peak_total {
            (self.at_peak, self.peak_total) = (self.now, self.now_total);
        }
    }

    fn subtract(&mut self, kind: MemoryKind, bytes: u64) {
        self.now.of_mut(kind).0 -= bytes;
        self.now_total -= bytes;
    }

    const fn reset_peak(&mut self) {
        (self.at_peak, self.peak_total, self.most) = (self.now, self.now_total, self.now);
    }
}

/// The bytes of all tensors of a device.
#[derive(Debug, Default)]
pub(crate) struct MemoryCounts(Mutex<[Count; 2]>);

impl MemoryCounts {
    fn lock(&self) -> MutexGuard<'_, [Count; 2]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, place: Place, kind: MemoryKind, bytes: usize) {
        self.lock()[place as usize].add(kind, bytes as u64);
    }

    pub(crate) fn subtract(&self, place: Place, kind: MemoryKind, bytes: usize) {
        self.lock()[place as usize].subtract(kind, bytes as u64);
    }

    /// Returns the bytes now.
    pub(crate) fn now(&self, place: Place) -> MemoryByKind {
        self.lock()[place as usize].now
    }

    /// Returns the bytes when their sum was largest since the last [`MemoryCounts::reset_peak`].
    pub(crate) fn at_peak(&self, place: Place) -> MemoryByKind {
        self.lock()[place as usize].at_peak
    }

    /// Divides `held`, all bytes that the device has allocated, between the kinds. Most are those of
    /// [`MemoryCounts::at_peak`]. The rest is kept for reuse, or for ops while they run. Of that, a kind gets
    /// what it had at another time beyond those; what is left counts as activations.
    pub(crate) fn divide(&self, held: usize) -> MemoryByKind {
        let (mut divided, most) = {
            let counts = &self.lock()[Place::Device as usize];
            (counts.at_peak, counts.most)
        };
        let mut spare = (held as u64).saturating_sub(divided.total().0);
        for (kind, most) in most.each().filter(|(kind, _)| *kind != MemoryKind::Activations) {
            let bytes = divided.of_mut(kind);
            let more = (most.0 - bytes.0).min(spare);
            (bytes.0, spare) = (bytes.0 + more, spare - more);
        }
        divided.activations += Bytes(spare);
        divided
    }

    pub(crate) fn reset_peak(&self) {
        self.lock().iter_mut().for_each(Count::reset_peak);
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::{Bytes, MemoryByKind, MemoryKind};

    use crate::{DType, Device, Op};

    const PAGE: u64 = 4096;

    /// Both devices count the same program alike.
    #[test]
    fn a_buffer_counts_for_its_tensor_and_moves_between_kinds() {
        for device in [Device::cpu(1).unwrap(), Device::sizes()] {
            let [weights, gradients] = [MemoryKind::Weights, MemoryKind::Gradients];
            let params = device.counting_for(weights).zeros(1024).unwrap();
            let grads = device.counting_for(gradients).zeros(2048).unwrap();
            let mut hidden = device.empty(DType::F32, 1024).unwrap();
            device.run(Op::Cast { x: params.view(), y: hidden.view_mut() }).unwrap();
            let all = MemoryByKind {
                weights: Bytes(PAGE),
                gradients: Bytes(2 * PAGE),
                activations: Bytes(PAGE),
                ..MemoryByKind::default()
            };
            assert_eq!((device.in_use_by_kind(), device.memory_by_kind()), (all, all));
            drop((hidden, grads));
            // The buffer of the hidden states holds another version of the parameters now.
            let older = device.counting_for(weights).zeros(1000).unwrap();
            let now = MemoryByKind { weights: Bytes(2 * PAGE), ..MemoryByKind::default() };
            assert_eq!(
                (device.in_use_by_kind(), device.memory_by_kind()),
                (now, all),
                "there is no spare one"
            );
            assert_eq!(device.memory().0 as u64, all.total().0);
            device.reset_peak();
            let spare = MemoryByKind { activations: Bytes(2 * PAGE), ..now };
            assert_eq!(device.memory_by_kind(), spare, "what is kept for reuse");
            drop((params, older));
            assert_eq!(device.in_use_by_kind(), MemoryByKind::default());
            assert_eq!(device.memory_by_kind(), spare);
        }
    }

    /// A thread may drop the last handle on a tensor.
    #[test]
    fn a_shared_tensor_counts_once_and_until_its_last_handle() {
        let device = Device::cpu(1).unwrap();
        let params = device.counting_for(MemoryKind::Weights).zeros(5).unwrap();
        let shared = params.share();
        drop(params);
        assert_eq!(device.in_use_by_kind().weights, Bytes(PAGE));
        std::thread::spawn(move || drop(shared)).join().unwrap();
        assert_eq!(device.in_use_by_kind(), MemoryByKind::default());
    }

    /// What a kind had at another time than all kinds together is its own, and not spare.
    #[test]
    fn temporary_buffers_of_an_update_are_not_activations() {
        let device = Device::sizes();
        let state = device.counting_for(MemoryKind::Optimizer);
        let moments = state.zeros(1024).unwrap();
        drop(device.zeros([10, 1024]).unwrap());
        drop(state.zeros(3 * 1024).unwrap());
        let held = MemoryByKind {
            optimizer: Bytes(4 * PAGE),
            activations: Bytes(10 * PAGE),
            ..MemoryByKind::default()
        };
        assert_eq!(device.memory_by_kind(), held);
        assert_eq!(device.memory().0 as u64, held.total().0);
        device.reset_peak();
        assert_eq!(device.memory_by_kind().optimizer, Bytes(PAGE));
        drop(moments);
    }
}
