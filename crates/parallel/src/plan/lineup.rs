//! Who takes which place of a run's pipelines when its members change, and which values then move between them.

use std::collections::{BTreeMap, BTreeSet};

/// Where a member stands in the plan before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stood {
    /// Its pipeline.
    pub replica: u32,
    /// Its rank in that.
    pub position: u32,
}

/// Which members form the pipelines of the next plan, and who is left over.
///
/// With fewer members than the run's pipelines should have stages, all of them form one pipeline of as many
/// stages as there are members, so that the model is cut anew. With more, there are as many whole pipelines as
/// there can be, and the others are spares: members that hold no part until somebody is lost or others come.
/// Or, where a pipeline is not whole, each stage is the pool of all that hold its part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lineup {
    /// Stages of a pipeline.
    pub stages: u32,
    /// Members of each stage, where stages are pools of members; empty where pipelines are whole.
    pub pools: Vec<u32>,
    /// The member at each rank of the plan: rank `replica * stages + position`, or pool by pool. Numbers count
    /// the members of the view.
    pub ranks: Vec<usize>,
    /// The others, in the view's order.
    pub spares: Vec<usize>,
}

impl Lineup {
    /// Of a view's members with where each of them stands in a plan of pipelines of `before` stages; `None` of
    /// one that holds no part. `stages` is what the run's pipelines should have.
    ///
    /// Pipelines of which most ranks are left stay together, and holes are filled by those that hold that part,
    /// so that as few values move as can be. A pure function: members that are told the same decide the same.
    ///
    /// ```
    /// use farflung_parallel::plan::{Lineup, Stood};
    ///
    /// // Of two pipelines of three, one has lost its second rank: the other goes on.
    /// let at = |replica, position| Some(Stood { replica, position });
    /// let members = [at(0, 0), at(0, 2), at(1, 0), at(1, 1), at(1, 2)];
    /// let next = Lineup::new(&members, 3, 3);
    /// assert_eq!((next.stages, next.ranks, next.spares), (3, vec![2, 3, 4], vec![0, 1]));
    /// ```
    #[must_use]
    pub fn new(members: &[Option<Stood>], before: u32, stages: u32) -> Self {
        let stages = stages.max(1).min(u32::try_from(members.len()).unwrap_or(u32::MAX)).max(1);
        let replicas = members.len() / stages as usize;
        let mut places: Vec<Option<usize>> = vec![None; replicas * stages as usize];
        let mut free: BTreeSet<usize> = (0..members.len()).collect();
        if before == stages {
            keep(members, stages, &mut places, &mut free);
        }
        // Who holds earlier layers takes an earlier place, so that a part moves as little as it can.
        let mut rest: Vec<usize> = free.into_iter().collect();
        rest.sort_by_key(|&member| {
            let stood = members[member];
            (stood.is_none(), stood.map(|stood| (stood.replica, stood.position)), member)
        });
        let mut rest = rest.into_iter();
        for place in places.iter_mut().filter(|place| place.is_none()) {
            *place = rest.next();
        }
        let mut spares: Vec<usize> = rest.collect();
        spares.sort_unstable();
        Self { stages, pools: Vec::new(), ranks: places.into_iter().flatten().collect(), spares }
    }

