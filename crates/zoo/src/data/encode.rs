//! From text to ids, with or without the special tokens that are written in the text.

use std::str::Utf8Error;

use crate::Tokenizer;

/// Texts of special tokens of other tokenizers that data sets are known to contain.
const OF_OTHERS: [&str; 1] = ["<|endoftext|>"];

/// An encoded text.
pub(super) struct Encoded {
    pub(super) ids: Vec<u32>,
    /// Special tokens that were read as plain text: each with its number, and whether the tokenizer has it.
    pub(super) plain: Vec<(&'static str, u64, bool)>,
}

/// Encodes a text. With `special`, special tokens of the tokenizer that are written in the text become tokens.
///
/// Errors: if the tokenizer needs text and the bytes are not UTF-8.
pub(super) fn encode(tokenizer: &dyn Tokenizer, bytes: &[u8], special: bool) -> Result<Encoded, Utf8Error> {
    let known = tokenizer.special_tokens();
    let others = OF_OTHERS.iter().filter(|other| known.iter().all(|(text, _)| text != *other));
    let mut plain: Vec<_> = others.map(|text| (*text, count(bytes, text), false)).collect();
    if !special || known.is_empty() {
        plain.extend(known.iter().map(|(text, _)| (*text, count(bytes, text), true)));
        return Ok(Encoded { ids: tokenizer.encode_bytes(bytes)?, plain });
    }
    let text = std::str::from_utf8(bytes)?;
    let (mut ids, mut rest) = (Vec::new(), text);
    loop {
        let found = known.iter().filter_map(|(text, id)| Some((rest.find(text)?, text.len(), *id)));
        // Of two that begin at the same place, the longer one.
        let Some((at, len, id)) = found.min_by_key(|&(at, len, _)| (at, std::cmp::Reverse(len))) else {
            break;
        };
        ids.extend(tokenizer.encode(&rest[..at]));
        ids.push(id);
        rest = &rest[at + len..];
    }
    ids.extend(tokenizer.encode(rest));
    Ok(Encoded { ids, plain })
}

/// Returns how often a word occurs in a text.
fn count(bytes: &[u8], word: &str) -> u64 {
    let word = word.as_bytes();
    let Some((&first, tail)) = word.split_first() else { return 0 };
    let (mut count, mut rest) = (0, bytes);
    while let Some(at) = rest.iter().position(|&byte| byte == first) {
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(tail) {
            count += 1;
            rest = after;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Byte;

    #[test]
    fn special_tokens_as_plain_text_are_counted() {
        let text = b"one<|endoftext|>two<<|endoftext|><|endoftext|";
        let encoded = encode(&Byte, text, true).unwrap();
        assert_eq!((encoded.ids.len(), encoded.plain), (text.len(), vec![("<|endoftext|>", 2, false)]));
    }

    #[cfg(feature = "bpe")]
    #[test]
    fn they_become_tokens_where_the_user_asks() {
        use crate::tokenizer::Gpt2;

        let text = "Hello world<|endoftext|>\nHello world<|endoftext|>".as_bytes();
        let ids = encode(&Gpt2, text, true).unwrap();
        assert_eq!((ids.ids, ids.plain), (vec![15496, 995, 50256, 198, 15496, 995, 50256], vec![]));
        let plain = encode(&Gpt2, text, false).unwrap();
        assert_eq!(plain.plain, [("<|endoftext|>", 2, true)]);
        assert_eq!(plain.ids[2..9], [27, 91, 437, 1659, 5239, 91, 29]);
    }
}
