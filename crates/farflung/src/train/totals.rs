//! Resources that a run has used.

use serde::{Deserialize, Serialize};

/// Resources used by a run up to a step, summed over its resumes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Totals {
    pub(super) time_s: f64,
    pub(super) wall_s: f64,
    pub(super) bytes_sent: u64,
    pub(super) bytes_received: u64,
}
