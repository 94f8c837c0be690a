//! Conversion between text and token ids.

mod byte;
mod files;
#[cfg(feature = "bpe")]
mod gpt2;

use std::fmt::Debug;
use std::str::Utf8Error;
use std::sync::Arc;

pub use byte::Byte;
pub use files::TokenizerFiles;
#[cfg(feature = "bpe")]
pub use gpt2::Gpt2;

use crate::ZooError;

/// All tokenizer names that [`by_name`] accepts.
pub const NAMES: &[&str] = if cfg!(feature = "bpe") { &["byte", "gpt2"] } else { &["byte"] };

/// A fixed mapping between text and ids in `0..vocab_size`.
pub trait Tokenizer: Debug + Send + Sync {
    /// Returns the name, as accepted by [`by_name`].
    fn name(&self) -> &'static str;

    /// Returns the number of ids.
    fn vocab_size(&self) -> usize;

    /// Returns the id that ends a document, if the vocabulary has one.
    fn end_of_text(&self) -> Option<u32> {
        None
    }

    /// Returns the texts and ids of tokens that stand for no text, such as the one that ends a document.
    fn special_tokens(&self) -> &'static [(&'static str, u32)] {
        &[]
    }

    /// Encodes a text. Special tokens in the text are encoded as plain text.
    fn encode(&self, text: &str) -> Vec<u32>;

    /// Encodes bytes, which need not be text.
    ///
    /// Errors: if the tokenizer needs text and the bytes are not UTF-8.
    fn encode_bytes(&self, bytes: &[u8]) -> Result<Vec<u32>, Utf8Error> {
        std::str::from_utf8(bytes).map(|text| self.encode(text))
    }

    /// Decodes ids to bytes. These may end within a character, so the result is not a `String`.
    ///
    /// Errors: [`ZooError::TokenOutOfRange`] with the position of the first id that is not in the vocabulary.
    fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>, ZooError>;
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
