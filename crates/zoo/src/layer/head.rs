//! The last layer: final norm, logits by the token table or a matrix of its own, perhaps with a bias, and the
//! loss. There is one buffer of logits; in training it is overwritten with the gradient of the logits. Where
//! ranks divide the vocabulary, none has all logits.

use farflung_tensor::{Fuse, Op, Tensor};

use super::builder::Builder;
use super::vocabulary::VocabularyPiece;
use super::{Grads, NormLayer, Result, StageContext, dims};
use crate::naming::Slot;
use crate::spec::{HeadSpec, ModelSpec};
use crate::tensor_spec::TensorKind;

/// Head: `logits = norm(x) table^T`.
#[derive(Debug, Clone)]
pub struct Head {
    norm: NormLayer,
    /// Index of the table `[V, C]` in the layout; the bias follows if there is one.
    table: usize,
    kind: HeadSpec,
    /// Number of logits of this rank.
    vocab: usize,
    /// Its piece of the vocabulary, if ranks divide it.
    piece: Option<VocabularyPiece>,
}

/// What a head is to predict.
#[derive(Debug, Clone, Copy)]
pub struct Targets<'a> {
    /// Ids of the target tokens: u32 `[B, T]`.
    pub ids: &'a Tensor,
    /// Weight of each target, `[B T]`; `None` for 1. Weight 0 is no target, whatever the id is.
    pub weights: Option<&'a Tensor>,
    /// Factor of the gradient of the weighted losses' sum: one over the sum of the weights of the whole step.
    pub scale: f32,
}

impl<'a> Targets<'a> {
    /// Every token has a target, and all weigh the same.
    #[must_use]
    pub const fn all(ids: &'a Tensor, scale: f32) -> Self {
        Self { ids, weights: None, scale }
    }
}

/// Values that a forward pass saves for the backward pass.
#[derive(Debug)]
pub struct HeadSaved {
    x: Tensor,
    stats: Tensor,
    norm: Tensor,
    d_logits: Tensor,
    d_norm: Option<Tensor>,
}

impl HeadSaved {
    /// Returns the tensors that are kept, the logits apart.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.x, &self.stats, &self.norm].into_iter().chain(&self.d_norm)
    }

    /// Returns the logits, or their gradient.
    pub(crate) const fn logits(&self) -> &Tensor {
        &self.d_logits
    }
}

impl Head {
    /// Adds the tensors of a head. `tied` is the index of the token table, if the head uses it.
    pub(super) fn new(builder: &mut Builder, spec: &ModelSpec, tied: Option<usize>) -> Self {
        let norm = NormLayer::new(builder, Slot::FinalNorm, spec.dim, &spec.norm);
        let table = match spec.head {
            HeadSpec::Tied => tied.unwrap_or(0),
            HeadSpec::Own | HeadSpec::OwnWithBias => {
                builder.vocabulary_tensor(Slot::Head, TensorKind::Table, &[spec.vocab, spec.dim])
            }
        };
        if spec.head == HeadSpec::OwnWithBias {
            builder.vocabulary_tensor(Slot::Head, TensorKind::Bias, &[spec.vocab]);
        }
        let piece = builder.piece_of_vocabulary(spec.vocab);
        let vocab = piece.as_ref().map_or(spec.vocab, VocabularyPiece::len);
        Self { norm, table, kind: spec.head, vocab, piece }
    }

    /// Returns the index of the first parameter, and their number, without a tied table.
    pub(crate) const fn params(&self) -> (usize, usize) {
        let (first, count) = self.norm.params();
        let own = match self.kind {
            HeadSpec::Tied => 0,
            HeadSpec::Own => 1,
            HeadSpec::OwnWithBias => 2,
        };
        (first, count + own)
    }

    /// Returns whether the head uses the token table.
    pub(crate) fn is_tied(&self) -> bool {
        self.kind == HeadSpec::Tied
    }

    fn has_bias(&self) -> bool {
        self.kind == HeadSpec::OwnWithBias
    }

    /// Returns this rank's logits `[B, T, V]`, the normalised hidden states, and the statistics of the norm.
    fn logits_of(&self, cx: &StageContext<'_>, x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let (norm, stats) = self.norm.forward(cx, x)?;
        let whole = cx.whole(&norm)?;
        let [b, t, _] = dims(&whole)?;
        let mut logits = cx.empty([b, t, self.vocab])?;
        let bias = self.has_bias().then(|| cx.param(self.table + 1)).transpose()?;
        cx.device.run(Op::MatMul {
            a: whole.view(),
            a_t: false,
            b: cx.param(self.table)?,
            b_t: true,
            c: logits.view_mut(),
            accumulate: false,
            scales: [1.0; 2],
            fuse: bias.map_or(Fuse::None, Fuse::Bias),
        })?;
        drop(whole);
        Ok((logits, norm, stats))
    }

