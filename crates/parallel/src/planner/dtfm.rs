//! DT-FM's placement of a pipeline with data parallelism on devices with uneven links: its cost model, its
//! evolutionary search, and other searches that are not from the paper.
//!
//! Devices are divided into groups of equal size, one per stage of the pipeline. Each group holds one stage and
//! averages its gradients. Each device of a group is joined to one device of the group with the next stage.
//! Source: Yuan et al. 2022, "Decentralized Training of Foundation Models in Heterogeneous Environments".

mod costs;
mod evolution;
mod exhaustive;
mod grouping;
mod layout;
mod local_search;
mod simulated;

#[cfg(test)]
mod tests;

pub use costs::{PairCosts, Workload};
pub use evolution::evolution;
pub use exhaustive::{exhaustive, partitions};
pub use grouping::{contiguous, random, transposed};
pub use layout::{Layout, LayoutCost};
pub use local_search::local_search;
pub use simulated::{TrainingLoad, simulate_layout};

use crate::ParallelError;

/// Result of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Found {
    /// The layout with the lowest cost.
    pub layout: Layout,
    /// Other good layouts that the search found, best first, without the best one. They can be ranked by
    /// simulation.
    pub runners_up: Vec<Layout>,
    /// Number of layouts whose cost was computed.
    pub evaluations: u64,
    /// Whether the layout is proven to be optimal.
    pub is_optimal: bool,
}

/// Runs the search of `farflung plan dtfm --layout search`: [`exhaustive`] if that needs at most `evaluations`,
/// else [`local_search`].
///
/// Errors: those of the two searches.
pub fn search(costs: &PairCosts, evaluations: u64, seed: u64) -> Result<Found, ParallelError> {
    if partitions(costs.devices(), costs.groups()).is_some_and(|count| count <= evaluations) {
        exhaustive(costs)
    } else {
        local_search(costs, evaluations, seed)
    }
}

fn no_evaluations() -> ParallelError {
    let expected = "at least 1".to_owned();
    ParallelError::Plan { field: "evaluations".to_owned(), value: "0".to_owned(), expected }
}
