//! What a replica holds besides activations.

/// Which of a replica's state data-parallel ranks share out. Source: Rajbhandari et al. 2020, "ZeRO".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroStage {
    /// Nothing.
    None,
    /// Stage 1: the optimizer's state.
    Optimizer,
    /// Stage 2: gradients too.
    Gradients,
    /// Stage 3: weights too.
    Weights,
}

impl ZeroStage {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::None, Self::Optimizer, Self::Gradients, Self::Weights];

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// Bytes that a parameter takes by kind, before it is shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BytesPerParameter {
    /// Weights that are computed with.
    pub weights: u64,
    /// Gradients.
    pub gradients: u64,
    /// Weights in f32, where those above are shorter, and the optimizer's moments.
    pub optimizer: u64,
}

impl BytesPerParameter {
    /// DeepSpeed: f16 weights and gradients; weights and two moments of Adam in f32. 16 bytes.
    pub const DEEPSPEED: Self = Self { weights: 2, gradients: 2, optimizer: 12 };
    /// Megatron: as DeepSpeed, but gradients in f32. 18 bytes.
    pub const MEGATRON: Self = Self { weights: 2, gradients: 4, optimizer: 12 };
    /// All in f32, as our trainer has it: weights, gradients, two moments. 16 bytes.
    pub const F32: Self = Self { weights: 4, gradients: 4, optimizer: 8 };
}

/// Bytes that one rank holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StateBytes {
    /// Weights.
    pub weights: f64,
    /// Gradients.
    pub gradients: f64,
    /// The optimizer's state.
    pub optimizer: f64,
}

impl StateBytes {
    /// Of so many parameters on a rank, shared out over `data` ranks; with `offload` the optimizer's state is
    /// in the host's memory.
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

    /// All of it.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.weights + self.gradients + self.optimizer
    }
}
