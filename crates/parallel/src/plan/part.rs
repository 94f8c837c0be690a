//! A part of a model: its layers, and which activations are kept for the backward pass.

use std::ops::Range;

use farflung_base::Bytes;

/// A range of layers held by one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Layers of the part. The first part also has the embeddings, the last part the head. Only a part between
    /// two others may be empty.
    pub layers: Range<u32>,
    /// Which activations are recomputed for the backward pass.
    pub recompute: Recompute,
    /// Number of layers, after the recomputed ones, whose activations are kept in host memory.
    pub offload: u32,
}

/// Which activations are recomputed immediately before a backward pass instead of being kept from the forward
/// pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing is recomputed: all activations are kept.
    None,
    /// All activations of the part are recomputed from the part's input, by a computation of the schedule. If
    /// the model is one part, this is [`Recompute::EachLayer`].
    Full,
    /// The activations of each layer are recomputed from the layer's input, within the backward pass: those of
    /// one layer are in memory at a time. Valid only if sequences are not cut into slices.
    EachLayer,
    /// The activations of this number of the part's first layers are recomputed. Those of the other layers are
    /// kept.
    Layers(u32),
    /// As many activations are recomputed as needed so that the kept activations of one microbatch fit into
    /// this number of bytes, chosen so that the time is least: the optimum of
    /// [`rotor`](crate::recompute::rotor). Valid only if the model is one part.
    Within(Bytes),
}

impl Recompute {
    /// Returns the number of recomputed layers of a part with `layers` layers. For [`Recompute::Within`] this
    /// is the upper bound, all layers.
    #[must_use]
    pub fn of(self, layers: u32) -> u32 {
        match self {
            Self::None => 0,
            Self::Full | Self::EachLayer | Self::Within(_) => layers,
            Self::Layers(n) => n.min(layers),
        }
    }

    /// Returns whether layers are recomputed from their own inputs within the backward pass, and not by a
    /// computation of the schedule: always in a model of one part, whose layers need not wait for each other.
    #[must_use]
    pub fn is_within_backward(self, parts: u32) -> bool {
        self == Self::EachLayer || self != Self::None && parts == 1
    }

    /// Returns whether a computation of the schedule recomputes the part.
    #[must_use]
    pub fn is_scheduled(self, parts: u32) -> bool {
        self != Self::None && !self.is_within_backward(parts)
    }
}

/// Divides layers into parts of nearly equal size. The first and the last part have at least one layer. Returns
/// `None` for zero parts, and for several parts with fewer than two layers.
#[must_use]
pub fn even_parts(layers: u32, parts: u32) -> Option<Vec<Range<u32>>> {
    if parts == 0 || parts > 1 && layers < 2 {
        return None;
    }
    let (all, count) = (u64::from(layers), u64::from(parts));
    let bound = |part: u32| match part {
        0 => 0,
        part if part == parts => layers,
        part => ((2 * u64::from(part) * all + count) / (2 * count)).clamp(1, all - 1) as u32,
    };
    Some((0..parts).map(|part| bound(part)..bound(part + 1)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_cut_evenly_and_the_ends_have_one() {
        let lens =
            |layers, parts| even_parts(layers, parts).unwrap().iter().map(Range::len).collect::<Vec<_>>();
        assert_eq!(lens(4, 2), [2, 2]);
        assert_eq!(lens(12, 5).iter().sum::<usize>(), 12);
        assert_eq!(lens(4, 8), [1, 0, 1, 0, 1, 0, 0, 1]);
        assert_eq!(lens(2, 8), [1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(lens(3, 1), [3]);
        assert!(even_parts(1, 2).is_none() && even_parts(3, 0).is_none());
    }
}
