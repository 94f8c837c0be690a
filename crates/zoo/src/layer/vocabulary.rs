//! The vocabulary divided among ranks: each has the rows of the token table, and the logits, of some tokens
//! (Shoeybi et al. 2019, "Megatron-LM", section 3). The loss needs three numbers a token of the other ranks,
//! not their logits. Unlike there, the vocabulary is not padded: pieces may have any lengths.

use farflung_base::Axis;
use farflung_tensor::{Op, Tensor};

use super::{Result, StageContext, Targets};
use crate::cut::AxisShare;

/// What a rank has of the vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VocabularyPiece {
    /// The first of its tokens.
    pub(super) first: u32,
    rank: usize,
    /// The number of tokens of each rank.
    lengths: Vec<usize>,
}

/// The losses of a rank's tokens, the same on all ranks.
pub(super) struct Losses {
    /// The weighted loss of each token, `[N]`.
    pub(super) losses: Tensor,
    /// The logarithm of the sum of `exp(logit)` over the whole vocabulary, `[N]`.
    log_sums: Tensor,
}

impl VocabularyPiece {
    pub(super) fn of(share: &AxisShare, vocab: usize) -> Self {
        let lengths = share.all().map(|share| share.of(vocab).len()).collect();
        Self { first: share.of(vocab).start as u32, rank: share.rank(), lengths }
    }

    /// Returns the number of its tokens.
    pub(super) fn len(&self) -> usize {
        self.lengths[self.rank]
    }

    /// Returns the logits of the whole vocabulary, `[B, T, V]`.
    pub(super) fn gather(&self, cx: &StageContext<'_>, logits: &Tensor) -> Result<Tensor> {
        cx.exchange.gather(Axis::Tensor, logits, 2, &self.lengths)
    }

    /// Returns the losses against targets, with their weights.
    pub(super) fn losses(
        &self,
        cx: &StageContext<'_>,
        logits: &Tensor,
        (targets, weights): (&Tensor, Option<&Tensor>),
    ) -> Result<Losses> {
        let rows = targets.shape().len();
        let mut stats = cx.empty([rows, 3])?;
        let (first, targets) = (self.first, targets.view());
        cx.device.run(Op::LogitStats { logits: logits.view(), first, targets, stats: stats.view_mut() })?;
        let own = stats.to_vec::<f32>()?;
        let own: Vec<&[f32]> = own.chunks_exact(3).collect();
        let tops: Vec<f32> = own.iter().map(|own| own[0]).collect();
        let mut tops = cx.device.tensor(&tops, rows)?;
        cx.exchange.all_reduce_max(Axis::Tensor, &mut tops)?;
        let tops = tops.to_vec::<f32>()?;
        // The sums relative to the largest logit of all ranks, and the logits of the targets.
        let sums = own.iter().zip(&tops).map(|(own, top)| own[1] * (own[0] - top).exp());
        let sums: Vec<f32> = sums.chain(own.iter().map(|own| own[2])).collect();
        let mut sums = cx.device.tensor(&sums, [2, rows])?;
        cx.sum(&mut sums)?;
        let sums = sums.to_vec::<f32>()?;
        let (sums, picked) = sums.split_at(rows);
        let weights = weights.map(Tensor::to_vec::<f32>).transpose()?;
        let log_sum = |(sum, top): (&f32, &f32)| f64::from(*sum).ln() + f64::from(*top);
        let log_sums: Vec<f64> = sums.iter().zip(&tops).map(log_sum).collect();
        let loss = |(row, (log_sum, picked)): (usize, (&f64, &f32))| {
            let weight = weights.as_ref().map_or(1.0, |weights| weights[row]);
            if weight == 0.0 { 0.0 } else { (log_sum - f64::from(*picked)) as f32 * weight }
        };
        let losses: Vec<f32> = log_sums.iter().zip(picked).enumerate().map(loss).collect();
        let log_sums: Vec<f32> = log_sums.into_iter().map(|log_sum| log_sum as f32).collect();
        Ok(Losses { losses: cx.device.tensor(&losses, rows)?, log_sums: cx.device.tensor(&log_sums, rows)? })
    }

    /// Returns the weighted losses, and overwrites the logits by the gradient of their sum times the targets'
    /// scale.
    pub(super) fn losses_and_gradient(
        &self,
        cx: &StageContext<'_>,
        logits: &mut Tensor,
        Targets { ids, weights, scale }: Targets<'_>,
    ) -> Result<Tensor> {
        let Losses { losses, log_sums } = self.losses(cx, logits, (ids, weights))?;
        cx.device.run(Op::LogitGrad {
            logits: logits.view_mut(),
            first: self.first,
            targets: ids.view(),
            weights: weights.map(Tensor::view),
            log_sums: log_sums.view(),
            scale,
        })?;
        Ok(losses)
    }
}
