//! Assignment of members to the ranks of a plan when the members of a run change, and the values that must then
//! move between members.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Rank;

use super::Plan;
use crate::mesh::whole_pipelines;

/// The position of a member in a plan: which pipeline, and which stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlanPosition {
    /// Index of the member's pipeline; with pools, the member's index in its pool.
    pub replica: u32,
    /// The member's position in the pipeline: the stage.
    pub position: u32,
}

/// The assignment of members to the pipelines of the next plan.
///
/// If there are fewer members than stages, all members form one pipeline with as many stages as members, and
/// the model is divided into new parts. Otherwise as many whole pipelines are formed as possible, and the
/// remaining members are spares: they hold no part until another member is lost or more members join.
/// Alternatively, if a pipeline is incomplete, each stage can be the pool of all members that hold its part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Number of stages of a pipeline.
    pub stages: u32,
    /// Number of members of each stage, if stages are pools of members. Empty if pipelines are whole.
    pub pools: Vec<u32>,
    /// The member at each rank of the plan, as an index into the view's members. Ranks are numbered pool by
    /// pool, or pipeline by pipeline as in [`Plan::at`].
    pub ranks: Vec<usize>,
    /// The members without a rank, in the view's order.
    pub spares: Vec<usize>,
}

impl Assignment {
    /// Assigns the members of a view. `members` has the position of each member in the current plan, whose
    /// pipelines have `before` stages; `None` for a member that holds no part. `stages` is the number of stages
    /// that the run's pipelines should have.
    ///
    /// The pipelines with the most remaining ranks stay together, and their empty places are filled with
    /// members that hold the same part, to move few values. The function is pure: members with the same
    /// arguments compute the same assignment.
    ///
    /// ```
    /// use farflung_parallel::plan::{Assignment, PlanPosition};
    ///
    /// // Of two pipelines of three, one has lost its second rank: the other goes on.
    /// let at = |replica, position| Some(PlanPosition { replica, position });
    /// let members = [at(0, 0), at(0, 2), at(1, 0), at(1, 1), at(1, 2)];
    /// let next = Assignment::new(&members, 3, 3);
    /// assert_eq!((next.stages, next.ranks, next.spares), (3, vec![2, 3, 4], vec![0, 1]));
    /// ```
    #[must_use]
    pub fn new(members: &[Option<PlanPosition>], before: u32, stages: u32) -> Self {
        let stages = stages.max(1).min(u32::try_from(members.len()).unwrap_or(u32::MAX)).max(1);
        let replicas = whole_pipelines(members.len(), stages as usize);
        let mut pipelines: Vec<Vec<Option<usize>>> = vec![vec![None; stages as usize]; replicas];
        let mut free: BTreeSet<usize> = (0..members.len()).collect();
        if before == stages {
            keep(members, &mut pipelines, &mut free);
        }
        // The remaining members take the free places in the order of their current ranks. So in each pipeline,
        // members with earlier layers take earlier places, and little of each part moves.
        let mut rest: Vec<usize> = free.into_iter().collect();
        rest.sort_by_key(|&member| {
            let stood = members[member];
            (stood.is_none(), stood.map(|stood| (stood.replica, stood.position)), member)
        });
        let mut rest = rest.into_iter();
        for place in pipelines.iter_mut().flatten().filter(|place| place.is_none()) {
            *place = rest.next();
        }
        let mut spares: Vec<usize> = rest.collect();
        spares.sort_unstable();
        Self { stages, pools: Vec::new(), ranks: pipelines.into_iter().flatten().flatten().collect(), spares }
    }

