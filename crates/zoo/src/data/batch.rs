//! A batch: tokens, what they are to predict, how much each prediction counts, and where documents begin and
//! prefixes end.

use std::ops::Range;

/// Some sequences of `length` tokens, row by row.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Batch {
    /// Number of tokens of a sequence.
    pub length: usize,
    /// The tokens.
    pub inputs: Vec<u32>,
    /// The token that follows each.
    pub targets: Vec<u32>,
    /// Weight of each target; `None` if all count 1. A target of weight 0 is none.
    pub weights: Option<Vec<f32>>,
    /// For each token, the position in its sequence of its document's first token: that of the token itself, or
    /// what the token before it has. `None` if each sequence is one document.
    pub documents: Option<Vec<u32>>,
    /// For each token, the position in its sequence at which the prefix of its document ends: up to there,
    /// tokens are read in both directions. `None` if there are no prefixes.
    pub prefixes: Option<Vec<u32>>,
}

impl Batch {
    /// Returns the sum of the weights: the number of targets that count.
    #[must_use]
    pub fn counted(&self) -> f64 {
        match &self.weights {
            Some(weights) => weights.iter().map(|&weight| f64::from(weight)).sum(),
            None => self.targets.len() as f64,
        }
    }

    /// Returns the same sequences with only some of their positions. Documents still begin where they began in
    /// the whole sequences, and prefixes end where they ended.
    ///
    /// # Panics
    /// If a position is not below `length`.
    #[must_use]
    pub fn positions(self, positions: &Range<usize>) -> Self {
        if positions.len() == self.length {
            return self;
        }
        Self {
            length: positions.len(),
            inputs: cut(&self.inputs, self.length, positions),
            targets: cut(&self.targets, self.length, positions),
            weights: self.weights.map(|weights| cut(&weights, self.length, positions)),
            documents: self.documents.map(|documents| cut(&documents, self.length, positions)),
            prefixes: self.prefixes.map(|prefixes| cut(&prefixes, self.length, positions)),
        }
    }
}

/// Returns some positions of rows of this length.
fn cut<T: Copy>(all: &[T], length: usize, positions: &Range<usize>) -> Vec<T> {
    all.chunks_exact(length).flat_map(|row| &row[positions.clone()]).copied().collect()
}
