//! Rows of token ids with labels, in a JSON file as `transformers` takes them.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::batch::Batch;
use crate::{ZooError, json_file};

/// The number that is no target, in Hugging Face's labels.
const NO_TARGET: i64 = -100;

/// Rows of equal length, with the target of each token.
///
/// The file is a JSON object. `input_ids` is a list of rows; `labels`, if it is there, has the same shape: the
/// label of a token is what the token before it is to predict (labels are not shifted), and -100 is no target.
/// Without labels, each token after a row's first is a target. Other keys are ignored, but
/// [`TokenRows::read_packed`] also reads `position_ids`, and [`TokenRows::read_prefixed`] reads `prefixes`.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRows {
    path: PathBuf,
    rows: Batch,
    hash: blake3::Hash,
    bytes: u64,
}

/// The file as deserialized, before it is checked.
#[derive(Deserialize)]
struct File {
    input_ids: Vec<Vec<i64>>,
    #[serde(default)]
    labels: Option<Vec<Vec<i64>>>,
}

/// The part of a file that says where documents begin.
#[derive(Deserialize)]
struct Packing {
    #[serde(default)]
    position_ids: Option<Vec<Vec<i64>>>,
}

/// The part of a file that says how long prefixes are.
#[derive(Deserialize)]
struct Prefixes {
    #[serde(default)]
    prefixes: Option<Vec<i64>>,
}

impl TokenRows {
    /// Reads a file whose rows hold several documents: `position_ids` has the position of each token in its
    /// document, so that 0 begins a document. The last token of a document has no target.
    ///
    /// `transformers` also accepts documents whose positions do not begin at 0; they are refused here.
    ///
    /// Errors: as [`TokenRows::read`]; [`ZooError::Rows`] for positions that are missing, do not have the shape
    /// of `input_ids`, or are neither 0 nor one more than that of the token before.
    pub fn read_packed(path: &Path) -> Result<Self, ZooError> {
        let bytes = fs::read(path).map_err(ZooError::open(path))?;
        Self::packed_from_bytes(path, &bytes)
    }

    /// Like [`TokenRows::read_packed`], of the bytes of a file. `path` is for messages.
    ///
    /// Errors: as [`TokenRows::read_packed`].
    pub fn packed_from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, ZooError> {
        let mut this = Self::from_bytes(path, bytes)?;
        let wrong = |problem: String| ZooError::Rows { path: path.to_owned(), problem };
        let (count, length) = (this.count(), this.length());
        let Packing { position_ids } = json_file::from_bytes(path, bytes)?;
        let Some(positions) = position_ids else {
            let what = "it has no `position_ids`, expected them because documents are to be kept apart";
            return Err(wrong(what.to_owned()));
        };
        if positions.len() != count {
            let found = positions.len();
            return Err(wrong(format!(
                "`position_ids` has {found} rows, expected {count}, as `input_ids` has"
            )));
        }
        let mut documents = Vec::with_capacity(count * length);
        let weights = this.rows.weights.get_or_insert_default();
        for (row, positions) in positions.iter().enumerate() {
            if positions.len() != length {
                let found = positions.len();
                let problem = format!("row {row} of `position_ids` has {found} tokens, expected {length}");
                return Err(wrong(problem));
            }
            let mut begins = 0;
            for (at, &position) in positions.iter().enumerate() {
                if position == 0 {
                    begins = at;
                    if at > 0 {
                        weights[row * length + at - 1] = 0.0;
                    }
                } else if at == 0 || i64::try_from(at - begins) != Ok(position) {
                    let problem = format!(
                        "token {at} of row {row} of `position_ids` is {position}, expected 0, where a document \
                         begins, or one more than the token before"
                    );
                    return Err(wrong(problem));
                }
                documents.push(begins as u32);
            }
        }
        this.rows.documents = Some(documents);
        this.with_targets()
    }

