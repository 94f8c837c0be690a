//! `AMSGrad`.

use super::{Adam, Averages, LocalMethod};
use crate::ChainBuilder;
use crate::transform::scale_by_amsgrad;

/// Row of [`METHODS`](super::METHODS) for [`amsgrad`].
pub const AMSGRAD: LocalMethod = LocalMethod {
    name: "amsgrad",
    summary: "Adam with the largest second moment so far",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[],
    averages: Averages::Gradients,
    buffers: |_| 3,
    per_tensor: false,
    build: |settings| amsgrad(settings.into()),
};

/// Builds `AMSGrad`: Adam with the largest second moment so far, as PyTorch's `Adam(amsgrad=True)`.
///
/// Source: Reddi et al. 2018, "On the Convergence of Adam and Beyond", Alg. 2.
#[must_use]
pub fn amsgrad(settings: Adam) -> ChainBuilder {
    settings.chain(scale_by_amsgrad)
}
