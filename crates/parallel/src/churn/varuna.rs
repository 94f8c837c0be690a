//! Varuna's morphing: after each loss, chooses the best number of pipelines and stages for the remaining
//! machines.

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
