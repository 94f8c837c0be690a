//! The text of ids that come one by one.

use super::Tokenizer;
use crate::ZooError;

/// Number of ids before the new ones whose text is decoded again: what some tokenizers write for an id depends
/// on its neighbours.
const WINDOW: usize = 8;
/// What decoders write for bytes that are no character, or not yet one.
const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();
/// Most ids that are held back until their bytes are a character, which has at most four.
const MOST_HELD: usize = 8;

/// Decodes ids that come one by one. The texts that it returns, one after the other, are the text of all.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a dyn Tokenizer,
    /// The last ids.
    ids: Vec<u32>,
    /// Number of those whose text was returned.
    returned: usize,
}

impl<'a> TextStream<'a> {
    /// Begins a text.
    #[must_use]
    pub const fn new(tokenizer: &'a dyn Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), returned: 0 }
    }

    /// Continues a text of these ids, which is not returned. Some tokenizers write a space before an id only if
    /// others are before it.
    #[must_use]
    pub fn after(tokenizer: &'a dyn Tokenizer, before: &[u32]) -> Self {
        let is_text = |id: &u32| tokenizer.special_tokens().iter().all(|token| token.id != *id);
        let last = &before[before.len().saturating_sub(WINDOW)..];
        let ids: Vec<u32> = last.iter().copied().filter(is_text).collect();
        Self { tokenizer, returned: ids.len(), ids }
    }

    /// Returns the text that an id adds. It is empty while the id is a part of a character, whose text follows
    /// with the rest of it.
    ///
    /// Errors: as [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<Vec<u8>, ZooError> {
        self.ids.push(id);
        let all = self.tokenizer.decode(&self.ids)?;
        if !all.ends_with(REPLACEMENT) {
            let before = self.tokenizer.decode(&self.ids[..self.returned])?;
            let new = all[common(&before, &all)..].to_vec();
            self.forget()?;
            return Ok(new);
        }
        if self.ids.len() - self.returned < MOST_HELD { Ok(Vec::new()) } else { self.finish() }
    }

    /// Returns the text of ids that were held back.
    ///
    /// Errors: as [`Tokenizer::decode`].
    pub fn finish(&mut self) -> Result<Vec<u8>, ZooError> {
        // What they are no character with may have been one by itself, so they are decoded alone.
        let text = self.tokenizer.decode(&self.ids[self.returned..])?;
        self.ids.clear();
        self.returned = 0;
        Ok(text)
    }

    /// Forgets ids whose text was returned, but the last ones, from the beginning of a character on.
    fn forget(&mut self) -> Result<(), ZooError> {
        let least = self.ids.len().saturating_sub(WINDOW);
        for from in (least.saturating_sub(3)..=least).rev() {
            if from == 0 || !self.tokenizer.decode(&self.ids[from..])?.starts_with(REPLACEMENT) {
                self.ids.drain(..from);
                break;
            }
        }
        self.returned = self.ids.len();
        Ok(())
    }
}

/// Returns the length of the common beginning.
fn common(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Byte;

    #[test]
    fn the_parts_are_the_whole() {
        let text = "naïve ▁ 字 🦀 done".repeat(3);
        let ids = Byte.encode(&text).unwrap();
        let mut stream = TextStream::new(&Byte);
        let mut all: Vec<u8> = ids.iter().flat_map(|&id| stream.push(id).unwrap()).collect();
        all.extend(stream.finish().unwrap());
        assert_eq!(all, text.as_bytes());
        assert!(TextStream::new(&Byte).push(256).is_err());
    }
}
