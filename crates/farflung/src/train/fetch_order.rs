//! When the units of a part's weights are fetched and dropped in a pass (`--zero 3`): as data, which a run
//! carries out and a prediction prices.

use std::ops::Range;

use farflung_zoo::layer::LayerUnits;

/// What a rank does before a layer runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fetch {
    /// Drops a unit.
    Drop(Range<usize>),
    /// Starts to fetch a unit, from all holders.
    Start(Range<usize>),
    /// Waits for a unit.
    Wait(Range<usize>),
}

/// The units that a rank has or fetches. While a layer runs, the units of the next one are on their way; those
/// of the last layer of a pass stay, since the next pass may begin with them.
#[derive(Debug, Default)]
pub(super) struct FetchOrder {
    /// Whether the units of a layer are fetched while the one before it computes.
    ahead: bool,
    layers: Vec<LayerUnits>,
    /// Number of the layer that was asked for last; `None` before the first.
    at: Option<usize>,
    held: Vec<Range<usize>>,
    coming: Vec<Range<usize>>,
}

impl FetchOrder {
    pub(super) fn new(ahead: bool) -> Self {
        Self { ahead, ..Self::default() }
    }

    /// Begins a pass over layers that read these units.
    pub(super) fn begin(&mut self, layers: Vec<LayerUnits>) {
        (self.layers, self.at) = (layers, None);
    }

    /// Returns the number of elements of the layers of the pass, without what some of them share.
    pub(super) fn elements(&self) -> u64 {
        self.layers.iter().map(own_elements).sum()
    }

    /// Returns what to do before a layer of these units runs, and whether it is the next one of the pass: a
    /// recomputation can ask for one again.
    pub(super) fn next(&mut self, units: &LayerUnits) -> (Vec<Fetch>, bool) {
        let from = self.at.unwrap_or(0);
        let found = (from..self.layers.len()).find(|&at| self.layers[at] == *units);
        let moves = found.is_some() && found != self.at;
        self.at = found.or(self.at);
        let then = found.and_then(|at| self.layers.get(at + 1)).cloned().unwrap_or_default();
        let starts = if self.ahead { &then[..] } else { &[] };
        let mut steps = Vec::new();
        self.held.retain(|unit| {
            let stays = units.contains(unit) || then.contains(unit);
            if !stays {
                steps.push(Fetch::Drop(unit.clone()));
            }
            stays
        });
        for unit in units.iter().filter(|unit| !self.held.contains(unit)) {
            if !self.coming.contains(unit) {
                steps.push(Fetch::Start(unit.clone()));
            }
        }
        for unit in units {
            if !self.held.contains(unit) {
                steps.push(Fetch::Wait(unit.clone()));
                self.coming.retain(|coming| coming != unit);
                self.held.push(unit.clone());
            }
        }
        for unit in starts {
            if !self.held.contains(unit) && !self.coming.contains(unit) {
                steps.push(Fetch::Start(unit.clone()));
                self.coming.push(unit.clone());
            }
        }
        (steps, moves)
    }
}

/// Returns the number of elements of a layer's own unit, the first of those that it reads.
pub(super) fn own_elements(layer: &LayerUnits) -> u64 {
    layer.first().map_or(0, |own| own.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each unit is there when its layer runs, the next one is on its way, and all others are dropped.
    #[test]
    fn the_next_unit_is_on_its_way_and_the_last_ones_stay() {
        let (table, block, other, norm) = (0..8, 8..10, 10..12, 12..13);
        let layer = |units: &[&Range<usize>]| units.iter().map(|&unit| unit.clone()).collect::<LayerUnits>();
        let [first, second, third] = [layer(&[&table]), layer(&[&block]), layer(&[&other])];
        let last = layer(&[&norm, &table]);
        let mut order = FetchOrder::new(true);
        order.begin(vec![first.clone(), second.clone(), third.clone(), last.clone()]);
        assert_eq!(order.elements(), 13);
        let (start, wait, drop) = (Fetch::Start, Fetch::Wait, Fetch::Drop);
        let begun = vec![start(table.clone()), wait(table.clone()), start(block.clone())];
        assert_eq!(order.next(&first), (begun, true));
        let then = vec![drop(table.clone()), wait(block.clone()), start(other.clone())];
        assert_eq!(order.next(&second), (then, true));
        let then = vec![drop(block.clone()), wait(other.clone()), start(norm.clone()), start(table.clone())];
        assert_eq!(order.next(&third), (then, true));
        let end = vec![drop(other.clone()), wait(norm.clone()), wait(table.clone())];
        assert_eq!(order.next(&last), (end, true));

        // The backward pass begins with what the forward pass has left; a recomputation asks twice.
        order.begin(vec![last.clone(), third.clone(), second.clone()]);
        assert_eq!(order.next(&last), (vec![start(other.clone())], true));
        let then = vec![drop(norm), drop(table), wait(other.clone()), start(block.clone())];
        assert_eq!(order.next(&third), (then, true));
        assert_eq!(order.next(&third), (Vec::new(), false));
        assert_eq!(order.next(&second), (vec![drop(other), wait(block.clone())], true));
        // One that the pass does not name comes and goes.
        let back = vec![drop(block), start(0..8), wait(0..8)];
        assert_eq!(order.next(&first), (back, false));
        // Without overlap, a layer waits for what it needs.
        let mut order = FetchOrder::new(false);
        order.begin(vec![second.clone(), third.clone()]);
        assert_eq!(order.next(&second), (vec![start(8..10), wait(8..10)], true));
        assert_eq!(order.next(&third), (vec![drop(8..10), start(10..12), wait(10..12)], true));
    }
}
