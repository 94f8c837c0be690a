//! Bytes that the coded ends of a rank's boundaries take in the host's memory.

use std::ops::Range;

use farflung_base::Rank;
use farflung_compress::link::SampleShape;
use farflung_parallel::Plan;
use farflung_parallel::pipeline::Placement;

use super::ends;
use crate::Result;

/// Bytes of a map's entry for a sample, beside the sample.
const ENTRY: u64 = 48;

/// Samples that a codec which remembers samples meets.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct SamplesSeen {
    /// Different ones of the whole run that are held in memory; 0 where files hold them.
    pub(in crate::train) held: u64,
    /// Those that a step changes of samples that are held already, or whose file takes them at its commit.
    pub(in crate::train) changed: u64,
}

/// Bytes that the coded ends of the rank at `position` take at the most: buffers to encode and decode, and the
/// samples of codecs that remember them. What a step changed of a sample is held beside it until its commit.
///
/// Errors: none for a plan whose names were checked.
pub(in crate::train) fn coded_bytes(
    plan: &Plan,
    placement: &Placement,
    position: Rank,
    slices: &[Range<usize>],
    channels: usize,
    seen: SamplesSeen,
) -> Result<u64> {
    let mut sum = 0;
    for end in ends(plan, placement, position, slices)? {
        let shape = SampleShape { positions: end.positions, channels };
        sum += end.spec.working_bytes(shape, plan.batch as usize) as u64;
        if let Some(samples) = end.spec.samples(shape) {
            sum += (seen.held + seen.changed) * (samples.bytes() as u64 + ENTRY);
        }
    }
    Ok(sum)
}
