//! Names of the tensors that a member holds, as sent to the other members of a view.

use std::collections::BTreeSet;

use farflung_parallel::plan::Holding;
use serde::{Deserialize, Serialize};

use crate::train::trainer::{Counted, Pieces};

/// Names of the tensors that a member holds, and the run's counters when they had these values.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Held {
    pub(super) counted: Counted,
    names: BTreeSet<String>,
}

impl Held {
    pub(super) fn of(pieces: &Pieces) -> Self {
        Self { counted: pieces.counted.clone(), names: pieces.names() }
    }

    pub(super) fn holding(&self, member: usize) -> Holding {
        Holding { member, step: self.counted.step, names: self.names.clone() }
    }
}
