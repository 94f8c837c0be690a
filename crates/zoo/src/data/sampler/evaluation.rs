//! Samplers for validation: of all windows, or of those that a router sends to one path.

use super::{Offsets, Sampler, Shard, Source};
use crate::ZooError;
use crate::data::router::TextRouter;
use crate::data::tokens::Split;

impl Sampler {
    /// Creates a sampler for validation: `windows` windows spread evenly over the split, always the same,
    /// whatever the shard is. Window `i` begins at `floor(i * (len - context - 1) / (windows - 1))`; a single
    /// window begins at 0. They are divided into as few batches as the shard allows; what is missing in the
    /// last one has no targets. Of a split that is rows, each row is a window.
    ///
    /// Errors: those of [`Sampler::random`].
    pub fn evaluation(split: Split, shard: Shard, context: usize, windows: usize) -> Result<Self, ZooError> {
        shard.validate()?;
        let columns = shard.global_batch();
        if let Some(rows) = split.rows() {
            let lanes = rows.count().next_multiple_of(columns) as u64;
            return Self::rows(split, shard, context, lanes);
        }
        let empty = Source::Recorded(Offsets { columns, values: Vec::new() });
        let mut sampler = Self::new(split, shard, context, empty)?;
        // No window is taken twice.
        let windows = windows.min(sampler.last_offset() + 1);
        let last = sampler.last_offset() as u128;
        let spread = |i: usize| (i as u128 * last / (windows as u128 - 1).max(1)) as i64;
        sampler.source = Source::Recorded(Offsets { columns, values: (0..windows).map(spread).collect() });
        Ok(sampler)
    }

    /// Creates a sampler like [`Sampler::evaluation`], but only of the windows that a router sends to one path,
    /// in the same order. The first [`TextRouter::prefix`] tokens of a window decide, or all `context` of them
    /// if there are no more. All paths together have each window of [`Sampler::evaluation`] once.
    ///
    /// The ranks of `shard` are those that share the path. A path may have no windows; there are 0 steps then.
    /// Sequences after the last window have no targets, and no step is an error. So paths with different
    /// numbers of windows can take the same number of steps.
    ///
    /// Errors: those of [`Sampler::evaluation`]; [`ZooError::Sampler`] if the router has no such path;
    /// [`ZooError::Rows`] if the split is rows, which are not routed.
    pub fn evaluation_routed(
        split: Split,
        shard: Shard,
        context: usize,
        windows: usize,
        router: &TextRouter,
        path: usize,
    ) -> Result<Self, ZooError> {
        if let Some(rows) = split.rows() {
            let problem = "rows of tokens cannot be routed to paths, expected a text".to_owned();
            return Err(ZooError::Rows { path: rows.path().to_owned(), problem });
        }
        if path >= router.paths() {
            let expected = format!("below {}, the number of paths", router.paths());
            return Err(ZooError::Sampler { field: "path", value: path, expected });
        }
        let mut sampler = Self::evaluation(split, shard, context, windows)?;
        let Source::Recorded(mut offsets) = sampler.source else { return Ok(sampler) };
        let (mut tokens, deciding) = (Vec::new(), router.prefix().min(context));
        offsets.values.retain(|&offset| {
            tokens.clear();
            sampler.split.append_to(offset as usize, deciding, &mut tokens);
            router.path(&tokens) == path
        });
        sampler.source = Source::Routed(offsets);
        Ok(sampler)
    }
}
