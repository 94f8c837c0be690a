//! The memory of a rank in a step, as its device and the owners of other memory count it.

use farflung_base::{Bytes, MemoryByKind};

use super::Trainer;
use crate::{CountedMemory, StepMemory};

impl Trainer {
    /// Begins to count the memory of a step: what was held before it no longer counts.
    pub fn begin_memory(&self) {
        self.executor.device.reset_peak();
    }

    /// Returns the memory of what was done since [`Trainer::begin_memory`].
    #[must_use]
    pub fn memory(&self) -> CountedMemory {
        let device = &self.executor.device;
        let (mut host, mut disk) = (device.offloaded_by_kind(), MemoryByKind::default());
        for part in self.executor.parts.values() {
            host.messages += part.sync.as_ref().map_or(Bytes::default(), |sync| sync.held());
            if let Some(state) = &part.disk {
                host += state.held_on_host();
                disk.optimizer += state.held_in_file();
            }
        }
        let boundaries = self.executor.boundaries.held();
        host.messages += Bytes(boundaries.memory as u64);
        disk.messages += Bytes(boundaries.files as u64);
        if let Some(mark) = &self.mark {
            host += mark.held_on_host();
        }
        CountedMemory {
            step: StepMemory { device: device.memory_by_kind(), host, disk },
            device_after: device.in_use_by_kind(),
        }
    }
}
