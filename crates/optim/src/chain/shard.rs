//! Which chains can update a part of a layout while other ranks update the rest.

use std::ops::Range;

use farflung_tensor::ParamLayout;

use super::{ChainBuilder, Link};
use crate::{OptimError, Shard};

impl ChainBuilder {
    /// Checks whether the links can update a part of a layout alone.
    pub(super) fn check_shard(&self, layout: &ParamLayout, shard: &Shard) -> Result<(), OptimError> {
        if shard.is_whole(layout.len()) {
            return Ok(());
        }
        self.check_parts(layout, shard.ranges(), "shard")
    }

    /// Checks whether the links can update a layout in parts, of which each has its own states.
    pub(super) fn check_parts(
        &self,
        layout: &ParamLayout,
        parts: &[Range<usize>],
        field: &'static str,
    ) -> Result<(), OptimError> {
        let refuse = |link: &Link, value: usize, expected| {
            let transform = link.transform.name();
            Err(OptimError::Setting { transform, field, value: value as f64, expected })
        };
        let inside = |at: &usize| layout.params().iter().any(|p| p.start < *at && *at < p.range().end);
        for link in &self.links {
            let transform = &link.transform;
            // After any warm-up.
            let more = transform.contribution(u64::MAX).is_some() || transform.accumulates().is_some();
            if more {
                let len = parts.first().map_or(0, ExactSizeIterator::len);
                return refuse(link, len, "the whole layout, because more than gradients is averaged");
            }
            let borders: Vec<usize> = parts.iter().flat_map(|part| [part.start, part.end]).collect();
            let cut = borders.iter().find(|at| inside(at)).filter(|_| transform.per_tensor().is_some());
            if let Some(&at) = cut {
                return refuse(link, at, "a border between tensors, because it works on whole tensors");
            }
        }
        Ok(())
    }
}
