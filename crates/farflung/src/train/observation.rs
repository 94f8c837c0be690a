//! Values of one rank after a step, for observers of a run.

use farflung_comm::{Algorithm, Counter};

use crate::{PeerCounters, StepTimes};

/// Values of one rank after a step. Counts of bytes and tokens are totals since the run's first step.
#[derive(Debug)]
pub struct Observation<'a> {
    /// The rank's times in the step, and its bytes sent.
    pub times: &'a StepTimes,
    /// Bytes received by the rank.
    pub bytes_received: u64,
    /// Number of tokens on which all ranks together trained.
    pub tokens: u64,
    /// Tokens of all ranks in the step, per second of this rank's time for it.
    pub tokens_per_s: f64,
    /// The learning rate of the step, before factors of parameter groups.
    pub lr: f64,
    /// Counters of the exchange with each peer.
    pub peers: &'a [PeerCounters],
    /// Counters of the operations of the communicator of all ranks, since this process joined.
    pub operations: &'a [(&'static str, Option<Algorithm>, Counter)],
}
