//! Assignments of members that cannot change their places now: pipelines that have lost a member stop.

use std::collections::BTreeMap;

use super::{Assignment, PlanPosition};

impl Assignment {
    /// Keeps the pipelines of which no member is missing, in their order. All other members are spares. `None`
    /// if no pipeline is left. `members` has the position of each member in the current plan, whose pipelines
    /// have `stages` stages.
    ///
    /// For the middle of a round of local steps: pipelines then have different parameters, so no member can
    /// take the place of a lost one in another pipeline.
    ///
    /// ```
    /// use farflung_parallel::plan::{Assignment, PlanPosition};
    ///
    /// // The first of two pipelines has lost its second stage.
    /// let at = |replica, position| Some(PlanPosition { replica, position });
    /// let next = Assignment::unbroken(&[at(0, 0), at(1, 0), at(1, 1)], 2);
    /// let next = next.expect("the second pipeline is whole");
    /// assert_eq!((next.ranks, next.spares), (vec![1, 2], vec![0]));
    /// assert_eq!(Assignment::unbroken(&[at(0, 0), at(1, 1)], 2), None);
    /// ```
    #[must_use]
    pub fn unbroken(members: &[Option<PlanPosition>], stages: u32) -> Option<Self> {
        let mut pipelines: BTreeMap<u32, BTreeMap<u32, usize>> = BTreeMap::new();
        for (member, stood) in members.iter().enumerate() {
            if let Some(PlanPosition { replica, position }) = *stood
                && position < stages
            {
                pipelines.entry(replica).or_default().insert(position, member);
            }
        }
        let whole = pipelines.into_values().filter(|places| places.len() == stages as usize);
        let ranks: Vec<usize> = whole.flat_map(BTreeMap::into_values).collect();
        let spares = (0..members.len()).filter(|member| !ranks.contains(member)).collect();
        (!ranks.is_empty()).then_some(Self { stages, pools: Vec::new(), ranks, spares })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pipelines_keep_their_order_and_places() {
        let at = |replica, position| Some(PlanPosition { replica, position });
        // The members of a view are in another order than the ranks, and two of them have no part.
        let members = [at(2, 1), None, at(0, 0), at(1, 0), at(2, 0), at(0, 1), None];
        let next = Assignment::unbroken(&members, 2).unwrap();
        assert_eq!((next.stages, next.ranks, next.spares), (2, vec![2, 5, 4, 0], vec![1, 3, 6]));
        assert_eq!(Assignment::unbroken(&[None, None], 2), None);
        assert_eq!(Assignment::unbroken(&[at(0, 0)], 1).unwrap().ranks, [0]);
    }
}
