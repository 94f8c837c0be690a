//! What was read of a data set, to tell the user.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::decode::NoText;
use super::skipped::{Skipped, grouped, shown};

/// Special tokens that stand in the text and were read as plain text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainSpecialTokens {
    /// The token's text.
    pub token: String,
    /// How often it occurs.
    pub count: u64,
    /// Whether the tokenizer has such a token.
    pub is_known: bool,
}

/// What was read of a data set. `Display` gives it on one line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reading {
    /// Number of files that were read; 0 for a text in memory.
    pub files: u64,
    /// Number of them that are compressed.
    pub packed: u64,
    /// Number of files in each encoding other than UTF-8.
    pub encodings: BTreeMap<&'static str, u64>,
    /// The files that were left out, and why.
    pub skipped: Vec<Skipped>,
    /// Bytes of text after unpacking and in UTF-8, and of files of tokens.
    pub bytes: u64,
    /// Whether the files hold ids of tokens.
    pub is_ids: bool,
    /// Bytes of text that are no text: not UTF-8, or control characters.
    pub no_text: u64,
    /// The file and the offset of the first of them.
    pub first_no_text: Option<(PathBuf, usize)>,
    /// The file that says which texts the ids of a file of tokens are, if one does.
    pub decoded_by: Option<PathBuf>,
    /// Bytes of text for which the tokenizer has no token, and which were left out.
    pub lost: u64,
    /// Number of examples, pairs of prompt and completion or conversations.
    pub examples: u64,
    /// Special tokens that stand in the text and were not made tokens.
    pub plain_special_tokens: Vec<PlainSpecialTokens>,
}

impl Reading {
    /// Adds a text.
    pub(in crate::data) fn add_text(&mut self, path: &Path, bytes: usize, no_text: NoText) {
        self.bytes += bytes as u64;
        self.no_text += no_text.bytes;
        if self.first_no_text.is_none() {
            self.first_no_text = no_text.first.map(|offset| (path.to_owned(), offset));
        }
    }

    /// Adds special tokens that were read as plain text.
    pub(in crate::data) fn add_plain(&mut self, token: String, count: u64, is_known: bool) {
        match self.plain_special_tokens.iter_mut().find(|known| known.token == token) {
            Some(known) => known.count += count,
            None => self.plain_special_tokens.push(PlainSpecialTokens { token, count, is_known }),
        }
    }

    /// Returns the share of bytes that are no text.
    #[must_use]
    pub fn no_text_share(&self) -> f64 {
        self.no_text as f64 / self.bytes.max(1) as f64
    }
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = if self.files == 1 { "file" } else { "files" };
        write!(f, "{} {files}", self.files)?;
        let mut kinds: Vec<String> =
            self.encodings.iter().map(|(name, count)| format!("{count} in {name}")).collect();
        if self.packed > 0 {
            kinds.insert(0, format!("{} compressed", self.packed));
        }
        if let Some(path) = &self.decoded_by {
            kinds.push(format!("ids decoded by `{}`", shown(path)));
        }
        if !kinds.is_empty() {
            write!(f, " ({})", kinds.join(", "))?;
        }
        write!(f, ", {} bytes", self.bytes)?;
        if self.examples > 0 {
            write!(f, ", {} examples", self.examples)?;
        }
        if let Some((path, offset)) = &self.first_no_text {
            // A share above 0 is not shown as 0.
            let percent = (100.0 * self.no_text_share()).max(0.01);
            write!(f, ", {percent:.2} % no text (first at byte {offset} of `{}`)", shown(path))?;
        } else if !self.is_ids {
            write!(f, ", 0 % no text")?;
        }
        if !self.skipped.is_empty() {
            write!(f, ", {} left out: {}", self.skipped.len(), grouped(&self.skipped))?;
        }
        Ok(())
    }
}
