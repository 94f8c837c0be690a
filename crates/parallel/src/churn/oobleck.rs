//! Oobleck's templates: pipelines of several lengths, planned in advance, that together use up any number of
//! machines.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::{Bytes, Nanos};

use super::StepTimes;
use super::policy::{ChangeContext, CheckpointInterval, Policy, PolicyRow, Reaction};

/// This policy's entry in the table [`POLICIES`](super::POLICIES).
pub(super) const ROW: PolicyRow = PolicyRow {
    name: "oobleck",
    summary: "at least two copies of each layer, in pipelines of planned lengths; lost layers are fetched \
              from another copy",
    saves: CheckpointInterval::Hourly,
    begin: || Box::new(Oobleck::default()),
};

/// Number of simultaneous failures after which every layer must still have a copy.
const FAILURES: u32 = 1;

/// Returns the template lengths: numbers of machines per pipeline with which any number of machines from
/// `(failures + 1) least` on can be used up. They go from `least` to `2 least - 1`, or to `least + 2` if that
/// is more, but never above `most`.
///
/// Source: Jang et al. 2023, "Oobleck", section 4.1: the lengths are consecutive, so that `sum x_i n_i = N` has
/// a solution for each `N`. Differs: theirs go up to `N - failures least`, which gives too many mixes to try;
/// [`best_mix`] also tries the mixes of any two lengths.
#[must_use]
pub fn templates(least: u32, most: u32) -> Vec<u32> {
    (least..=(2 * least).saturating_sub(1).max(least + 2).min(most)).collect()
}

/// Returns every way to use up exactly `machines` with `templates`, as the number of pipelines of each
/// template.
///
/// ```
/// use farflung_parallel::churn::mixes;
///
/// assert_eq!(mixes(&[2, 3], 7), [[2, 1]]);
/// ```
#[must_use]
pub fn mixes(templates: &[u32], machines: u32) -> Vec<Vec<u32>> {
    let Some((&last, shorter)) = templates.split_last() else {
        return if machines == 0 { vec![Vec::new()] } else { Vec::new() };
    };
    let mut found = Vec::new();
    for count in 0..=machines.checked_div(last).unwrap_or(0) {
        for mut mix in mixes(shorter, machines - count * last) {
            mix.push(count);
            found.push(mix);
        }
    }
    found
}

/// Time that a pipeline takes: for the first microbatch, and for each further one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineTimes {
    /// Time of the first microbatch.
    pub first: Nanos,
    /// Time of each further microbatch.
    pub each: Nanos,
}

/// Divides `microbatches` over pipelines, at least one each, so that the slowest pipeline is as fast as
/// possible.
///
/// `None` if there are fewer microbatches than pipelines, or no pipelines. Source: Jang et al. 2023, section
/// 4.2.2. Differs: theirs is an integer program for equal `b_i T_i`; this one is exact, by bisection on the
/// time.
#[must_use]
pub fn shares(pipelines: &[PipelineTimes], microbatches: u32) -> Option<Vec<u32>> {
    if pipelines.is_empty() || pipelines.len() > microbatches as usize {
        return None;
    }
    let most = u64::from(microbatches);
    let within = |pace: &PipelineTimes, time: u64| {
        let further =
            time.checked_sub(pace.first.0).map(|rest| rest.checked_div(pace.each.0).unwrap_or(most));
        further.map_or(0, |further| (further + 1).min(most))
    };
    let all = |time: u64| pipelines.iter().map(|pace| within(pace, time)).sum::<u64>();
    let mut low = pipelines.iter().map(|pace| pace.first.0).max()?;
    let mut high =
        pipelines.iter().map(|pace| pace.first.0.saturating_add(pace.each.0.saturating_mul(most))).max()?;
    while low < high {
        let middle = low + (high - low) / 2;
        if all(middle) >= most { high = middle } else { low = middle + 1 }
    }
    let mut shares: Vec<u64> = pipelines.iter().map(|pace| within(pace, low)).collect();
    let mut over = shares.iter().sum::<u64>().checked_sub(most)?;
    // Takes the surplus from the slowest pipelines first.
    let mut slowest: Vec<usize> = (0..pipelines.len()).collect();
    slowest.sort_by_key(|&at| std::cmp::Reverse(pipelines[at].each));
    for at in slowest {
        let less = over.min(shares[at] - 1);
        shares[at] -= less;
        over -= less;
    }
    (over == 0).then(|| shares.into_iter().map(|share| share as u32).collect())
}

/// A set of pipelines of several lengths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mix {
    /// Number of machines of each pipeline.
    pub sizes: Vec<u32>,
    /// Number of microbatches of each pipeline.
    pub microbatches: Vec<u32>,
    /// Time of a step.
    pub step: Nanos,
}

/// Number of mixes (sets of pipelines of several lengths) to simulate, after a closed form has ranked all
/// mixes.
const FINALISTS: usize = 8;

