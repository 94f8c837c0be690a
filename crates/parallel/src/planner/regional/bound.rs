//! A lower bound on the time of any plan of contiguous stages, for any network.

use farflung_base::{Bytes, Nanos};

use super::super::uneven::{ChainLayer, ChainMachine};
use super::RegionalChain;

/// Returns a lower bound on the time of a step of the chain's microbatches on its machines. Each machine
/// computes one contiguous part of the layers for one pipeline. Messages and averages take no time.
///
/// Stage `s` of a pipeline of `m` microbatches cannot begin before the first microbatch has passed the previous
/// stages, and then computes `m` times: `T >= m t_s + f sum(t_k, k < s)`, where `f` is the least share of the
/// forward in a layer's operations: one third, or less with recomputation. So with machines of rate `r`, the
/// first `S` stages compute at most `r T (1 - (1 - f/m)^S) / f` operations of a microbatch. A slower machine
/// computes at most the same fraction of what a fast one does. With `-1 / ln(1 - f/m) >= m / f - g`, where
/// `g = 1 / f + 1 / ln(1 - f)` (0.5338 for one third), over all ways to divide `M` microbatches among at most
/// `R` pipelines and `N` machines (in units of the fastest):
///
/// `T >= f A / (1 - exp(-N / (M/f - g R)))`, where `A` is the time of a microbatch on the fastest machine.
///
/// `R` is at most `M`, and at most the number of machines divided by the fewest machines whose memory together
/// holds the state of all layers. As `M` grows, the bound approaches all operations divided by the sum of all
/// rates; it is never less than that.
#[must_use]
pub fn lower_bound(chain: &RegionalChain) -> Nanos {
    let RegionalChain { layers, machines, microbatches, .. } = chain;
    let (share, microbatches) = (least_share(chain), *microbatches);
    let fastest = machines.iter().map(|machine| machine.flops).max().unwrap_or(1).max(1) as f64;
    let rates: f64 = machines.iter().map(|machine| machine.flops as f64).sum();
    let operations: f64 = layers.iter().map(|layer| layer.operations as f64).sum();
    let pipelines = (machines.len() as f64 / fewest(layers, machines) as f64).floor().max(1.0);
    let pipelines = pipelines.min(f64::from(microbatches));
    // Without forwards, no stage waits for another one.
    let seconds = if share > 0.0 {
        let exponent = (rates / fastest) / (f64::from(microbatches) / share - most_gap(share) * pipelines);
        share * operations / fastest / (1.0 - (-exponent).exp())
    } else {
        0.0
    };
    let at_full_rate = operations * f64::from(microbatches) / rates.max(1.0);
    Nanos((seconds.max(at_full_rate) * 1e9) as u64)
}

/// Returns the least share of the forward in the operations of a layer; 0 if no layer has operations.
fn least_share(chain: &RegionalChain) -> f64 {
    let layers = chain.layers.iter().zip(&chain.forward).filter(|(layer, _)| layer.operations > 0);
    let shares = layers.map(|(layer, &forward)| forward as f64 / layer.operations as f64);
    shares.min_by(f64::total_cmp).unwrap_or(0.0)
}

/// Returns an upper bound of `m / f + 1 / ln(1 - f/m)` for a share `f` of the forward and any `m`. It is
/// largest at `m` = 1, and it grows with `f`, from one half to one.
fn most_gap(share: f64) -> f64 {
    const OF_A_THIRD: f64 = 0.5338;
    if share <= 1.0 / 3.0 { OF_A_THIRD } else { 1.0 / share + 1.0 / (1.0 - share).ln() }
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
