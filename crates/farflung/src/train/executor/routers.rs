//! The routers of mixtures of experts in a rank's passes. Losses that take layers together need the choices in
//! all of them: how often each expert was chosen in the layers before goes with the hidden states, and how
//! often in all layers goes back with the gradients. What the routers chose is counted for the metrics.

use std::collections::BTreeMap;

use farflung_zoo::layer::Routed;
use farflung_zoo::spec::{BalanceOver, ExpertsSpec, RouterLosses};
use farflung_zoo::{ModelSpec, Saved, Stage};

use crate::Result;
use crate::metrics::MixtureMetrics;

/// The routers of a rank's parts.
#[derive(Debug)]
pub(in crate::train) struct Routers {
    /// Weight of each sequence in the means of the routers' losses.
    pub(in crate::train) sequence_weight: f32,
    /// Number of counts that a message has behind its values: sequences times experts, or 0.
    counts: usize,
    /// How often each expert was chosen so far, by microbatch: in the layers before, in the end in all.
    chosen: BTreeMap<u32, Vec<u32>>,
    tally: Tally,
    /// What they add to the loss, the sum over sequences, by microbatch.
    losses: BTreeMap<u32, f64>,
}

/// The sums over a pass of what the routers chose, by layer.
#[derive(Debug)]
struct Tally {
    /// The blocks that have a router, and its experts, balanced by layer.
    mixtures: Vec<(usize, ExpertsSpec)>,
    /// For each of them one number for each expert, and [`OTHERS`] more.
    sums: Vec<f64>,
}

/// What the routers of a rank chose in a pass that failed, for a trainer that continues it.
#[derive(Debug)]
pub(in crate::train) struct RouterRecord {
    chosen: BTreeMap<u32, Vec<u32>>,
    sums: Vec<f64>,
    losses: BTreeMap<u32, f64>,
}

impl RouterRecord {
    /// Leaves out a microbatch that is computed again.
    pub(in crate::train) fn forget(&mut self, microbatch: u32) {
        self.chosen.remove(&microbatch);
        self.losses.remove(&microbatch);
    }
}

/// Numbers of a router beside its choices: dropped ones, the losses times the tokens, and the tokens.
const OTHERS: usize = 4;

/// Returns the number of bytes that a message of `batch` sequences has behind its values.
pub(in crate::train) fn trailing_bytes(model: &ModelSpec, batch: usize) -> usize {
    size_of::<u32>() * trailing_counts(model, batch)
}

fn trailing_counts(model: &ModelSpec, batch: usize) -> usize {
    let experts = model.mixtures().filter(|_| model.joins_routers()).map(|(_, experts)| experts.count);
    batch * experts.max().unwrap_or(0)
}

impl Routers {
    /// Makes the routers of a rank's parts of a model, for microbatches of `batch` sequences.
    pub(in crate::train) fn new(model: &ModelSpec, batch: usize, sequence_weight: f32) -> Self {
        let counts = trailing_counts(model, batch);
        Self {
            sequence_weight,
            counts,
            chosen: BTreeMap::new(),
            tally: Tally::new(model),
            losses: BTreeMap::new(),
        }
    }

    /// Begins a pass without any choices.
    pub(super) fn begin(&mut self) {
        self.chosen.clear();
        self.tally.sums.fill(0.0);
        self.losses.clear();
    }

    /// Returns what was chosen in the pass so far, and leaves nothing.
    pub(in crate::train) fn take_record(&mut self) -> RouterRecord {
        let nothing = vec![0.0; self.tally.sums.len()];
        let sums = std::mem::replace(&mut self.tally.sums, nothing);
        let (chosen, losses) = (std::mem::take(&mut self.chosen), std::mem::take(&mut self.losses));
        RouterRecord { chosen, sums, losses }
    }

    /// Continues a pass in which this was chosen.
    pub(in crate::train) fn set_record(&mut self, record: RouterRecord) {
        (self.chosen, self.losses, self.tally.sums) = (record.chosen, record.losses, record.sums);
    }

    /// Adds what the routers of a stage chose in a microbatch's forward pass.
    pub(super) fn add(&mut self, microbatch: u32, saved: &Saved) {
        let routed = saved.routed();
        for of_layer in routed {
            self.tally.add(of_layer);
        }
        if self.counts > 0 {
            let chosen = self.chosen.entry(microbatch).or_insert_with(|| vec![0; self.counts]);
            for (sum, count) in chosen.iter_mut().zip(Routed::join(routed)) {
                *sum = sum.saturating_add(count);
            }
        }
    }

