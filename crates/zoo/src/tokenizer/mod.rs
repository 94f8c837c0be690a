//! Conversion between text and token ids.

mod byte;
#[cfg(any(feature = "bpe", feature = "tokenizers"))]
mod byte_chars;
#[cfg(feature = "tokenizers")]
mod file;
mod files;
#[cfg(feature = "bpe")]
mod gpt2;
mod special;
mod stream;

use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;

pub use byte::Byte;
#[cfg(feature = "tokenizers")]
pub use file::{FileTokenizer, TrainOptions};
pub use files::TokenizerFiles;
#[cfg(feature = "bpe")]
pub use gpt2::Gpt2;
pub use special::{Affixes, Marks, SpecialToken};
pub use stream::TextStream;

use crate::ZooError;

/// All tokenizer names that [`by_name`] accepts.
pub const NAMES: &[&str] = if cfg!(feature = "bpe") { &["byte", "gpt2"] } else { &["byte"] };

/// A fixed mapping between text and ids in `0..vocab_size`.
pub trait Tokenizer: Debug + Send + Sync {
    /// Returns the name: one that [`by_name`] accepts, or one that tells a tokenizer of a file from others.
    fn name(&self) -> &str;

    /// Returns one more than the largest id.
    fn vocab_size(&self) -> usize;

    /// Returns the id that ends a document, if the vocabulary has one.
    fn end_of_text(&self) -> Option<u32> {
        None
    }

    /// Returns the ids after which a model says no more: [`Tokenizer::end_of_text`], and others that the
    /// model's files name, such as the end of a message.
    fn ends(&self) -> Vec<u32> {
        self.end_of_text().into_iter().collect()
    }

    /// Returns the tokens that stand for no text, such as the one that ends a document.
    fn special_tokens(&self) -> &[SpecialToken] {
        &[]
    }

    /// Returns the number of ids at the end of the vocabulary that were added to it, such as GPT-J's
    /// `<|extratoken_1|>`: a text has them only where they are written out.
    fn spare_ids(&self) -> usize {
        0
    }

    /// Returns the special tokens that belong around a text which a model is given, such as LLaMA's begin
    /// token.
    fn affixes(&self) -> Affixes {
        Affixes::default()
    }

    /// Encodes a text. Special tokens in the text are encoded as plain text, and none is added.
    ///
    /// Errors: [`ZooError::Tokenizer`] for a text that the tokenizer cannot encode.
    fn encode(&self, text: &str) -> Result<Vec<u32>, ZooError>;

    /// Encodes a text that a model is to continue: as [`Tokenizer::encode`], after the special tokens that
    /// belong before it.
    ///
    /// Errors: as [`Tokenizer::encode`].
    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, ZooError> {
        let mut ids = self.affixes().before;
        ids.extend(self.encode(text)?);
        Ok(ids)
    }

    /// Encodes a text. Special tokens that are written in it become tokens, and none is added.
    ///
    /// Errors: as [`Tokenizer::encode`].
    fn encode_marked(&self, text: &str) -> Result<Vec<u32>, ZooError> {
        special::encode_marked(self, text)
    }

    /// Encodes bytes, which need not be text; `None` if the tokenizer needs text.
    fn encode_bytes(&self, _bytes: &[u8]) -> Option<Vec<u32>> {
        None
    }

    /// Returns the number of bytes of a text that encoding leaves out, because the vocabulary has no token for
    /// them: of some real ones, control characters.
    fn lost_bytes(&self, _text: &[u8]) -> u64 {
        0
    }

    /// Decodes ids to bytes. These may end within a character, so the result is not a `String`. Special tokens
    /// are written out.
    ///
    /// Errors: [`ZooError::TokenOutOfRange`] with the position of the first id that is not in the vocabulary.
    fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>, ZooError>;

    /// Returns the Jinja template of conversations that belongs to the tokenizer.
    fn chat_template(&self) -> Option<&str> {
        None
    }

    /// Returns the texts of the begin and end tokens, which templates of conversations use.
    fn marks(&self) -> Marks<'_> {
        Marks::default()
    }

    /// Returns the files that describe the tokenizer, by their names in a model's folder. There are none for
    /// one that has a name.
    fn files(&self) -> Vec<(&'static str, Cow<'_, [u8]>)> {
        Vec::new()
    }
}

/// Returns the tokenizer with this name.
///
/// Errors: [`ZooError::UnknownTokenizer`], whose message lists the names.
pub fn by_name(name: &str) -> Result<Arc<dyn Tokenizer>, ZooError> {
    match name {
        "byte" => Ok(Arc::new(Byte)),
        #[cfg(feature = "bpe")]
        "gpt2" => Ok(Arc::new(Gpt2)),
        _ => Err(ZooError::UnknownTokenizer { name: name.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_and_others_are_told_the_names() {
        for name in NAMES {
            assert_eq!(by_name(name).unwrap().name(), *name);
        }
        let message = by_name("char").unwrap_err().to_string();
        assert!(NAMES.iter().all(|name| message.contains(name)), "{message}");
    }
}
