//! Parcae's policy: chooses the shape with the highest liveput, the expected throughput after predicted losses
//! of machines.

use farflung_base::Nanos;

use super::policy::{ChangeContext, CheckpointInterval, Policy, PolicyRow, Reaction};
use super::{Shape, StepTimes};
use crate::mesh::whole_pipelines;

/// This policy's entry in the table [`POLICIES`](super::POLICIES).
pub(super) const ROW: PolicyRow = PolicyRow {
    name: "parcae",
    summary: "the numbers of pipelines and stages with the highest expected throughput under the losses to \
              come, with spare machines",
    saves: CheckpointInterval::Hourly,
    begin: || Box::new(Parcae::default()),
};

/// Time between two decisions.
const INTERVAL: Nanos = Nanos(60_000_000_000);

/// Number of intervals that a decision looks ahead.
const AHEAD: u32 = 12;

/// Returns the probability of each number of complete pipelines, indexed by that number, after `lost` of
/// `machines` machines fail. Every machine is equally likely to fail.
///
/// The shape uses some of the machines; the others are spares. A machine of one pipeline may take the place of
/// the same stage in another pipeline (their intra-stage migration), so the stage with the fewest machines left
/// decides.
///
/// Exact: the machines lost in each stage are independent draws, under the condition that `lost` are lost in
/// all. Source: Duan et al. 2024, "Parcae", section 5.
///
/// ```
/// use farflung_parallel::churn::{Shape, survivors};
///
/// // Of four machines in two pipelines of two stages one is lost: one pipeline is left.
/// let left = survivors(Shape { stages: 2, pipelines: 2 }, 4, 1);
/// assert!((left[1] - 1.0).abs() < 1e-12);
/// ```
#[must_use]
pub fn survivors(shape: Shape, machines: u32, lost: u32) -> Vec<f64> {
    let (used, pipelines) = (shape.machines().min(machines), shape.pipelines as usize);
    let lost = lost.min(machines);
    if lost == 0 {
        return (0..=pipelines).map(|left| if left == pipelines { 1.0 } else { 0.0 }).collect();
    }
    if lost == machines {
        return (0..=pipelines).map(|left| if left == 0 { 1.0 } else { 0.0 }).collect();
    }
    let chance = f64::from(lost) / f64::from(machines);
    let stage = binomial(shape.pipelines, chance);
    let spare = binomial(machines - used, chance);
    let all = binomial(machines, chance)[lost as usize];
    // Probability that each stage loses at most `most`, given that `lost` are lost in all.
    let at_most = |most: usize| {
        let mut sum = vec![1.0];
        for _ in 0..shape.stages {
            sum = convolved(&sum, &stage[..=most], lost as usize);
        }
        convolved(&sum, &spare, lost as usize).get(lost as usize).copied().unwrap_or(0.0) / all
    };
    let below: Vec<f64> = (0..=pipelines).map(at_most).collect();
    let exactly = |most: usize| below[most] - if most > 0 { below[most - 1] } else { 0.0 };
    (0..=pipelines).map(|left| exactly(pipelines - left).max(0.0)).collect()
}

/// Returns the probabilities of 0 to `n` successes.
fn binomial(n: u32, chance: f64) -> Vec<f64> {
    let mut chances = vec![1.0];
    for _ in 0..n {
        chances = convolved(&chances, &[1.0 - chance, chance], n as usize);
    }
    chances
}

/// Returns the distribution of the sum of two counts, up to `most`.
fn convolved(a: &[f64], b: &[f64], most: usize) -> Vec<f64> {
    let mut sum = vec![0.0; (a.len() + b.len() - 1).min(most + 1)];
    for (i, x) in a.iter().enumerate() {
        for (to, y) in sum.iter_mut().skip(i).zip(b) {
            *to += x * y;
        }
    }
    sum
}

