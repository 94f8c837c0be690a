//! A step of pools that continues after ranks were lost: the other ranks keep what they have computed, and only
//! the work of the lost ranks is done again.

use farflung_base::{Nanos, Rank};
use serde::{Deserialize, Serialize};

use super::{CellProgress, ComputeOrder, Content, Pools, StageCost};
use crate::ParallelError;

/// What a rank has done of a microbatch in its stage, in a step that was not completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KeptCell {
    /// Index of the microbatch.
    pub microbatch: u32,
    /// The work that is done.
    pub progress: CellProgress,
}

/// A step of pools, part of which is done.
///
/// Each pair of microbatch and stage (cell) is computed by one rank and counts once: a rank keeps the cells of
/// which it has done something, and the other cells of its former routes are assigned anew.
///
/// Source: Ryabinin et al. 2023, "SWARM": a microbatch whose peer fails is sent to another peer of that stage.
/// Differs: all ranks first agree which work is done. So a microbatch cannot count twice, even if a peer is
/// late, or fails after it has sent its gradients.
///
/// ```
/// use farflung_parallel::pipeline::{CellProgress, KeptCell, Pools, ResumedStep};
///
/// // Two stages. The second had two ranks, of which one was lost; the first has done all forward passes.
/// let kept = |microbatch, progress| KeptCell { microbatch, progress };
/// let first = (0..4).map(|microbatch| kept(microbatch, CellProgress::Forward)).collect();
/// let second = vec![kept(1, CellProgress::WeightGradient)];
/// let step = ResumedStep::new(&Pools::equal(vec![1, 1]), 4, &[first, second]).unwrap();
/// assert_eq!((step.computations_kept(), step.computations()), (7, 24));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumedStep {
    /// By microbatch and stage.
    routes: Vec<Vec<Rank>>,
    progress: Vec<Vec<CellProgress>>,
}

impl ResumedStep {
    /// Plans the rest of a step of `microbatches` microbatches. `kept` has the cells of each rank of `pools`,
    /// which are the pools of the remaining ranks and of newcomers. The cells of lost ranks are assigned to the
    /// ranks of their pool that have least to do, in proportion to their rates.
    ///
    /// Returns `None` if the step must be done as a whole: no rank keeps anything; a cell is kept by two ranks
    /// or does not exist; a rank would have no microbatch; there would be too many different routes. A pure
    /// function, so all ranks get the same result.
    #[must_use]
    pub fn new(pools: &Pools, microbatches: u32, kept: &[Vec<KeptCell>]) -> Option<Self> {
        if pools.fault().is_some() || kept.len() != pools.ranks() as usize {
            return None;
        }
        ComputeOrder::check_cells(pools.stages().into(), microbatches, 1).ok()?;
        let stages = pools.stages() as usize;
        let mut route_of: Vec<Vec<Option<Rank>>> = vec![vec![None; stages]; microbatches as usize];
        let mut progress = vec![vec![CellProgress::Nothing; stages]; microbatches as usize];
        // Computations that each rank still has to do, and whether it has any microbatch.
        let mut left = vec![0_u32; kept.len()];
        let mut has_any = vec![false; kept.len()];
        for (rank, cells) in (0..).zip(kept) {
            let stage = pools.stage_of(rank)? as usize;
            for KeptCell { microbatch, progress: done } in cells {
                let cell = route_of.get_mut(*microbatch as usize)?;
                if *done == CellProgress::Nothing {
                    continue;
                }
                if cell[stage].replace(Rank(rank)).is_some() {
                    return None;
                }
                progress[*microbatch as usize][stage] = *done;
                left[rank as usize] += done.left();
                has_any[rank as usize] = true;
            }
        }
        if !has_any.contains(&true) {
            return None;
        }
        let all = CellProgress::Nothing.left();
        for (stage, (first, &size)) in pools.firsts().into_iter().zip(&pools.sizes).enumerate() {
            let pool = first as usize..(first + size) as usize;
            for route in &mut route_of {
                if route[stage].is_some() {
                    continue;
                }
                // The time after which the rank would have done this cell, too.
                let end = |rank: usize| f64::from(left[rank] + all) / f64::from(pools.rates[rank]);
                let rank = pool.clone().min_by(|&a, &b| {
                    (has_any[a], end(a)).partial_cmp(&(has_any[b], end(b))).expect("rates are above 0")
                })?;
                route[stage] = Some(Rank(rank as u32));
                left[rank] += all;
                has_any[rank] = true;
            }
        }
        let routes =
            route_of.into_iter().map(|route| route.into_iter().collect()).collect::<Option<Vec<_>>>()?;
        // Each distinct route is a copy of the model in the order of the step.
        let copies = routes.iter().collect::<std::collections::BTreeSet<_>>().len() as u64;
        ComputeOrder::check_cells(copies * u64::from(pools.stages()), microbatches, 1).ok()?;
        (!has_any.contains(&false)).then_some(Self { routes, progress })
    }

