//! LAMB's trust ratio.

use super::Transform;
use crate::OptimError;
use crate::per_tensor::{PerTensor, Tensors};

/// Scales the update of each tensor to the norm of its parameters: multiplies it by `||p|| / ||u||`, or by 1
/// where either norm is 0.
///
/// Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Alg. 2,
/// with `phi(z) = z`. All tensors are scaled, vectors too. Tensors are independent, so a rank that holds some
/// of a model's tensors needs nothing from other ranks.
#[must_use]
pub fn scale_by_trust_ratio() -> impl Transform {
    ScaleByTrustRatio
}

#[derive(Debug)]
struct ScaleByTrustRatio;

impl Transform for ScaleByTrustRatio {
    fn name(&self) -> &'static str {
        "trust_ratio"
    }
    fn per_tensor(&self) -> Option<&dyn PerTensor> {
        Some(self)
    }
}

impl PerTensor for ScaleByTrustRatio {
    fn rewrite(&self, tensors: &mut Tensors<'_>) -> Result<(), OptimError> {
        let (params, updates) = (tensors.param_norms()?, tensors.update_norms()?);
        for (i, (param, update)) in params.into_iter().zip(updates).enumerate() {
            let ratio = param / update;
            if param > 0.0 && update > 0.0 && ratio.is_finite() {
                tensors.scale(i, ratio as f32)?;
            }
        }
        Ok(())
    }
}
