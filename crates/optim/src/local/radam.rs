//! `RAdam`.

use super::{Adam, Averages, LocalMethod};
use crate::ChainBuilder;
use crate::transform::scale_by_radam;

/// Row of [`METHODS`](super::METHODS) for [`radam`].
pub const RADAM: LocalMethod = LocalMethod {
    name: "radam",
    summary: "rectified Adam: uses the second moment only once its estimate is reliable",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[],
    averages: Averages::Gradients,
    buffers: |_| 2,
    per_tensor: false,
    build: |settings| radam(settings.into()),
};

/// Builds rectified Adam: momentum alone until the second moment has averaged enough steps, then Adam times a
/// rectification factor.
///
/// Source: Liu et al. 2020, "On the Variance of the Adaptive Learning Rate and Beyond", Alg. 2, in PyTorch's
/// form.
#[must_use]
pub fn radam(settings: Adam) -> ChainBuilder {
    settings.chain(scale_by_radam)
}