/// Returns the expected steps per second of a shape after `lost` of `machines` machines fail.
pub fn liveput(prices: &mut StepTimes<'_>, shape: Shape, machines: u32, lost: u32) -> f64 {
    let chances = survivors(shape, machines, lost);
    let mut rate = 0.0;
    for (pipelines, chance) in (0..).zip(chances) {
        if let Some(step) = prices.step(Shape { pipelines, ..shape }) {
            rate += chance / step.as_secs_f64().max(1e-12);
        }
    }
    rate
}

/// The policy's state: the stage that each machine holds, and the losses seen so far.
#[derive(Default)]
struct Parcae {
    shape: Option<Shape>,
    /// Stage of each machine.
    stage: Vec<Option<u32>>,
    /// Time of each loss so far.
    losses: Vec<Nanos>,
}

impl Parcae {
    /// Returns the shape that does the most work over the intervals ahead, minus the pause for changing to it.
    fn best(&self, now: ChangeContext<'_>, prices: &mut StepTimes<'_>, machines: u32) -> Option<Shape> {
        let seen = Nanos(INTERVAL.0 * u64::from(AHEAD));
        let recent = self.losses.iter().filter(|&&at| at.saturating_add(seen) > now.at).count() as u32;
        let lost = recent.div_ceil(AHEAD).max(1);
        let ahead = seen.as_secs_f64();
        let mut best: Option<(f64, Shape)> = None;
        let layers = prices.fleet().layers.len() as u32;
        for stages in 1..=machines.min(layers) {
            let most = whole_pipelines(machines, stages).min(prices.fleet().microbatches);
            // Also tries one pipeline fewer, because spare machines can be worth more.
            for pipelines in most.saturating_sub(1).max(1)..=most {
                let shape = Shape { stages, pipelines };
                if prices.division(stages).is_none() {
                    continue;
                }
                let pause = if self.shape == Some(shape) { 0.0 } else { self.migration(now, prices, shape) };
                let work = liveput(prices, shape, machines, lost) * (ahead - pause).max(0.0);
                if best.is_none_or(|(most, _)| work > most) {
                    best = Some((work, shape));
                }
            }
        }
        best.filter(|(work, _)| *work > 0.0).map(|(_, shape)| shape)
    }

    /// Returns the seconds that a change to a shape takes: machines regroup, and copy a stage if the number of
    /// stages changes or that of pipelines grows.
    fn migration(&self, now: ChangeContext<'_>, prices: &mut StepTimes<'_>, shape: Shape) -> f64 {
        let is_same = self
            .shape
            .is_some_and(|before| before.stages == shape.stages && before.pipelines >= shape.pipelines);
        let state = if is_same { None } else { prices.state(shape.stages) };
        let copying = state.map_or(0.0, |state| prices.fleet().link.time(state).as_secs_f64());
        now.recovery.regroup.as_secs_f64() + copying
    }

    /// Assigns the stages of a shape to machines. If the number of stages is the same, machines keep their
    /// stage.
    fn place(&mut self, shape: Option<Shape>, live: &[u32]) {
        let is_same = |before: Option<Shape>| before.map(|s| s.stages) == shape.map(|s| s.stages);
        let nothing = vec![None; self.stage.len()];
        let before = std::mem::replace(&mut self.stage, nothing);
        let keeps = is_same(self.shape);
        self.shape = shape;
        let Some(shape) = shape else { return };
        let mut needs = vec![shape.pipelines; shape.stages as usize];
        let mut free = Vec::new();
        for &machine in live {
            match before[machine as usize] {
                Some(stage) if keeps && needs[stage as usize] > 0 => {
                    needs[stage as usize] -= 1;
                    self.stage[machine as usize] = Some(stage);
                }
                _ => free.push(machine),
            }
        }
        let mut free = free.into_iter();
        for (stage, &needs) in (0..).zip(&needs) {
            for machine in free.by_ref().take(needs as usize) {
                self.stage[machine as usize] = Some(stage);
            }
        }
    }

