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
    summary: "as d-psgd, in --moniqua-bits a value: parameters modulo a bound, --theta, on how far neighbours \
              are apart",
    reads: &["sync-every", "consensus-rate", "theta", "moniqua-bits"],
    build: |s| {
        let modulo = Modulo::new(s.theta, s.bits, s.average.seed)?;
        let rate = s.consensus_rate;
        Ok(Box::new(Gossip::with_wire(s, Graph::Ring, Wire::Modulo { modulo, rate })?))
    },
    ..D_PSGD
};
