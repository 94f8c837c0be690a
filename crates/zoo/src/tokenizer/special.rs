//! Special tokens: those that stand for no text, such as the one that ends a document.

use std::borrow::Cow;
use std::cmp::Reverse;

use super::Tokenizer;
use crate::ZooError;

/// A token that stands for no text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    /// How it is written in a text in which special tokens are read.
    pub text: Cow<'static, str>,
    /// Its id.
    pub id: u32,
}

/// The special tokens that a tokenizer puts around each text that a model is given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Affixes {
    /// Before the text, such as LLaMA's begin token.
    pub before: Vec<u32>,
    /// After the text.
    pub after: Vec<u32>,
}

/// The texts of the tokens that begin and end a text. A text is empty if there is no such token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Marks<'a> {
    /// Of the one that begins it: `bos_token`.
    pub begin: &'a str,
    /// Of the one that ends it: `eos_token`.
    pub end: &'a str,
}

/// Encodes a text in which special tokens are written. Of two that begin at the same place, the longer one is
/// read.
pub(super) fn encode_marked<T: Tokenizer + ?Sized>(tokenizer: &T, text: &str) -> Result<Vec<u32>, ZooError> {
    let known = tokenizer.special_tokens();
    let find = |token: &SpecialToken, from: usize| text[from..].find(&*token.text).map(|at| from + at);
    let mut next: Vec<Option<usize>> = known.iter().map(|token| find(token, 0)).collect();
    let (mut ids, mut start) = (Vec::new(), 0);
    loop {
        for (at, token) in next.iter_mut().zip(known) {
            if at.is_some_and(|at| at < start) {
                *at = find(token, start);
            }
        }
        let found = next.iter().zip(known).filter_map(|(at, token)| Some(((*at)?, token)));
        let Some((at, token)) = found.min_by_key(|(at, token)| (*at, Reverse(token.text.len()))) else {
            break;
        };
        ids.extend(tokenizer.encode(&text[start..at])?);
        ids.push(token.id);
        start = at + token.text.len();
    }
    ids.extend(tokenizer.encode(&text[start..])?);
    Ok(ids)
}
