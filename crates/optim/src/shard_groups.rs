//! Groups of the ranks that divide flat buffers, inside which links are faster: gradients are added up in each
//! group before they go to their owners (Wang et al. 2023, "ZeRO++").

/// The groups of the ranks of a communicator. Each rank is in one group.
///
/// What the ranks of a group add up of the shard of owner `s` is added by its member `s mod g`, if it has `g`
/// members, which then sends it to the owner: so groups of any sizes work, and all members add about as much.
///
/// ```
/// use farflung_optim::ShardGroups;
///
/// let groups = ShardGroups::new(vec![vec![0, 1, 2], vec![3, 4]]);
/// assert_eq!((groups.of(4), groups.adder(0, 4), groups.adder(1, 4)), (1, 1, 3));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardGroups {
    members: Vec<Vec<usize>>,
}

impl ShardGroups {
    /// Returns the groups with these members, by their numbers in the communicator.
    ///
    /// # Panics
    /// If a group is empty.
    #[must_use]
    pub fn new(members: Vec<Vec<usize>>) -> Self {
        assert!(members.iter().all(|group| !group.is_empty()), "a group has members");
        Self { members }
    }

    /// Returns the members of each group.
    #[must_use]
    pub fn members(&self) -> &[Vec<usize>] {
        &self.members
    }

    /// Returns the group of a rank.
    ///
    /// # Panics
    /// If it is in none.
    #[must_use]
    pub fn of(&self, rank: usize) -> usize {
        let found = self.members.iter().position(|group| group.contains(&rank));
        found.expect("each rank is in a group")
    }

    /// Returns the rank of a group that adds up what its members have of an owner's shard.
    #[must_use]
    pub fn adder(&self, group: usize, owner: usize) -> usize {
        let members = &self.members[group];
        members[owner % members.len()]
    }

    /// Returns how many bytes each rank of a group sends to each other in the first exchange of a window, whose
    /// parts by owner have these lengths, by their positions in the group; `bytes` is that of a vector.
    #[must_use]
    pub fn inside(&self, group: usize, lengths: &[usize], bytes: impl Fn(usize) -> usize) -> Vec<usize> {
        let members = &self.members[group];
        let to = |&member: &usize| bytes(self.of_adder(group, member, lengths).map(|(_, len)| len).sum());
        members.iter().map(to).collect()
    }

    /// Returns how many bytes a rank sends to another in the second exchange.
    #[must_use]
    pub fn between(
        &self,
        (from, to): (usize, usize),
        lengths: &[usize],
        bytes: impl Fn(usize) -> usize,
    ) -> usize {
        if self.adder(self.of(from), to) == from { bytes(lengths[to]) } else { 0 }
    }

    /// Returns how many bytes a rank sends to another of what it owns, when all ranks get it: to the one of
    /// each group that passes it on.
    #[must_use]
    pub fn entering(
        &self,
        (from, to): (usize, usize),
        lengths: &[usize],
        bytes: impl Fn(usize) -> usize,
    ) -> usize {
        if self.adder(self.of(to), from) == to { bytes(lengths[from]) } else { 0 }
    }

    /// Returns how many bytes each rank of a group then passes on to each other.
    #[must_use]
    pub fn passed_on(&self, group: usize, lengths: &[usize], bytes: impl Fn(usize) -> usize) -> Vec<usize> {
        let of = |&member: &usize| self.of_adder(group, member, lengths).map(|(_, len)| bytes(len)).sum();
        self.members[group].iter().map(of).collect()
    }

    /// Returns the owners whose shares a member of a group adds up, with the lengths of these.
    pub(crate) fn of_adder<'a>(
        &'a self,
        group: usize,
        member: usize,
        lengths: &'a [usize],
    ) -> impl Iterator<Item = (usize, usize)> + use<'a> {
        let owners = lengths.iter().copied().enumerate();
        owners.filter(move |&(owner, _)| self.adder(group, owner) == member)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each slice reaches its owner from each group once, for the published sizes and for uneven groups.
    #[test]
    fn each_owner_gets_its_slice_from_each_group() {
        let even = |groups: usize, each: usize| {
            ShardGroups::new((0..groups).map(|k| (k * each..(k + 1) * each).collect()).collect())
        };
        let uneven = ShardGroups::new(vec![vec![0, 2, 5], vec![1, 3], vec![4]]);
        for groups in [even(2, 4), even(3, 2), even(4, 2), uneven] {
            let ranks: usize = groups.members().iter().map(Vec::len).sum();
            let lengths = vec![1; ranks];
            for owner in 0..ranks {
                let senders: Vec<usize> = (0..ranks)
                    .filter(|&from| groups.between((from, owner), &lengths, |len| len) > 0)
                    .map(|from| groups.of(from))
                    .collect();
                let mut sorted = senders.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..groups.members().len()).collect::<Vec<_>>());
            }
            for group in 0..groups.members().len() {
                let added: usize = groups.inside(group, &lengths, |len| len).into_iter().sum();
                assert_eq!(added, ranks);
            }
        }
    }
}
