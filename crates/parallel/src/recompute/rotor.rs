//! Rotor: the optimal recompute plan for a chain of unequal layers within a byte budget.

use farflung_base::{Bytes, ChainStep, Nanos};

use super::RecomputePlan;
use crate::ParallelError;

/// Time and sizes of one layer of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layer {
    /// Time of the layer's forward.
    pub forward: Nanos,
    /// Time of the layer's backward.
    pub backward: Nanos,
    /// Bytes of the layer's output for the next layer.
    pub output: Bytes,
    /// Bytes that the layer's backward needs besides the layer's input; includes its output.
    pub saved: Bytes,
}

/// How layers `i..=j` begin in the best plan for some amount of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// The layers do not fit.
    Impossible,
    /// Layer i keeps all its activations; the other layers follow.
    All,
    /// The layers from i to the one before the given layer run and keep nothing. The input of the given layer
    /// is kept.
    KeepInput(u32),
}

/// Returns the fastest plan for `layers` whose kept bytes never exceed `budget`. The chain's input of `input`
/// bytes counts as kept.
///
/// Sizes are rounded up to multiples of `budget / units`: more units give a finer result and a slower search
/// (layers³ · units). In each forward, a layer keeps either all its activations or none. The inputs of some
/// layers are kept, so that the forward can run again from there.
///
/// Errors: [`ParallelError::Budget`] if no plan fits; [`ParallelError::Zero`] without layers, units or budget;
/// [`ParallelError::TooMany`] for a table of more than 2^26 cells. Source: Beaumont et al. 2019, "Optimal
/// checkpointing for heterogeneous chains", theorem 1. Differs: temporary memory of a running layer is not
/// counted.
///
/// ```
/// use farflung_base::{Bytes, Nanos};
/// use farflung_parallel::recompute::{Layer, rotor};
///
/// let layer = Layer { forward: Nanos(1), backward: Nanos(2), output: Bytes(1), saved: Bytes(4) };
/// let all = rotor(&[layer; 8], Bytes(1), Bytes(40), 40)?;
/// assert_eq!(all.time, Nanos(24));
/// let tight = rotor(&[layer; 8], Bytes(1), Bytes(12), 12)?;
/// assert!(tight.time > all.time);
/// assert!(rotor(&[layer; 8], Bytes(1), Bytes(4), 4).is_err());
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
pub fn rotor(
    layers: &[Layer],
    input: Bytes,
    budget: Bytes,
    units: u32,
) -> Result<RecomputePlan, ParallelError> {
    for (field, value) in [("layers", layers.len() as u64), ("units", u64::from(units)), ("budget", budget.0)]
    {
        if value == 0 {
            return Err(ParallelError::Zero { of: "the chain".to_owned(), field });
        }
    }
    let cells = (layers.len() as u128).pow(2) * u128::from(units);
    if cells > 1 << 26 {
        let what = "cells of the table of recomputation";
        return Err(ParallelError::TooMany { what, found: cells, limit: 1 << 26 });
    }
    let in_units = |bytes: Bytes| {
        let units = (u128::from(bytes.0) * u128::from(units)).div_ceil(u128::from(budget.0));
        usize::try_from(units).unwrap_or(usize::MAX)
    };
    let table = Table::fill(layers, &in_units, units as usize);
    let last = layers.len() - 1;
    let free = (units as usize).checked_sub(in_units(input));
    let plan = free.and_then(|free| {
        let time = table.time(0, last, free)?;
        let mut steps = vec![ChainStep::Keep(0)];
        table.steps(0, last, free, &mut steps);
        Some(RecomputePlan { steps, time })
    });
    plan.ok_or(ParallelError::Budget { layers: layers.len(), budget })
}

struct Table {
    n: usize,
    units: usize,
    /// The least time and the first choice, by first layer, last layer, and memory that is left for them. The
    /// time is [`Nanos::MAX`] if they do not fit.
    cells: Vec<(Nanos, Choice)>,
    output: Vec<usize>,
    saved: Vec<usize>,
}

impl Table {
    fn fill(layers: &[Layer], in_units: &dyn Fn(Bytes) -> usize, units: usize) -> Self {
        let n = layers.len();
        let mut table = Self {
            n,
            units,
            cells: vec![(Nanos::MAX, Choice::Impossible); n * n * (units + 1)],
            output: layers.iter().map(|l| in_units(l.output)).collect(),
            saved: layers.iter().map(|l| in_units(l.saved)).collect(),
        };
        for length in 1..=n {
            for from in 0..=n - length {
                for memory in 0..=units {
                    let best = table.best(layers, from, from + length - 1, memory);
                    let at = table.at(from, from + length - 1, memory);
                    table.cells[at] = best;
                }
            }
        }
        table
    }

    const fn at(&self, from: usize, to: usize, memory: usize) -> usize {
        (from * self.n + to) * (self.units + 1) + memory
    }

    fn time(&self, from: usize, to: usize, memory: usize) -> Option<Nanos> {
        let (time, choice) = self.cells[self.at(from, to, memory)];
        (choice != Choice::Impossible).then_some(time)
    }

    fn best(&self, layers: &[Layer], from: usize, to: usize, memory: usize) -> (Nanos, Choice) {
        let layer = layers[from];
        let mut best = (Nanos::MAX, Choice::Impossible);
        if let Some(rest) = memory.checked_sub(self.saved[from]) {
            let behind = if from == to { Some(Nanos::ZERO) } else { self.time(from + 1, to, rest) };
            if let Some(behind) = behind {
                best = (layer.forward + layer.backward + behind, Choice::All);
            }
        }
        let mut forwards = Nanos::ZERO;
        for next in from + 1..=to {
            forwards += layers[next - 1].forward;
            let Some(rest) = memory.checked_sub(self.output[next - 1]) else { continue };
            let (behind, before) = (self.time(next, to, rest), self.time(from, next - 1, memory));
            if let (Some(behind), Some(before)) = (behind, before) {
                let time = forwards + behind + before;
                if time < best.0 {
                    best = (time, Choice::KeepInput(next as u32));
                }
            }
        }
        best
    }

    /// Appends the steps of layers `from..=to`. The input of layer `from` is kept and is the current value.
    fn steps(&self, from: usize, to: usize, memory: usize, steps: &mut Vec<ChainStep>) {
        let first = from as u32;
        match self.cells[self.at(from, to, memory)].1 {
            Choice::Impossible => {}
            Choice::All => {
                steps.push(ChainStep::ForwardAll(first));
                if from < to {
                    // The next layer's input is part of what this layer keeps.
                    self.steps(from + 1, to, memory - self.saved[from], steps);
                }
                steps.push(ChainStep::Backward(first));
            }
            Choice::KeepInput(next) => {
                steps.extend((first..next).map(ChainStep::Forward));
                steps.push(ChainStep::Keep(next));
                let next = next as usize;
                self.steps(next, to, memory - self.output[next - 1], steps);
                steps.extend([ChainStep::Drop(next as u32), ChainStep::Restore(first)]);
                self.steps(from, next - 1, memory, steps);
            }
        }
    }
}
