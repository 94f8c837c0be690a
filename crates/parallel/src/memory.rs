//! Bytes and operations that training a transformer takes, by closed forms: weights, gradients, optimizer state
//! under each ZeRO stage, activations under each way of recomputing. Of the published systems, not of our
//! trainer.

mod activations;
mod state;
mod transformer;

pub use activations::ActivationMethod;
pub use state::{BytesPerParameter, StateBytes, ZeroStage};
pub use transformer::{Degrees, Footprint, Transformer};
