//! Mixtures of experts: feed-forward networks of which a router chooses some for each token.

/// A mixture of experts. The router is a matrix; its product with a token, in f32 on every device, has a logit
/// for each expert. The experts with the highest logits are chosen, of equal ones the first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsSpec {
    /// Number of experts.
    pub count: usize,
    /// Number of experts that each token has.
    pub per_token: usize,
    /// The factors of their outputs.
    pub weights: ExpertWeights,
    /// How many tokens an expert takes.
    pub capacity: Capacity,
    /// What the router's losses add to the loss.
    pub losses: RouterLosses,
}

/// The factors of the outputs of a token's experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertWeights {
    /// Softmax over the logits of the chosen experts: they add up to 1 (Jiang et al. 2024, "Mixtral").
    Renormalised,
    /// Softmax over all logits (Fedus et al. 2021, "Switch Transformers").
    Probabilities,
}

/// How many tokens of a sequence an expert takes. First choices come before second ones, and earlier tokens
/// before later ones (Lepikhin et al. 2020, "`GShard`"); a token that finds no place has no output of that
/// expert. Counts are by sequence, so that they do not depend on the plan. Tokens that are generated one after
/// the other each are a sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Capacity {
    /// All of them.
    None,
    /// This number.
    Tokens(usize),
    /// This factor times an equal share of a sequence's choices, rounded up.
    Factor(f64),
}

impl Capacity {
    /// Returns the number of tokens that an expert takes of a sequence.
    pub(crate) fn of(self, tokens: usize, spec: &ExpertsSpec) -> usize {
        match self {
            Self::None => usize::MAX,
            Self::Tokens(most) => most,
            Self::Factor(factor) => {
                let share = (tokens * spec.per_token) as f64 / spec.count as f64;
                ((factor * share).ceil() as usize).max(1)
            }
        }
    }
}

/// Losses that keep a router in order. Each is a mean over the tokens and sequences of a step, whatever the
/// number of their targets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterLosses {
    /// Factor of the balancing loss `E sum_i f_i P_i`, for `E` experts, the share `f_i` of the choices that are
    /// expert `i`, and its mean probability `P_i` among all experts: 1 if all are used alike. Fedus et al. take
    /// 0.01.
    pub balance: f64,
    /// What shares and means are over.
    pub over: BalanceOver,
    /// Factor of the z-loss, the mean of the squared log-sum-exp of a token's logits (Zoph et al. 2022,
    /// "ST-MoE"). They take 0.001.
    pub z: f64,
}

/// What the shares and means of balancing losses are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalanceOver {
    /// Each layer and each sequence by itself; the losses of layers are added up. Gradients then depend neither
    /// on the plan nor on the sizes of microbatches.
    Layer,
    /// All layers together, each sequence by itself, as `transformers` computes it for Switch Transformers. The
    /// z-loss is a mean over layers.
    Model,
    /// All layers and all sequences of a microbatch together, as `transformers` computes it for Mixtral. The
    /// z-loss is a mean over layers.
    Batch,
}

impl BalanceOver {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Layer, Self::Model, Self::Batch];

    /// Returns its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Layer => "layer",
            Self::Model => "model",
            Self::Batch => "batch",
        }
    }

    /// Returns the one of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|over| over.name() == name)
    }
}

impl RouterLosses {
    /// No losses.
    pub const NONE: Self = Self { balance: 0.0, over: BalanceOver::Layer, z: 0.0 };

    /// Returns whether the losses take layers together, so that gradients of a layer's router depend on the
    /// others.
    #[must_use]
    pub fn joins_layers(&self) -> bool {
        self.over != BalanceOver::Layer && (self.balance != 0.0 || self.z != 0.0)
    }
}
