//! Stages that are pools of ranks. Pools may differ in size, and ranks in speed.

use farflung_base::{Nanos, Rank, StageId};

use super::routed::{Hop, RankTimes, Routed};
use super::{CellProgress, ComputeOrder, Placement, StageCost};
use crate::ParallelError;
use crate::mesh::Mesh;
use crate::swarm::{PeerRate, Wiring};

/// A pipeline in which each stage is held by a pool of ranks. A microbatch passes one rank of each pool.
///
/// Ranks are numbered pool by pool: with sizes 1 and 2, rank 0 holds the first stage, ranks 1 and 2 hold the
/// second.
///
/// ```
/// use farflung_parallel::pipeline::Pools;
///
/// let pools = Pools { sizes: vec![1, 3], rates: vec![1, 4, 2, 1] };
/// let second: Vec<u32> = pools.routes(7)?.iter().map(|route| route[1].0).collect();
/// assert_eq!(second, [1, 2, 3, 1, 1, 2, 1]);
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pools {
    /// Number of ranks of each stage.
    pub sizes: Vec<u32>,
    /// Speed of each rank relative to the others of its pool: microbatches in the same time.
    pub rates: Vec<u32>,
}

/// An invalid field of [`Pools`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolsFault {
    /// Name of the field: `sizes` or `rates`.
    pub field: &'static str,
    /// Description of a valid value.
    pub expected: String,
}

/// Returns the number of ranks of pools of these sizes.
fn ranks_of(sizes: &[u32]) -> u32 {
    sizes.iter().fold(0, |sum, &size| sum.saturating_add(size))
}

impl Pools {
    /// Maximum rate.
    pub const MOST: u32 = 1_000_000;

    /// Creates pools whose ranks all have rate 1. More ranks than [`Mesh::MAX_RANKS`] get no rates, so that
    /// wrong sizes allocate nothing; [`Pools::fault`] then says so.
    #[must_use]
    pub fn equal(sizes: Vec<u32>) -> Self {
        let ranks = ranks_of(&sizes);
        let rates = if ranks > Mesh::MAX_RANKS { Vec::new() } else { vec![1; ranks as usize] };
        Self { sizes, rates }
    }

    /// Returns the number of stages.
    #[must_use]
    pub const fn stages(&self) -> u32 {
        self.sizes.len() as u32
    }

