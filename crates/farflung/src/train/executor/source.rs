//! Where the sequences of an executor's passes come from.

use farflung_zoo::{Batch, Sampler, Shard};

use super::Pass;
use crate::Result;

/// The sequences of the passes.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one of it on a rank")]
pub(in crate::train) enum Source {
    /// Sequences of a text.
    Text {
        /// Those on which the replica trains.
        training: Sampler,
        /// Those on which it is evaluated.
        evaluation: Sampler,
    },
    /// Sequences without contents, for an executor on a device that only counts.
    Counted {
        /// Sequences of a microbatch.
        batch: usize,
        /// Tokens of a sequence.
        context: usize,
        /// Whether passes are told where documents begin.
        documents: bool,
        /// Whether they are told where prefixes end.
        prefixes: bool,
    },
}

impl Source {
    /// Returns the number of sequences of a training microbatch.
    pub(super) const fn batch(&self) -> usize {
        match self {
            Self::Text { training, .. } => training.shard().batch,
            Self::Counted { batch, .. } => *batch,
        }
    }

    pub(super) const fn context(&self) -> usize {
        match self {
            Self::Text { training, .. } => training.context(),
            Self::Counted { context, .. } => *context,
        }
    }

    /// Returns the number of different sequences of the text, if they are numbered.
    pub(in crate::train) fn windows(&self) -> Option<u64> {
        match self {
            Self::Text { training, .. } => training.windows(),
            Self::Counted { .. } => None,
        }
    }

    /// Returns whether the sequences of a pass have documents that are kept apart, or prefixes.
    pub(super) fn has_borders(&self, pass: Pass) -> bool {
        let of = |sampler: &Sampler| sampler.is_divided() || sampler.has_prefixes();
        match self {
            Self::Text { training, evaluation } => match pass {
                Pass::Training { .. } => of(training),
                Pass::Evaluation => of(evaluation),
            },
            Self::Counted { documents, prefixes, .. } => *documents || *prefixes,
        }
    }

    /// Returns the numbers of the samples of a microbatch, counted over all steps and replicas.
    pub(super) fn windows_of(&self, microbatch: u64) -> Vec<u64> {
        let batch = self.batch() as u64;
        let sequences = microbatch * batch..(microbatch + 1) * batch;
        match self {
            Self::Text { training, .. } => sequences.map(|n| training.window(n).unwrap_or(n)).collect(),
            Self::Counted { .. } => sequences.collect(),
        }
    }

    /// Returns the sequences of a microbatch of a pass.
    pub(super) fn sequences(&self, pass: Pass, microbatch: u32) -> Result<Batch> {
        match self {
            Self::Text { training, evaluation } => {
                let (sampler, first, batch) = of_pass(training, evaluation, pass, microbatch);
                Ok(sampler.sequences(first, batch)?)
            }
            Self::Counted { batch, context, documents, prefixes } => {
                let count = batch * context;
                Ok(Batch {
                    length: *context,
                    inputs: vec![0; count],
                    targets: vec![0; count],
                    // The last token of a document has no target, nor have most of a prefix.
                    weights: (*documents || *prefixes).then(|| vec![1.0; count]),
                    documents: documents.then(|| vec![0; count]),
                    prefixes: prefixes.then(|| vec![0; count]),
                })
            }
        }
    }

    /// Returns the number of tokens that count in `microbatches` microbatches of a pass from one on.
    pub(super) fn counted(&self, pass: Pass, microbatch: u32, microbatches: u32) -> Result<f64> {
        match self {
            Self::Text { training, evaluation } => {
                let (sampler, first, batch) = of_pass(training, evaluation, pass, microbatch);
                Ok(sampler.counted(first, batch as u64 * u64::from(microbatches))?)
            }
            Self::Counted { batch, context, .. } => Ok((batch * context) as f64 * f64::from(microbatches)),
        }
    }
}

/// Returns the sampler of a pass, the number of a microbatch's first sequence, and the number of its sequences.
const fn of_pass<'a>(
    training: &'a Sampler,
    evaluation: &'a Sampler,
    pass: Pass,
    microbatch: u32,
) -> (&'a Sampler, u64, usize) {
    match pass {
        Pass::Training { first } => {
            let batch = training.shard().batch;
            (training, (first + microbatch as u64) * batch as u64, batch)
        }
        Pass::Evaluation => {
            let Shard { rank, world, batch } = evaluation.shard();
            (evaluation, (microbatch as usize * world * batch + rank * batch) as u64, batch)
        }
    }
}
