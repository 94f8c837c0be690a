//! Rows of examples: several in one, kept apart, or one each.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::ZooError;
use crate::data::batch::Batch;
use crate::data::tokens::Split;

/// How examples are put into rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// Several to a row, as many as fit: the longest example first, each into the row in which it leaves the
    /// least room (best-fit decreasing). Attention, positions and targets stop at their borders.
    #[default]
    Packed,
    /// One to a row.
    Alone,
}

/// Rows of a split's examples. A pure function of the split, the length of rows and the packing.
#[derive(Debug, Clone)]
pub struct ExampleRows {
    split: Split,
    length: usize,
    /// The tokens of the split that each row has, by example.
    rows: Vec<Vec<Range<usize>>>,
    /// Whether rows have prefixes: what is before the first target of an example.
    prefixed: bool,
    cut: usize,
    dropped: usize,
    targets: u64,
}

impl ExampleRows {
    /// Puts the examples of a split into rows of `length` tokens. Longer ones are cut; those without a target
    /// are left out. With `prefixed`, the tokens before an example's first target are read in both directions.
    ///
    /// Errors: [`ZooError::Sampler`] for a length of 0; [`ZooError::TooShort`] if no example has a target.
    ///
    /// # Panics
    /// If the split is a text ([`Split::has_examples`]).
    pub fn new(split: Split, length: usize, packing: Packing, prefixed: bool) -> Result<Self, ZooError> {
        assert!(split.has_examples(), "rows of examples are made of examples");
        if length == 0 {
            let expected = "at least 1".to_owned();
            return Err(ZooError::Sampler { field: "context", value: 0, expected });
        }
        let mut this = Self { rows: Vec::new(), cut: 0, dropped: 0, targets: 0, length, prefixed, split };
        let mut kept = Vec::new();
        for example in this.split.documents() {
            let fits = example.start..example.end.min(example.start.saturating_add(length));
            let counted = this.targets_of(&fits).count() as u64;
            if counted == 0 {
                this.dropped += 1;
                continue;
            }
            this.cut += usize::from(fits.len() < example.len());
            this.targets += counted;
            kept.push(fits);
        }
        if kept.is_empty() {
            return Err(ZooError::TooShort { split: this.split.name(), tokens: 0, needed: 1 });
        }
        this.rows = match packing {
            Packing::Alone => kept.into_iter().map(|example| vec![example]).collect(),
            Packing::Packed => packed(kept, length),
        };
        Ok(this)
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn count(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of tokens of a row.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.length
    }

    /// Returns the number of examples.
    #[must_use]
    pub fn examples(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// Returns how many of the examples were cut, since they are longer than a row.
    #[must_use]
    pub const fn cut(&self) -> usize {
        self.cut
    }

    /// Returns how many examples were left out, since none of their tokens is a target.
    #[must_use]
    pub const fn dropped(&self) -> usize {
        self.dropped
    }

    /// Returns the number of targets of all rows.
    #[must_use]
    pub const fn targets(&self) -> u64 {
        self.targets
    }

    /// Returns whether rows have prefixes.
    #[must_use]
    pub const fn has_prefixes(&self) -> bool {
        self.prefixed
    }

    /// Returns the split.
    pub(in crate::data) const fn split(&self) -> &Split {
        &self.split
    }

    /// Returns the numbers of an example's tokens that are predicted, from the first one on.
    fn targets_of(&self, example: &Range<usize>) -> impl Iterator<Item = usize> {
        let from = example.start;
        (1..example.len()).filter(move |at| self.split.counts(from + at))
    }

    /// Returns the number of targets in a row after its first `skipped` positions; 0 for numbers without a row.
    pub(in crate::data) fn counted(&self, row: Option<usize>, skipped: usize) -> f64 {
        let mut before = 0;
        let mut all = 0;
        for example in row.and_then(|row| self.rows.get(row)).into_iter().flatten() {
            all += self.targets_of(example).filter(|at| before + at > skipped).count();
            before += example.len();
        }
        all as f64
    }

    /// Appends a row to a batch of rows. What is missing is filled up with token 0 of weight 0, as a document
    /// of its own; so are numbers without a row.
    pub(in crate::data) fn append_to(&self, row: Option<usize>, batch: &mut Batch) {
        let first = batch.inputs.len();
        let weights = batch.weights.get_or_insert_default();
        let documents = batch.documents.get_or_insert_default();
        let mut prefixes = self.prefixed.then(|| batch.prefixes.get_or_insert_default());
        for example in row.and_then(|row| self.rows.get(row)).into_iter().flatten() {
            let begins = batch.inputs.len() - first;
            self.split.append_to(example.start, example.len(), &mut batch.inputs);
            batch.targets.extend_from_slice(&batch.inputs[first + begins + 1..]);
            batch.targets.push(0);
            documents.resize(batch.inputs.len(), begins as u32);
            weights.resize(batch.inputs.len(), 0.0);
            for at in self.targets_of(example) {
                weights[first + begins + at - 1] = 1.0;
            }
            if let Some(prefixes) = &mut prefixes {
                let prefix = self.targets_of(example).next().unwrap_or(0);
                prefixes.resize(batch.inputs.len(), (begins + prefix) as u32);
            }
        }
        let (filled, end) = (batch.inputs.len() - first, first + self.length);
        batch.inputs.resize(end, 0);
        batch.targets.resize(end, 0);
        weights.resize(end, 0.0);
        documents.resize(end, filled as u32);
        if let Some(prefixes) = prefixes {
            prefixes.resize(end, 0);
        }
    }
}

/// Puts examples of at most `length` tokens into rows, in the order of the first example of each row.
fn packed(examples: Vec<Range<usize>>, length: usize) -> Vec<Vec<Range<usize>>> {
    let mut by_length = examples;
    by_length.sort_by_key(|example| (std::cmp::Reverse(example.len()), example.start));
    let mut rows: Vec<Vec<Range<usize>>> = Vec::new();
    // Rows by the room that they have left.
    let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for example in by_length {
        let len = example.len();
        let tightest = open.range(len..).next().map(|(&room, _)| room);
        let (row, room) = if let Some(room) = tightest {
            let rows = open.get_mut(&room).expect("the room was found");
            let row = rows.pop().expect("a room has rows");
            if rows.is_empty() {
                open.remove(&room);
            }
            (row, room)
        } else {
            rows.push(Vec::new());
            (rows.len() - 1, length)
        };
        rows[row].push(example);
        open.entry(room - len).or_default().push(row);
    }
    for row in &mut rows {
        row.sort_by_key(|example| example.start);
    }
    rows.sort_by_key(|row| row[0].start);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_examples_are_in_rows_that_are_nearly_full() {
        let mut start = 0;
        let lengths = (0..500_usize).map(|i| 1 + i * i * 7 % 97);
        let all: Vec<Range<usize>> = lengths
            .map(|len| {
                start += len;
                start - len..start
            })
            .collect();
        let rows = packed(all.clone(), 100);
        let mut found: Vec<Range<usize>> = rows.concat();
        found.sort_by_key(|example| example.start);
        assert_eq!(found, all);
        let sum = |row: &Vec<Range<usize>>| row.iter().map(Range::len).sum::<usize>();
        assert!(rows.iter().all(|row| sum(row) <= 100));
        // Best-fit decreasing needs at most 11/9 of the best number of rows, and 6/9 more (Dósa 2007).
        assert!(
            rows.len() as f64 <= 11.0 / 9.0 * (start as f64 / 100.0).ceil() + 6.0 / 9.0,
            "{}",
            rows.len()
        );
    }
}
