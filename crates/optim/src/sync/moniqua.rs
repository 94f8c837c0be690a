//! Moniqua: gossip in a few bits per value, without any memory.

use super::SyncMethod;
use super::gossip::{D_PSGD, Gossip, Wire};
use super::modulo::Modulo;
use super::neighbours::Graph;

/// Row of [`METHODS`](super::METHODS) for Moniqua: [`Gossip`] on a ring whose messages are parameters modulo a
/// bound.
///
/// Source: Lu and De Sa 2020, "Moniqua: Modulo Quantized Communication in Decentralized SGD", Alg. 1;
/// `--consensus-rate` is the slack parameter of its 1-bit form.
pub const MONIQUA: SyncMethod = SyncMethod {
    name: "moniqua",
    summary: "as d-psgd, with --moniqua-bits per value: parameters are sent modulo a number that follows from \
              --theta, the bound on differences between neighbours",
    reads: &["sync-every", "consensus-rate", "theta", "moniqua-bits"],
    build: |s| {
        let modulo = Modulo::new(s.theta, s.bits, s.average.seed)?;
        let rate = s.consensus_rate;
        Ok(Box::new(Gossip::with_wire(s, Graph::Ring, Wire::Modulo { modulo, rate })?))
    },
    ..D_PSGD
};