    /// Returns the rank that each microbatch passes at each stage, as `routes[microbatch][stage]`.
    #[must_use]
    pub fn routes(&self) -> &[Vec<Rank>] {
        &self.routes
    }

    /// Returns how far a microbatch is in a stage. [`CellProgress::Nothing`] if there is no such microbatch or
    /// stage.
    #[must_use]
    pub fn progress(&self, microbatch: u32, stage: u32) -> CellProgress {
        let cell = self.progress.get(microbatch as usize).and_then(|cells| cells.get(stage as usize));
        cell.copied().unwrap_or_default()
    }

    /// Returns whether the output of a stage for a microbatch must be sent: whether the computation that needs
    /// it is not done. `content` says to which of its neighbours the stage sends it.
    #[must_use]
    pub fn needs(&self, microbatch: u32, stage: u32, content: Content) -> bool {
        match content {
            Content::Activation => self.progress(microbatch, stage + 1) < CellProgress::Forward,
            Content::Gradient => stage
                .checked_sub(1)
                .is_none_or(|to| self.progress(microbatch, to) < CellProgress::InputGradient),
        }
    }

    /// Returns the number of computations of the step: three for each microbatch in each stage.
    #[must_use]
    pub fn computations(&self) -> u64 {
        self.progress.iter().flatten().map(|_| u64::from(CellProgress::Nothing.left())).sum()
    }

    /// Returns the number of computations that are kept.
    #[must_use]
    pub fn computations_kept(&self) -> u64 {
        self.computations() - self.progress.iter().flatten().map(|done| u64::from(done.left())).sum::<u64>()
    }

