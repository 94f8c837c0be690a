//! What a block has behind its attention: one feed-forward network, or a mixture of experts.

use farflung_tensor::Tensor;

use super::builder::Builder;
use super::{Activations, Experts, Grads, Mlp, Result, StageContext, Then};
use crate::spec::BlockSpec;

/// A feed-forward network, or several.
#[derive(Debug, Clone)]
pub(super) enum FeedForward {
    Dense(Mlp),
    Experts(Experts),
}

impl FeedForward {
    pub(super) fn new(builder: &mut Builder, dim: usize, spec: &BlockSpec) -> Self {
        match &spec.experts {
            None => Self::Dense(Mlp::new(builder, dim, &spec.mlp)),
            Some(experts) => Self::Experts(Experts::new(builder, dim, &spec.mlp, experts)),
        }
    }

    /// Returns the index of the last parameter, plus one.
    pub(super) fn end(&self) -> usize {
        match self {
            Self::Dense(mlp) => mlp.end(),
            Self::Experts(experts) => experts.end(),
        }
    }

    pub(super) fn forward(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        then: Then<'_>,
        saved: &mut Activations,
    ) -> Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.forward(cx, x, then, saved),
            Self::Experts(experts) => experts.forward(cx, x, &then, saved),
        }
    }

    pub(super) fn backward_input(
        &self,
        cx: &StageContext<'_>,
        saved: &mut Activations,
        dy: &Tensor,
    ) -> Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.backward_input(cx, saved, dy),
            Self::Experts(experts) => experts.backward_input(cx, saved, dy),
        }
    }

    pub(super) fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        saved: &Activations,
        x: &Tensor,
        dy: &Tensor,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        match self {
            Self::Dense(mlp) => mlp.backward_weight(cx, saved, x, dy, grads),
            Self::Experts(experts) => experts.backward_weight(cx, saved, x, grads),
        }
    }
}
