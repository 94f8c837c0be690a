//! Estimates the memory of the training data from the sizes of its files. A file that cannot be read counts as
//! empty here; opening it later reports the error.

use std::path::Path;

use farflung_zoo::data::{Listing, ReadOptions, TokenType};

use crate::TrainConfig;
use crate::config::choice::TokenizerKind;
use crate::train::job::read_options;

/// Bytes of the default text, rounded up.
const DEFAULT_TEXT: u64 = 3_500_000;
/// A compressed text becomes about this many times as long.
const UNPACKED_TIMES: u64 = 4;

/// Memory of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Data {
    /// Peak in bytes while the data is read and tokenized.
    pub(super) reading: u64,
    /// Bytes of the tokens afterwards.
    pub(super) tokens: u64,
    /// Whether the tokenizer has tables to load.
    pub(super) tokenizer: bool,
}

/// Sizes of the files of a data set.
#[derive(Debug, Clone, Copy, Default)]
struct Files {
    sum: u64,
    largest: u64,
    /// Whether the files hold ids of tokens rather than text.
    tokens: bool,
}

impl Files {
    fn add(&mut self, len: u64) {
        self.sum = self.sum.saturating_add(len);
        self.largest = self.largest.max(len);
    }
}

/// Estimates the memory of the data of these settings.
pub(super) fn data(config: &TrainConfig) -> Data {
    let files = match &config.data {
        None => Files { sum: DEFAULT_TEXT, largest: DEFAULT_TEXT, tokens: false },
        Some(path) => files(path, &read_options(config)),
    };
    let byte = config.tokenizer == TokenizerKind::Byte;
    let width = token_bytes(config);
    let times = u64::saturating_mul;
    let id_bytes = config.token_type.unwrap_or(TokenType::U16).bytes() as u64;
    let (tokens, beside) = match (files.tokens, byte) {
        (true, _) => (times(files.sum / id_bytes, width), files.largest),
        // While text is read, memory holds the text and an id of four bytes for each of its bytes.
        (false, true) => (files.sum, times(files.largest, 5)),
        // A token is about four bytes of text. While text is read, it has an id of four bytes.
        (false, false) => (times(files.sum / 4, width), times(files.largest, 3)),
    };
    Data { reading: tokens.saturating_add(beside), tokens, tokenizer: !byte }
}

/// Returns the bytes in which a token is stored: with a vocabulary of 256 one, up to 65536 two, else four.
pub(super) fn token_bytes(config: &TrainConfig) -> u64 {
    match config.tokenizer {
        TokenizerKind::Byte => 1,
        TokenizerKind::Gpt2 => 2,
        TokenizerKind::File(_) if config.vocab.is_some_and(|vocab| vocab <= 1 << 16) => 2,
        TokenizerKind::File(_) => 4,
    }
}

/// Returns the sizes of the files that the corpus reads.
fn files(path: &Path, options: &ReadOptions) -> Files {
    let mut files = Files::default();
    for file in Listing::of(path, options).map(|listing| listing.files).unwrap_or_default() {
        files.tokens |= file.tokens;
        files.add(file.bytes.saturating_mul(if file.packed { UNPACKED_TIMES } else { 1 }));
    }
    files
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn of(path: &Path, tokenizer: TokenizerKind) -> Data {
        data(&TrainConfig { data: Some(path.to_owned()), tokenizer, ..TrainConfig::default() })
    }

    #[test]
    fn files_count_as_the_corpus_reads_them() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
        fs::create_dir(folder.path().join("deeper")).unwrap();
        write("a.txt", &[b'a'; 1000]);
        write("deeper/b.txt", &[b'b'; 500]);
        write("picture", &[0; 9999]);
        let byte = of(folder.path(), TokenizerKind::Byte);
        assert_eq!((byte.tokens, byte.reading), (1500, 1500 + 5 * 1000));
        let gpt2 = of(&folder.path().join("a.txt"), TokenizerKind::Gpt2);
        assert_eq!((gpt2.tokens, gpt2.tokenizer), (500, true));
        write("train.bin", &[1; 64]);
        assert_eq!(of(folder.path(), TokenizerKind::Gpt2).tokens, 64, "token files, and no text beside them");
        let none = of(&folder.path().join("missing"), TokenizerKind::Byte);
        assert_eq!((none.tokens, none.reading), (0, 0));
        assert_eq!(data(&TrainConfig::default()).tokens, DEFAULT_TEXT);
    }

    #[test]
    fn the_default_text_is_no_larger_than_said() {
        let len = crate::corpus::default_text().unwrap().0.len() as u64;
        assert!((DEFAULT_TEXT * 9 / 10..=DEFAULT_TEXT).contains(&len), "{len}");
    }
}
