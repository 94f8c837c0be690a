//! Galvatron's planner: chooses for each layer how devices divide it and which activations it keeps, within
//! memory.

use farflung_base::{Bytes, Nanos};

use crate::ParallelError;

/// Cost of one layer under one strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StrategyCost {
    /// Time of a step.
    pub time: Nanos,
    /// Bytes held on each device.
    pub memory: Bytes,
}

/// A strategy for each layer, and the time of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct LayerStrategies {
    /// Index of each layer's strategy.
    pub strategies: Vec<usize>,
    /// Time of a step, including changes of layout between layers.
    pub time: Nanos,
}

/// Returns the fastest strategies whose memory adds up to at most `memory`. Memory is counted in units of
/// `grain` bytes, rounded up for each layer. With a grain of 1 byte the result is exact, but the table's size
/// is proportional to `memory`.
///
/// Shapes: `costs` is `[layers][strategies]`; `change(a, b)` is the time between two layers if the first has
/// strategy `a` and the next has `b`. Source: Miao et al. 2022, "Galvatron", equation 1: `C(l, E) = min_s C(l -
/// 1, E - memory(l, s)) + time(l, s) + change`. The strategy of layer `l` is part of the state, because the
/// change depends on both strategies.
///
/// Errors: [`ParallelError::Plan`] if nothing fits, there are no layers or strategies, layers have different
/// numbers of strategies, the grain is 0, or there are more than 2^26 states.
pub fn galvatron(
    costs: &[Vec<StrategyCost>],
    change: &dyn Fn(usize, usize) -> Nanos,
    memory: Bytes,
    grain: Bytes,
) -> Result<LayerStrategies, ParallelError> {
    let wrong = |field: &str, value: String, expected: &str| ParallelError::Plan {
        field: field.to_owned(),
        value,
        expected: expected.to_owned(),
    };
    let count = costs.first().map_or(0, Vec::len);
    if count == 0 || costs.iter().any(|layer| layer.len() != count) {
        return Err(wrong(
            "costs",
            format!("{} layers", costs.len()),
            "at least one layer, and the same strategies, one or more, for each layer",
        ));
    }
    if grain.0 == 0 {
        return Err(wrong("grain", grain.to_string(), "at least 1 B"));
    }
    let units = memory.0 / grain.0;
    let states = units.saturating_add(1).saturating_mul((count * costs.len()) as u64);
    if states > STATES {
        return Err(wrong(
            "grain",
            grain.to_string(),
            "a larger grain: units of memory times strategies must be at most 2^26",
        ));
    }
    let units = units as usize;
    // `least[strategy][used]`: least time of the layers so far, if the last one has this strategy and they use
    // this much memory.
    let mut least = vec![vec![None; units + 1]; count];
    let mut before: Vec<Vec<Vec<usize>>> = Vec::new();
    for (layer, strategies) in costs.iter().enumerate() {
        let mut next: Vec<Vec<Option<u64>>> = vec![vec![None; units + 1]; count];
        let mut from = vec![vec![0; units + 1]; count];
        for (strategy, cost) in strategies.iter().enumerate() {
            let needs = usize::try_from(cost.memory.0.div_ceil(grain.0)).unwrap_or(usize::MAX);
            for used in needs..=units {
                if layer == 0 {
                    next[strategy][used] = (used == needs).then_some(cost.time.0);
                    continue;
                }
                let so_far = (0..count).filter_map(|last| {
                    let time: u64 = least[last][used - needs]?;
                    Some((time.saturating_add(change(last, strategy).0), last))
                });
                if let Some((time, last)) = so_far.min() {
                    next[strategy][used] = Some(time.saturating_add(cost.time.0));
                    from[strategy][used] = last;
                }
            }
        }
        least = next;
        before.push(from);
    }
    let all = (0..count).flat_map(|strategy| (0..=units).map(move |used| (strategy, used)));
    let found = all.filter_map(|(strategy, used)| Some((least[strategy][used]?, strategy, used))).min();
    let refused = || wrong("memory", memory.to_string(), "enough for the smallest strategy of each layer");
    let (time, mut strategy, mut used) = found.ok_or_else(refused)?;
    let mut chosen = Vec::with_capacity(costs.len());
    for layer in (0..costs.len()).rev() {
        chosen.push(strategy);
        let last = before[layer][strategy][used];
        used -= costs[layer][strategy].memory.0.div_ceil(grain.0) as usize;
        strategy = last;
    }
    chosen.reverse();
    Ok(LayerStrategies { strategies: chosen, time: Nanos(time) })
}