/// Returns the mix with the fastest step on at most `machines` machines, with at least `copies` pipelines.
/// Leaves out some machines if that is faster, but fewer than the shortest template has.
///
/// The time of a step is the pass of the slowest pipeline, simulated under 1F1B, plus the averages of the
/// shortest pipeline's stages. Source: Jang et al. 2023, section 4.2.
pub fn best_mix(prices: &mut StepTimes<'_>, machines: u32, copies: u32) -> Option<Mix> {
    let layers = prices.fleet().layers.len() as u32;
    let least = (1..=layers).find(|&stages| prices.division(stages).is_some())?;
    let lengths: Vec<u32> = (least..=layers.min(machines)).collect();
    let paces: BTreeMap<u32, PipelineTimes> =
        lengths.iter().filter_map(|&stages| Some((stages, pace(prices, stages)?))).collect();
    let fewest = machines.saturating_sub(least - 1);
    let templates = templates(least, layers);
    let mut all: Vec<Vec<u32>> = (fewest..=machines)
        .flat_map(|machines| mixes(&templates, machines))
        .map(|mix| sizes(&templates, &mix))
        .collect();
    for (at, &short) in lengths.iter().enumerate() {
        for &long in &lengths[at + 1..] {
            let pairs = (fewest..=machines).flat_map(|machines| mixes(&[short, long], machines));
            all.extend(pairs.map(|mix| sizes(&[short, long], &mix)));
        }
    }
    all.sort_unstable();
    all.dedup();
    let mut ranked = Vec::new();
    for sizes in all.into_iter().filter(|sizes| sizes.len() >= copies as usize) {
        let each: Option<Vec<PipelineTimes>> = sizes.iter().map(|size| paces.get(size).copied()).collect();
        let Some(each) = each else { continue };
        let Some(microbatches) = shares(&each, prices.fleet().microbatches) else { continue };
        let time = |(pace, &share): (&PipelineTimes, &u32)| {
            pace.first.0.saturating_add(pace.each.0.saturating_mul(u64::from(share) - 1))
        };
        let pass = each.iter().zip(&microbatches).map(time).max()?;
        let averages = prices.averages(*sizes.iter().min()?, sizes.len() as u32)?;
        ranked.push(Mix { sizes, microbatches, step: Nanos(pass).saturating_add(averages) });
    }
    ranked.sort_by_key(|mix| mix.step);
    ranked.truncate(FINALISTS);
    for mix in &mut ranked {
        let passes: Option<Vec<Nanos>> =
            mix.sizes.iter().zip(&mix.microbatches).map(|(&size, &share)| prices.pass(size, share)).collect();
        let averages = prices.averages(*mix.sizes.iter().min()?, mix.sizes.len() as u32)?;
        mix.step = passes?.into_iter().max()?.saturating_add(averages);
    }
    ranked.into_iter().min_by_key(|mix| mix.step)
}

/// Returns the length of each pipeline of a mix.
fn sizes(templates: &[u32], mix: &[u32]) -> Vec<u32> {
    templates.iter().zip(mix).flat_map(|(&size, &count)| vec![size; count as usize]).collect()
}

/// Returns the times of a pipeline's first and further microbatches. They come from simulated passes, because
/// links can make the period longer than the slowest stage.
fn pace(prices: &mut StepTimes<'_>, stages: u32) -> Option<PipelineTimes> {
    let first = prices.pass(stages, 1)?;
    let (fewer, more) = (prices.pass(stages, 2 * stages)?, prices.pass(stages, 4 * stages)?);
    let each = Nanos(more.saturating_sub(fewer).0 / u64::from(2 * stages));
    // Time in which the first microbatches fill the pipeline.
    let fill = fewer.saturating_sub(Nanos(each.0.saturating_mul(u64::from(2 * stages - 1))));
    Some(PipelineTimes { first: first.max(fill), each })
}

/// The policy's state: the layers that each machine holds.
#[derive(Default)]
struct Oobleck {
    held: Vec<Option<Range<usize>>>,
    step: Option<Nanos>,
}

impl Oobleck {
    /// Assigns the stages of a mix to the machines that already hold most of their layers. Returns the bytes
    /// that the machine with most missing state must copy.
    fn place(&mut self, mix: &Mix, live: &[u32], prices: &mut StepTimes<'_>) -> Bytes {
        let state = |layers: Range<usize>, prices: &StepTimes<'_>| -> u64 {
            prices.fleet().layers[layers].iter().map(|layer| layer.state.0).sum()
        };
        let common = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
        let mut free = live.to_vec();
        let nothing = vec![None; self.held.len()];
        let before = std::mem::replace(&mut self.held, nothing);
        let mut most = 0;
        for &size in &mix.sizes {
            let Some(layers) = prices.division(size).map(|division| division.layers.clone()) else {
                continue;
            };
            for stage in layers {
                let has = |machine: u32| match &before[machine as usize] {
                    Some(held) if !common(held, &stage).is_empty() => state(common(held, &stage), prices),
                    _ => 0,
                };
                let Some(at) = (0..free.len()).max_by_key(|&at| (has(free[at]), std::cmp::Reverse(at)))
                else {
                    break;
                };
                let machine = free.remove(at);
                most = most.max(state(stage.clone(), prices) - has(machine));
                self.held[machine as usize] = Some(stage);
            }
        }
        Bytes(most)
    }

    /// Returns whether each layer is held by a machine that is present.
    fn is_whole(&self, layers: usize) -> bool {
        (0..layers).all(|layer| self.held.iter().flatten().any(|held| held.contains(&layer)))
    }
}

