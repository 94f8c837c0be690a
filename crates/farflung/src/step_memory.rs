//! The memory of a rank in a step, by place and kind: as predicted, or as counted.

use std::fmt;

use farflung_base::{Bytes, MemoryByKind};
use serde::{Deserialize, Serialize};

/// Memory of a rank in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StepMemory {
    /// In the device's memory, when the step's tensors used the most: see
    /// [`Device::memory_by_kind`](farflung_tensor::Device::memory_by_kind).
    pub device: MemoryByKind,
    /// In the host's memory beside the device's. If the device is the host's processor, what is not in tensors.
    pub host: MemoryByKind,
    /// In files that the run reads or writes in a step; checkpoints are not among them.
    pub disk: MemoryByKind,
}

impl StepMemory {
    /// Returns the bytes in memory by kind, on the device and beside it.
    #[must_use]
    pub fn by_kind(&self) -> MemoryByKind {
        self.device + self.host
    }

    /// Returns the bytes in memory.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.by_kind().total()
    }
}

impl fmt::Display for StepMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.total())?;
        let kinds = self.by_kind().each().filter(|(_, bytes)| bytes.0 > 0);
        for (number, (kind, bytes)) in kinds.enumerate() {
            write!(f, "{} {} {bytes}", if number == 0 { ":" } else { "," }, kind.name())?;
        }
        match self.disk.total() {
            Bytes(0) => Ok(()),
            files => write!(f, "; in files {files}"),
        }
    }
}

/// Memory that was counted in a step of a run: the key `memory` of `metrics.jsonl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CountedMemory {
    /// The most of the step.
    #[serde(flatten)]
    pub step: StepMemory,
    /// In the device's memory after the step, in tensors alone.
    pub device_after: MemoryByKind,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_line_of_text_and_a_line_of_metrics() {
        let device = MemoryByKind { weights: Bytes(4096), gradients: Bytes(4096), ..MemoryByKind::default() };
        let host = MemoryByKind { messages: Bytes(1000), ..MemoryByKind::default() };
        let disk = MemoryByKind { optimizer: Bytes(2_000_000), ..MemoryByKind::default() };
        let step = StepMemory { device, host, disk };
        assert_eq!(
            step.to_string(),
            "9.19 kB: weights 4.1 kB, gradients 4.1 kB, messages 1 kB; in files 2 MB"
        );
        assert_eq!(StepMemory::default().to_string(), "0 B");
        let counted = CountedMemory { step, device_after: device };
        let text = serde_json::to_string(&counted).unwrap();
        assert!(
            text.starts_with(
                "{\"device\":{\"weights\":4096,\"gradients\":4096,\"optimizer\":0,\"activations\":0,\
                 \"operands\":0,\"messages\":0},\"host\":{"
            ),
            "{text}"
        );
        assert!(text.contains("\"disk\":{") && text.contains("\"device_after\":{"), "{text}");
        assert_eq!(serde_json::from_str::<CountedMemory>(&text).unwrap(), counted);
    }
}