    /// Reads a file whose rows begin with a prefix that is read in both directions: `prefixes` has the number
    /// of tokens of each row's. Tokens of the prefix are no targets; others are as in [`TokenRows::read`].
    ///
    /// Errors: as [`TokenRows::read`]; [`ZooError::Rows`] for prefixes that are missing, not one a row, or
    /// longer than a row.
    pub fn read_prefixed(path: &Path) -> Result<Self, ZooError> {
        let bytes = fs::read(path).map_err(ZooError::open(path))?;
        Self::prefixed_from_bytes(path, &bytes)
    }

    /// Like [`TokenRows::read_prefixed`], of the bytes of a file. `path` is for messages.
    ///
    /// Errors: as [`TokenRows::read_prefixed`].
    pub fn prefixed_from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, ZooError> {
        let mut this = Self::from_bytes(path, bytes)?;
        let wrong = |problem: String| Err(ZooError::Rows { path: path.to_owned(), problem });
        let (count, length) = (this.count(), this.length());
        let Prefixes { prefixes } = json_file::from_bytes(path, bytes)?;
        let Some(prefixes) = prefixes else {
            let what = "it has no `prefixes`, expected the number of each row's tokens that are read in both \
                        directions";
            return wrong(what.to_owned());
        };
        if prefixes.len() != count {
            let found = prefixes.len();
            return wrong(format!("`prefixes` has {found} numbers, expected {count}, one for each row"));
        }
        if let Some((row, prefix)) = prefixes
            .iter()
            .enumerate()
            .find(|(_, prefix)| usize::try_from(**prefix).map_or(true, |n| n > length))
        {
            return wrong(format!(
                "number {row} of `prefixes` is {prefix}, expected 0 to {length}, a row's tokens"
            ));
        }
        let weights = this.rows.weights.get_or_insert_default();
        for (row, &prefix) in prefixes.iter().enumerate() {
            // Its tokens attend to each other, so that none of them is there to be predicted.
            let known = (prefix as usize).saturating_sub(1);
            weights[row * length..][..known].fill(0.0);
        }
        let all = prefixes.iter().flat_map(|&prefix| std::iter::repeat_n(prefix as u32, length));
        this.rows.prefixes = Some(all.collect());
        this.with_targets()
    }

    /// Returns the rows, if a token is a target.
    fn with_targets(self) -> Result<Self, ZooError> {
        if self.targets() > 0 {
            return Ok(self);
        }
        let problem = "no token is a target, expected at least one".to_owned();
        Err(ZooError::Rows { path: self.path, problem })
    }

    /// Reads a file.
    ///
    /// Errors: [`ZooError::Io`], [`ZooError::Json`], [`ZooError::Rows`] with what is wrong.
    pub fn read(path: &Path) -> Result<Self, ZooError> {
        let bytes = fs::read(path).map_err(ZooError::open(path))?;
        Self::from_bytes(path, &bytes)
    }