impl Policy for Oobleck {
    fn change(&mut self, now: ChangeContext<'_>, prices: &mut StepTimes<'_>) -> Reaction {
        self.held.resize(now.there.len(), None);
        let mut is_hit = self.step.is_none();
        for &machine in now.lost {
            is_hit |= self.held[machine as usize].take().is_some();
        }
        let live = now.live();
        let machines = live.len() as u32;
        let mix = best_mix(prices, machines, FAILURES + 1).or_else(|| best_mix(prices, machines, 1));
        let Some(mix) = mix else {
            self.step = None;
            return Reaction { gone: super::policy::LostWork::Step, ..Reaction::same(None) };
        };
        let is_whole = self.is_whole(prices.fleet().layers.len());
        let before = self.held.clone();
        let missing = self.place(&mix, &live, prices);
        if !is_whole {
            self.step = Some(mix.step);
            return Reaction::restarted(self.step, now.recovery.restart);
        }
        let copying = prices.fleet().link.time(missing);
        let pause = now.recovery.regroup.saturating_add(copying);
        let is_better = |step: Nanos| now.is_worth(pause, step, mix.step, machines);
        if !is_hit && !self.step.is_some_and(is_better) {
            self.held = before;
            return Reaction::same(self.step);
        }
        self.step = Some(mix.step);
        Reaction::regrouped(self.step, pause)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fleet::tests::fleet;
    use super::*;
    use crate::seeded_rng::SeededRng;

    #[test]
    fn the_mixes_are_as_many_as_published() {
        let counts: Vec<usize> =
            (4..=13).rev().map(|machines| mixes(&[2, 3, 4, 5], machines).len()).collect();
        assert_eq!(counts, [10, 10, 7, 7, 5, 5, 3, 3, 2, 2]);
        for mix in mixes(&[2, 3, 4, 5], 13) {
            assert_eq!(mix.iter().zip([2, 3, 4, 5]).map(|(count, size)| count * size).sum::<u32>(), 13);
        }
        assert_eq!(mixes(&[], 1), Vec::<Vec<u32>>::new());
    }

    #[test]
    fn any_machines_from_two_copies_on_are_made_up() {
        for least in 1..=6 {
            let templates = templates(least, 64);
            for machines in 2 * least..40 {
                let found = mixes(&templates, machines);
                assert!(found.iter().any(|mix| mix.iter().sum::<u32>() >= 2), "{least} {machines}");
            }
        }
    }

    #[test]
    fn no_shares_are_faster() {
        let mut draw = SeededRng::new(3, 0);
        for _ in 0..300 {
            let pipelines: Vec<PipelineTimes> = (0..=draw.below(3))
                .map(|_| PipelineTimes {
                    first: Nanos(draw.below(50) as u64),
                    each: Nanos(draw.below(20) as u64),
                })
                .collect();
            let microbatches = 1 + draw.below(9) as u32;
            let time = |shares: &[u32]| -> Option<u64> {
                let each = |(pace, &share): (&PipelineTimes, &u32)| {
                    Some(pace.first.0 + pace.each.0 * u64::from(share.checked_sub(1)?))
                };
                pipelines.iter().zip(shares).map(each).collect::<Option<Vec<u64>>>()?.into_iter().max()
            };
            let n = pipelines.len() as u32;
            let mut best = None;
            for at in 0..(microbatches + 1).pow(n) {
                let split: Vec<u32> =
                    (0..n).map(|i| at / (microbatches + 1).pow(i) % (microbatches + 1)).collect();
                if split.iter().sum::<u32>() == microbatches {
                    best = [best, time(&split)].into_iter().flatten().min();
                }
            }
            let found = shares(&pipelines, microbatches);
            assert_eq!(found.as_ref().and_then(|found| time(found)), best, "{pipelines:?} {microbatches}");
            assert!(found.is_none_or(|found| found.iter().sum::<u32>() == microbatches));
        }
    }

    #[test]
    fn a_mix_takes_nearly_all_machines_and_holds_copies() {
        let fleet = fleet();
        let mut prices = StepTimes::new(&fleet).unwrap();
        for machines in 6..=16 {
            let mix = best_mix(&mut prices, machines, 2).unwrap();
            assert!((machines - 2..=machines).contains(&mix.sizes.iter().sum()));
            assert!(mix.sizes.len() >= 2 && mix.microbatches.iter().sum::<u32>() == fleet.microbatches);
        }
        assert_eq!(best_mix(&mut prices, 5, 2), None);
    }
}
