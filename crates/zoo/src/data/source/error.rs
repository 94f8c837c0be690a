//! Errors of the files of training data: each names the file, what was found in it and what to do.

use std::path::PathBuf;

use crate::file_kind::Compression;

use super::skipped::{Skipped, grouped};

/// A file or folder cannot be used as training data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The file is of a kind that holds no plain text.
    #[error("`{}` is {what}, expected text or a .bin file of tokens: {advice}", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// What the file is.
        what: String,
        /// What to do.
        advice: &'static str,
    },
    /// A folder has no file that can be read.
    #[error("`{}` has no text: {}", path.display(), skipped_text(skipped))]
    NothingToRead {
        /// The folder.
        path: PathBuf,
        /// The files that are left out, and why.
        skipped: Vec<Skipped>,
    },
    /// A compressed file is damaged, or its end is missing.
    #[error("`{}` cannot be unpacked as {format} after {unpacked} bytes: {problem}", path.display())]
    Packed {
        /// The file.
        path: PathBuf,
        /// The format.
        format: Compression,
        /// Bytes that were unpacked before the error.
        unpacked: u64,
        /// The decoder's error.
        problem: String,
    },
    /// A compressed file is far smaller than what it holds.
    #[error(
        "`{}` has {packed} bytes of {format} and unpacks to more than {limit}: if that is right, unpack it \
         and give the file",
        path.display()
    )]
    Bomb {
        /// The file.
        path: PathBuf,
        /// The format.
        format: Compression,
        /// Length of the file in bytes.
        packed: u64,
        /// The bound on the unpacked bytes.
        limit: u64,
    },
    /// A text is not in the encoding in which it is read.
    #[error(
        "`{}` is not {encoding} at byte {offset}{}: give the text's encoding with `--encoding`, such as \
         windows-1252{}",
        path.display(),
        or(*byte),
        if *any { "" } else { ", or the tokenizer `byte`, which reads any bytes" }
    )]
    Encoding {
        /// The file.
        path: PathBuf,
        /// Name of the encoding.
        encoding: &'static str,
        /// Offset of the first wrong byte.
        offset: usize,
        /// The first wrong byte, if the text does not end there.
        byte: Option<u8>,
        /// Whether an encoding was given.
        any: bool,
    },
    /// A line of a file of examples is wrong.
    #[error("`{}`, line {line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The number of the line, counted from 1.
        line: usize,
        /// What is wrong, and what was expected.
        problem: String,
    },
    /// A file beside a file of tokens does not describe it.
    #[error("`{}`: {problem}", path.display())]
    Sidecar {
        /// The file that describes the tokens.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// The ids of a file of tokens cannot be those of the tokenizer.
    #[error("`{}`: {problem}", path.display())]
    NotTheseTokens {
        /// The file.
        path: PathBuf,
        /// Why, and what to do.
        problem: String,
    },
}

fn or(byte: Option<u8>) -> String {
    byte.map_or_else(String::new, |byte| format!(" (0x{byte:02x})"))
}

fn skipped_text(skipped: &[Skipped]) -> String {
    match skipped {
        [] => "it is empty".to_owned(),
        skipped => grouped(skipped),
    }
}