    /// Assigns members as [`Assignment::new`] does, but if whole pipelines would leave out members that hold a
    /// part, each stage becomes a pool of all members that hold its part. The members of a pool share the
    /// stage's microbatches. Members without a part fill the places of lost members. Whole pipelines are used
    /// again as soon as there are enough members. They are also used if the number of stages changes, or if the
    /// smallest pool would have fewer members than there would be whole pipelines.
    ///
    /// Source: Gandhi et al. 2024, "ReCycle": microbatches of a lost worker go to workers that hold the same
    /// stage.
    ///
    /// ```
    /// use farflung_parallel::plan::{Assignment, PlanPosition};
    ///
    /// // Two pipelines of two have lost one: the three that are left go on, and no part moves.
    /// let at = |replica, position| Some(PlanPosition { replica, position });
    /// let next = Assignment::rerouted(&[at(0, 0), at(0, 1), at(1, 1)], 2, 2);
    /// assert_eq!((next.pools, next.ranks, next.spares), (vec![1, 2], vec![0, 1, 2], vec![]));
    /// ```
    #[must_use]
    pub fn rerouted(members: &[Option<PlanPosition>], before: u32, stages: u32) -> Self {
        let whole = Self::new(members, before, stages);
        if before != stages || stages < 2 || whole.spares.is_empty() {
            return whole;
        }
        let mut order: Vec<(PlanPosition, usize)> =
            members.iter().zip(0..).filter_map(|(stood, member)| Some(((*stood)?, member))).collect();
        order.sort_unstable();
        let mut pools: Vec<Vec<usize>> = vec![Vec::new(); stages as usize];
        for (PlanPosition { position, .. }, member) in order {
            match pools.get_mut(position as usize) {
                Some(pool) => pool.push(member),
                None => return whole,
            }
        }
        let most = pools.iter().map(Vec::len).max().unwrap_or(0);
        let mut spares = Vec::new();
        for member in (0..members.len()).filter(|&member| members[member].is_none()) {
            match pools.iter_mut().min_by_key(|pool| pool.len()).filter(|pool| pool.len() < most) {
                Some(pool) => pool.push(member),
                None => spares.push(member),
            }
        }
        let fewest = pools.iter().map(Vec::len).min().unwrap_or(0);
        if fewest == most || fewest < whole.replicas() {
            // Either whole pipelines leave out no member that holds a part, or moving members to other parts
            // gives more whole pipelines than the smallest pool has members.
            return whole;
        }
        let sizes = pools.iter().map(|pool| pool.len() as u32).collect();
        Self { stages, pools: sizes, ranks: pools.concat(), spares }
    }

    /// Returns the rank of a member, or `None` for a spare.
    #[must_use]
    pub fn rank_of(&self, member: usize) -> Option<u32> {
        self.ranks.iter().position(|&other| other == member).map(|rank| rank as u32)
    }

    /// Returns the place of a member, or `None` for a spare.
    #[must_use]
    pub fn position_of(&self, member: usize) -> Option<PlanPosition> {
        let rank = self.rank_of(member)?;
        if self.pools.is_empty() {
            let mesh = Plan::mesh_of(u32::try_from(self.replicas()).ok()?, self.stages).ok()?;
            return mesh.at(Rank(rank)).ok().map(PlanPosition::from);
        }
        PlanPosition::in_pools(&self.pools, rank)
    }

    /// Returns the number of whole pipelines; with pools, the size of the smallest pool.
    #[must_use]
    pub fn replicas(&self) -> usize {
        match self.pools.iter().min() {
            Some(&fewest) => fewest as usize,
            None => whole_pipelines(self.ranks.len(), self.stages as usize),
        }
    }
}

impl PlanPosition {
    /// Returns the place of a rank in pools of these sizes: `position` is the stage and `replica` the index in
    /// its pool.
    #[must_use]
    pub fn in_pools(pools: &[u32], rank: u32) -> Option<Self> {
        let mut first = 0_u32;
        for (&size, position) in pools.iter().zip(0..) {
            if rank.checked_sub(first)? < size {
                return Some(Self { replica: rank - first, position });
            }
            first = first.saturating_add(size);
        }
        None
    }
}

/// Assigns places to members that already hold the part of the place. `places` has those of each pipeline.
fn keep(members: &[Option<PlanPosition>], places: &mut [Vec<Option<usize>>], free: &mut BTreeSet<usize>) {
    let stages = places.first().map_or(0, Vec::len);
    let mut pipelines: BTreeMap<u32, Vec<(u32, usize)>> = BTreeMap::new();
    for (member, stood) in members.iter().enumerate() {
        let Some(PlanPosition { replica, position }) = *stood else { continue };
        if (position as usize) < stages {
            pipelines.entry(replica).or_default().push((position, member));
        }
    }
    let mut order: Vec<(usize, u32)> =
        pipelines.iter().map(|(&replica, left)| (usize::MAX - left.len(), replica)).collect();
    order.sort_unstable();
    let mut chosen: Vec<u32> = order.iter().take(places.len()).map(|(_, replica)| *replica).collect();
    // The chosen pipelines keep their order.
    chosen.sort_unstable();
    for (places, replica) in places.iter_mut().zip(&chosen) {
        for &(position, member) in &pipelines[replica] {
            let place = &mut places[position as usize];
            if place.is_none() && free.remove(&member) {
                *place = Some(member);
            }
        }
    }
    let others = order.iter().map(|(_, replica)| replica).filter(|replica| !chosen.contains(replica));
    for &(position, member) in others.flat_map(|replica| &pipelines[replica]) {
        let hole =
            places.iter_mut().map(|places| &mut places[position as usize]).find(|place| place.is_none());
        if let Some(hole) = hole
            && free.remove(&member)
        {
            *hole = Some(member);
        }
    }
}

