//! Revolve: equal layers and a number of slots for inputs, with the fewest forwards.

use farflung_base::Nanos;

use super::{RecomputePlan, Step};

/// `C(n, k)`, or the most that fits.
fn choose(n: u64, k: u64) -> u64 {
    let k = k.min(n - k);
    (1..=k).fold(1_u64, |c, i| {
        let wide = u128::from(c) * u128::from(n - k + i) / u128::from(i);
        u64::try_from(wide).unwrap_or(u64::MAX)
    })
}

/// The fewest forwards, besides those that a backward needs right before it, for `layers` equal layers with `slots`
/// inputs kept at once, the chain's own among them.
///
/// With r the least number for which C(slots + r, r) layers are enough, it is r·layers - C(slots + r, r - 1).
///
/// Source: Griewank and Walther 2000, "Algorithm 799: revolve", proposition 1. `None` without a slot.
#[must_use]
pub fn revolve_forwards(layers: u64, slots: u64) -> Option<u64> {
    if slots == 0 {
        return None;
    }
    if layers <= 1 {
        return Some(0);
    }
    if slots == 1 {
        return Some(layers.saturating_mul(layers - 1) / 2);
    }
    let repeats = (1..=layers).find(|&r| choose(slots + r, r) >= layers)?;
    Some(repeats * layers - choose(slots + repeats, repeats - 1))
}

/// The steps of [`revolve_forwards`]. `None` without a slot.
///
/// `forward` and `backward` are one layer's times; a layer's backward includes the forward that it needs.
#[must_use]
pub fn revolve(layers: u32, slots: u32, forward: Nanos, backward: Nanos) -> Option<RecomputePlan> {
    revolve_forwards(u64::from(layers), u64::from(slots))?;
    let mut steps = Vec::new();
    if layers > 0 {
        steps.push(Step::Keep(0));
        reverse(0, layers, slots, &mut steps);
    }
    let count = |of: fn(&Step) -> bool| steps.iter().filter(|s| of(s)).count() as u64;
    let forwards = count(|s| matches!(s, Step::Forward(_) | Step::ForwardAll(_)));
    let backwards = count(|s| matches!(s, Step::Backward(_)));
    Some(RecomputePlan { time: forward * forwards + backward * backwards, steps })
}

/// Reverses layers `from..to`, whose first input is kept and at hand, with `slots` slots, that one included.
fn reverse(from: u32, to: u32, slots: u32, steps: &mut Vec<Step>) {
    if slots == 1 || to - from == 1 {
        for layer in (from..to).rev() {
            if layer + 1 < to {
                steps.push(Step::Restore(from));
            }
            steps.extend((from..layer).map(Step::Forward));
            steps.extend([Step::ForwardAll(layer), Step::Backward(layer)]);
        }
        steps.push(Step::Drop(from));
        return;
    }
    let cost = |layers: u32, slots: u32| revolve_forwards(u64::from(layers), u64::from(slots));
    let middle = (1..to - from)
        .min_by_key(|&i| {
            let behind = cost(to - from - i, slots - 1).unwrap_or(u64::MAX);
            let before = cost(i, slots).unwrap_or(u64::MAX);
            u64::from(i).saturating_add(behind).saturating_add(before)
        })
        .expect("two layers have one between them");
    let middle = from + middle;
    steps.extend((from..middle).map(Step::Forward));
    steps.push(Step::Keep(middle));
    reverse(middle, to, slots - 1, steps);
    steps.push(Step::Restore(from));
    reverse(from, middle, slots, steps);
}
