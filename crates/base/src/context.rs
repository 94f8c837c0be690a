//! How ranks divide the positions of sequences (context parallelism): which positions each has.

use std::fmt;
use std::str::FromStr;

use crate::name::{UnknownName, find};

/// Which positions of a sequence each rank of a ring has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ContextOrder {
    /// Of `2 c` ranges, rank `r` of `c` has number `r` and number `2 c - 1 - r`, so that causal attention is
    /// the same work on all ranks, and in each step of the ring (Llama 3 team 2024, section 3.3.2).
    #[default]
    Zigzag,
    /// Rank `r` of `c` has the positions `r`, `r + c`, `r + 2 c`, ... (Brandon et al. 2023, "Striped
    /// Attention").
    Striped,
    /// Rank `r` has one range, the `r`-th (Liu et al. 2023, "Ring Attention"): the last rank has nearly twice
    /// the work of the mean.
    Contiguous,
}

impl ContextOrder {
    /// All orders.
    pub const ALL: [Self; 3] = [Self::Zigzag, Self::Striped, Self::Contiguous];

    /// Returns the name used on command lines and in plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zigzag => "zigzag",
            Self::Striped => "striped",
            Self::Contiguous => "contiguous",
        }
    }
}

impl fmt::Display for ContextOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ContextOrder {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        find("order of positions", text, &Self::ALL, Self::name)
    }
}

/// A division of sequences' positions among ranks: a ring of groups. The ranks of a group exchange their
/// positions for heads in attention (Jacobs et al. 2023, "DeepSpeed Ulysses"), and the groups pass keys and
/// values on along the ring. The ranks of a group are neighbours.
///
/// ```
/// use farflung_base::{ContextCut, ContextOrder};
///
/// let cut = ContextCut { ring: 2, ulysses: 1, order: ContextOrder::Zigzag };
/// assert_eq!([0, 1].map(|rank| cut.positions(rank, 8)), [[0, 1, 6, 7], [2, 3, 4, 5]]);
/// let both = ContextCut { ulysses: 2, ..cut };
/// assert_eq!([0, 1].map(|rank| both.positions(rank, 8)), [[0, 1], [6, 7]]);
/// assert_eq!(both.of_group(0, 8), [0, 1, 6, 7]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContextCut {
    /// Number of groups along the ring.
    pub ring: u32,
    /// Number of ranks of each group.
    pub ulysses: u32,
    /// The positions of each group.
    pub order: ContextOrder,
}

impl Default for ContextCut {
    /// Every rank has all positions.
    fn default() -> Self {
        Self { ring: 1, ulysses: 1, order: ContextOrder::default() }
    }
}

impl ContextCut {
    /// Returns the division among `readers` ranks in groups of `ulysses`; `None` if these are not equal groups.
    #[must_use]
    pub const fn of_readers(readers: u32, ulysses: u32, order: ContextOrder) -> Option<Self> {
        if readers == 0 || ulysses == 0 || !readers.is_multiple_of(ulysses) {
            return None;
        }
        Some(Self { ring: readers / ulysses, ulysses, order })
    }

    /// Returns the number of ranks that have the positions of a sequence together.
    #[must_use]
    pub const fn readers(self) -> u32 {
        self.ring.saturating_mul(self.ulysses)
    }

    /// Returns whether a rank lacks some positions.
    #[must_use]
    pub const fn divides(self) -> bool {
        self.readers() > 1
    }

    /// Returns the number of which the length of sequences must be a multiple, so that all ranks have equally
    /// many positions.
    #[must_use]
    pub const fn unit(self) -> usize {
        let zigzag =
            matches!(self.order, ContextOrder::Zigzag) && self.ring > 1 && !self.ulysses.is_multiple_of(2);
        self.readers() as usize * if zigzag { 2 } else { 1 }
    }

    /// Returns whether all ranks have equally many positions of sequences of `len` tokens.
    #[must_use]
    pub const fn fits(self, len: usize) -> bool {
        len > 0 && len.is_multiple_of(self.unit())
    }

    /// Returns how many of `len` positions each rank has.
    #[must_use]
    pub const fn each(self, len: usize) -> usize {
        len / self.readers() as usize
    }

