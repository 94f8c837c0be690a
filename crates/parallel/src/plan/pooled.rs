//! Stages that are pools of members that join and leave: the assignment of members to stages, and the choice of
//! a member that changes its stage when one pool is slower than the others.

use farflung_base::Nanos;

use super::{Assignment, Hysteresis, Measured, PlanPosition};
use crate::pipeline::Pools;

/// Arguments of [`Assignment::pooled`] besides the members.
#[derive(Debug, Clone, PartialEq)]
pub struct Pooling {
    /// Number of stages that the run should have.
    pub stages: u32,
    /// Maximum number of members of a pool: the number of microbatches of a step, so that each member gets at
    /// least one.
    pub most: u32,
    /// Operations of a microbatch in each stage, in any unit.
    pub work: Vec<f64>,
    /// Speed of each member of the view, in operations per second of any unit.
    pub speeds: Vec<f64>,
    /// A member that changes its stage, by its index in the view, and its new stage.
    pub moving: Option<(usize, u32)>,
}

impl Pooling {
    /// Returns the throughput of a pool in microbatches per second.
    fn throughput(&self, stage: usize, pool: &[usize]) -> f64 {
        let speed: f64 = pool.iter().map(|&member| self.speeds.get(member).copied().unwrap_or(1.0)).sum();
        speed / self.work.get(stage).copied().unwrap_or(1.0).max(f64::MIN_POSITIVE)
    }

    /// Returns the stage whose pool has the lowest throughput among the pools that `admits` accepts; the lower
    /// stage if equal.
    fn slowest(&self, pools: &[Vec<usize>], admits: impl Fn(&[usize]) -> bool) -> Option<usize> {
        let admitted = (0..pools.len()).filter(|&stage| admits(&pools[stage]));
        admitted.min_by(|&a, &b| self.throughput(a, &pools[a]).total_cmp(&self.throughput(b, &pools[b])))
    }

    /// Removes a member from its pool, for an empty pool, and returns it: the slowest member of the pool with
    /// the highest throughput among pools with two members or more.
    fn take_from_fastest_pool(&self, pools: &mut [Vec<usize>]) -> Option<usize> {
        let give = (0..pools.len()).rev().filter(|&stage| pools[stage].len() > 1);
        let from =
            give.max_by(|&a, &b| self.throughput(a, &pools[a]).total_cmp(&self.throughput(b, &pools[b])))?;
        let speed = |member: usize| self.speeds.get(member).copied().unwrap_or(1.0);
        let slowest = (0..pools[from].len())
            .rev()
            .min_by(|&a, &b| speed(pools[from][a]).total_cmp(&speed(pools[from][b])))?;
        Some(pools[from].remove(slowest))
    }
}