    /// Tells a backward pass of a stage how often each expert was chosen in all layers, and adds what its
    /// routers add to the loss.
    ///
    /// Errors: those of [`Stage::router_loss`].
    pub(super) fn join(&mut self, microbatch: u32, stage: &Stage, saved: &mut Saved) -> Result<()> {
        if let Some(chosen) = self.chosen.get(&microbatch) {
            saved.join_routed(chosen.clone());
        }
        *self.losses.entry(microbatch).or_default() += stage.router_loss(saved)?;
        Ok(())
    }

    /// Returns what the routers of this rank add to the loss of the pass: the sum over sequences.
    pub(in crate::train) fn loss(&self) -> f64 {
        self.losses.values().sum()
    }

    /// Adds the counts of a microbatch to a message.
    pub(super) fn append(&self, microbatch: u32, message: &mut Vec<u8>) {
        if self.counts > 0 {
            let chosen = self.chosen.get(&microbatch).cloned().unwrap_or_else(|| vec![0; self.counts]);
            message.extend(chosen.into_iter().flat_map(u32::to_le_bytes));
        }
    }

    /// Takes the counts of a microbatch off a message. Returns the rest; `None` if the message is too short.
    pub(super) fn take<'a>(&mut self, microbatch: u32, message: &'a [u8]) -> Option<&'a [u8]> {
        let at = message.len().checked_sub(size_of::<u32>() * self.counts)?;
        let (values, counts) = message.split_at(at);
        if self.counts > 0 {
            let (counts, _) = counts.as_chunks();
            self.chosen.insert(microbatch, counts.iter().map(|&count| u32::from_le_bytes(count)).collect());
        }
        Some(values)
    }

    /// Returns what the routers chose in the pass, as numbers to be summed over ranks; empty without experts.
    pub(in crate::train) fn told(&self) -> &[f64] {
        &self.tally.sums
    }

    /// Reads the sums of [`Routers::told`] over ranks.
    pub(in crate::train) fn read(mixtures: &[(usize, ExpertsSpec)], sums: &[f64]) -> Vec<MixtureMetrics> {
        let mut rest = sums;
        let mut all = Vec::new();
        for &(layer, ExpertsSpec { count, .. }) in mixtures {
            let Some((of_one, behind)) = rest.split_at_checked(count + OTHERS) else { break };
            let (counts, others) = of_one.split_at(count);
            let mean = |sum: f64| if others[3] > 0.0 { sum / others[3] } else { 0.0 };
            all.push(MixtureMetrics {
                layer: layer as u64,
                counts: counts.iter().map(|&count| count as u64).collect(),
                dropped: others[0] as u64,
                balance_loss: mean(others[1]),
                z_loss: mean(others[2]),
            });
            rest = behind;
        }
        all
    }

    /// Returns the blocks that have a router, and its experts.
    pub(in crate::train) fn mixtures(&self) -> &[(usize, ExpertsSpec)] {
        &self.tally.mixtures
    }
}

impl Tally {
    fn new(model: &ModelSpec) -> Self {
        let by_layer = |experts: &ExpertsSpec| {
            let losses = RouterLosses { over: BalanceOver::Layer, ..experts.losses };
            ExpertsSpec { losses, ..*experts }
        };
        let mixtures: Vec<_> = model.mixtures().map(|(at, experts)| (at, by_layer(experts))).collect();
        let sums = mixtures.iter().map(|(_, experts)| experts.count + OTHERS).sum();
        Self { mixtures, sums: vec![0.0; sums] }
    }

    fn add(&mut self, routed: &Routed) {
        let mut start = 0;
        for (block, spec) in &self.mixtures {
            let experts = spec.count;
            if *block != routed.block {
                start += experts + OTHERS;
                continue;
            }
            let sums = &mut self.sums[start..][..experts + OTHERS];
            for (i, &count) in routed.chosen.iter().enumerate() {
                sums[i % experts] += f64::from(count);
            }
            let (losses, tokens) = (Routed::losses(spec, std::slice::from_ref(routed)), routed.tokens as f64);
            let others = [routed.dropped as f64, losses.balance * tokens, losses.z * tokens, tokens];
            sums[experts..].iter_mut().zip(others).for_each(|(sum, value)| *sum += value);
        }
    }
}
