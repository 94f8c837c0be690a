//! `.bin` files of ids: those of nanoGPT and Megatron-LM (only little-endian ids) and of llm.c (a header of 256
//! `i32`, then the ids).
//!
//! If the first word of a file is one of llm.c's magic numbers, the file is in llm.c's format. There is no
//! ambiguity: read as tokens, the magic numbers are not ids of GPT-2. Other files do not say how long an id is:
//! it is what a file beside it says ([`super::sidecar`]), or what the user says, or two bytes.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use super::SourceError;
use super::decode::no_text;
use crate::file_kind::{FileKind, START};
use crate::{Tokenizer, ZooError};

/// llm.c for GPT-2: version 1, `u16` tokens.
const MAGIC_U16: u32 = 20_240_520;
/// llm.c for Llama 3: version 7, `u32` tokens.
const MAGIC_U32: u32 = 20_240_801;
const HEADER_BYTES: usize = 1024;

/// The type of ids in a file, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// One byte.
    U8,
    /// Two bytes, as nanoGPT writes them.
    U16,
    /// Four bytes.
    U32,
    /// Four bytes with a sign.
    I32,
    /// Eight bytes with a sign, NumPy's default.
    I64,
}

const NAMES: [(&str, TokenType); 5] = [
    ("u8", TokenType::U8),
    ("u16", TokenType::U16),
    ("u32", TokenType::U32),
    ("i32", TokenType::I32),
    ("i64", TokenType::I64),
];

/// Error: no type of ids has this name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected u8, u16, u32, i32 or i64")]
pub struct NoTokenType;

impl FromStr for TokenType {
    type Err = NoTokenType;

    fn from_str(name: &str) -> Result<Self, NoTokenType> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind).ok_or(NoTokenType)
    }
}

impl fmt::Display for TokenType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, kind)| kind == self).map_or("", |(name, _)| *name);
        f.write_str(name)
    }
}

impl TokenType {
    /// Returns the number of bytes of an id.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Returns what must be zero for a file of whole ids.
    const fn remainder(self) -> &'static str {
        match self {
            Self::U8 => "remainder of the length in bytes divided by 1",
            Self::U16 => "remainder of the length in bytes divided by 2",
            Self::U32 | Self::I32 => "remainder of the length in bytes divided by 4",
            Self::I64 => "remainder of the length in bytes divided by 8",
        }
    }
}

/// The ids of a file.
#[derive(Debug, Clone, Copy)]
pub(in crate::data) struct Ids<'a> {
    body: &'a [u8],
    kind: TokenType,
    /// Whether the file, a file beside it or the user says what the type is.
    is_said: bool,
}

impl<'a> Ids<'a> {
    /// Finds the ids in a file's bytes. `said` is the type that a file beside it says, or the user.
    ///
    /// Errors: [`ZooError::TokenFile`] if the version or the length is wrong, or the header contradicts `said`.
    pub(in crate::data) fn of(
        path: &Path,
        bytes: &'a [u8],
        said: Option<TokenType>,
    ) -> Result<Self, ZooError> {
        let Some(magic @ (MAGIC_U16 | MAGIC_U32)) = word(bytes, 0) else {
            let kind = said.unwrap_or(TokenType::U16);
            let rest = bytes.len() % kind.bytes();
            expect(path, kind.remainder(), rest as u64, 0)?;
            return Ok(Self { body: bytes, kind, is_said: said.is_some() });
        };
        let (version, kind) = match magic {
            MAGIC_U16 => (1, TokenType::U16),
            _ => (7, TokenType::U32),
        };
        if bytes.len() < HEADER_BYTES {
            expect(path, "length in bytes", bytes.len() as u64, HEADER_BYTES as u64)?;
        }
        expect(path, "version", u64::from(word(bytes, 1).unwrap_or(0)), version)?;
        let claimed = HEADER_BYTES as u64 + u64::from(word(bytes, 2).unwrap_or(0)) * kind.bytes() as u64;
        expect(path, "length in bytes", bytes.len() as u64, claimed)?;
        let given = said.unwrap_or(kind).bytes() as u64;
        expect(path, "length of an id in bytes", given, kind.bytes() as u64)?;
        Ok(Self { body: &bytes[HEADER_BYTES..], kind, is_said: true })
    }