/// Tensors that a member holds as of one step: its current parts, or an older copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// Index of the member in the view.
    pub member: usize,
    /// Number of steps after which the tensors had these values.
    pub step: u64,
    /// Names of the tensors.
    pub names: BTreeSet<String>,
}

/// A tensor that a rank of a plan needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needed {
    /// Name of the tensor.
    pub name: String,
    /// Bytes that are sent if the tensor moves: its values and its optimizer state.
    pub bytes: u64,
}

/// A tensor that is sent from one member to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// Name of the tensor.
    pub name: String,
    /// Bytes that are sent; see [`Needed::bytes`].
    pub bytes: u64,
    /// Index of the sending member.
    pub from: usize,
    /// Index of the receiving member.
    pub to: usize,
}

/// Returns the newest step for which the members together hold all needed tensors.
///
/// Errors: if there is no such step, the name of a tensor that no member holds at the newest step of any
/// holding.
pub fn newest_whole<'a>(holdings: &[Holding], needed: &'a [Needed]) -> Result<u64, &'a str> {
    let steps: BTreeSet<u64> = holdings.iter().map(|holding| holding.step).collect();
    let missing_at = |step: u64| {
        let has = |name: &str| holdings.iter().any(|h| h.step == step && h.names.contains(name));
        needed.iter().map(|needed| needed.name.as_str()).find(|name| !has(name))
    };
    let mut missing = needed.first().map_or("", |needed| needed.name.as_str());
    for (nth, &step) in steps.iter().rev().enumerate() {
        match missing_at(step) {
            None => return Ok(step),
            Some(name) if nth == 0 => missing = name,
            Some(_) => {}
        }
    }
    Err(missing)
}

