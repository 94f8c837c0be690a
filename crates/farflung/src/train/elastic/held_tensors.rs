//! Names of the tensors that a member holds, as sent to the other members of a view.

use std::collections::BTreeSet;

use farflung_parallel::plan::Holding;
use serde::{Deserialize, Serialize};

use crate::train::run_state::{RunCounters, RunState};

/// Names of the tensors that a member holds, and the run's counters when they had these values.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct HeldTensors {
    pub(super) counted: RunCounters,
    names: BTreeSet<String>,
}

impl HeldTensors {
    pub(super) fn of(state: &RunState) -> Self {
        Self { counted: state.counted.clone(), names: state.names() }
    }

    /// Returns whether it holds tensors of all these names.
    pub(super) fn has_all<'a>(&self, mut names: impl Iterator<Item = &'a String>) -> bool {
        names.all(|name| self.names.contains(name))
    }

    pub(super) fn holding(&self, member: usize) -> Holding {
        Holding { member, step: self.counted.step, names: self.names.clone() }
    }
}
