//! The square root of the layers: keep the input of every segment, and run a segment again before its backward.

use super::{RecomputePlan, Step};
use farflung_base::Nanos;

/// Layers in segments of nearly equal length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    /// The first layer of each segment, and the number of layers at the end.
    pub bounds: Vec<u32>,
}

/// Cuts `layers` into about as many segments as a segment has layers, so that inputs kept and layers held at once are
/// least together: about 2√n.
///
/// Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1.
#[must_use]
pub fn sqrt_segments(layers: u32) -> Segments {
    let held = |segments: u32| segments + layers.div_ceil(segments);
    let segments = (1..=layers.isqrt() + 1).min_by_key(|&s| held(s)).unwrap_or(1).min(layers.max(1));
    let bound = |i: u32| (u64::from(layers) * u64::from(i) / u64::from(segments)) as u32;
    Segments { bounds: (0..=segments).map(bound).collect() }
}

impl Segments {
    /// The most inputs of segments and layers of one segment that are held at once.
    #[must_use]
    pub fn peak(&self) -> u32 {
        let longest = self.bounds.windows(2).map(|w| w[1] - w[0]).max().unwrap_or_default();
        self.bounds.len() as u32 - 1 + longest
    }

    /// The steps: once forward, then segment by segment from the last, forward again and backward. The last segment
    /// is not run twice.
    #[must_use]
    pub fn plan(&self, forward: Nanos, backward: Nanos) -> RecomputePlan {
        let mut steps = Vec::new();
        let segments: Vec<(u32, u32)> = self.bounds.windows(2).map(|w| (w[0], w[1])).collect();
        for (i, &(from, to)) in segments.iter().enumerate() {
            steps.push(Step::Keep(from));
            if i + 1 < segments.len() {
                steps.extend((from..to).map(Step::Forward));
            }
        }
        for (i, &(from, to)) in segments.iter().enumerate().rev() {
            if i + 1 < segments.len() {
                steps.push(Step::Restore(from));
            }
            steps.extend((from..to).map(Step::ForwardAll));
            steps.extend((from..to).rev().map(Step::Backward));
            steps.push(Step::Drop(from));
        }
        let count = |of: fn(&Step) -> bool| steps.iter().filter(|s| of(s)).count() as u64;
        let forwards = count(|s| matches!(s, Step::Forward(_) | Step::ForwardAll(_)));
        let backwards = count(|s| matches!(s, Step::Backward(_)));
        RecomputePlan { time: forward * forwards + backward * backwards, steps }
    }
}
