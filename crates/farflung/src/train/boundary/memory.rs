//! Host memory of the encoded ends of a rank's boundaries.

use std::ops::Range;

use farflung_base::Rank;
use farflung_compress::link::{FileStore, SampleShape};
use farflung_parallel::pipeline::Placement;

use super::ends;
use crate::train::bound_plan::BoundPlan;

/// Bytes of a sample's map entry, besides the sample.
const ENTRY: u64 = 48;

/// Numbers of samples that a stateful codec sees.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct SamplesSeen {
    /// Number of distinct samples of the whole run that are stored in memory; 0 if files store them.
    pub(in crate::train) held: u64,
    /// Number of samples for which each file has room; 0 if memory stores them.
    pub(in crate::train) in_files: u64,
    /// Number of stored samples that a step changes. If files store samples: number of samples that a step
    /// writes to a file.
    pub(in crate::train) changed: u64,
}

/// Bytes of the encoded ends of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::train) struct CodedBytes {
    /// Peak bytes in the host's memory: buffers to encode and decode, and the samples of stateful codecs.
    pub(in crate::train) memory: u64,
    /// Bytes of the files of samples.
    pub(in crate::train) files: u64,
}

/// Returns the peak bytes of the encoded ends of the rank at `position`. The changed value of a sample is held
/// beside the old one until the step's commit.
pub(in crate::train) fn coded_bytes(
    plan: &BoundPlan,
    placement: &Placement,
    position: Rank,
    slices: &[Range<usize>],
    channels: usize,
    seen: SamplesSeen,
) -> CodedBytes {
    let mut sum = CodedBytes::default();
    for end in ends(plan, placement, position, slices) {
        let shape = SampleShape { positions: end.positions, channels };
        sum.memory += end.spec.working_bytes(shape, plan.batch as usize) as u64;
        if let Some(samples) = end.spec.samples(shape) {
            sum.memory += (seen.held + seen.changed) * (samples.bytes() as u64 + ENTRY);
            if seen.in_files > 0 {
                sum.files += FileStore::file_bytes(samples, seen.in_files);
            }
        }
    }
    sum
}