/// Maximum number of entries of the table.
const STATES: u64 = 1 << 26;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded_rng::SeededRng;

    /// Returns the time and memory of a choice.
    fn price(
        costs: &[Vec<StrategyCost>],
        change: &dyn Fn(usize, usize) -> Nanos,
        chosen: &[usize],
    ) -> (u64, u64) {
        let layers = || chosen.iter().zip(costs).map(|(&strategy, layer)| layer[strategy]);
        let changes: u64 = chosen.windows(2).map(|pair| change(pair[0], pair[1]).0).sum();
        (layers().map(|cost| cost.time.0).sum::<u64>() + changes, layers().map(|cost| cost.memory.0).sum())
    }

    #[test]
    fn no_choice_is_faster() {
        let mut draw = SeededRng::new(7, 0);
        let mut planned = 0;
        for _ in 0..200 {
            let (layers, count) = (1 + draw.below(5), 1 + draw.below(3));
            let mut cost = || StrategyCost {
                time: Nanos(1 + draw.below(30) as u64),
                memory: Bytes(draw.below(10) as u64),
            };
            let costs: Vec<Vec<StrategyCost>> =
                (0..layers).map(|_| (0..count).map(|_| cost()).collect()).collect();
            let changes: Vec<u64> = (0..9).map(|_| draw.below(12) as u64).collect();
            let change = |a: usize, b: usize| Nanos(if a == b { 0 } else { changes[a * 3 + b] });
            let memory = Bytes(draw.below(30) as u64);
            let choices = (0..count.pow(layers as u32)).map(|number| {
                (0..layers as u32).map(|layer| number / count.pow(layer) % count).collect::<Vec<_>>()
            });
            let best =
                choices.map(|chosen| price(&costs, &change, &chosen)).filter(|(_, held)| *held <= memory.0);
            let best = best.map(|(time, _)| time).min();
            let found = galvatron(&costs, &change, memory, Bytes(1)).ok();
            assert_eq!(found.as_ref().map(|found| found.time.0), best, "{costs:?} {memory}");
            if let Some(found) = found {
                let (time, held) = price(&costs, &change, &found.strategies);
                assert!(time == found.time.0 && held <= memory.0);
                planned += 1;
                // A coarser unit may increase the time, but never exceeds the memory.
                if let Ok(coarse) = galvatron(&costs, &change, memory, Bytes(3)) {
                    let (time, held) = price(&costs, &change, &coarse.strategies);
                    assert!(time >= found.time.0 && held <= memory.0);
                }
            }
        }
        assert!((100..200).contains(&planned), "{planned}");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let cost = StrategyCost { time: Nanos(1), memory: Bytes(5) };
        let change = |_, _| Nanos(0);
        let said = |costs: &[Vec<StrategyCost>], memory, grain| {
            galvatron(costs, &change, Bytes(memory), Bytes(grain)).unwrap_err().to_string()
        };
        assert!(
            said(&[], 9, 1).contains("0 layers") && said(&[vec![cost], vec![]], 9, 1).contains("2 layers")
        );
        assert!(said(&[vec![cost]], 4, 1).contains("memory") && said(&[vec![cost]], 9, 0).contains("grain"));
        assert!(said(&[vec![cost]], u64::MAX, 1).contains("2^26"));
    }
}
