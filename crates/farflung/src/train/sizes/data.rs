//! Estimates the memory of the training data from the sizes of its files. A file that cannot be read counts as
//! empty here; opening it later reports the error.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use crate::TrainConfig;
use crate::config::choice::TokenizerKind;

/// Bytes of the default text, rounded up.
const DEFAULT_TEXT: u64 = 3_500_000;
/// Number of bytes at the start of a file that are checked to decide whether it is text.
const LOOK: u64 = 8192;

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
    /// Whether the files hold tokens of two bytes rather than text.
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
        Some(path) => files(path),
    };
    let byte = config.tokenizer == TokenizerKind::Byte;
    let times = u64::saturating_mul;
    let (tokens, beside) = match (files.tokens, byte) {
        // Files have two bytes per token; with a vocabulary of 256, tokens are stored in one byte.
        (true, true) => (files.sum / 2, files.largest),
        (true, false) => (files.sum, files.largest),
        // While text is read, memory holds the text and an id of four bytes for each of its bytes.
        (false, true) => (files.sum, times(files.largest, 5)),
        // A token is about four bytes of text, and is stored in two bytes. While text is read, it has an id of
        // four bytes.
        (false, false) => (files.sum / 2, times(files.largest, 3)),
    };
    Data { reading: tokens.saturating_add(beside), tokens, tokenizer: !byte }
}

fn is_bin(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "bin")
}

/// Lists the same files as `zoo::Corpus::open`.
fn files(path: &Path) -> Files {
    let mut files = Files::default();
    let Ok(metadata) = fs::metadata(path) else { return files };
    if !metadata.is_dir() {
        files.tokens = is_bin(path);
        files.add(metadata.len());
        return files;
    }
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if let Ok(metadata) = fs::metadata(entry.path())
            && metadata.is_file()
            && is_bin(&entry.path())
        {
            files.tokens = true;
            files.add(metadata.len());
        }
    }
    if !files.tokens {
        texts_below(path, &mut files);
    }
    files
}

fn texts_below(folder: &Path, files: &mut Files) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            texts_below(&entry.path(), files);
        } else if kind.is_file() && is_text(&entry.path()) {
            files.add(entry.metadata().map_or(0, |metadata| metadata.len()));
        }
    }
}

fn is_text(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LOOK).read_to_end(&mut start));
    read.is_ok() && !start.contains(&0)
}

#[cfg(test)]
mod tests {
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