impl Assignment {
    /// Assigns members as [`Assignment::new`] does, but each stage is a pool of members, and pools may have
    /// different sizes. A member that holds a part keeps it, except `pooling.moving` and if the number of
    /// stages changes. An empty pool gets a member without a part, or a member of the pool with the highest
    /// throughput. The other members without a part join the pool with the lowest throughput. With fewer
    /// members than stages, all members form one pipeline of as many stages as members.
    ///
    /// The function is pure: members with the same arguments compute the same assignment.
    ///
    /// Source: Ryabinin et al. 2023, "SWARM": a newcomer joins the slowest stage. Differs: all members of a
    /// view compute the same assignment.
    ///
    /// ```
    /// use farflung_parallel::plan::{Assignment, PlanPosition, Pooling};
    ///
    /// // Two pools of one member each, of which the second is half as fast: the newcomer joins it.
    /// let at = |replica, position| Some(PlanPosition { replica, position });
    /// let pooling =
    ///     Pooling { stages: 2, most: 8, work: vec![1.0, 1.0], speeds: vec![2.0, 1.0, 1.0], moving: None };
    /// let next = Assignment::pooled(&[at(0, 0), at(0, 1), None], 2, &pooling);
    /// assert_eq!((next.pools, next.ranks, next.spares), (vec![1, 2], vec![0, 1, 2], vec![]));
    /// ```
    #[must_use]
    pub fn pooled(members: &[Option<PlanPosition>], before: u32, pooling: &Pooling) -> Self {
        let stages = pooling.stages.max(2) as usize;
        // `Assignment::new` sorts members by replica, then by part. With replica 0 for all, it sorts them by
        // part, so that little moves when the model is divided into other parts.
        let by_part = |stood: PlanPosition| PlanPosition { replica: 0, position: stood.position };
        if members.len() < stages {
            let parts: Vec<Option<PlanPosition>> = members.iter().map(|stood| stood.map(by_part)).collect();
            return Self::new(&parts, before, pooling.stages);
        }
        let mut holders: Vec<(u32, u32, usize)> = members.iter().zip(0..).filter_map(placed).collect();
        holders.sort_unstable();
        let mut free: Vec<usize> = (0..members.len()).filter(|&member| members[member].is_none()).collect();
        let mut pools: Vec<Vec<usize>> = vec![Vec::new(); stages];
        let mut cut_anew = Vec::new();
        for (position, _, member) in holders {
            match pools.get_mut(position as usize).filter(|_| before as usize == stages) {
                Some(pool) => pool.push(member),
                None => cut_anew.push(member),
            }
        }
        let mut cut_anew = cut_anew.into_iter();
        for pool in pools.iter_mut().filter(|pool| pool.is_empty()) {
            pool.extend(cut_anew.next());
        }
        free.splice(0..0, cut_anew);
        if let Some((member, to)) = pooling.moving {
            change_stage(&mut pools, member, to, pooling.most);
        }
        let mut free = free.into_iter();
        for stage in 0..stages {
            if pools[stage].is_empty() {
                let filled = free.next().or_else(|| pooling.take_from_fastest_pool(&mut pools));
                pools[stage].extend(filled);
            }
        }
        let mut spares = Vec::new();
        for member in free {
            match pooling.slowest(&pools, |pool| pool.len() < pooling.most.max(1) as usize) {
                Some(stage) => pools[stage].push(member),
                None => spares.push(member),
            }
        }
        spares.sort_unstable();
        let sizes = pools.iter().map(|pool| pool.len() as u32).collect();
        Self { stages: pooling.stages, pools: sizes, ranks: pools.concat(), spares }
    }
}

/// Returns a member's stage, its index in the pool of that stage, and its index in the view.
fn placed((stood, member): (&Option<PlanPosition>, usize)) -> Option<(u32, u32, usize)> {
    stood.map(|PlanPosition { replica, position }| (position, replica, member))
}

/// Moves a member to the pool of another stage, unless its own pool would become empty or the other one is
/// full.
fn change_stage(pools: &mut [Vec<usize>], member: usize, to: u32, most: u32) {
    let to = to as usize;
    let Some(from) = pools.iter().position(|pool| pool.contains(&member)) else { return };
    if from == to || pools[from].len() < 2 || pools.get(to).is_none_or(|pool| pool.len() >= most as usize) {
        return;
    }
    pools[from].retain(|&other| other != member);
    pools[to].push(member);
}

/// Change that [`PoolBalance`] advises.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolAdvice {
    /// No change.
    Stay,
    /// New rates. Microbatches take other routes; no part moves.
    Rates(Vec<u32>),
    /// A rank changes its stage.
    Moves {
        /// Number of the rank.
        rank: u32,
        /// New stage of the rank.
        to: u32,
    },
}

/// Ranks of a pool get equal rates if the fastest has less than this factor times the speed of the slowest.
const ALIKE: f64 = 1.1;

