//! A part of a model: which layers, and what of them is kept for the backward pass.

use std::ops::Range;

use farflung_base::Bytes;

/// A range of layers that one stage holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its layers. The first part also has the embeddings, the last the head. A part between two others may be
    /// empty.
    pub layers: Range<u32>,
    /// What is computed again for the backward pass.
    pub recompute: Recompute,
    /// Layers, behind those that are computed again, whose activations wait in the host's memory.
    pub offload: u32,
}

/// What is computed again right before a backward pass, rather than kept from the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// All of a part, from its input.
    Full,
    /// So many of a part's first layers; what the others need is kept.
    Layers(u32),
    /// What lets the activations that a part holds of a microbatch fit into so many bytes, in the least time:
    /// the optimum of [`rotor`](crate::recompute::rotor). Where the model is one part.
    Within(Bytes),
}

impl Recompute {
    /// Layers that are computed again, of a part that has so many: where memory decides, perhaps all.
    #[must_use]
    pub fn of(self, layers: u32) -> u32 {
        match self {
            Self::None => 0,
            Self::Full | Self::Within(_) => layers,
            Self::Layers(n) => n.min(layers),
        }
    }
}

/// Layers cut into parts as equal as they can be, of which the first and the last have one at least; `None` if
/// there are fewer than two layers for several parts.
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