    /// Returns the positions of a group, in order: those that its ranks have together.
    #[must_use]
    pub fn of_group(self, group: u32, len: usize) -> Vec<u32> {
        let (ring, group, len) = (self.ring as usize, group as usize, len as u32 as usize);
        let range = |of: usize, i: usize| (i * len / of) as u32..((i + 1) * len / of) as u32;
        match self.order {
            ContextOrder::Contiguous => range(ring, group).collect(),
            ContextOrder::Zigzag => {
                range(2 * ring, group).chain(range(2 * ring, 2 * ring - 1 - group)).collect()
            }
            ContextOrder::Striped => (group as u32..len as u32).step_by(ring).collect(),
        }
    }

    /// Returns the group of a rank.
    #[must_use]
    pub const fn group(self, rank: u32) -> u32 {
        rank / self.ulysses
    }

    /// Returns the number of a rank among those that have the same sequences; `replica` is counted over all.
    #[must_use]
    pub const fn rank_of(self, replica: u32) -> u32 {
        replica % self.readers()
    }

    /// Returns the group whose keys a group has in a step of the ring: in the first, its own.
    #[must_use]
    pub const fn source(self, group: u32, step: u32) -> u32 {
        (group + self.ring - step) % self.ring
    }

    /// Returns the positions of a rank, in order: an equal part of its group's.
    #[must_use]
    pub fn positions(self, rank: u32, len: usize) -> Vec<u32> {
        let all = self.of_group(self.group(rank), len);
        let (member, of) = ((rank % self.ulysses) as usize, self.ulysses as usize);
        all[member * all.len() / of..(member + 1) * all.len() / of].to_vec()
    }

    /// Returns the number of pairs of a query and a key at or before it, of a group's queries and another's
    /// keys.
    #[must_use]
    pub fn pairs(self, queries: u32, keys: u32, len: usize) -> u64 {
        let keys = self.of_group(keys, len);
        self.of_group(queries, len)
            .into_iter()
            .map(|query| keys.partition_point(|&key| key <= query) as u64)
            .sum()
    }

    /// Returns the sum over the steps of the ring of the most pairs that a group has in the step.
    #[must_use]
    pub fn slowest_pairs(self, len: usize) -> u64 {
        let of = |step: u32| {
            (0..self.ring).map(move |group| self.pairs(group, self.source(group, step), len)).max()
        };
        (0..self.ring).filter_map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(ring: u32, order: ContextOrder) -> ContextCut {
        ContextCut { ring, ulysses: 1, order }
    }

    #[test]
    fn positions_and_work_are_those_of_the_papers() {
        let all =
            |cut: ContextCut, len| (0..cut.readers()).map(|r| cut.positions(r, len)).collect::<Vec<_>>();
        assert_eq!(
            all(cut(4, ContextOrder::Zigzag), 16),
            [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
        );
        assert_eq!(
            all(cut(4, ContextOrder::Striped), 16),
            [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
        );
        let both = ContextCut { ring: 2, ulysses: 2, order: ContextOrder::Zigzag };
        assert_eq!(all(both, 16), [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]);
        let sums = ContextOrder::ALL.map(|order| cut(4, order).slowest_pairs(16));
        assert_eq!(sums, [34, 40, 58]);
        for (ring, len) in [(2, 16), (4, 64), (8, 4096)] {
            let whole = (len * (len + 1)) as u64;
            assert_eq!(cut(ring, ContextOrder::Zigzag).slowest_pairs(len), whole / u64::from(2 * ring));
        }
    }

    #[test]
    fn each_position_is_on_one_rank_and_all_have_equally_many() {
        for order in ContextOrder::ALL {
            for (ring, ulysses) in [(1, 1), (1, 3), (2, 1), (3, 2), (4, 3)] {
                let cut = ContextCut { ring, ulysses, order };
                for len in [cut.unit(), 5 * cut.unit()] {
                    assert!(cut.fits(len));
                    let each: Vec<_> = (0..cut.readers()).map(|rank| cut.positions(rank, len)).collect();
                    assert!(each.iter().all(|own| own.len() == cut.each(len) && own.is_sorted()));
                    let mut all = each.concat();
                    all.sort_unstable();
                    assert_eq!(all, (0..len as u32).collect::<Vec<_>>());
                }
            }
        }
        assert!(!cut(2, ContextOrder::Zigzag).fits(6) && cut(2, ContextOrder::Striped).fits(6));
        assert!(!ContextCut::default().divides() && ContextCut::default().fits(7));
    }

    #[test]
    fn names_read_back() {
        for order in ContextOrder::ALL {
            assert_eq!(order.to_string().parse(), Ok(order));
        }
        assert!(
            "ring".parse::<ContextOrder>().unwrap_err().to_string().contains("zigzag, striped, contiguous")
        );
    }
}
