//! GPT-2's byte-pair encoding. The vocabulary is compiled in (crate `tiktoken-rs`).

use std::borrow::Cow;

use tiktoken_rs::{CoreBPE, r50k_base_singleton};

use super::byte_chars::{BYTES, byte_chars};
use super::{SpecialToken, Tokenizer};
use crate::ZooError;

/// GPT-2's tokenizer with 50257 tokens; the last one, 50256, is `<|endoftext|>`.
///
/// Only UTF-8 can be encoded; token lists decode to any bytes. The vocabulary is built on first use and shared.
///
/// Source: Radford et al. 2019, section 2.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gpt2;

/// Number of ids.
pub(super) const VOCAB: usize = 50257;
const END_OF_TEXT: u32 = 50256;

/// Maximum length of a run of white space that is encoded at once. The regular expression that splits words
/// keeps a stack entry per character of a run, and panics at a million.
const LONGEST_RUN: usize = 1 << 17;

fn bpe() -> &'static CoreBPE {
    r50k_base_singleton()
}

/// The words of the vocabulary as tokenizer files write them: each byte is a printable character.
pub(super) struct Words {
    /// The character of each byte.
    chars: [char; BYTES],
}

impl Words {
    pub(super) fn new() -> Self {
        Self { chars: byte_chars() }
    }

    /// Returns the word of an id; `None` if the vocabulary has no such id.
    pub(super) fn get(&self, id: u64) -> Option<String> {
        let id = u32::try_from(id).ok().filter(|&id| (id as usize) < VOCAB)?;
        let bytes = bpe().decode_bytes(&[id]).expect("all ids below the vocabulary's size have bytes");
        Some(bytes.into_iter().map(|byte| self.chars[usize::from(byte)]).collect())
    }
}

/// Returns the end of the first part of `text` that can be encoded at once: the whole text, or a point within a
/// run of white space that is too long.
fn safe_prefix(text: &str) -> usize {
    let mut run = 0;
    for (at, c) in text.char_indices() {
        run = if c.is_whitespace() { run + 1 } else { 0 };
        if run > LONGEST_RUN {
            return at;
        }
    }
    text.len()
}

impl Tokenizer for Gpt2 {
    fn name(&self) -> &'static str {
        "gpt2"
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn end_of_text(&self) -> Option<u32> {
        Some(END_OF_TEXT)
    }

    fn special_tokens(&self) -> &[SpecialToken] {
        const { &[SpecialToken { text: Cow::Borrowed("<|endoftext|>"), id: END_OF_TEXT }] }
    }

    /// Encodes as the original, except that runs of more than 131072 white-space characters are encoded in
    /// pieces.
    fn encode(&self, text: &str) -> Result<Vec<u32>, ZooError> {
        let mut tokens = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let (head, tail) = rest.split_at(safe_prefix(rest));
            tokens.extend(bpe().encode_ordinary(head));
            rest = tail;
        }
        Ok(tokens)
    }

    fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>, ZooError> {
        if let Some(position) = tokens.iter().position(|&token| token as usize >= VOCAB) {
            let token = tokens[position];
            return Err(ZooError::TokenOutOfRange { path: None, position, token, vocab: VOCAB });
        }
        Ok(bpe().decode_bytes(tokens).expect("all ids below the vocabulary's size have bytes"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn encodes_as_openai_does() {
        let vectors: [(&str, &[u32]); 9] = [
            ("", &[]),
            ("Hello world", &[15496, 995]),
            ("Hello, world!", &[15496, 11, 995, 0]),
            ("Hello, my dog is cute", &[15496, 11, 616, 3290, 318, 13779]),
            ("hello world", &[31373, 995]),
            (
                "The quick brown fox jumps over the lazy dog.",
                &[464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290, 13],
            ),
            ("\n\n", &[628]),
            ("\n", &[198]),
            ("<|endoftext|>", &[27, 91, 437, 1659, 5239, 91, 29]),
        ];
        for (text, tokens) in vectors {
            assert_eq!(Gpt2.encode(text).unwrap(), tokens, "{text:?}");
            assert_eq!(Gpt2.decode(tokens).unwrap(), text.as_bytes());
        }
        assert_eq!(Gpt2.decode(&[50256]).unwrap(), b"<|endoftext|>");
        let message = Gpt2.decode(&[0, 50257]).unwrap_err().to_string();
        assert!(message.contains("50257 at position 1"), "{message}");
    }

    #[test]
    fn every_id_has_bytes() {
        for id in 0..VOCAB as u32 {
            assert!(!Gpt2.decode(&[id]).unwrap().is_empty(), "{id}");
        }
    }

    #[test]
    fn long_runs_neither_panic_nor_take_for_ever() {
        for unit in [" ", "\n", "a", "1", "!", "\u{3000}", "é"] {
            let text = format!("{}x", unit.repeat(1_500_000));
            let tokens = Gpt2.encode(&text).unwrap();
            assert_eq!(Gpt2.decode(&tokens).unwrap(), text.as_bytes(), "{unit:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_comes_back(text in "\\PC{0,60}[ \\n\\t]{0,5}.{0,40}") {
            prop_assert_eq!(Gpt2.decode(&Gpt2.encode(&text).unwrap()).unwrap(), text.as_bytes());
        }
    }
}