    /// Returns the order of the step's work, as [`Pools::order`] does. It has all computations in an
    /// order that is valid whatever is done; those that are done take no time.
    ///
    /// Errors: as [`Pools::order`].
    pub fn order(
        &self,
        pools: &Pools,
        cost: &[StageCost],
        hop: Nanos,
        memory: Option<u32>,
    ) -> Result<ComputeOrder, ParallelError> {
        pools.order_along((&self.routes, &self.progress), cost, hop, memory)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::pipeline::{Action, ComputeKind, Lowered, Lowering, Message, Op, Schedule, TransferDirection};
    use crate::seeded_rng::SeededRng;

    fn cells(of: &[u32], progress: CellProgress) -> Vec<KeptCell> {
        of.iter().map(|&microbatch| KeptCell { microbatch, progress }).collect()
    }

    /// Runs the lists of a schedule: a computation that is done needs no message, and messages that nobody
    /// needs are not sent. Returns the computations that were not done before, each with its rank.
    fn run(schedule: &Schedule, step: &ResumedStep) -> Vec<(usize, Action)> {
        let placement = schedule.order().placement();
        let needs = |m: Message| step.needs(m.microbatch, placement.part(m.from), m.content);
        let (mut sent, mut computed) = (BTreeSet::new(), Vec::new());
        let mut at = vec![0; schedule.lists().len()];
        loop {
            let before = at.clone();
            for (rank, list) in schedule.lists().iter().enumerate() {
                while let Some(entry) = list.get(at[rank]) {
                    if let Some((TransferDirection::Send, message)) = entry.message(placement) {
                        if needs(message) {
                            assert!(sent.insert(message), "{message} is sent twice");
                        }
                    } else if let Lowered::Compute(Op::Run(action)) = *entry {
                        let done = step.progress(action.microbatch, placement.part(action.stage));
                        let taken = Message::taken_by(action, placement);
                        if CellProgress::after(action.kind).is_some_and(|after| done < after) {
                            if taken.is_some_and(|message| !sent.contains(&message)) {
                                break;
                            }
                            computed.push((rank, action));
                        }
                    }
                    at[rank] += 1;
                }
            }
            if at == before {
                break;
            }
        }
        for (rank, list) in schedule.lists().iter().enumerate() {
            assert_eq!(at[rank], list.len(), "rank {rank} waits for ever");
        }
        computed
    }

    fn drawn(rng: &mut SeededRng, below: u32) -> u32 {
        rng.below(below as usize) as u32
    }

    #[test]
    fn what_is_done_stays_and_the_rest_is_computed_once_without_deadlock() {
        for seed in 0..300 {
            let mut rng = SeededRng::new(seed, 0);
            let stages = 2 + drawn(&mut rng, 3);
            let sizes: Vec<u32> = (0..stages).map(|_| 1 + drawn(&mut rng, 3)).collect();
            let microbatches = 4 + drawn(&mut rng, 12);
            let ranks = sizes.iter().sum::<u32>();
            let pools = Pools { sizes, rates: (0..ranks).map(|_| 1 + drawn(&mut rng, 3)).collect() };
            let mut kept = vec![Vec::new(); ranks as usize];
            // Some of what each rank had to do is done; a part of the cells belonged to ranks that are lost.
            for (microbatch, route) in (0..).zip(pools.routes(microbatches).unwrap()) {
                for rank in route {
                    let progress = match drawn(&mut rng, 6) {
                        0 | 1 => CellProgress::WeightGradient,
                        2 => CellProgress::InputGradient,
                        3 => CellProgress::Forward,
                        _ => continue,
                    };
                    kept[rank.index()].push(KeptCell { microbatch, progress });
                }
            }
            let Some(step) = ResumedStep::new(&pools, microbatches, &kept) else { continue };
            for (rank, cells) in (0..).map(Rank).zip(&kept) {
                let stage = pools.stage_of(rank.0).unwrap();
                for cell in cells {
                    assert_eq!(step.routes()[cell.microbatch as usize][stage as usize], rank);
                    assert_eq!(step.progress(cell.microbatch, stage), cell.progress);
                }
            }
            let memory = (seed % 3 > 0).then(|| 1 + drawn(&mut rng, 3));
            let order = step.order(&pools, &[StageCost::UNIT], Nanos(100), memory).unwrap();
            let schedule = Schedule::new(order, &Lowering::default()).unwrap();
            let computed = run(&schedule, &step);
            let all = step.computations() - step.computations_kept();
            assert_eq!(computed.len() as u64, all, "seed {seed}");
            let place = |&(_, action): &(usize, Action)| {
                (schedule.order().placement().part(action.stage), action.microbatch, action.kind.text())
            };
            assert_eq!(computed.iter().map(place).collect::<BTreeSet<_>>().len(), computed.len());
        }
    }

    /// With any limit, a rank holds no more than that, or one more than it has kept.
    #[test]
    fn a_rank_holds_at_most_one_more_than_it_may() {
        let pools = Pools::equal(vec![2, 2]);
        let kept = [
            vec![],
            cells(&[1, 3, 5], CellProgress::Forward),
            cells(&[0, 2], CellProgress::Forward),
            cells(&[1], CellProgress::InputGradient),
        ];
        let step = ResumedStep::new(&pools, 12, &kept).unwrap();
        for most in 1..5 {
            let order = step.order(&pools, &[StageCost::UNIT], Nanos(100), Some(most)).unwrap();
            for (rank, list) in order.lists().iter().enumerate() {
                let (mut held, mut peak) = (kept[rank].len() as u32, 0);
                for action in list.iter().flat_map(Op::actions) {
                    let done = step.progress(action.microbatch, order.placement().part(action.stage));
                    match action.kind {
                        ComputeKind::Forward => held += u32::from(done < CellProgress::Forward),
                        ComputeKind::BackwardWeight => held -= 1,
                        _ => {}
                    }
                    peak = peak.max(held);
                }
                assert!(peak <= most.max(kept[rank].len() as u32 + 1), "rank {rank}, {most}: {peak}");
            }
        }
    }

    #[test]
    fn the_work_of_lost_ranks_goes_to_those_with_least_to_do() {
        let pools = Pools::equal(vec![1, 2]);
        let kept = [
            cells(&[0, 1, 2, 3, 4, 5], CellProgress::Forward),
            cells(&[0], CellProgress::Forward),
            cells(&[1, 4], CellProgress::WeightGradient),
        ];
        let step = ResumedStep::new(&pools, 6, &kept).unwrap();
        let second: Vec<u32> = step.routes().iter().map(|route| route[1].0).collect();
        // Rank 1 has two computations left, rank 2 none: microbatches 2, 3 and 5 go to 2, 1 and 2.
        assert_eq!(second, [1, 2, 2, 1, 2, 2]);
        assert!(!step.needs(1, 0, Content::Activation) && step.needs(2, 0, Content::Activation));
        assert!(step.needs(1, 1, Content::Gradient));
    }

    #[test]
    fn a_step_without_anything_to_keep_or_with_contradictions_is_done_as_a_whole() {
        let pools = Pools::equal(vec![1, 2]);
        let cell = |microbatch| KeptCell { microbatch, progress: CellProgress::Forward };
        let none = |kept: [Vec<KeptCell>; 3]| ResumedStep::new(&pools, 3, &kept).is_none();
        assert!(none([vec![], vec![], vec![]]));
        assert!(none([vec![], vec![cell(1)], vec![cell(1)]]));
        assert!(none([vec![cell(3)], vec![], vec![]]));
        // Rank 2 would have nothing to do.
        assert!(none([vec![], vec![cell(0), cell(1), cell(2)], vec![]]));
        assert!(!none([vec![], vec![cell(0), cell(2)], vec![]]));
        assert!(ResumedStep::new(&pools, 3, &[vec![cell(0)]]).is_none());
    }
}
