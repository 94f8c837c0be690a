//! Assignments with a limited number of pipelines: members that could form another one stay spares.

use super::{Assignment, PlanPosition};

impl Assignment {
    /// Assigns members by `assign`, but to at most `most` whole pipelines: of the members without a part, the
    /// last ones stay spares. Without whole pipelines of `before` stages (pools, or another division of the
    /// model), nothing is limited. `assign` is [`Assignment::new`] or [`Assignment::rerouted`] with its other
    /// arguments.
    ///
    /// ```
    /// use farflung_parallel::plan::{Assignment, PlanPosition};
    ///
    /// // Members 0 and 1 are a pipeline. Members 2 and 3 could be a second one.
    /// let at = |position| Some(PlanPosition { replica: 0, position });
    /// let members = [at(0), at(1), None, None];
    /// let assign = |members: &[_]| Assignment::new(members, 2, 2);
    /// assert_eq!(Assignment::limited(assign, &members, 2, 1).spares, [2, 3]);
    /// assert_eq!(Assignment::limited(assign, &members, 2, 2).ranks, [0, 1, 2, 3]);
    /// ```
    #[must_use]
    pub fn limited(
        assign: impl Fn(&[Option<PlanPosition>]) -> Self,
        members: &[Option<PlanPosition>],
        before: u32,
        most: usize,
    ) -> Self {
        let all = assign(members);
        if all.stages != before || !all.pools.is_empty() || all.replicas() <= most {
            return all;
        }
        let surplus = (all.replicas() - most) * all.stages as usize;
        let free: Vec<usize> = (0..members.len()).filter(|&member| members[member].is_none()).collect();
        let left_out = &free[free.len().saturating_sub(surplus)..];
        let kept: Vec<usize> = (0..members.len()).filter(|member| !left_out.contains(member)).collect();
        let of_kept: Vec<Option<PlanPosition>> = kept.iter().map(|&member| members[member]).collect();
        assign(&of_kept).of_some(&kept, members.len())
    }

    /// Converts an assignment of some members to one of all: `kept` has the index of each of them among all
    /// `count` members, in ascending order. The other members are spares.
    ///
    /// ```
    /// use farflung_parallel::plan::{Assignment, PlanPosition};
    ///
    /// // The first of three members gets no part.
    /// let at = |position| Some(PlanPosition { replica: 0, position });
    /// let next = Assignment::new(&[at(1), None], 2, 2).of_some(&[1, 2], 3);
    /// assert_eq!((next.ranks, next.spares), (vec![2, 1], vec![0]));
    /// ```
    #[must_use]
    pub fn of_some(self, kept: &[usize], count: usize) -> Self {
        let Self { stages, pools, ranks, spares } = self;
        let ranks: Vec<usize> = ranks.into_iter().map(|member| kept[member]).collect();
        let left_out = (0..count).filter(|member| !kept.contains(member));
        let mut spares: Vec<usize> = spares.into_iter().map(|member| kept[member]).chain(left_out).collect();
        spares.sort_unstable();
        Self { stages, pools, ranks, spares }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::unnecessary_wraps, reason = "members are given as options")]
    const fn at(replica: u32, position: u32) -> Option<PlanPosition> {
        Some(PlanPosition { replica, position })
    }

    #[test]
    fn a_lost_place_is_filled_although_no_pipeline_is_added() {
        // The second pipeline has lost its first stage; three members have no part.
        let members = [at(0, 0), None, at(0, 1), at(1, 1), None, None];
        let assign = |members: &[_]| Assignment::rerouted(members, 2, 2);
        let next = Assignment::limited(assign, &members, 2, 2);
        assert_eq!((next.ranks, next.spares), (vec![0, 2, 1, 3], vec![4, 5]));
        assert_eq!(Assignment::limited(assign, &members, 2, 3).replicas(), 3);
    }

    #[test]
    fn another_division_of_the_model_is_not_limited() {
        let assign = |members: &[_]| Assignment::new(members, 2, 3);
        let next = Assignment::limited(assign, &[at(0, 0), at(0, 1), None, None, None, None], 2, 1);
        assert_eq!((next.stages, next.replicas()), (3, 2));
    }
}
