//! What a run tells of the data that it read: lines for the terminal, and fields of the report.

use farflung_zoo::Split;
use farflung_zoo::data::{Reading, Skipped};
use serde::{Deserialize, Serialize};

/// Source of a run's text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataSource {
    /// Description of the file or folder.
    pub source: String,
    /// Hash of the text, or of the files of tokens.
    pub hash: String,
    /// Number of files that were read; 0 for the default text.
    #[serde(default)]
    pub files: u64,
    /// The files that were left out, and why.
    #[serde(default)]
    pub skipped: Vec<Skipped>,
    /// Bytes of text after unpacking and in UTF-8, and of files of tokens.
    #[serde(default)]
    pub bytes: u64,
    /// Number of tokens to train on.
    #[serde(default)]
    pub training_tokens: u64,
    /// Number of tokens that are held out.
    #[serde(default)]
    pub held_out_tokens: u64,
    /// Share of the bytes of text that are no text: not UTF-8, or control characters.
    #[serde(default)]
    pub no_text_share: f64,
}

impl DataSource {
    /// Describes what was read.
    #[must_use]
    pub fn new(source: &str, hash: &str, reading: &Reading, training: &Split, held_out: &Split) -> Self {
        Self {
            source: source.to_owned(),
            hash: hash.to_owned(),
            files: reading.files,
            skipped: reading.skipped.clone(),
            bytes: reading.bytes,
            training_tokens: training.len() as u64,
            held_out_tokens: held_out.len() as u64,
            no_text_share: reading.no_text_share(),
        }
    }
}

/// Returns the lines on what was read: one, and one more for special tokens that are not made tokens.
#[must_use]
pub fn data_notes(reading: &Reading, training: &Split, held_out: &Split) -> Vec<String> {
    let tokens = format!("{} tokens to train on and {} held out", training.len(), held_out.len());
    // The default text is no file of the user's.
    let mut lines = vec![match reading.files {
        0 => format!("data: {} bytes of the default text; {tokens}", reading.bytes),
        _ => format!("data: {reading}; {tokens}"),
    }];
    if reading.lost > 0 {
        lines.push(format!(
            "data: warning: {} bytes of the text were left out: the tokenizer has no token for them",
            reading.lost
        ));
    }
    lines.extend(plain_special_tokens(reading).map(|line| format!("data: {line}")));
    lines
}

/// Returns the warning that a text to keep documents apart in is one document, and so are its parts; `None` for
/// rows.
#[must_use]
pub fn one_document(splits: [&Split; 2]) -> Option<String> {
    let is_one = splits.iter().all(|split| split.rows().is_none() && split.documents().len() <= 1);
    is_one.then(|| {
        "data: warning: `--document-mask` changes nothing: the text is one document, without end-of-text tokens".to_owned()
    })
}

/// Returns a line for each special token that stands in the text and was read as plain text.
pub(crate) fn plain_special_tokens(reading: &Reading) -> impl Iterator<Item = String> {
    reading.plain_special_tokens.iter().map(|plain| {
        let (token, count) = (&plain.token, plain.count);
        let advice = if plain.is_known {
            "`--special-tokens true` makes them tokens, which end documents"
        } else {
            "the tokenizer has no such token"
        };
        format!("`{token}` stands in the text {count} times and is read as plain text: {advice}")
    })
}