    /// Reads the bytes of a file. `path` is for messages.
    ///
    /// Errors: as [`TokenRows::read`].
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, ZooError> {
        let File { input_ids, labels } = json_file::from_bytes(path, bytes)?;
        let wrong = |problem: String| ZooError::Rows { path: path.to_owned(), problem };
        let length = input_ids.first().map_or(0, Vec::len);
        if length == 0 {
            return Err(wrong("`input_ids` has no tokens, expected rows of at least one".to_owned()));
        }
        let mut rows = Batch { length, weights: Some(Vec::new()), ..Batch::default() };
        let weights = rows.weights.get_or_insert_default();
        let named = if labels.is_some() { "labels" } else { "input_ids" };
        let ends = labels.as_ref().map_or(input_ids.len(), Vec::len);
        if ends != input_ids.len() {
            let problem =
                format!("`labels` has {ends} rows, expected {}, as `input_ids` has", input_ids.len());
            return Err(wrong(problem));
        }
        for (row, ids) in input_ids.iter().enumerate() {
            let labels = labels.as_ref().map_or(ids, |labels| &labels[row]);
            for (field, found) in [("input_ids", ids.len()), ("labels", labels.len())] {
                if found != length {
                    let problem = format!("row {row} of `{field}` has {found} tokens, expected {length}");
                    return Err(wrong(problem));
                }
            }
            let id = |field: &str, at: usize, id: i64| {
                let what = || wrong(format!("token {at} of row {row} of `{field}` is {id}, expected an id"));
                u32::try_from(id).map_err(|_| what())
            };
            for (at, &token) in ids.iter().enumerate() {
                rows.inputs.push(id("input_ids", at, token)?);
                // The last token predicts nothing of its row.
                let next = labels.get(at + 1).copied().unwrap_or(NO_TARGET);
                let counts = next != NO_TARGET;
                rows.targets.push(if counts { id(named, at + 1, next)? } else { 0 });
                weights.push(if counts { 1.0 } else { 0.0 });
            }
        }
        let this = Self { path: path.to_owned(), rows, hash: blake3::hash(bytes), bytes: bytes.len() as u64 };
        this.with_targets()
    }

    /// Checks that all ids are below a model's number of tokens, and that rows are at most as long as its
    /// sequences.
    ///
    /// Errors: [`ZooError::TokenOutOfRange`], [`ZooError::Rows`].
    pub fn check(&self, vocab: usize, context: usize) -> Result<(), ZooError> {
        for ids in [&self.rows.inputs, &self.rows.targets] {
            if let Some(position) = ids.iter().position(|&id| id as usize >= vocab) {
                let path = Some(self.path.clone());
                return Err(ZooError::TokenOutOfRange { path, position, token: ids[position], vocab });
            }
        }
        if self.length() > context {
            let problem = format!(
                "its rows have {} tokens, expected at most {context}, the model's context",
                self.length()
            );
            return Err(ZooError::Rows { path: self.path.clone(), problem });
        }
        Ok(())
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn count(&self) -> usize {
        self.rows.inputs.len() / self.rows.length
    }

    /// Returns the number of tokens of a row.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.rows.length
    }

    /// Returns the number of targets that count.
    #[must_use]
    pub fn targets(&self) -> u64 {
        self.rows.counted() as u64
    }

    /// Returns all rows.
    #[must_use]
    pub const fn rows(&self) -> &Batch {
        &self.rows
    }

    /// Returns some of the rows.
    ///
    /// # Panics
    /// If the range ends after the last row.
    #[must_use]
    pub fn batch(&self, rows: Range<usize>) -> Batch {
        assert!(rows.end <= self.count(), "rows {rows:?} of {}", self.count());
        let mut batch = Batch { length: self.length(), ..Batch::default() };
        rows.for_each(|row| self.append_to(row as u64, &mut batch));
        batch
    }

    /// Returns the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) const fn hash(&self) -> blake3::Hash {
        self.hash
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of targets that count in a row after its first `skipped` ones; 0 for numbers without
    /// a row.
    pub(super) fn counted(&self, row: u64, skipped: usize) -> f64 {
        let weights = self.rows.weights.as_deref().unwrap_or_default();
        let row = usize::try_from(row).ok().and_then(|row| weights.chunks_exact(self.length()).nth(row));
        row.map_or(0.0, |weights| weights.iter().skip(skipped).map(|&weight| f64::from(weight)).sum())
    }

