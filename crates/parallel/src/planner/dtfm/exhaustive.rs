//! Exhaustive search over every division of a few devices into groups.

use super::layout::Layout;
use super::{Found, PairCosts};
use crate::ParallelError;

/// Maximum number of devices for [`exhaustive`].
const DEVICES: usize = 16;

/// Returns the number of ways to divide `devices` into `groups` of equal size. `None` if it does not fit in 64
/// bits.
#[must_use]
pub fn partitions(devices: usize, groups: usize) -> Option<u64> {
    let size = devices.checked_div(groups)?;
    let mut ways: u64 = 1;
    // The remaining device with the lowest number gets a group. The other devices of this group are selected
    // from those that remain.
    for left in (1..=groups).map(|k| k * size) {
        ways = ways.checked_mul(binomial(left as u64 - 1, size as u64 - 1)?)?;
    }
    Some(ways)
}

fn binomial(n: u64, k: u64) -> Option<u64> {
    (0..k).try_fold(1_u64, |value, i| Some(value.checked_mul(n - i)? / (i + 1)))
}

/// Computes the cost of every division and returns the best one.
///
/// Errors: [`ParallelError::Plan`] for more than 16 devices.
pub fn exhaustive(costs: &PairCosts) -> Result<Found, ParallelError> {
    if costs.devices() > DEVICES {
        return Err(ParallelError::Plan {
            field: "devices".to_owned(),
            value: costs.devices().to_string(),
            expected: format!("at most {DEVICES} for an exhaustive search"),
        });
    }
    let mut search = Search { costs, groups: vec![Vec::new(); costs.groups()], evaluations: 0, best: None };
    search.place(0);
    let Search { evaluations, best, .. } = search;
    let layout = best.expect("there is a division");
    Ok(Found { layout, runners_up: Vec::new(), evaluations, is_optimal: true })
}

struct Search<'a> {
    costs: &'a PairCosts,
    groups: Vec<Vec<usize>>,
    evaluations: u64,
    best: Option<Layout>,
}

impl Search<'_> {
    /// Adds a device to each group with room. Empty groups are equivalent, so only the first one is tried.
    fn place(&mut self, device: usize) {
        if device == self.costs.devices() {
            let layout = Layout::of(self.groups.clone(), self.costs);
            self.evaluations += 1;
            if self.best.as_ref().is_none_or(|best| layout.cost.total() < best.cost.total()) {
                self.best = Some(layout);
            }
            return;
        }
        for group in 0..self.groups.len() {
            let is_empty = self.groups[group].is_empty();
            if self.groups[group].len() < self.costs.size() {
                self.groups[group].push(device);
                self.place(device + 1);
                self.groups[group].pop();
            }
            if is_empty {
                return;
            }
        }
    }
}
