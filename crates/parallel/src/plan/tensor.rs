//! The ranks that divide the width of layers: the tensor axis of a plan's mesh.

use farflung_base::{Axis, Rank};

use super::Plan;

impl Plan {
    /// Returns the number of ranks that divide the width of each layer; 1 if each layer is on one rank.
    #[must_use]
    pub fn tensor_ranks(&self) -> u32 {
        self.mesh.along(Axis::Tensor)
    }

    /// Returns the weights of the ranks along the tensor axis.
    #[must_use]
    pub fn shares_of_width(&self) -> Vec<u32> {
        match &self.tensor_weights[..] {
            [] => vec![1; self.tensor_ranks() as usize],
            weights => weights.to_vec(),
        }
    }

    /// Returns the weights of the ranks along the tensor axis, as checkpoints have them: none if each layer is
    /// on one rank.
    #[must_use]
    pub fn recorded_width(&self) -> Vec<u32> {
        if self.tensor_ranks() == 1 { Vec::new() } else { self.shares_of_width() }
    }

    /// Returns the ranks of a replica: those of its pipelines, one for each rank along the tensor axis.
    ///
    /// # Panics
    /// If the plan has no such replica.
    #[must_use]
    pub fn ranks_of(&self, replica: u32) -> Vec<Rank> {
        self.pipeline_of(replica).into_iter().flat_map(|rank| self.group(rank, Axis::Tensor)).collect()
    }
}