    /// Appends a row to a batch of longer or equal sequences. What is missing is filled up with token 0 of
    /// weight 0, as a document of its own if rows hold several; so are numbers without a row.
    pub(super) fn append_to(&self, row: u64, batch: &mut Batch) {
        let Batch { length, inputs, targets, weights, documents, prefixes } = &self.rows;
        let start = usize::try_from(row).ok().filter(|&row| row < self.count()).map(|row| row * length);
        let more = batch.weights.get_or_insert_default();
        let (mut filled, padded) = (0, batch.length);
        if let (Some(start), Some(weights)) = (start, weights) {
            batch.inputs.extend_from_slice(&inputs[start..start + length]);
            batch.targets.extend_from_slice(&targets[start..start + length]);
            more.extend_from_slice(&weights[start..start + length]);
            filled = *length;
        }
        let rest = padded - filled;
        if let Some(documents) = documents {
            let more = batch.documents.get_or_insert_default();
            more.extend(start.into_iter().flat_map(|start| &documents[start..start + length]));
            more.extend(std::iter::repeat_n(filled as u32, rest));
        }
        if let Some(prefixes) = prefixes {
            let prefix = start.map_or(0, |start| prefixes[start]);
            batch.prefixes.get_or_insert_default().extend(std::iter::repeat_n(prefix, padded));
        }
        batch.inputs.extend(std::iter::repeat_n(0, rest));
        batch.targets.extend(std::iter::repeat_n(0, rest));
        more.extend(std::iter::repeat_n(0.0, rest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(json: &str) -> Result<TokenRows, ZooError> {
        TokenRows::from_bytes(Path::new("rows.json"), json.as_bytes())
    }

    #[test]
    fn labels_are_shifted_and_minus_100_counts_nothing() {
        let of = rows(
            r#"{"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, -100, 7], [-100, -100, -100]], "x": 1}"#,
        );
        let of = of.unwrap();
        assert_eq!((of.count(), of.length(), of.targets()), (2, 3, 1));
        assert_eq!(of.rows().targets, [0, 7, 0, 0, 0, 0]);
        assert_eq!(of.rows().weights.as_deref().unwrap(), [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        let plain = rows(r#"{"input_ids": [[1, 2, 3]]}"#).unwrap();
        assert_eq!((plain.rows().targets.as_slice(), plain.targets()), (&[2, 3, 0][..], 2));
        let mut batch = Batch { length: 4, ..Batch::default() };
        (0..2).for_each(|row| plain.append_to(row, &mut batch));
        assert_eq!(batch.inputs, [1, 2, 3, 0, 0, 0, 0, 0]);
        assert!((batch.counted() - 2.0).abs() < 1e-9 && (plain.counted(1, 0)).abs() < 1e-9);
    }

    #[test]
    fn prefixes_are_one_a_row_and_not_longer_than_it() {
        let of = |json: &str| TokenRows::prefixed_from_bytes(Path::new("rows.json"), json.as_bytes());
        let found = of(r#"{"input_ids": [[1, 2, 3], [4, 5, 6]], "prefixes": [2, 0]}"#).unwrap();
        assert_eq!(found.rows().prefixes.as_deref(), Some(&[2, 2, 2, 0, 0, 0][..]));
        assert_eq!(found.rows().weights.as_deref(), Some(&[0.0, 1.0, 0.0, 1.0, 1.0, 0.0][..]));
        let all = of(r#"{"input_ids": [[1, 2, 3]], "prefixes": [3]}"#).unwrap_err().to_string();
        assert!(all.contains("no token is a target"), "{all}");
        let mut batch = Batch { length: 4, ..Batch::default() };
        (0..3).for_each(|row| found.append_to(row, &mut batch));
        assert_eq!(batch.prefixes.unwrap(), [[2; 4], [0; 4], [0; 4]].concat());
        for (prefixes, said) in [
            ("[2]", "`prefixes` has 1 numbers, expected 2"),
            ("[2, 4]", "number 1 of `prefixes` is 4, expected 0 to 3"),
            ("[-1, 0]", "number 0 of `prefixes` is -1"),
            ("null", "it has no `prefixes`"),
        ] {
            let error = of(&format!(r#"{{"input_ids": [[1, 2, 3], [4, 5, 6]], "prefixes": {prefixes}}}"#));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, said) in [
            (r#"{"labels": [[1]]}"#, "not valid JSON"),
            (r#"{"input_ids": []}"#, "no tokens"),
            (r#"{"input_ids": [[]]}"#, "no tokens"),
            (r#"{"input_ids": [[1, 2], [3]]}"#, "row 1 of `input_ids` has 1 tokens, expected 2"),
            (r#"{"input_ids": [[1, 2]], "labels": [[1]]}"#, "row 0 of `labels` has 1 tokens"),
            (r#"{"input_ids": [[1, 2]], "labels": []}"#, "`labels` has 0 rows, expected 1"),
            (r#"{"input_ids": [[1, -2]]}"#, "token 1 of row 0 of `input_ids` is -2"),
            (r#"{"input_ids": [[1, 2]], "labels": [[1, -5]]}"#, "token 1 of row 0 of `labels` is -5"),
            (r#"{"input_ids": [[1, 4294967296]]}"#, "is 4294967296, expected an id"),
            (r#"{"input_ids": [[1, 2]], "labels": [[1, -100]]}"#, "no token is a target"),
        ] {
            let error = rows(json).unwrap_err();
            assert!(error.to_string().contains(said) && error.to_string().contains("rows.json"), "{error}");
        }
        let good = rows(r#"{"input_ids": [[1, 7]]}"#).unwrap();
        assert!(good.check(8, 2).is_ok());
        assert!(good.check(7, 2).unwrap_err().to_string().contains("token 7"));
        assert!(good.check(8, 1).unwrap_err().to_string().contains("at most 1, the model's context"));
    }

    #[test]
    fn positions_that_begin_again_divide_rows() {
        let json = r#"{"input_ids": [[1, 2, 3, 4, 5], [6, 7, 8, 9, 1]],
            "position_ids": [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]], "labels": [[1, 2, 3, 4, 5], [-100, 7, -100, 9, 1]]}"#;
        let packed = TokenRows::packed_from_bytes(Path::new("rows.json"), json.as_bytes()).unwrap();
        assert_eq!(packed.rows().documents.as_deref(), Some(&[0, 0, 2, 3, 3, 0, 0, 0, 0, 0][..]));
        let weights = packed.rows().weights.as_deref().unwrap();
        assert_eq!(weights, [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]);
        assert_eq!((packed.targets(), packed.counted(0, 0) as u64), (5, 2));
        // What fills up a sequence is a document of its own.
        let mut batch = Batch { length: 7, ..Batch::default() };
        for row in [0, 9] {
            packed.append_to(row, &mut batch);
        }
        let want = [0, 0, 2, 3, 3, 5, 5, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!((batch.documents.as_deref(), batch.inputs.len()), (Some(&want[..]), 14));
        assert_eq!(packed.batch(1..2).documents.unwrap(), [0; 5]);
        // Other readers ignore the key, whatever it holds.
        let plain = rows(&json.replace("[0, 1, 0, 0, 1]", "\"any\"")).unwrap();
        assert_eq!((plain.rows().documents.as_ref(), plain.targets()), (None, 7));
    }

    #[test]
    fn positions_that_divide_nothing_are_refused() {
        for (positions, said) in [
            ("[[0, 1, 3]]", "token 2 of row 0 of `position_ids` is 3, expected 0"),
            ("[[1, 2, 3]]", "token 0 of row 0 of `position_ids` is 1"),
            ("[[0, -1, 0]]", "token 1 of row 0 of `position_ids` is -1"),
            ("[[0, 0, 9223372036854775807]]", "is 9223372036854775807"),
            ("[[0, 1]]", "row 0 of `position_ids` has 2 tokens, expected 3"),
            ("[]", "`position_ids` has 0 rows, expected 1"),
            ("[[0, 0, 0]]", "no token is a target"),
            ("null", "it has no `position_ids`"),
        ] {
            let json = format!(r#"{{"input_ids": [[1, 2, 3]], "position_ids": {positions}}}"#);
            let error = TokenRows::packed_from_bytes(Path::new("rows.json"), json.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(said) && error.to_string().contains("rows.json"), "{error}");
        }
    }
}
