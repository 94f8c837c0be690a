//! A lower bound on the time of any plan of contiguous stages, for any network.

use farflung_base::{Bytes, Nanos};

use super::super::uneven::{ChainLayer, ChainMachine};

/// Returns a lower bound on the time of a step of `microbatches` over `machines`. Each machine computes one
/// contiguous part of the layers for one pipeline. Messages and averages take no time.
///
/// Stage `s` of a pipeline of `m` microbatches cannot begin before the first microbatch has passed the previous
/// stages, and then computes `m` times: `T >= m t_s + f sum(t_k, k < s)`, where `f` is the forward's share of
/// the operations, one third. So with machines of rate `r`, the first `S` stages compute at most
/// `r T (1 - (1 - f/m)^S) / f` operations of a microbatch. A slower machine computes at most the same fraction
/// of what a fast one does. With `-1 / ln(1 - f/m) >= m / f - 0.5338`, over all ways to divide `M` microbatches
/// among at most `R` pipelines and `N` machines (in units of the fastest):
///
/// `T >= f A / (1 - exp(-N / (M/f - 0.5338 R)))`, where `A` is the time of a microbatch on the fastest machine.
///
/// `R` is at most `M`, and at most the number of machines divided by the fewest machines whose memory together
/// holds the state of all layers. As `M` grows, the bound approaches all operations divided by the sum of all
/// rates; it is never less than that.
#[must_use]
pub fn lower_bound(layers: &[ChainLayer], machines: &[ChainMachine], microbatches: u32) -> Nanos {
    const FORWARD: f64 = 1.0 / 3.0;
    const MOST_GAP: f64 = 0.5338;
    let fastest = machines.iter().map(|machine| machine.flops).max().unwrap_or(1).max(1) as f64;
    let rates: f64 = machines.iter().map(|machine| machine.flops as f64).sum();
    let operations: f64 = layers.iter().map(|layer| layer.operations as f64).sum();
    let pipelines = (machines.len() as f64 / fewest(layers, machines) as f64).floor().max(1.0);
    let pipelines = pipelines.min(f64::from(microbatches));
    let exponent = (rates / fastest) / (f64::from(microbatches) / FORWARD - MOST_GAP * pipelines);
    let seconds = FORWARD * operations / fastest / (1.0 - (-exponent).exp());
    let at_full_rate = operations * f64::from(microbatches) / rates.max(1.0);
    Nanos((seconds.max(at_full_rate) * 1e9) as u64)
}

/// Returns the smallest number of machines whose memory together holds the state of all layers.
fn fewest(layers: &[ChainLayer], machines: &[ChainMachine]) -> usize {
    let state: u64 = layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.state.0));
    let mut memory: Vec<u64> = machines.iter().map(|m| m.memory.map_or(u64::MAX, |Bytes(has)| has)).collect();
    memory.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum = 0_u64;
    let enough = memory.iter().position(|&has| {
        sum = sum.saturating_add(has);
        sum >= state
    });
    enough.map_or(machines.len(), |at| at + 1).max(1)
}