    /// Returns the number of ranks, the sum of the sizes.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        ranks_of(&self.sizes)
    }

    /// Returns the first rank of each pool.
    #[must_use]
    pub fn firsts(&self) -> Vec<u32> {
        let mut next = 0_u32;
        let first = |&size: &u32| {
            let first = next;
            next = first.saturating_add(size);
            first
        };
        self.sizes.iter().map(first).collect()
    }

    /// Returns the stage of a rank. `None` if there is no such rank.
    #[must_use]
    pub fn stage_of(&self, rank: u32) -> Option<u32> {
        let firsts = self.firsts();
        (rank < self.ranks()).then(|| firsts.iter().filter(|&&first| first <= rank).count() as u32 - 1)
    }

    /// Returns the minimum number of microbatches of a step. With fewer, a rank of the largest pool would have
    /// none.
    #[must_use]
    pub fn fewest(&self) -> u32 {
        self.sizes.iter().copied().max().unwrap_or(1)
    }

    /// Converts speeds into relative rates: all 1 if the speeds are equal, otherwise thousandths of the
    /// fastest, at least 1.
    #[must_use]
    pub fn whole_rates(speeds: &[f64]) -> Vec<u32> {
        let fastest = speeds.iter().copied().fold(0.0_f64, f64::max);
        if fastest <= 0.0 || speeds.iter().all(|speed| speed.total_cmp(&speeds[0]).is_eq()) {
            return vec![1; speeds.len()];
        }
        speeds.iter().map(|speed| ((1000.0 * speed / fastest).round() as u32).max(1)).collect()
    }

    /// Returns the first invalid field, if any.
    #[must_use]
    pub fn fault(&self) -> Option<PoolsFault> {
        let fault = |field, expected: &str| Some(PoolsFault { field, expected: expected.to_owned() });
        if self.sizes.len() < 2 {
            return fault("sizes", "at least two pools, one for each stage of the pipeline");
        }
        if self.sizes.contains(&0) {
            return fault(
                "sizes",
                "at least one rank in each pool, because a stage without a rank stops the pipeline",
            );
        }
        if self.ranks() > Mesh::MAX_RANKS {
            return fault("sizes", &format!("at most {} ranks in all pools", Mesh::MAX_RANKS));
        }
        if self.rates.len() != self.ranks() as usize {
            let expected = format!("{} numbers, one for each rank of the pools", self.ranks());
            return fault("rates", &expected);
        }
        if self.rates.iter().any(|&rate| rate == 0 || rate > Self::MOST) {
            return fault("rates", "numbers from 1 to 1000000");
        }
        None
    }

    /// Returns the rank that each microbatch passes at each stage, as `routes[microbatch][stage]`. In each
    /// pool, microbatches are assigned by interleaved weighted round robin over the rates. Every rank has a
    /// microbatch if there are at least [`Pools::fewest`].
    ///
    /// Source: Ryabinin et al. 2023, "SWARM", algorithm 1. Differs: the routes of a step are fixed by the plan
    /// before it begins, so that each microbatch counts exactly once even if a rank is late. If a rank is lost,
    /// [`ResumedStep`](super::ResumedStep) has the routes of the rest.
    ///
    /// Errors: [`ParallelError::Plan`] with the invalid field if [`Pools::fault`] returns one;
    /// [`ParallelError::TooLarge`] for more stages times microbatches than [`ComputeOrder::MAX_CELLS`].
    pub fn routes(&self, microbatches: u32) -> Result<Vec<Vec<Rank>>, ParallelError> {
        if let Some(PoolsFault { field, expected }) = self.fault() {
            let value = format!("{:?}", if field == "sizes" { &self.sizes } else { &self.rates });
            return Err(ParallelError::Plan { field: format!("pools.{field}"), value, expected });
        }
        ComputeOrder::check_cells(self.sizes.len() as u64, microbatches, 1)?;
        let mut routes = vec![Vec::with_capacity(self.sizes.len()); microbatches as usize];
        for (first, &size) in self.firsts().into_iter().zip(&self.sizes) {
            let mut wiring = Wiring::default();
            for &rate in &self.rates[first as usize..][..size as usize] {
                wiring.join(PeerRate::new(rate.into()))?;
            }
            for route in &mut routes {
                let peer = wiring.forward(1.0).expect("no peer is banned");
                route.push(Rank(first + peer as u32));
            }
        }
        Ok(routes)
    }

    /// Returns the order of a step's work, made by list scheduling over the routes.
    ///
    /// `cost` is the cost of each stage on the slowest rank of its pool, or one cost for all stages; `hop` is
    /// the time of a message. A rank holds at most `memory` microbatches. By default, the limit is enough to
    /// keep the ranks of its stage and of later stages busy, message times included, in proportion to the
    /// rank's microbatches. The limit, apart from message times, is doubled if the ranks of any pool differ in
    /// speed, because microbatches then return in another order than they left.
    ///
    /// Errors: those of [`Pools::routes`]; [`ParallelError::PerStage`] if the number of costs is neither 1 nor
    /// the number of stages; those of [`ComputeOrder::new`].
    pub fn order(
        &self,
        microbatches: u32,
        cost: &[StageCost],
        hop: Nanos,
        memory: Option<u32>,
    ) -> Result<ComputeOrder, ParallelError> {
        self.order_along((&self.routes(microbatches)?, &[]), cost, hop, memory)
    }

    /// Returns the order of a step's work as [`Pools::order`] does, with these routes. `progress` is what is
    /// done of each microbatch in each stage; empty if nothing is.
    pub(super) fn order_along(
        &self,
        (routes, progress): (&[Vec<Rank>], &[Vec<CellProgress>]),
        cost: &[StageCost],
        hop: Nanos,
        memory: Option<u32>,
    ) -> Result<ComputeOrder, ParallelError> {
        let stages = self.sizes.len();
        let cost: Vec<StageCost> = match cost {
            [one] => vec![*one; stages],
            each if each.len() == stages => each.to_vec(),
            each => {
                return Err(ParallelError::PerStage { what: "cost", given: each.len(), stages });
            }
        };
        let times = self.times(&cost);
        let held = memory.map_or_else(|| self.held(routes, &times, hop), |most| vec![most; times.len()]);
        let hops = vec![Hop { activation: hop, gradient: hop }; stages - 1];
        Routed { routes, progress, times: &times, hops: &hops, held: &held }.order()
    }

    /// Returns all pairs of ranks of which the first may send microbatches to the second.
    pub fn neighbours(&self) -> impl Iterator<Item = (Rank, Rank)> {
        let pools: Vec<_> = self.pools().collect();
        (1..pools.len()).flat_map(move |next| {
            let (from, to) = (pools[next - 1].clone(), pools[next].clone());
            from.flat_map(move |a| to.clone().map(move |b| (Rank(a as u32), Rank(b as u32))))
        })
    }

    /// Returns the cost of each stage of a placement on the rank that holds the stage. `cost` is the cost of
    /// each part on the slowest rank of its pool. The time of the optimizer step stays that of the slowest
    /// rank, because rates are measured on microbatches.
    #[must_use]
    pub fn own_costs(&self, placement: &Placement, cost: &[StageCost]) -> Vec<StageCost> {
        let shares = self.shares();
        let own = |stage: StageId| {
            let cost = cost[placement.part(stage) as usize];
            let own = |time| shares[placement.rank(stage).index()].of(time);
            let (forward, input) = (own(cost.forward), own(cost.input));
            let (weight, recompute) = (own(cost.weight), own(cost.recompute));
            StageCost { forward, input, weight, recompute, ..cost }
        };
        (0..placement.stages()).map(StageId).map(own).collect()
    }

    fn pools(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.firsts()
            .into_iter()
            .zip(&self.sizes)
            .map(|(first, &size)| first as usize..(first + size) as usize)
    }

    /// Returns the ratio of each rank's times to those of the slowest rank of its pool.
    fn shares(&self) -> Vec<Share> {
        let of_pool = |pool: std::ops::Range<usize>| {
            let rates = &self.rates[pool];
            let slowest = rates.iter().copied().min().unwrap_or(1);
            rates.iter().map(move |&rate| Share { slowest, rate })
        };
        self.pools().flat_map(of_pool).collect()
    }

    /// Returns the times of each rank for one microbatch. `cost` is the cost of each stage on the slowest rank
    /// of its pool.
    fn times(&self, cost: &[StageCost]) -> Vec<RankTimes> {
        let shares = self.shares();
        let of_pool = |(pool, cost): (std::ops::Range<usize>, &StageCost)| {
            let of_rank = |own: &Share| RankTimes {
                forward: own.of(cost.forward),
                input: own.of(cost.input),
                weight: own.of(cost.weight),
            };
            shares[pool].iter().map(of_rank).collect::<Vec<_>>()
        };
        self.pools().zip(cost).flat_map(of_pool).collect()
    }

    /// Returns the number of microbatches that each rank may hold by default; see [`Pools::order`].
    fn held(&self, routes: &[Vec<Rank>], times: &[RankTimes], hop: Nanos) -> Vec<u32> {
        let mut counts = vec![0_u128; times.len()];
        for rank in routes.iter().flatten() {
            counts[rank.index()] += 1;
        }
        let all = routes.len().max(1) as u128;
        // Compute time of a rank in the step. That of the busiest rank, divided by the number of microbatches,
        // is the mean time per microbatch (`each`).
        let busy = |rank: usize| {
            let RankTimes { forward, input, weight } = times[rank];
            counts[rank] * u128::from(forward.saturating_add(input).saturating_add(weight).0)
        };
        let each = ((0..times.len()).map(busy).max().unwrap_or(0) / all).max(1);
        let is_uneven = self.pools().any(|pool| times[pool].windows(2).any(|pair| pair[0] != pair[1]));
        let waiting = if is_uneven { 2 } else { 1 };
        let mut held = Vec::with_capacity(times.len());
        for (stage, pool) in self.pools().enumerate() {
            let behind: u128 = self.sizes[stage..].iter().map(|&size| u128::from(size)).sum();
            let way = 2 * u128::from(hop.0) * (self.sizes.len() - 1 - stage) as u128;
            let lanes = (waiting * behind + way.div_ceil(each)).min(all);
            let of_rank = |rank: usize| (lanes * counts[rank]).div_ceil(all).max(1) as u32;
            held.extend(pool.map(of_rank));
        }
        held
    }
}