    /// Returns the ids. One that is negative or has more than four bytes becomes the largest.
    pub(in crate::data) fn iter(self) -> Box<dyn Iterator<Item = u32> + 'a> {
        let body = self.body;
        match self.kind {
            TokenType::U8 => Box::new(body.iter().map(|&byte| u32::from(byte))),
            TokenType::U16 => {
                Box::new(body.as_chunks().0.iter().map(|&two| u32::from(u16::from_le_bytes(two))))
            }
            TokenType::U32 => Box::new(body.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four))),
            TokenType::I32 => Box::new(
                body.as_chunks()
                    .0
                    .iter()
                    .map(|&four| i32::from_le_bytes(four).try_into().unwrap_or(u32::MAX)),
            ),
            TokenType::I64 => Box::new(
                body.as_chunks()
                    .0
                    .iter()
                    .map(|&eight| i64::from_le_bytes(eight).try_into().unwrap_or(u32::MAX)),
            ),
        }
    }

    /// Returns the number of ids.
    pub(in crate::data) const fn len(self) -> usize {
        self.body.len() / self.kind.bytes()
    }

    /// Checks that the ids can be those of a tokenizer.
    ///
    /// Errors: [`ZooError::TokenOutOfRange`] for an id outside the vocabulary;
    /// [`SourceError::NotTheseTokens`] for ids of another width, or which are not what the tokenizer makes.
    pub(in crate::data) fn check(self, path: &Path, tokenizer: &dyn Tokenizer) -> Result<(), ZooError> {
        self.check_width(path)?;
        let vocab = tokenizer.vocab_size();
        let out_of_range = self.iter().enumerate().find(|&(_, id)| id as usize >= vocab);
        if let Some((position, token)) = out_of_range {
            return Err(ZooError::TokenOutOfRange { path: Some(path.to_owned()), position, token, vocab });
        }
        if let Some(problem) = self.of_others(tokenizer)? {
            return Err(SourceError::NotTheseTokens { path: path.to_owned(), problem }.into());
        }
        Ok(())
    }

    /// Checks that the ids are not parts of wider ones, nor text.
    ///
    /// Errors: [`SourceError::NotTheseTokens`].
    pub(in crate::data) fn check_width(self, path: &Path) -> Result<(), SourceError> {
        let wrong = |problem| Err(SourceError::NotTheseTokens { path: path.to_owned(), problem });
        let start = &self.body[..self.body.len().min(START)];
        if !self.is_said
            && start.len() >= SAMPLE_LEAST
            && matches!(FileKind::of(start), Some(FileKind::Text(_)))
        {
            let advice = "rename it, so that its name does not end in .bin";
            return wrong(format!("it is text, and is read as ids because of its name: {advice}"));
        }
        let Some((bytes, name)) = self.wider() else { return Ok(()) };
        let own = self.kind.bytes();
        wrong(format!(
            "ids of {own} bytes are mostly 0, as if each were a part of one of {bytes} bytes: give `--token-type \
             {name}`"
        ))
    }

    /// Returns the length in bytes and the type of ids of which these are parts, if they seem to be parts.
    fn wider(self) -> Option<(usize, &'static str)> {
        let wider = |times: usize| {
            let zero = |(at, id): (usize, u32)| at % times == 0 || id == 0;
            let parts = self.len() >= SAMPLE_LEAST && self.len().is_multiple_of(times);
            parts && self.iter().enumerate().all(zero) && self.iter().any(|id| id != 0)
        };
        [(8, "i64"), (4, "u32")].into_iter().find(|(bytes, _)| {
            let times = bytes / self.kind.bytes();
            times > 1 && wider(times)
        })
    }

    /// Returns what is wrong if the first ids are not how the tokenizer writes their text.
    fn of_others(self, tokenizer: &dyn Tokenizer) -> Result<Option<String>, ZooError> {
        let sample: Vec<u32> = self.iter().take(SAMPLE).collect();
        if sample.len() < SAMPLE_LEAST {
            return Ok(None);
        }
        let text = tokenizer.decode(&sample)?;
        let name = tokenizer.name();
        let advice = "give the `--tokenizer` that made them, or the text itself";
        // Binary data has ids above 127 too.
        let odd = no_text(&text).bytes as usize;
        if text.iter().all(u8::is_ascii) && odd * 100 > text.len() {
            return Ok(Some(format!(
                "{odd} of the first {} bytes of the text that `{name}` has for the ids are no text, so they \
                 are ids of another vocabulary: {advice}",
                text.len()
            )));
        }
        let again = tokenizer.encode(&String::from_utf8_lossy(&text))?.len();
        if again * 2 < sample.len() {
            return Ok(Some(format!(
                "`{name}` writes the text of the first {} ids with {again}, so they are ids of another \
                 vocabulary: {advice}",
                sample.len()
            )));
        }
        Ok(None)
    }
}

/// Number of ids that are looked at to find whether they are those of a tokenizer.
const SAMPLE: usize = 4096;
/// Fewer ids say too little.
const SAMPLE_LEAST: usize = 64;