    /// Returns the number of machines of the stage that has fewest.
    fn fewest(&self) -> u32 {
        let Some(shape) = self.shape else { return 0 };
        let of = |stage: u32| self.stage.iter().filter(|held| **held == Some(stage)).count() as u32;
        (0..shape.stages).map(of).min().unwrap_or(0)
    }
}

impl Policy for Parcae {
    fn change(&mut self, now: ChangeContext<'_>, prices: &mut StepTimes<'_>) -> Reaction {
        self.stage.resize(now.there.len(), None);
        let mut is_hit = self.shape.is_none();
        for &machine in now.lost {
            is_hit |= self.stage[machine as usize].take().is_some();
            self.losses.push(now.at);
        }
        let live = now.live();
        let wake = Some(now.at.saturating_add(INTERVAL));
        let left = self.fewest();
        let (was_running, before) = (self.shape.is_some(), self.shape);
        let best = self.best(now, prices, live.len() as u32);
        if left == 0 {
            self.place(best, &live);
            let step = best.and_then(|shape| prices.step(shape));
            let restarted = Reaction::restarted(step, now.recovery.restart);
            return Reaction {
                wake,
                ..if was_running || best.is_some() { restarted } else { Reaction::same(None) }
            };
        }
        if !is_hit && best == before {
            let step = before.and_then(|shape| prices.step(shape));
            return Reaction { wake, ..Reaction::same(step) };
        }
        // Machines of the same stage replace each other without a copy. Any other change copies a stage.
        let is_moved =
            best.zip(before).is_none_or(|(to, from)| to.stages != from.stages || to.pipelines > left);
        let state = best.filter(|_| is_moved).and_then(|shape| prices.state(shape.stages));
        let copying = state.map_or(Nanos::ZERO, |state| prices.fleet().link.time(state));
        self.place(best, &live);
        let step = best.and_then(|shape| prices.step(shape));
        Reaction { wake, ..Reaction::regrouped(step, now.recovery.regroup.saturating_add(copying)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fleet::tests::fleet;
    use super::*;

    #[test]
    fn the_chances_are_those_of_counting_all_losses() {
        for (stages, pipelines, machines) in [(2, 2, 4), (2, 3, 8), (3, 2, 7), (1, 4, 5), (4, 1, 4)] {
            for lost in 0..=machines {
                let (mut counts, mut all) = (vec![0_u32; pipelines as usize + 1], 0_u32);
                for set in 0_u32..1 << machines {
                    if set.count_ones() == lost {
                        let alive = |stage: u32| {
                            (0..pipelines).filter(|row| set & (1 << (row * stages + stage)) == 0).count()
                        };
                        counts[(0..stages).map(alive).min().unwrap()] += 1;
                        all += 1;
                    }
                }
                let found = survivors(Shape { stages, pipelines }, machines, lost);
                for (left, count) in counts.iter().enumerate() {
                    let expected = f64::from(*count) / f64::from(all);
                    assert!((found[left] - expected).abs() < 1e-12, "{stages} {pipelines} {machines} {lost}");
                }
            }
        }
    }

    #[test]
    fn liveput_without_losses_is_throughput_and_falls_with_them() {
        let fleet = fleet();
        let mut prices = StepTimes::new(&fleet).unwrap();
        let shape = Shape { stages: 4, pipelines: 3 };
        let rate = 1.0 / prices.step(shape).unwrap().as_secs_f64();
        assert!((liveput(&mut prices, shape, 12, 0) / rate - 1.0).abs() < 1e-12);
        let mut before = rate;
        for lost in 1..=12 {
            let now = liveput(&mut prices, shape, 12, lost);
            // A pipeline needs four machines.
            assert!(if lost <= 8 { now < before } else { now < 1e-12 }, "{lost}");
            before = now;
        }
        // Spares are outside the shape. Losing a spare costs nothing.
        assert!(liveput(&mut prices, shape, 24, 1) > liveput(&mut prices, shape, 12, 1));
    }
}