/// Rates of the slowest rank of a pool and of one of its ranks.
#[derive(Debug, Clone, Copy)]
struct Share {
    slowest: u32,
    rate: u32,
}

impl Share {
    /// Returns the rank's time for what takes the slowest rank of its pool `time`.
    fn of(self, time: Nanos) -> Nanos {
        Nanos((u128::from(time.0) * u128::from(self.slowest) / u128::from(self.rate)) as u64)
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::{Bandwidth, Bytes, Link};

    use super::*;
    use crate::Lane;
    use crate::pipeline::{Boundary, ComputeKind, Method, PipelineCost, Settings, peaks, simulate};

    fn pools(sizes: &[u32], rates: &[u32]) -> Pools {
        Pools { sizes: sizes.to_vec(), rates: rates.to_vec() }
    }

    #[test]
    fn wrong_sizes_allocate_nothing() {
        let huge = Pools::equal(vec![u32::MAX, u32::MAX]);
        assert!(huge.rates.is_empty());
        assert!(huge.fault().is_some_and(|fault| fault.expected.contains("at most 1048576 ranks")));
        assert!(matches!(huge.routes(1), Err(ParallelError::Plan { .. })));
    }

    #[test]
    fn each_microbatch_passes_one_rank_of_each_pool_by_rate() {
        let pools = pools(&[2, 3], &[3, 1, 4, 2, 1]);
        let order = pools.order(28, &[StageCost::UNIT], Nanos::ZERO, None).unwrap();
        let mut counts = [0; 5];
        for (rank, action) in order.actions().filter(|(_, action)| action.kind == ComputeKind::Forward) {
            assert_eq!(order.placement().part(action.stage), pools.stage_of(rank.0).unwrap());
            counts[rank.index()] += 1;
        }
        assert_eq!(counts, [21, 7, 16, 8, 4]);
        assert_eq!((pools.stage_of(1), pools.stage_of(2), pools.stage_of(5)), (Some(0), Some(1), None));
    }

    #[test]
    fn pools_of_one_rank_take_no_longer_than_1f1b() {
        for (stages, microbatches) in [(2, 4), (3, 8), (4, 8), (4, 3)] {
            let pools = Pools::equal(vec![1; stages as usize]);
            let base = Method::OneFOneB.order(&Settings::new(stages, microbatches)).unwrap();
            let cost = PipelineCost::uniform(&base, StageCost::UNIT, Boundary::latency(Nanos::ZERO));
            let order = pools.order(microbatches, &[StageCost::UNIT], Nanos::ZERO, None).unwrap();
            let (mine, theirs) = (simulate(&order, &cost).unwrap(), simulate(&base, &cost).unwrap());
            assert!(mine.makespan() <= theirs.makespan(), "{stages} {microbatches}");
            assert!(peaks(&order).iter().zip(peaks(&base)).all(|(mine, theirs)| *mine <= theirs));
        }
    }

    #[test]
    fn a_rank_holds_no_more_than_it_may() {
        let pools = pools(&[1, 2, 1], &[1, 1, 1, 1]);
        for memory in 1..5 {
            let order = pools.order(12, &[StageCost::UNIT], Nanos(500_000), Some(memory)).unwrap();
            assert!(peaks(&order).iter().all(|&peak| peak <= memory), "{memory}");
        }
    }

    #[test]
    fn more_ranks_of_the_slow_stage_make_a_step_shorter() {
        let slow = StageCost { forward: Nanos(3_000_000), input: Nanos(3_000_000), ..StageCost::UNIT };
        let cost = [StageCost::UNIT, slow];
        let makespan = |sizes: &[u32]| {
            let order = Pools::equal(sizes.to_vec()).order(16, &cost, Nanos::ZERO, None).unwrap();
            let cost = PipelineCost {
                stages: cost.to_vec(),
                ..PipelineCost::uniform(&order, StageCost::UNIT, Boundary::latency(Nanos::ZERO))
            };
            simulate(&order, &cost).unwrap().makespan()
        };
        let (one, two) = (makespan(&[1, 1]), makespan(&[1, 2]));
        // 16 microbatches take 7 ms each if a pool has one rank, and 3.5 ms each if it has two.
        assert!(one.0 >= 112_000_000 && two.0 < 66_000_000, "{one} {two}");
    }

    /// With six machines of unequal speed in their best pools, the slowest pool hardly waits.
    #[test]
    fn unequal_ranks_keep_the_slowest_pool_busy() {
        let pools = pools(&[1, 2, 3], &[4, 3, 1, 2, 2, 1]);
        let quarter = StageCost {
            forward: Nanos(250_000),
            input: Nanos(250_000),
            weight: Nanos(250_000),
            ..StageCost::UNIT
        };
        let cost = [quarter, StageCost::UNIT, StageCost::UNIT];
        let hop = Nanos(370_000);
        for (microbatches, share) in [(24, 0.9), (66, 0.94), (132, 0.98)] {
            let order = pools.order(microbatches, &cost, hop, None).unwrap();
            let cost = PipelineCost {
                stages: pools.own_costs(order.placement(), &cost),
                ..PipelineCost::uniform(&order, StageCost::UNIT, Boundary::latency(hop))
            };
            let took = simulate(&order, &cost).unwrap().makespan();
            // In three milliseconds, the first two pools can compute four microbatches each, the third five.
            let bound = f64::from(microbatches) * 0.75e6;
            assert!(bound / took.0 as f64 >= share, "{microbatches}: {took}");
            assert!(peaks(&order).iter().all(|&peak| peak <= 16), "{:?}", peaks(&order));
        }
    }

    #[test]
    fn every_computation_of_a_microbatch_takes_the_time_of_its_rank() {
        let pools = pools(&[1, 2], &[1, 1, 4]);
        let cost = [StageCost { step: Nanos(8), ..StageCost::UNIT }; 2];
        let order = pools.order(10, &cost, Nanos::ZERO, None).unwrap();
        let placement = order.placement();
        let costs = pools.own_costs(placement, &cost);
        for stage in (0..placement.stages()).map(StageId) {
            let time = Nanos(if placement.rank(stage) == Rank(2) { 250_000 } else { 1_000_000 });
            let StageCost { forward, input, weight, recompute, step, .. } = costs[stage.index()];
            assert_eq!([forward, input, weight, recompute, step], [time, time, time, time, Nanos(8)]);
        }
    }

    /// A rank of a pool has a wire to each rank of the next and of the previous pool, and each has its lane.
    #[test]
    fn each_wire_has_a_lane_of_its_own() {
        let pools = Pools::equal(vec![1, 3, 1]);
        let order = pools.order(12, &[StageCost::UNIT], Nanos::ZERO, None).unwrap();
        // One byte per nanosecond: a message takes as long as a computation.
        let link = Link { bandwidth: Bandwidth(8_000_000_000), latency: Nanos::ZERO };
        let bytes = Bytes(1_000_000);
        let boundary = Boundary { link, forward: bytes, backward: bytes };
        let cost = PipelineCost::uniform(&order, StageCost::UNIT, boundary);
        let timeline = simulate(&order, &cost).unwrap().timeline();
        let lanes = timeline.lanes();
        let to = |rank| Lane::To(Rank(rank));
        assert_eq!(lanes[0], [Lane::Compute, Lane::Next, Lane::Previous, to(2), to(3)]);
        assert_eq!(lanes[2], [Lane::Compute, Lane::Next, Lane::Previous, to(0), to(4)]);
        assert_eq!((to(2).to_string(), lanes[4].len()), ("to rank 2".to_owned(), 5));
        for (rank, lanes) in (0..).map(Rank).zip(&lanes) {
            for &lane in lanes {
                let spans: Vec<_> = timeline.lane(rank, lane).collect();
                assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start), "{rank}, {lane}");
            }
        }
        let trace = crate::render::trace(&timeline);
        assert!(trace.contains("to rank 3"), "{trace}");
    }

    #[test]
    fn what_cannot_be_is_named() {
        let fault = |sizes: &[u32], rates: &[u32]| pools(sizes, rates).routes(4).unwrap_err().to_string();
        assert!(fault(&[3], &[1; 3]).contains("pools.sizes"));
        assert!(fault(&[1, 0], &[1]).contains("a stage without a rank"));
        assert!(fault(&[1, 2], &[1, 1]).contains("3 numbers"));
        assert!(fault(&[1, 2], &[1, 0, 1]).contains("pools.rates"));
        assert!(fault(&[u32::MAX, u32::MAX], &[1]).contains("pools.sizes"));
        let order = Pools::equal(vec![1, 3]).order(2, &[StageCost::UNIT], Nanos::ZERO, None);
        assert!(order.is_err(), "a rank without work");
        let many = Pools::equal(vec![1, 1]).order(u32::MAX, &[StageCost::UNIT], Nanos::ZERO, None);
        let message = many.unwrap_err().to_string();
        assert!(message.contains("8589934590 actions of a schedule are too many"), "{message}");
    }

    #[test]
    fn rates_are_whole_numbers() {
        assert_eq!(Pools::whole_rates(&[5e10, 5e10]), [1, 1]);
        assert_eq!(Pools::whole_rates(&[1e12, 5e11, 1.0]), [1000, 500, 1]);
    }
}