    /// As [`Lineup::new`], but all that hold a part go on with it where whole pipelines would leave some of
    /// them out: each stage is a pool of members then, which share its microbatches. Members without a part
    /// fill the places of those that are lost. It ends as soon as there are members enough for whole pipelines,
    /// and does not begin where the smallest pool would be smaller than the number of whole pipelines.
    ///
    /// Source: Gandhi et al. 2024, "ReCycle": microbatches of a lost worker go to those that hold the same
    /// stage.
    ///
    /// ```
    /// use farflung_parallel::plan::{Lineup, Stood};
    ///
    /// // Two pipelines of two have lost one: the three that are left go on, and no part moves.
    /// let at = |replica, position| Some(Stood { replica, position });
    /// let next = Lineup::rerouted(&[at(0, 0), at(0, 1), at(1, 1)], 2, 2);
    /// assert_eq!((next.pools, next.ranks, next.spares), (vec![1, 2], vec![0, 1, 2], vec![]));
    /// ```
    #[must_use]
    pub fn rerouted(members: &[Option<Stood>], before: u32, stages: u32) -> Self {
        let whole = Self::new(members, before, stages);
        if before != stages || stages < 2 || whole.spares.is_empty() {
            return whole;
        }
        let mut order: Vec<(Stood, usize)> =
            members.iter().zip(0..).filter_map(|(stood, member)| Some(((*stood)?, member))).collect();
        order.sort_unstable();
        let mut pools: Vec<Vec<usize>> = vec![Vec::new(); stages as usize];
        for (Stood { position, .. }, member) in order {
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
            // Nobody is left out by whole pipelines, or more of them can be made of those that hold another
            // part.
            return whole;
        }
        let sizes = pools.iter().map(|pool| pool.len() as u32).collect();
        Self { stages, pools: sizes, ranks: pools.concat(), spares }
    }

    /// The rank of a member; `None` of a spare.
    #[must_use]
    pub fn rank_of(&self, member: usize) -> Option<u32> {
        self.ranks.iter().position(|&other| other == member).map(|rank| rank as u32)
    }

    /// Where a member stands; `None` of a spare.
    #[must_use]
    pub fn stands(&self, member: usize) -> Option<Stood> {
        let rank = self.rank_of(member)?;
        if self.pools.is_empty() {
            return Some(Stood { replica: rank / self.stages, position: rank % self.stages });
        }
        Stood::in_pools(&self.pools, rank)
    }

    /// Number of pipelines that are whole.
    #[must_use]
    pub fn replicas(&self) -> usize {
        match self.pools.iter().min() {
            Some(&fewest) => fewest as usize,
            None => self.ranks.len() / self.stages as usize,
        }
    }
}

impl Stood {
    /// Where a rank of pools of these sizes stands: the stage is its position.
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

/// Gives places to those that hold their part already.
fn keep(members: &[Option<Stood>], stages: u32, places: &mut [Option<usize>], free: &mut BTreeSet<usize>) {
    let mut pipelines: BTreeMap<u32, Vec<(u32, usize)>> = BTreeMap::new();
    for (member, stood) in members.iter().enumerate() {
        let Some(Stood { replica, position }) = *stood else { continue };
        if position < stages {
            pipelines.entry(replica).or_default().push((position, member));
        }
    }
    let mut order: Vec<(usize, u32)> =
        pipelines.iter().map(|(&replica, left)| (usize::MAX - left.len(), replica)).collect();
    order.sort_unstable();
    let replicas = places.len() / stages as usize;
    let mut chosen: Vec<u32> = order.iter().take(replicas).map(|(_, replica)| *replica).collect();
    // Among themselves they keep their order.
    chosen.sort_unstable();
    let at = |replica: usize, position: u32| replica * stages as usize + position as usize;
    for (number, replica) in chosen.iter().enumerate() {
        for &(position, member) in &pipelines[replica] {
            let place = &mut places[at(number, position)];
            if place.is_none() && free.remove(&member) {
                *place = Some(member);
            }
        }
    }
    let others = order.iter().map(|(_, replica)| replica).filter(|replica| !chosen.contains(replica));
    for &(position, member) in others.flat_map(|replica| &pipelines[replica]) {
        let hole = (0..replicas).map(|number| at(number, position)).find(|&place| places[place].is_none());
        if let Some(hole) = hole
            && free.remove(&member)
        {
            places[hole] = Some(member);
        }
    }
}

/// Values that a member has, after some steps: of its parts now, or a copy from before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// Which member of the view.
    pub member: usize,
    /// Steps done when the values were these.
    pub step: u64,
    /// The tensors, by name.
    pub names: BTreeSet<String>,
}

/// A tensor that a rank of a plan needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needed {
    /// Its name.
    pub name: String,
    /// What moves where it does: its values and the optimizer's.
    pub bytes: u64,
}