/// Decides on rates and stage changes from the times that ranks measure. The result depends only on the
/// arguments of [`PoolBalance::observe`], so all ranks reach the same decision.
///
/// Rates are changed to the measured ones if this shortens the busiest rank's work in a step by more than a
/// tenth, in five consecutive steps ([`Hysteresis`]). Otherwise a member moves from another pool to the pool of
/// the busiest rank, if then the busiest rank of both pools would have less than nine tenths of that work, also
/// in five consecutive steps. At most one member moves at a time.
///
/// Source: Ryabinin et al. 2023, "SWARM", algorithm 2. Differs: compares measured times instead of queue
/// lengths, because the microbatches of a step are assigned before it begins; moves the member that helps most,
/// from any other pool; the margin is ours.
///
/// ```
/// use farflung_base::Nanos;
/// use farflung_parallel::pipeline::Pools;
/// use farflung_parallel::plan::{Measured, PoolAdvice, PoolBalance};
///
/// let of = |ms| Measured { microbatch: Nanos::from_millis(ms), rest: Nanos::ZERO };
/// let (pools, work) = (Pools::equal(vec![1, 2]), [1.0, 1.0]);
/// let mut balance = PoolBalance::default();
/// let times = [of(10), of(20), of(60)];
/// let said: Vec<_> = (0..5).map(|_| balance.observe(&pools, 8, &times, &work)).collect();
/// assert_eq!(said[3], PoolAdvice::Stay);
/// assert_eq!(said[4], PoolAdvice::Rates(vec![1, 1000, 333]));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolBalance {
    hysteresis: Hysteresis,
    /// Number of consecutive steps in which new rates would have been worthwhile.
    rerouting: u32,
    /// The rank and stage of the move that would have been worthwhile, and for how many consecutive steps.
    moving: Option<(u32, u32, u32)>,
}

impl PoolBalance {
    /// Creates a balance with another hysteresis than the usual one.
    #[must_use]
    pub fn new(hysteresis: Hysteresis) -> Self {
        Self { hysteresis, ..Self::default() }
    }

    /// Returns the advice after a step. `measured` has one entry for each rank; `work` has the operations of a
    /// microbatch in each stage. Returns [`PoolAdvice::Stay`] if a time is not known.
    pub fn observe(
        &mut self,
        pools: &Pools,
        microbatches: u32,
        measured: &[Measured],
        work: &[f64],
    ) -> PoolAdvice {
        let times: Vec<Nanos> = measured.iter().map(|measured| measured.microbatch).collect();
        let known = times.len() == pools.ranks() as usize && times.iter().all(|&time| time > Nanos::ZERO);
        let now = busiest(pools, microbatches, &times).filter(|_| known && work.len() == pools.sizes.len());
        let Some(now) = now else {
            *self = Self::new(self.hysteresis);
            return PoolAdvice::Stay;
        };
        let by_speed = Pools { rates: rates_of(pools, &times), ..pools.clone() };
        let routed = busiest(&by_speed, microbatches, &times).unwrap_or(now);
        if self.hysteresis.is_worth_it(now, routed) {
            (self.moving, self.rerouting) = (None, self.rerouting + 1);
            if self.rerouting < self.hysteresis.steps {
                return PoolAdvice::Stay;
            }
            self.rerouting = 0;
            return PoolAdvice::Rates(by_speed.rates);
        }
        self.rerouting = 0;
        let best = best_move(pools, microbatches, &times, work);
        let best = best.filter(|(_, then)| self.hysteresis.is_worth_it(now, *then));
        let Some(((rank, to), _)) = best else {
            self.moving = None;
            return PoolAdvice::Stay;
        };
        let before = self.moving.filter(|(r, t, _)| (*r, *t) == (rank, to)).map_or(0, |(_, _, steps)| steps);
        self.moving = Some((rank, to, before + 1));
        if before + 1 < self.hysteresis.steps {
            return PoolAdvice::Stay;
        }
        self.moving = None;
        PoolAdvice::Moves { rank, to }
    }
}

/// Returns the compute time of the busiest rank of each stage in a step.
fn busy(pools: &Pools, microbatches: u32, times: &[Nanos]) -> Option<Vec<Nanos>> {
    let mut counts = vec![0_u64; times.len()];
    for rank in pools.routes(microbatches).ok()?.iter().flatten() {
        *counts.get_mut(rank.index())? += 1;
    }
    let mut stages = vec![Nanos::ZERO; pools.sizes.len()];
    for ((rank, count), time) in (0..).zip(counts).zip(times) {
        let stage = &mut stages[pools.stage_of(rank)? as usize];
        *stage = (*stage).max(Nanos(time.0.saturating_mul(count)));
    }
    Some(stages)
}

