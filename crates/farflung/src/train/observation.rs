//! What is known of one rank after a step, for whoever observes a run.

use farflung_comm::{Algorithm, Counter};

use crate::{PeerCounters, StepTimes};

/// Of one rank, after a step. Counts of bytes and tokens are totals since the run's first step.
#[derive(Debug)]
pub struct Observation<'a> {
    /// The rank's times in the step, and its bytes sent.
    pub times: &'a StepTimes,
    /// Bytes received.
    pub bytes_received: u64,
    /// Tokens that all ranks trained on.
    pub tokens: u64,
    /// All ranks' tokens of the step, a second of what this rank took for it.
    pub tokens_per_s: f64,
    /// The learning rate of the step, before what single groups of parameters make of it.
    pub lr: f64,
    /// What was exchanged with each peer.
    pub peers: &'a [PeerCounters],
    /// What the operations of the communicator of all ranks have done since this process joined.
    pub operations: &'a [(&'static str, Option<Algorithm>, Counter)],
}
