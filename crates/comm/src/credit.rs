//! How many frames of each tag are on their way, and for how many taken ones the sender is told so.

use std::collections::BTreeMap;

use crate::transport::Tag;

/// Frames taken for which one credit is sent.
pub(crate) const CREDIT: u32 = 8;
/// Tags for which frames are counted.
const COUNTED: usize = 1024;

/// Frames per tag. Old tags that were never counted down to nothing are forgotten.
#[derive(Debug, Default)]
pub(crate) struct Counts(BTreeMap<Tag, u32>);

impl Counts {
    /// How many of a tag.
    pub(crate) fn of(&self, tag: Tag) -> usize {
        self.0.get(&tag).map_or(0, |&count| count as usize)
    }

    /// Counts one more.
    pub(crate) fn add(&mut self, tag: Tag) -> &mut u32 {
        if self.0.len() > COUNTED {
            let first = Tag { number: 0, ..tag };
            let old = self.0.range(first..tag).next().map(|(old, _)| *old);
            old.or_else(|| self.0.keys().next().copied()).and_then(|old| self.0.remove(&old));
        }
        let count = self.0.entry(tag).or_insert(0);
        *count += 1;
        count
    }

    /// Counts so many less.
    pub(crate) fn sub(&mut self, tag: Tag, by: u32) {
        if let Some(count) = self.0.get_mut(&tag) {
            *count = count.saturating_sub(by);
            if *count == 0 {
                self.0.remove(&tag);
            }
        }
    }
}