/// Returns the compute time of the busiest rank in a step.
fn busiest(pools: &Pools, microbatches: u32, times: &[Nanos]) -> Option<Nanos> {
    busy(pools, microbatches, times)?.into_iter().max()
}

/// Returns the rates of ranks, relative to their own pool, from their times for a microbatch. If the speeds of
/// a pool are nearly equal, all its rates are 1, so that routes do not follow noise.
#[must_use]
pub fn rates_of(pools: &Pools, times: &[Nanos]) -> Vec<u32> {
    let mut rates = Vec::with_capacity(times.len());
    let mut rest = times;
    for &size in &pools.sizes {
        let (pool, others) = rest.split_at((size as usize).min(rest.len()));
        rest = others;
        let speeds: Vec<f64> = pool.iter().map(|time| 1.0 / time.as_secs_f64().max(1e-9)).collect();
        let (least, most) = speeds.iter().fold((f64::INFINITY, 0.0_f64), |(a, b), &s| (a.min(s), b.max(s)));
        let alike = most < ALIKE * least;
        rates.extend(if alike { vec![1; pool.len()] } else { Pools::whole_rates(&speeds) });
    }
    rates
}

/// Returns the best move of one rank to the busiest stage, and the time of the busier of the two stages after
/// the move. The best move is the one with the least such time. If moves are equally good, the lowest stage
/// gives its slowest rank, to change as little as possible.
fn best_move(pools: &Pools, microbatches: u32, times: &[Nanos], work: &[f64]) -> Option<((u32, u32), Nanos)> {
    let firsts = pools.firsts();
    let ranks = |stage: usize| {
        let first = firsts[stage] as usize;
        first..first + pools.sizes[stage] as usize
    };
    let busy = busy(pools, microbatches, times)?;
    let to = (0..busy.len()).rev().max_by_key(|&stage| busy[stage])?;
    if pools.sizes[to] >= microbatches {
        return None;
    }
    let mut best: Option<((u32, u32), Nanos)> = None;
    for from in (0..busy.len()).filter(|&from| from != to && pools.sizes[from] > 1) {
        let mut givers: Vec<usize> = ranks(from).collect();
        givers.sort_by_key(|&rank| std::cmp::Reverse(times[rank]));
        for rank in givers {
            // The rank is appended to its new pool.
            let mut order: Vec<Nanos> = Vec::with_capacity(times.len());
            for stage in 0..busy.len() {
                order.extend(ranks(stage).filter(|&other| other != rank).map(|other| times[other]));
                if stage == to {
                    order.push(Nanos::from_secs_f64(times[rank].as_secs_f64() * work[to] / work[from]));
                }
            }
            let mut after = Pools::equal(pools.sizes.clone());
            (after.sizes[from], after.sizes[to]) = (after.sizes[from] - 1, after.sizes[to] + 1);
            after.rates = rates_of(&after, &order);
            let Some(then) = self::busy(&after, microbatches, &order) else { continue };
            let then = then[from].max(then[to]);
            if best.is_none_or(|(_, least)| then < least) {
                best = Some(((rank as u32, to as u32), then));
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swarm::optimum;

    #[expect(clippy::unnecessary_wraps, reason = "members are told as options")]
    const fn at(position: u32, replica: u32) -> Option<PlanPosition> {
        Some(PlanPosition { replica, position })
    }

    fn pooling(stages: u32, speeds: &[f64]) -> Pooling {
        let work = vec![1.0; stages as usize];
        Pooling { stages, most: 16, work, speeds: speeds.to_vec(), moving: None }
    }

    fn pools(assignment: &Assignment) -> Vec<Vec<usize>> {
        let mut ranks = assignment.ranks.iter().copied();
        assignment.pools.iter().map(|&size| ranks.by_ref().take(size as usize).collect()).collect()
    }

    #[test]
    fn a_loss_moves_nobody_while_another_holds_the_part() {
        let all = [at(0, 0), at(0, 1), at(1, 0), at(2, 0), at(2, 1), at(2, 2)];
        for lost in [0, 1, 3, 4, 5] {
            let mut members = all.to_vec();
            members.remove(lost);
            let next = Assignment::pooled(&members, 3, &pooling(3, &[1.0; 5]));
            assert!(next.spares.is_empty());
            for (stage, pool) in pools(&next).iter().enumerate() {
                assert!(pool.iter().all(|&member| members[member].unwrap().position == stage as u32));
            }
        }
        // An empty pool gets the slowest member of the pool with the highest throughput.
        let mut members = all.to_vec();
        members.remove(2);
        let next = Assignment::pooled(&members, 3, &pooling(3, &[4.0, 2.0, 1.0, 3.0, 3.0]));
        assert_eq!(pools(&next), [vec![0, 1], vec![2], vec![3, 4]]);
        // A member without a part is assigned to an empty pool first.
        members.push(None);
        let next = Assignment::pooled(&members, 3, &pooling(3, &[4.0, 2.0, 1.0, 3.0, 3.0, 9.0]));
        assert_eq!(pools(&next), [vec![0, 1], vec![5], vec![2, 3, 4]]);
    }

    #[test]
    fn newcomers_join_the_pool_that_can_do_least() {
        let members = [at(0, 0), at(1, 0), at(2, 0), None, None, None];
        let next = Assignment::pooled(&members, 3, &pooling(3, &[3.0, 1.0, 2.0, 1.0, 1.0, 1.0]));
        // Throughputs of the pools before each newcomer: 3, 1, 2; then 3, 2, 2; then 3, 3, 2. If equal, the
        // lower stage is taken.
        assert_eq!(pools(&next), [vec![0], vec![1, 3, 4], vec![2, 5]]);
        // With four times the work, a stage has a quarter of the throughput.
        let heavy = Pooling { work: vec![4.0, 1.0, 1.0], ..pooling(3, &[3.0, 1.0, 2.0, 1.0, 1.0, 1.0]) };
        assert_eq!(pools(&Assignment::pooled(&members, 3, &heavy)), [vec![0, 3, 4], vec![1, 5], vec![2]]);
        // A pool does not get more members than a step has microbatches.
        let small = Pooling { most: 1, ..pooling(3, &[1.0; 6]) };
        let next = Assignment::pooled(&members, 3, &small);
        assert_eq!((next.pools.clone(), next.spares), (vec![1, 1, 1], vec![3, 4, 5]));
    }

    #[test]
    fn fewer_members_than_stages_are_one_pipeline_that_grows_again() {
        // Two members are left for three stages, so they form one pipeline of two stages. With two newcomers,
        // there are three stages again.
        let next = Assignment::pooled(&[at(0, 1), at(2, 0)], 3, &pooling(3, &[1.0; 2]));
        assert_eq!((next.stages, next.pools, next.ranks), (2, vec![], vec![0, 1]));
        let next = Assignment::pooled(&[at(1, 0), at(0, 0), None, None], 2, &pooling(3, &[1.0; 4]));
        assert_eq!((next.stages, pools(&next)), (3, vec![vec![1, 3], vec![0], vec![2]]));
    }

    #[test]
    fn a_member_changes_its_stage_where_its_pool_keeps_another() {
        let members = [at(0, 0), at(0, 1), at(1, 0)];
        let with = |moving| Assignment::pooled(&members, 2, &Pooling { moving, ..pooling(2, &[1.0; 3]) });
        assert_eq!(pools(&with(Some((0, 1)))), [vec![1], vec![2, 0]]);
        for none in [None, Some((2, 0)), Some((0, 0)), Some((0, 7)), Some((9, 1))] {
            assert_eq!(pools(&with(none)), [vec![0, 1], vec![2]], "{none:?}");
        }
    }

    /// Times of microbatches on machines of these speeds in these pools. Every stage has the same work.
    fn times(pools: &[Vec<f64>]) -> Vec<Measured> {
        let time = |speed: &f64| Measured { microbatch: Nanos((12e6 / speed) as u64), rest: Nanos::ZERO };
        pools.iter().flatten().map(time).collect()
    }

    /// Applies the advice of 500 steps; returns the pools at the end and the number of moves.
    fn settled(mut pools: Vec<Vec<f64>>) -> (Vec<Vec<f64>>, u32) {
        let work = vec![1.0; pools.len()];
        let mut rates = Pools::equal(pools.iter().map(|pool| pool.len() as u32).collect()).rates;
        let (mut balance, mut moves) = (PoolBalance::default(), 0);
        for _ in 0..500 {
            let sizes: Vec<u32> = pools.iter().map(|pool| pool.len() as u32).collect();
            let now = Pools { sizes, rates: rates.clone() };
            match balance.observe(&now, 120, &times(&pools), &work) {
                PoolAdvice::Stay => {}
                PoolAdvice::Rates(next) => rates = next,
                PoolAdvice::Moves { rank, to } => {
                    let from = now.stage_of(rank).unwrap() as usize;
                    let speed = pools[from].remove((rank - now.firsts()[from]) as usize);
                    pools[to as usize].push(speed);
                    let sizes = pools.iter().map(|pool| pool.len() as u32).collect();
                    let told: Vec<Nanos> = times(&pools).iter().map(|m| m.microbatch).collect();
                    rates = rates_of(&Pools::equal(sizes), &told);
                    moves += 1;
                }
            }
        }
        (pools, moves)
    }

    #[test]
    fn moves_end_near_the_best_of_all_assignments() {
        let speeds = [4.0, 3.0, 2.0, 2.0, 1.0, 1.0];
        let best = optimum(&speeds, 3);
        for pools in [
            vec![vec![4.0, 3.0, 2.0, 2.0], vec![1.0], vec![1.0]],
            vec![vec![1.0], vec![4.0, 2.0, 1.0], vec![3.0, 2.0]],
            vec![vec![2.0], vec![2.0], vec![1.0, 1.0, 3.0, 4.0]],
        ] {
            let (after, moves) = settled(pools.clone());
            let least = |pools: &[Vec<f64>]| {
                pools.iter().map(|pool| pool.iter().sum::<f64>()).fold(f64::INFINITY, f64::min)
            };
            assert!(moves > 0 && moves < 10 && least(&after) > least(&pools), "{pools:?} {after:?}");
            assert!(least(&after) >= 0.75 * best, "{pools:?} {after:?}: {moves} moves");
        }
        // An assignment that is already optimal does not change.
        let (_, moves) = settled(vec![vec![4.0], vec![3.0, 1.0], vec![2.0, 2.0, 1.0]]);
        assert_eq!(moves, 0);
    }

    #[test]
    fn the_vectors_of_the_seeds() {
        // Machines with the speeds 8, 1, 1, 1 and 1 on three stages. Machines cannot be divided, so at best the
        // slowest pool has a total speed of 2.
        let (pools, _) = settled(vec![vec![8.0, 1.0, 1.0], vec![1.0], vec![1.0]]);
        let mut sums: Vec<f64> = pools.iter().map(|pool| pool.iter().sum()).collect();
        sums.sort_by(f64::total_cmp);
        assert_eq!(sums, [2.0, 2.0, 8.0]);
        // There are pools of two, two and one machines. Moving a machine would not shorten a step, so none
        // moves.
        assert_eq!(settled(vec![vec![1.0; 2], vec![1.0; 2], vec![1.0]]).1, 0);
    }

    #[test]
    fn a_moment_and_nonsense_change_nothing() {
        let (pools, work) = (Pools::equal(vec![1, 2]), [1.0, 1.0]);
        let mut balance = PoolBalance::default();
        for step in 0..50 {
            let slow = if step % 5 == 4 { 1.0 } else { 0.2 };
            let told = times(&[vec![2.0], vec![1.0, slow]]);
            assert_eq!(balance.observe(&pools, 8, &told, &work), PoolAdvice::Stay);
        }
        let mut none = times(&[vec![2.0], vec![1.0, 0.1]]);
        none[2].microbatch = Nanos::ZERO;
        for told in [&none[..], &none[..2], &[]] {
            assert!((0..50).all(|_| balance.observe(&pools, 8, told, &work) == PoolAdvice::Stay));
        }
        // Nearly equal speeds give equal rates.
        let near = [10, 21, 20].map(Nanos::from_millis);
        assert_eq!(rates_of(&pools, &near), [1, 1, 1]);
    }
}