    /// Returns the logits `[B, T, V]` of hidden states.
    pub fn logits(&self, cx: &StageContext<'_>, x: &Tensor) -> Result<Tensor> {
        let logits = self.logits_of(cx, x)?.0;
        match &self.piece {
            Some(piece) => piece.gather(cx, &logits),
            None => Ok(logits),
        }
    }

    /// Returns the losses `[B T]` in nats, per token, against `targets` (u32 `[B, T]`).
    pub fn losses(&self, cx: &StageContext<'_>, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (mut logits, ..) = self.logits_of(cx, x)?;
        if let Some(piece) = &self.piece {
            return Ok(piece.losses(cx, &logits, (targets, None))?.losses);
        }
        let mut losses = cx.empty(targets.shape().len())?;
        cx.device.run(Op::CrossEntropy {
            logits: logits.view_mut(),
            targets: targets.view(),
            weights: None,
            losses: losses.view_mut(),
            grad_scale: None,
        })?;
        Ok(losses)
    }

    /// Returns the weighted losses `[B T]` per token, and the saved values for the backward pass. The gradient
    /// is that of their sum times the targets' scale.
    pub fn forward(
        &self,
        cx: &StageContext<'_>,
        x: Tensor,
        targets: Targets<'_>,
    ) -> Result<(Tensor, HeadSaved)> {
        let (mut d_logits, norm, stats) = self.logits_of(cx, &x)?;
        if let Some(piece) = &self.piece {
            let losses = piece.losses_and_gradient(cx, &mut d_logits, targets)?;
            return Ok((losses, HeadSaved { x, stats, norm, d_logits, d_norm: None }));
        }
        let mut losses = cx.empty(targets.ids.shape().len())?;
        cx.device.run(Op::CrossEntropy {
            logits: d_logits.view_mut(),
            targets: targets.ids.view(),
            weights: targets.weights.map(Tensor::view),
            losses: losses.view_mut(),
            grad_scale: Some(targets.scale),
        })?;
        Ok((losses, HeadSaved { x, stats, norm, d_logits, d_norm: None }))
    }

    /// Returns the gradient of the hidden states.
    pub fn backward_input(&self, cx: &StageContext<'_>, saved: &mut HeadSaved) -> Result<Tensor> {
        let [b, t, _] = dims(&saved.d_logits)?;
        let mut d_norm = cx.empty([b, t, dims(&saved.x)?[2]])?;
        cx.device.run(Op::MatMul {
            a: saved.d_logits.view(),
            a_t: false,
            b: cx.param(self.table)?,
            b_t: false,
            c: d_norm.view_mut(),
            accumulate: false,
            scales: [cx.gradient_scale, 1.0],
            fuse: Fuse::None,
        })?;
        if self.piece.is_some() {
            d_norm = cx.reduced(d_norm)?;
        }
        let dx = self.norm.backward_input(cx, &saved.x, &saved.stats, &d_norm, None)?;
        saved.d_norm = Some(d_norm);
        Ok(dx)
    }

    /// Computes the gradients of the final norm, of the table and of its bias.
    ///
    /// # Panics
    /// If [`Head::backward_input`] was not called before.
    pub fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        saved: HeadSaved,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let d_norm = saved.d_norm.expect("`backward_input` is called before `backward_weight`");
        let accumulate = grads.accumulate();
        let [table] = grads.of(cx.layout, self.table)?;
        cx.device.run(Op::MatMul {
            a: saved.d_logits.view(),
            a_t: true,
            b: cx.whole(&saved.norm)?.view(),
            b_t: false,
            c: table,
            accumulate,
            scales: [cx.gradient_scale, 1.0],
            fuse: Fuse::None,
        })?;
        if self.has_bias() {
            let [bias] = grads.of(cx.layout, self.table + 1)?;
            cx.device.run(Op::SumRows { x: saved.d_logits.view(), y: bias, accumulate })?;
        }
        self.norm.backward_weight(cx, &saved.x, &saved.stats, &d_norm, grads)
    }
}
