//! From text to ids, with or without the special tokens that are written in the text.

use std::collections::BTreeMap;
use std::str::Utf8Error;

use crate::{Tokenizer, ZooError};

/// Texts of special tokens of other tokenizers that data sets are known to contain.
const OF_OTHERS: [&str; 1] = ["<|endoftext|>"];

/// An encoded text.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) ids: Vec<u32>,
    /// Special tokens that were read as plain text: each with its number, and whether the tokenizer has it.
    pub(super) plain: Vec<(String, u64, bool)>,
}

/// A text cannot be encoded.
#[derive(Debug)]
pub(super) enum EncodeError {
    /// The tokenizer needs text, and the bytes are not UTF-8.
    NotText(Utf8Error),
    Tokenizer(ZooError),
}

/// Encodes a text. With `special`, special tokens of the tokenizer that are written in the text become tokens.
pub(super) fn encode(tokenizer: &dyn Tokenizer, bytes: &[u8], special: bool) -> Result<Encoded, EncodeError> {
    let known = tokenizer.special_tokens();
    let is_read = special && !known.is_empty();
    let others = OF_OTHERS.iter().filter(|other| known.iter().all(|token| token.text != **other));
    let mut words: Vec<(&str, bool)> = others.map(|text| (*text, false)).collect();
    if !is_read {
        words.extend(known.iter().map(|token| (&*token.text, true)));
    }
    let counts = count(bytes, &words);
    let plain = words.into_iter().zip(counts);
    let plain =
        plain.filter(|(_, n)| *n > 0).map(|((text, is_known), n)| (text.to_owned(), n, is_known)).collect();
    if !is_read && let Some(ids) = tokenizer.encode_bytes(bytes) {
        return Ok(Encoded { ids, plain });
    }
    let text = std::str::from_utf8(bytes).map_err(EncodeError::NotText)?;
    let ids = if is_read { tokenizer.encode_marked(text) } else { tokenizer.encode(text) };
    Ok(Encoded { ids: ids.map_err(EncodeError::Tokenizer)?, plain })
}

/// Returns how often each of several words occurs in a text.
fn count(bytes: &[u8], words: &[(&str, bool)]) -> Vec<u64> {
    let mut counts = vec![0; words.len()];
    let mut by_first: BTreeMap<u8, Vec<(&[u8], usize)>> = BTreeMap::new();
    for (index, (word, _)) in words.iter().enumerate() {
        if let Some((&first, tail)) = word.as_bytes().split_first() {
            by_first.entry(first).or_default().push((tail, index));
        }
    }
    for (first, tails) in by_first {
        let mut rest = bytes;
        while let Some(at) = rest.iter().position(|&byte| byte == first) {
            rest = &rest[at + 1..];
            for (tail, index) in &tails {
                counts[*index] += u64::from(rest.starts_with(tail));
            }
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Byte;

    #[test]
    fn special_tokens_as_plain_text_are_counted() {
        let text = b"one<|endoftext|>two<<|endoftext|><|endoftext|";
        let encoded = encode(&Byte, text, true).unwrap();
        let expected = vec![("<|endoftext|>".to_owned(), 2, false)];
        assert_eq!((encoded.ids.len(), encoded.plain), (text.len(), expected));
    }

    #[cfg(feature = "bpe")]
    #[test]
    fn they_become_tokens_where_the_user_asks() {
        use crate::tokenizer::Gpt2;

        let text = "Hello world<|endoftext|>\nHello world<|endoftext|>".as_bytes();
        let ids = encode(&Gpt2, text, true).unwrap();
        assert_eq!((ids.ids, ids.plain), (vec![15496, 995, 50256, 198, 15496, 995, 50256], vec![]));
        let plain = encode(&Gpt2, text, false).unwrap();
        assert_eq!(plain.plain, [("<|endoftext|>".to_owned(), 2, true)]);
        assert_eq!(plain.ids[2..9], [27, 91, 437, 1659, 5239, 91, 29]);
        assert!(matches!(encode(&Gpt2, b"a\xFF", false), Err(EncodeError::NotText(_))));
    }
}
