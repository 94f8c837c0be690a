//! Memory and operations for training a transformer, by closed forms: weights, gradients, optimizer state under
//! each ZeRO stage, and activations under each recomputation method. The forms describe published systems, not
//! farflung's own trainer.

mod activations;
mod state;
mod transformer;

pub use activations::ActivationMethod;
pub use state::{BytesPerParameter, StateBytes, ZeroStage};
pub use transformer::{Degrees, Footprint, Transformer, fewest_devices};
