//! Varuna's morphing: after the loss of a machine in use, restarts from the newest checkpoint with the best
//! numbers of pipelines and stages for the machines that are present. After any other change of the machines,
//! it takes the best numbers if this saves more time than the pause costs.

use super::best_shape::best_shape;
use super::policy::{CheckpointInterval, PolicyRow};
use super::restart::Restart;

/// This policy's entry in the table [`POLICIES`](super::POLICIES).
pub(super) const ROW: PolicyRow = PolicyRow {
    name: "varuna",
    summary: "restarts from the newest checkpoint, with the best numbers of pipelines and stages for the \
              machines that are left",
    saves: CheckpointInterval::Daly,
    begin: || Box::new(Restart::new(|prices, machines, _| best_shape(prices, machines, 1))),
};