/// A tensor that goes from one member to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// Its name.
    pub name: String,
    /// See [`Needed::bytes`].
    pub bytes: u64,
    /// The member that has it.
    pub from: usize,
    /// The member that needs it.
    pub to: usize,
}

/// The newest step of which the members together have all of these tensors; otherwise one that nobody has at
/// the newest step of any.
///
/// Errors: the name of a tensor that is missing.
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

/// What moves so that each member has what it needs at a step: the difference of two plans, in tensors and
/// bytes. Those that several members have are shared out among them, so that none gives much more than the
/// others.
///
/// `needs` are the tensors that each member needs. What nobody has at that step does not move.
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

    const fn stood(replica: u32, position: u32) -> Stood {
        Stood { replica, position }
    }

    /// So many pipelines of so many stages, in the order of their ranks.
    fn whole(replicas: u32, stages: u32) -> Vec<Option<Stood>> {
        (0..replicas)
            .flat_map(|replica| (0..stages).map(move |position| Some(stood(replica, position))))
            .collect()
    }

    #[test]
    fn whoever_holds_a_part_keeps_it_whoever_is_lost() {
        for lost in 0..8 {
            let mut members = whole(2, 4);
            members.remove(lost);
            let next = Lineup::new(&members, 4, 4);
            assert_eq!((next.stages, next.replicas(), next.spares.len()), (4, 1, 3));
            for (rank, &member) in next.ranks.iter().enumerate() {
                assert_eq!(members[member].unwrap().position as usize, rank, "{lost} is lost");
            }
            // The pipeline that is whole goes on as it is.
            let replica = u32::from(lost < 4);
            assert!(next.ranks.iter().all(|&member| members[member].unwrap().replica == replica));
        }
        // Two that are lost in different pipelines at different places leave one.
        let mut members = whole(2, 4);
        members.remove(6);
        members.remove(1);
        let next = Lineup::new(&members, 4, 4);
        let positions: Vec<u32> = next.ranks.iter().map(|&m| members[m].unwrap().position).collect();
        assert_eq!(positions, [0, 1, 2, 3]);
    }

    #[test]
    fn spares_and_newcomers_fill_the_holes() {
        // Seven have one pipeline and three spares; with an eighth there are two.
        let members = [
            None,
            Some(stood(0, 0)),
            None,
            Some(stood(0, 1)),
            Some(stood(0, 2)),
            Some(stood(0, 3)),
            None,
            None,
        ];
        let next = Lineup::new(&members, 4, 4);
        assert_eq!(next.ranks, [1, 3, 4, 5, 0, 2, 6, 7]);
        assert!(next.spares.is_empty());
        assert_eq!(next.stands(2), Some(Stood { replica: 1, position: 1 }));
        // A part whose holder is lost is taken by a spare.
        let members = [Some(stood(0, 0)), Some(stood(0, 2)), Some(stood(0, 3)), None];
        assert_eq!(Lineup::new(&members, 4, 4).ranks, [0, 3, 1, 2]);
    }

    #[test]
    fn fewer_members_than_stages_are_one_shorter_pipeline() {
        let members = [Some(stood(0, 3)), Some(stood(0, 0)), Some(stood(0, 1))];
        let next = Lineup::new(&members, 4, 4);
        assert_eq!((next.stages, next.ranks), (3, vec![1, 2, 0]));
        // And it grows again.
        let members = [Some(stood(0, 2)), Some(stood(0, 0)), Some(stood(0, 1)), None];
        let next = Lineup::new(&members, 3, 4);
        assert_eq!((next.stages, next.ranks), (4, vec![1, 2, 0, 3]));
        assert_eq!(Lineup::new(&[Some(stood(0, 0))], 1, 4).ranks, [0]);
    }

    #[test]
    fn whoever_holds_a_part_goes_on_with_it_where_a_pipeline_is_broken() {
        for lost in 0..12 {
            let mut members = whole(3, 4);
            members.remove(lost);
            let next = Lineup::rerouted(&members, 4, 4);
            let sizes: Vec<u32> = (0..4).map(|stage| 3 - u32::from(stage == lost as u32 % 4)).collect();
            assert_eq!((&next.pools, next.spares.len()), (&sizes, 0));
            for (member, stood) in members.iter().enumerate() {
                let now = next.stands(member).unwrap();
                assert_eq!(now.position, stood.unwrap().position, "no part moves");
            }
            // A newcomer makes all pipelines whole again, and only it takes a part.
            let mut now: Vec<Option<Stood>> = (0..11).map(|member| next.stands(member)).collect();
            now.push(None);
            let again = Lineup::rerouted(&now, 4, 4);
            assert_eq!((again.pools.len(), again.replicas(), again.spares.len()), (0, 3, 0));
            for (member, stood) in now.iter().enumerate().take(11) {
                assert_eq!(again.stands(member).unwrap().position, stood.unwrap().position);
            }
        }
    }

    #[test]
    fn spares_fill_holes_and_parts_that_are_lost_are_not_rerouted() {
        // A spare takes the place of the lost one: both pipelines are whole.
        let members = [Some(stood(0, 0)), Some(stood(0, 1)), Some(stood(1, 1)), None];
        assert_eq!(Lineup::rerouted(&members, 2, 2), Lineup::new(&members, 2, 2));
        // Two are lost and one spare is there.
        let mut three = whole(3, 2);
        three.remove(4);
        three.remove(2);
        three.push(None);
        let next = Lineup::rerouted(&three, 2, 2);
        assert_eq!((next.pools, next.spares), (vec![2, 3], vec![]));
        // One is left of the first stage and four of the second: one of these makes a second pipeline.
        let mut five: Vec<Option<Stood>> = (0..4).map(|replica| Some(stood(replica, 1))).collect();
        five.push(Some(stood(0, 0)));
        assert_eq!(Lineup::rerouted(&five, 2, 2).replicas(), 2);
        // Nobody is left of a part: the model is cut or filled as without pools.
        let members = [Some(stood(0, 1)), Some(stood(1, 1)), Some(stood(2, 1))];
        assert_eq!(Lineup::rerouted(&members, 2, 2), Lineup::new(&members, 2, 2));
        // Another cut than before, or newcomers alone that are left over.
        let members = [Some(stood(0, 0)), Some(stood(0, 1)), None];
        assert!(Lineup::rerouted(&members, 2, 2).pools.is_empty());
        assert!(Lineup::rerouted(&whole(3, 1), 1, 2).pools.is_empty());
    }

    #[test]
    fn every_member_has_one_place() {
        for members in 1..14 {
            for stages in 1..6 {
                for holds in 0..=members {
                    let all: Vec<Option<Stood>> = (0..members)
                        .map(|n| (n < holds).then_some(Stood { replica: n / stages, position: n % stages }))
                        .collect();
                    let next = Lineup::new(&all, stages, stages);
                    let mut found: Vec<usize> = next.ranks.iter().chain(&next.spares).copied().collect();
                    found.sort_unstable();
                    assert_eq!(found, (0..members as usize).collect::<Vec<_>>());
                    assert_eq!(next.ranks.len() % next.stages as usize, 0);
                    assert!(next.spares.len() < next.stages as usize);
                    let next = Lineup::rerouted(&all, stages, stages);
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
        // `b` is lost; a copy of it is there after step 6, and the others have theirs of steps 4 and 6.
        let mut holdings = vec![held(0, 9, &["a"]), held(1, 9, &["c"])];
        assert_eq!(newest_whole(&holdings, &all), Err("b"));
        holdings.extend([held(0, 4, &["a", "b"]), held(1, 4, &["c"])]);
        assert_eq!(newest_whole(&holdings, &all), Ok(4));
        holdings.extend([held(0, 6, &["a", "b"]), held(1, 6, &["c"])]);
        assert_eq!(newest_whole(&holdings, &all), Ok(6));
        // One half-sent copy is none.
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
