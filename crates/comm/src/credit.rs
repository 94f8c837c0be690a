//! Flow control of a link: counts the frames of each tag that are on their way, and decides when the receiver
//! sends credits for frames that were taken.

use std::collections::BTreeMap;

use crate::transport::{Channel, Tag};

/// Number of frames taken per credit sent.
const CREDIT: u32 = 8;
/// Number of tags with counts above which an old tag is removed for each new one.
const COUNTED: usize = 1024;

/// Credit: the receiver took this number of frames of a tag, so the sender may send as many more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Credit {
    pub(crate) tag: Tag,
    pub(crate) frames: u32,
}

/// Number of frames by tag. If there are too many tags, old tags are removed even if their number is not 0.
#[derive(Debug, Default)]
pub(crate) struct Counts(BTreeMap<Tag, u32>);

impl Counts {
    /// Returns the count of a tag.
    pub(crate) fn of(&self, tag: Tag) -> usize {
        self.0.get(&tag).map_or(0, |&count| count as usize)
    }

    fn add(&mut self, tag: Tag) -> &mut u32 {
        let count = self.0.entry(tag).or_insert(0);
        *count += 1;
        count
    }

    /// Makes room for `tag` if there are too many tags: removes an older tag of the same context and channel,
    /// or if there is none, any tag. Returns the removed tag and its count.
    fn forget_for(&mut self, tag: Tag) -> Option<Credit> {
        if self.0.len() <= COUNTED || self.0.contains_key(&tag) {
            return None;
        }
        let first = Tag { number: 0, ..tag };
        let old = self.0.range(first..tag).next().map(|(old, _)| *old);
        let (tag, frames) = self.0.remove_entry(&old.or_else(|| self.0.keys().next().copied())?)?;
        Some(Credit { tag, frames })
    }

    /// Counts a frame that was sent. No credit is sent for a tag that is removed to make room.
    pub(crate) fn count(&mut self, tag: Tag) {
        self.forget_for(tag);
        self.add(tag);
    }

    /// Counts a frame that was taken, and returns the credits to send now: one for every eight frames, and one
    /// for a tag of messages that is removed to make room.
    pub(crate) fn taken(&mut self, tag: Tag) -> impl Iterator<Item = Credit> + use<> {
        // Tags of collectives are never reused, so no credit is sent when such a tag is removed. The sender of
        // a message waits for credits of its tag, so they are sent before the tag is removed.
        let forgotten = self.forget_for(tag).filter(|old| old.tag.channel != Channel::Collective);
        let is_credit = *self.add(tag) >= CREDIT;
        if is_credit {
            self.sub(tag, CREDIT);
        }
        forgotten.into_iter().chain(is_credit.then_some(Credit { tag, frames: CREDIT }))
    }

    /// Subtracts `by` from the count of a tag.
    pub(crate) fn sub(&mut self, tag: Tag, by: u32) {
        if let Some(count) = self.0.get_mut(&tag) {
            *count = count.saturating_sub(by);
            if *count == 0 {
                self.0.remove(&tag);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_that_are_in_use_stay_and_what_is_forgotten_is_told() {
        let tag = |channel, number| Tag { context: 1, channel, number };
        let mut counts = Counts::default();
        counts.add(tag(Channel::User, 1));
        (0..COUNTED as u32).for_each(|number| *counts.add(tag(Channel::Collective, number)) = 2);
        // A tag that has a count already needs no room.
        assert_eq!(counts.forget_for(tag(Channel::User, 1)), None);
        assert_eq!(*counts.add(tag(Channel::User, 1)), 2);
        // The tag of a new collective takes the place of the tag of an old one.
        let next = tag(Channel::Collective, COUNTED as u32);
        assert_eq!(counts.forget_for(next), Some(Credit { tag: tag(Channel::Collective, 0), frames: 2 }));
        counts.add(next);
        // Before the tag of a message is removed, its sender gets credit for all frames taken.
        let told: Vec<Credit> = counts.taken(tag(Channel::User, 9)).collect();
        assert_eq!(told, [Credit { tag: tag(Channel::User, 1), frames: 2 }]);
        assert_eq!(counts.0.len(), COUNTED + 1);
    }

    #[test]
    fn one_credit_is_sent_for_every_eight_frames() {
        let tag = Tag { context: 1, channel: Channel::User, number: 3 };
        let mut counts = Counts::default();
        let told: Vec<usize> = (1..=20).filter(|_| counts.taken(tag).count() > 0).collect();
        assert_eq!((told, counts.of(tag)), (vec![8, 16], 4));
    }
}