/// Returns the `index`-th little-endian word of a header.
fn word(bytes: &[u8], index: usize) -> Option<u32> {
    let four = bytes.get(4 * index..4 * index + 4)?;
    Some(u32::from_le_bytes(four.try_into().expect("the slice has four bytes")))
}

fn expect(path: &Path, field: &'static str, found: u64, expected: u64) -> Result<(), ZooError> {
    if found == expected {
        return Ok(());
    }
    Err(ZooError::TokenFile { path: path.to_owned(), field, found, expected })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Byte;

    fn check(ids: &[u8], said: Option<TokenType>, tokenizer: &dyn Tokenizer) -> Result<(), ZooError> {
        let path = Path::new("train.bin");
        Ids::of(path, ids, said)?.check(path, tokenizer)
    }

    fn u16s(ids: impl IntoIterator<Item = u32>) -> Vec<u8> {
        ids.into_iter().flat_map(|id| (id as u16).to_le_bytes()).collect()
    }

    #[test]
    fn ids_have_the_width_that_is_said() {
        let types = [
            (TokenType::U8, vec![7, 9]),
            (TokenType::U16, vec![7, 0, 9, 0]),
            (TokenType::U32, vec![7, 0, 0, 0, 9, 0, 0, 0]),
            (TokenType::I32, vec![7, 0, 0, 0, 9, 0, 0, 0]),
            (TokenType::I64, vec![7, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]),
        ];
        for (kind, bytes) in types {
            let ids = Ids::of(Path::new("a"), &bytes, Some(kind)).unwrap();
            assert_eq!((ids.iter().collect::<Vec<_>>(), ids.len()), (vec![7, 9], 2), "{kind}");
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        let negative = Ids::of(Path::new("a"), &[0xff; 8], Some(TokenType::I64)).unwrap();
        assert_eq!(negative.iter().next(), Some(u32::MAX));
        let error = Ids::of(Path::new("a"), &[0; 6], Some(TokenType::U32)).unwrap_err();
        assert!(matches!(error, ZooError::TokenFile { found: 2, .. }), "{error}");
    }

    #[test]
    fn ids_of_four_bytes_are_not_taken_for_pairs_of_two() {
        let wide: Vec<u8> = (0..200_u32).flat_map(|i| (i % 90 + 32).to_le_bytes()).collect();
        let error = check(&wide, None, &Byte).unwrap_err().to_string();
        assert!(error.contains("--token-type u32"), "{error}");
        check(&wide, Some(TokenType::U32), &Byte).unwrap();
        let wider: Vec<u8> = (0..200_i64).flat_map(|i| (i % 90 + 32).to_le_bytes()).collect();
        for said in [None, Some(TokenType::U16), Some(TokenType::U32)] {
            let error = check(&wider, said, &Byte).unwrap_err().to_string();
            assert!(error.contains("--token-type i64"), "{error}");
        }
        check(&wider, Some(TokenType::I64), &Byte).unwrap();
        let text =
            "This is text, and its name says that it is ids of tokens, which it is not at all.".repeat(2);
        assert!(check(text.as_bytes(), None, &Byte).unwrap_err().to_string().contains("it is text"));
    }

    #[test]
    fn ids_of_another_vocabulary_are_refused() {
        // Characters in alphabetical order, as nanoGPT numbers them: newline, space, then letters.
        let text = "a slow link\n".repeat(50);
        let characters = u16s(text.bytes().map(|c| match c {
            b'\n' => 0,
            b' ' => 1,
            letter => u32::from(letter - b'a') + 2,
        }));
        let error = check(&characters, None, &Byte).unwrap_err().to_string();
        assert!(error.contains("another vocabulary"), "{error}");
        check(&u16s(text.bytes().map(u32::from)), None, &Byte).unwrap();
        check(&u16s((0..4096).map(|i| i * 7 % 256)), None, &Byte).unwrap();
    }

    #[cfg(feature = "bpe")]
    #[test]
    fn ids_that_gpt2_would_not_make_are_refused() {
        use crate::tokenizer::Gpt2;

        let text = "The quick brown fox jumps over the lazy dog. ".repeat(20);
        check(&u16s(Gpt2.encode(&text).unwrap()), None, &Gpt2).unwrap();
        let error = check(&u16s(text.bytes().map(u32::from)), None, &Gpt2).unwrap_err().to_string();
        assert!(error.contains("another vocabulary"), "{error}");
        // Its bytes as GPT-2 numbers them: `!` is 0.
        let bytes = u16s(text.bytes().filter(|&b| b > b' ').map(|b| u32::from(b - b'!')));
        let error = check(&bytes, None, &Gpt2).unwrap_err().to_string();
        assert!(error.contains("another vocabulary"), "{error}");
    }
}
