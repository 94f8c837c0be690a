//! A time that no plan of contiguous stages beats, whatever the network.

use farflung_base::{Bytes, Nanos};

use super::super::uneven::{ChainLayer, ChainMachine};

/// The least time of a step of `microbatches` over `machines`, each of which computes one contiguous part of
/// the layers for one pipeline; messages and averages are free.
///
/// Stage `s` of a pipeline of `m` microbatches cannot begin before the first has passed the stages ahead, and
/// computes `m` times: `T >= m t_s + f sum(t_k, k < s)`, `f` being forward's share of the operations, one
/// third. So with machines of rate `r` the first `S` stages compute at most `r T (1 - (1 - f/m)^S) / f`
/// operations of a microbatch. A slower machine does less than the same fraction of a fast one. With
/// `-1 / ln(1 - f/m) >= m / f - 0.5338`, over all ways to share `M` microbatches among at most `R` pipelines
/// and `N` machines (in units of the fastest):
///
/// `T >= f A / (1 - exp(-N / (M/f - 0.5338 R)))`, where `A` is the time of a microbatch on the fastest machine.
///
/// `R` is at most `M`, and the machines over the fewest whose memory together holds the state of all layers. As
/// `M` grows it becomes all operations over all rates, which it never is below.
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

/// The fewest machines whose memory together holds the state of all layers.
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