/// Returns the transfers after which each member holds the tensors that it needs at a step. A tensor that
/// several members hold is sent by the one that has been assigned the fewest bytes so far.
///
/// `needs` lists the tensors that each member needs. Tensors that no member holds at that step are skipped.
#[must_use]
pub fn moves(holdings: &[Holding], step: u64, needs: &[(usize, &[Needed])]) -> Vec<Move> {
    let at: Vec<&Holding> = holdings.iter().filter(|holding| holding.step == step).collect();
    let has = |member: usize, name: &str| at.iter().any(|h| h.member == member && h.names.contains(name));
    let mut given: BTreeMap<usize, u64> = BTreeMap::new();
    let mut moves = Vec::new();
    for &(to, needed) in needs {
        for Needed { name, bytes } in needed {
            if has(to, name) {
                continue;
            }
            let donors = at.iter().filter(|h| h.names.contains(name)).map(|h| h.member);
            let least = donors.min_by_key(|donor| (given.get(donor).copied().unwrap_or(0), *donor));
            let Some(from) = least else { continue };
            *given.entry(from).or_default() += bytes;
            moves.push(Move { name: name.clone(), bytes: *bytes, from, to });
        }
    }
    moves
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn plan_position(replica: u32, position: u32) -> PlanPosition {
        PlanPosition { replica, position }
    }

    /// Members of `replicas` whole pipelines of `stages` stages, in rank order.
    fn whole(replicas: u32, stages: u32) -> Vec<Option<PlanPosition>> {
        (0..replicas)
            .flat_map(|replica| (0..stages).map(move |position| Some(plan_position(replica, position))))
            .collect()
    }

    #[test]
    fn whoever_holds_a_part_keeps_it_whoever_is_lost() {
        for lost in 0..8 {
            let mut members = whole(2, 4);
            members.remove(lost);
            let next = Assignment::new(&members, 4, 4);
            assert_eq!((next.stages, next.replicas(), next.spares.len()), (4, 1, 3));
            for (rank, &member) in next.ranks.iter().enumerate() {
                assert_eq!(members[member].unwrap().position as usize, rank, "{lost} is lost");
            }
            // The pipeline without a loss continues unchanged.
            let replica = u32::from(lost < 4);
            assert!(next.ranks.iter().all(|&member| members[member].unwrap().replica == replica));
        }
        // Two members are lost in different pipelines and at different stages. The others form one whole
        // pipeline.
        let mut members = whole(2, 4);
        members.remove(6);
        members.remove(1);
        let next = Assignment::new(&members, 4, 4);
        let positions: Vec<u32> = next.ranks.iter().map(|&m| members[m].unwrap().position).collect();
        assert_eq!(positions, [0, 1, 2, 3]);
    }

    #[test]
    fn spares_and_newcomers_fill_the_holes() {
        // Seven members form one pipeline and have three spares. An eighth member makes two pipelines.
        let members = [
            None,
            Some(plan_position(0, 0)),
            None,
            Some(plan_position(0, 1)),
            Some(plan_position(0, 2)),
            Some(plan_position(0, 3)),
            None,
            None,
        ];
        let next = Assignment::new(&members, 4, 4);
        assert_eq!(next.ranks, [1, 3, 4, 5, 0, 2, 6, 7]);
        assert!(next.spares.is_empty());
        assert_eq!(next.position_of(2), Some(PlanPosition { replica: 1, position: 1 }));
        // A spare takes the part of a lost member.
        let members = [Some(plan_position(0, 0)), Some(plan_position(0, 2)), Some(plan_position(0, 3)), None];
        assert_eq!(Assignment::new(&members, 4, 4).ranks, [0, 3, 1, 2]);
    }

    #[test]
    fn fewer_members_than_stages_are_one_shorter_pipeline() {
        let members = [Some(plan_position(0, 3)), Some(plan_position(0, 0)), Some(plan_position(0, 1))];
        let next = Assignment::new(&members, 4, 4);
        assert_eq!((next.stages, next.ranks), (3, vec![1, 2, 0]));
        // A new member makes the pipeline longer again.
        let members = [Some(plan_position(0, 2)), Some(plan_position(0, 0)), Some(plan_position(0, 1)), None];
        let next = Assignment::new(&members, 3, 4);
        assert_eq!((next.stages, next.ranks), (4, vec![1, 2, 0, 3]));
        assert_eq!(Assignment::new(&[Some(plan_position(0, 0))], 1, 4).ranks, [0]);
    }

    #[test]
    fn whoever_holds_a_part_goes_on_with_it_where_a_pipeline_is_broken() {
        for lost in 0..12 {
            let mut members = whole(3, 4);
            members.remove(lost);
            let next = Assignment::rerouted(&members, 4, 4);
            let sizes: Vec<u32> = (0..4).map(|stage| 3 - u32::from(stage == lost as u32 % 4)).collect();
            assert_eq!((&next.pools, next.spares.len()), (&sizes, 0));
            for (member, stood) in members.iter().enumerate() {
                let now = next.position_of(member).unwrap();
                assert_eq!(now.position, stood.unwrap().position, "no part moves");
            }
            // A newcomer makes all pipelines whole again. No other member changes its part.
            let mut now: Vec<Option<PlanPosition>> = (0..11).map(|member| next.position_of(member)).collect();
            now.push(None);
            let again = Assignment::rerouted(&now, 4, 4);
            assert_eq!((again.pools.len(), again.replicas(), again.spares.len()), (0, 3, 0));
            for (member, stood) in now.iter().enumerate().take(11) {
                assert_eq!(again.position_of(member).unwrap().position, stood.unwrap().position);
            }
        }
    }

    #[test]
    fn spares_fill_holes_and_parts_that_are_lost_are_not_rerouted() {
        // A spare takes the lost member's place, so both pipelines are whole.
        let members = [Some(plan_position(0, 0)), Some(plan_position(0, 1)), Some(plan_position(1, 1)), None];
        assert_eq!(Assignment::rerouted(&members, 2, 2), Assignment::new(&members, 2, 2));
        // Two members are lost and there is one spare.
        let mut three = whole(3, 2);
        three.remove(4);
        three.remove(2);
        three.push(None);
        let next = Assignment::rerouted(&three, 2, 2);
        assert_eq!((next.pools, next.spares), (vec![2, 3], vec![]));
        // One member of the first stage and four of the second are left. One of the four moves to make a second
        // pipeline.
        let mut five: Vec<Option<PlanPosition>> =
            (0..4).map(|replica| Some(plan_position(replica, 1))).collect();
        five.push(Some(plan_position(0, 0)));
        assert_eq!(Assignment::rerouted(&five, 2, 2).replicas(), 2);
        // No member holds the first part: the assignment is the one without pools.
        let members = [Some(plan_position(0, 1)), Some(plan_position(1, 1)), Some(plan_position(2, 1))];
        assert_eq!(Assignment::rerouted(&members, 2, 2), Assignment::new(&members, 2, 2));
        // The number of stages changes, or only newcomers would be left out.
        let members = [Some(plan_position(0, 0)), Some(plan_position(0, 1)), None];
        assert!(Assignment::rerouted(&members, 2, 2).pools.is_empty());
        assert!(Assignment::rerouted(&whole(3, 1), 1, 2).pools.is_empty());
    }

    #[test]
    fn every_member_has_one_place() {
        for members in 1..14 {
            for stages in 1..6 {
                for holds in 0..=members {
                    let all: Vec<Option<PlanPosition>> = (0..members)
                        .map(|n| {
                            let mesh = Plan::mesh_of(members, stages).unwrap();
                            (n < holds).then(|| mesh.at(Rank(n)).unwrap().into())
                        })
                        .collect();
                    let next = Assignment::new(&all, stages, stages);
                    let mut found: Vec<usize> = next.ranks.iter().chain(&next.spares).copied().collect();
                    found.sort_unstable();
                    assert_eq!(found, (0..members as usize).collect::<Vec<_>>());
                    assert_eq!(next.ranks.len(), next.replicas() * next.stages as usize);
                    assert!(next.spares.len() < next.stages as usize);
                    let next = Assignment::rerouted(&all, stages, stages);
                    let mut found: Vec<usize> = next.ranks.iter().chain(&next.spares).copied().collect();
                    found.sort_unstable();
                    assert_eq!(found, (0..members as usize).collect::<Vec<_>>());
                    let sizes = next.pools.iter().sum::<u32>() as usize;
                    assert!(next.pools.is_empty() || sizes == next.ranks.len() && !next.pools.contains(&0));
                }
            }
        }
    }

    fn held(member: usize, step: u64, names: &[&str]) -> Holding {
        Holding { member, step, names: names.iter().map(|&name| name.to_owned()).collect() }
    }

    fn needed(names: &[(&str, u64)]) -> Vec<Needed> {
        names.iter().map(|&(name, bytes)| Needed { name: name.to_owned(), bytes }).collect()
    }

    #[test]
    fn all_return_to_the_newest_step_that_is_held_for_every_part() {
        let all = needed(&[("a", 1), ("b", 1), ("c", 1)]);
        // The newest `b` is lost. Older copies of all tensors exist for steps 4 and 6.
        let mut holdings = vec![held(0, 9, &["a"]), held(1, 9, &["c"])];
        assert_eq!(newest_whole(&holdings, &all), Err("b"));
        holdings.extend([held(0, 4, &["a", "b"]), held(1, 4, &["c"])]);
        assert_eq!(newest_whole(&holdings, &all), Ok(4));
        holdings.extend([held(0, 6, &["a", "b"]), held(1, 6, &["c"])]);
        assert_eq!(newest_whole(&holdings, &all), Ok(6));
        // An incomplete copy is not used.
        holdings.push(held(1, 8, &["a", "c"]));
        assert_eq!(newest_whole(&holdings, &all), Ok(6));
        assert_eq!(newest_whole(&[], &all), Err("a"));
    }

    #[test]
    fn only_what_a_member_lacks_moves_and_donors_share_it() {
        let holdings = [
            held(0, 5, &["a", "b"]),
            held(1, 5, &["a", "b"]),
            held(2, 5, &["c"]),
            held(3, 4, &["a", "b", "c"]),
        ];
        let (first, second) = (needed(&[("a", 10), ("b", 10)]), needed(&[("c", 7)]));
        let moves = moves(&holdings, 5, &[(0, &first), (2, &second), (3, &first), (4, &second)]);
        let found: Vec<_> = moves.iter().map(|m| (m.name.as_str(), m.from, m.to)).collect();
        assert_eq!(found, [("a", 0, 3), ("b", 1, 3), ("c", 2, 4)]);
        assert_eq!(moves.iter().map(|m| m.bytes).sum::<u64>(), 27);
    }
}
