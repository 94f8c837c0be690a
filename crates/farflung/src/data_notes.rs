//! What a run tells of the data that it read: lines for the terminal, and fields of the report.

use farflung_zoo::Split;
use farflung_zoo::data::{ExampleRows, Reading, Skipped};
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
    /// What is told of examples; `None` for a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub examples: Option<ExampleCounts>,
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
            examples: None,
        }
    }

    /// Adds what is told of examples.
    #[must_use]
    pub fn with_examples(self, examples: Option<ExampleCounts>) -> Self {
        Self { examples, ..self }
    }
}

/// What is told of examples in the rows that a run trains on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExampleCounts {
    /// Number of examples.
    pub examples: usize,
    /// Number of rows.
    pub rows: usize,
    /// Tokens of a row.
    pub row_tokens: usize,
    /// Number of tokens to be predicted.
    pub targets: u64,
    /// Number of examples that were cut, since they are longer than a row.
    pub cut: usize,
    /// Number of examples that were left out, since none of their tokens is to be predicted.
    pub left_out: usize,
}

impl ExampleCounts {
    /// Describes rows.
    #[must_use]
    pub fn of(rows: &ExampleRows) -> Self {
        Self {
            examples: rows.examples(),
            rows: rows.count(),
            row_tokens: rows.length(),
            targets: rows.targets(),
            cut: rows.cut(),
            left_out: rows.dropped(),
        }
    }

    /// Returns the line on them.
    #[must_use]
    pub fn note(&self) -> String {
        let Self { examples, rows, row_tokens, targets, cut, left_out } = self;
        let cut = if *cut > 0 {
            format!("; {cut} were cut at {row_tokens} tokens (--context)")
        } else {
            String::new()
        };
        let left_out = if *left_out > 0 {
            format!("; {left_out} more were left out, without a token of an answer")
        } else {
            String::new()
        };
        format!(
            "data: {examples} examples in {rows} rows of {row_tokens} tokens, {targets} of them to be \
             predicted{cut}{left_out}"
        )
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
