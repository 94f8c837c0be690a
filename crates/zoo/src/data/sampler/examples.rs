//! Samplers of rows of examples, for training and for validation.

use std::sync::Arc;

use super::{Epochs, Offsets, Sampler, Shard, Source};
use crate::ZooError;
use crate::data::examples::ExampleRows;

impl Sampler {
    /// Creates a sampler of rows of examples in shuffled epochs: each epoch has all rows once, in a new order,
    /// which depends on the seed alone. With `lanes` above 1, each lane has its own `floor(rows / lanes)` rows,
    /// and the last `rows mod lanes` rows are not used, as in [`Sampler::epochs`].
    ///
    /// Errors: [`ZooError::Sampler`], also if there are fewer rows than lanes.
    pub fn examples(rows: Arc<ExampleRows>, seed: u64, shard: Shard, lanes: u64) -> Result<Self, ZooError> {
        let Some(epochs) = Epochs::new(seed, lanes, rows.count() as u64) else {
            let value = usize::try_from(lanes).unwrap_or(usize::MAX);
            let expected = format!("at most {}, the number of rows of examples", rows.count());
            return Err(ZooError::Sampler { field: "sequences of a step", value, expected });
        };
        Self::checked(rows.split().clone(), shard, rows.length(), Source::Examples(rows, epochs))
    }

    /// Returns the number of the row of examples of a sequence; `None` if it has no targets.
    pub(super) fn row_of_examples(&self, sequence: u64) -> Option<usize> {
        match &self.source {
            Source::Examples(_, epochs) => usize::try_from(epochs.window(sequence)).ok(),
            Source::SomeExamples(_, offsets) => offsets.at(sequence),
            _ => None,
        }
    }

    /// Creates a sampler for validation of at most `windows` rows of examples, spread evenly over all of them,
    /// always the same, as [`Sampler::evaluation`] has windows.
    ///
    /// Errors: [`ZooError::Sampler`].
    pub fn evaluation_of_examples(
        rows: Arc<ExampleRows>,
        shard: Shard,
        windows: usize,
    ) -> Result<Self, ZooError> {
        shard.validate()?;
        let (windows, last) = (windows.min(rows.count()), rows.count() as u128 - 1);
        let spread = |i: usize| (i as u128 * last / (windows as u128 - 1).max(1)) as i64;
        let offsets = Offsets { columns: shard.global_batch(), values: (0..windows).map(spread).collect() };
        Self::checked(rows.split().clone(), shard, rows.length(), Source::SomeExamples(rows, offsets))
    }
}
