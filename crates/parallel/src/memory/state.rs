//! Memory of a replica besides activations.

use std::ops::Add;

/// Which parts of a replica's state are divided over data-parallel ranks. Source: Rajbhandari et al. 2020,
/// "ZeRO".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroStage {
    /// No part of the state is divided.
    None,
    /// Stage 1: the optimizer's state is divided.
    Optimizer,
    /// Stage 2: optimizer state and gradients are divided.
    Gradients,
    /// Stage 3: optimizer state, gradients and weights are divided.
    Weights,
}

impl ZeroStage {
    /// All stages.
    pub const ALL: [Self; 4] = [Self::None, Self::Optimizer, Self::Gradients, Self::Weights];

    /// Returns the number of the stage.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// Bytes per parameter for each kind of state, before the state is divided over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BytesPerParameter {
    /// Bytes of the weights used in computation.
    pub weights: u64,
    /// Bytes of gradients.
    pub gradients: u64,
    /// Bytes of the optimizer's moments, and of f32 weights if the weights above are shorter.
    pub optimizer: u64,
}

impl BytesPerParameter {
    /// DeepSpeed: weights and gradients in f16; a second copy of the weights and two moments of Adam in f32. 16
    /// bytes.
    pub const DEEPSPEED: Self = Self { weights: 2, gradients: 2, optimizer: 12 };
    /// Megatron: as DeepSpeed, but gradients in f32. 18 bytes.
    pub const MEGATRON: Self = Self { weights: 2, gradients: 4, optimizer: 12 };
    /// Everything in f32, as in farflung's trainer: weights, gradients, two moments. 16 bytes.
    pub const F32: Self = Self { weights: 4, gradients: 4, optimizer: 8 };
}

/// Bytes that one rank holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StateBytes {
    /// Bytes of weights.
    pub weights: f64,
    /// Bytes of gradients.
    pub gradients: f64,
    /// Bytes of the optimizer's state.
    pub optimizer: f64,
}

impl Add for StateBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            gradients: self.gradients + other.gradients,
            optimizer: self.optimizer + other.optimizer,
        }
    }
}

impl StateBytes {
    /// Computes the bytes for `parameters` parameters, divided over `data` ranks as `stage` says. With
    /// `offload`, the optimizer's state is in the host's memory and not counted.
    #[must_use]
    pub fn new(parameters: f64, each: BytesPerParameter, stage: ZeroStage, data: u64, offload: bool) -> Self {
        let share = |from: ZeroStage| {
            if stage.number() >= from.number() { parameters / data.max(1) as f64 } else { parameters }
        };
        Self {
            weights: each.weights as f64 * share(ZeroStage::Weights),
            gradients: each.gradients as f64 * share(ZeroStage::Gradients),
            optimizer: if offload { 0.0 } else { each.optimizer as f64 * share(ZeroStage::Optimizer) },
        }
    }

    /// Returns the total.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.weights + self.gradients + self.optimizer
    }
}
