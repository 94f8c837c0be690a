//! DT-FM's placement of a pipeline with data parallelism on devices whose links are uneven: its cost model, its
//! evolutionary search, and searches of our own.
//!
//! Devices are divided into as many groups of equal size as the pipeline has stages. Each group holds one stage
//! and averages its gradients; each device of a group is joined to one device of the group that holds the next
//! stage. Source: Yuan et al. 2022, "Decentralized Training of Foundation Models in Heterogeneous
//! Environments".

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

/// What a search found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Found {
    /// The best layout.
    pub layout: Layout,
    /// Other layouts that it came by, best first and without the best one: for a ranking by simulation.
    pub runners_up: Vec<Layout>,
    /// Layouts that it computed the cost of.
    pub evaluations: u64,
    /// Whether no layout costs less.
    pub is_optimal: bool,
}

/// The search that `farflung plan dtfm --layout search` runs: [`exhaustive`] where that needs no more than
/// `evaluations`, else [`local_search`].
///
/// Errors: those of the two.
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
