//! Checks of a model's description.

use super::{
    Activation, BlockSpec, Capacity, ExpertsSpec, MlpSpec, ModelSpec, NormSpec, Positions, RotaryScaling,
    RotarySpec,
};
use crate::{AxisShare, ZooError};

/// Bounds that keep all counts of a model within 64 bits.
pub(super) const LAYERS: usize = 1 << 14;
const HEADS: usize = 1 << 14;
const DIM: usize = 1 << 18;
const MLP_WIDTH: usize = 1 << 20;
const CONTEXT: usize = 1 << 24;
/// Most tokens of a context with tiles, of which there may be as many as the square of it over 8192.
const TILED_CONTEXT: usize = 1 << 18;
/// Most words of 32 bits of the lists of tiles of a layer.
const TILED_WORDS: u64 = 1 << 27;
const VOCAB: usize = 1 << 24;
const EXPERTS: usize = 1 << 12;

fn within(field: &'static str, value: usize, most: usize, expected: &'static str) -> Result<(), ZooError> {
    if value == 0 || value > most {
        return Err(ZooError::Config { field, value, expected });
    }
    Ok(())
}

fn ensure(good: bool, field: &'static str, value: usize, expected: &'static str) -> Result<(), ZooError> {
    if good { Ok(()) } else { Err(ZooError::Config { field, value, expected }) }
}

fn real(field: &'static str, value: f64, good: bool, expected: &'static str) -> Result<(), ZooError> {
    if good && value.is_finite() { Ok(()) } else { Err(ZooError::RealField { field, value, expected }) }
}

impl ModelSpec {
    /// Checks that every size is at least 1 and within bounds that keep all counts in 64 bits, and that the
    /// sizes fit each other.
    ///
    /// Errors: [`ZooError::Config`] or [`ZooError::RealField`] with the invalid field.
    pub fn validate(&self) -> Result<(), ZooError> {
        let layers = self.blocks.iter().try_fold(0_usize, |sum, run| sum.checked_add(run.count));
        within("layers", layers.unwrap_or(usize::MAX), LAYERS, "1 to 16384")?;
        within("dim", self.dim, DIM, "1 to 262144")?;
        within("context", self.context, CONTEXT, "1 to 16777216")?;
        within("vocab", self.vocab, VOCAB, "1 to 16777216")?;
        self.norm.validate()?;
        let experts: Vec<usize> = self.mixtures().map(|(_, experts)| experts.count).collect();
        if let Some(&first) = experts.first().filter(|_| self.joins_routers()) {
            let expected = "as many in each block, if they are balanced over blocks";
            let other = experts.into_iter().find(|&count| count != first);
            ensure(other.is_none(), "experts", other.unwrap_or(first), expected)?;
        }
        for run in &self.blocks {
            ensure(run.count > 0, "layers", run.count, "runs of at least one block")?;
            run.block.validate()?;
            let is_small = self.context <= TILED_CONTEXT || run.block.attention.pattern.is_one_range();
            let expected = "at most 262144 with a pattern of attention other than full and a window";
            ensure(is_small, "context", self.context, expected)?;
            let expected =
                "a shorter one, or another pattern of attention: its lists of tiles could exceed 512 MB";
            let words = run.words_of_tiles(self.context);
            ensure(words <= TILED_WORDS, "context", self.context, expected)?;
            let rotates = run.block.attention.rotary.is_some();
            let told = rotates != (self.positions == Positions::Learned);
            ensure(told, "positions", 0, "either a table of positions or a rotation in each block")?;
            if let Some(RotarySpec { scaling: RotaryScaling::Dynamic { original_context, .. }, .. }) =
                run.block.attention.rotary
            {
                let expected = "at most that without a change of the dynamic rotary base";
                ensure(self.context <= original_context, "context", self.context, expected)?;
            }
        }
        Ok(())
    }

    /// Checks that each rank of those that divide the experts has one in each mixture.
    ///
    /// Errors: [`ZooError::Config`].
    pub fn check_experts(&self, share: &AxisShare) -> Result<(), ZooError> {
        for (_, experts) in self.mixtures() {
            let has_one = share.all().all(|rank| !rank.of(experts.count).is_empty());
            ensure(has_one, "experts", experts.count, "one for each rank along the expert view")?;
        }
        Ok(())
    }

    /// Checks that each rank of those that divide the width of layers has a piece of each layer.
    ///
    /// Errors: [`ZooError::Config`] with the field that cannot be cut so.
    pub fn check_cut(&self, share: &AxisShare) -> Result<(), ZooError> {
        let has_one = |units| share.all().all(|rank| !rank.of(units).is_empty());
        ensure(has_one(self.vocab), "vocab", self.vocab, "a token for each rank along the tensor axis")?;
        for block in self.blocks.iter().map(|run| &run.block) {
            let heads = block.attention.heads.kv;
            for (field, units, expected) in [
                ("heads", heads, "enough key-value heads for each rank along the tensor axis to have one"),
                ("mlp width", block.mlp.width, "a column for each rank along the tensor axis"),
            ] {
                ensure(has_one(units), field, units, expected)?;
            }
        }
        Ok(())
    }
}

impl NormSpec {
    fn validate(&self) -> Result<(), ZooError> {
        let eps = f64::from(self.norm.eps);
        real("norm eps", eps, eps > 0.0 && eps < 1.0, "above 0 and below 1")
    }
}

impl BlockSpec {
    fn validate(&self) -> Result<(), ZooError> {
        self.norm.validate()?;
        let attention = &self.attention;
        let (heads, head_dim) = (attention.heads, attention.head_dim);
        within("heads", heads.query, HEADS, "1 to 16384")?;
        within("kv heads", heads.kv, HEADS, "1 to 16384")?;
        ensure(heads.query.is_multiple_of(heads.kv), "kv heads", heads.kv, "a divisor of `heads`")?;
        within("head dim", head_dim, DIM, "1 to 262144")?;
        ensure(
            heads.query.saturating_mul(head_dim) <= DIM,
            "head dim",
            head_dim,
            "at most 262144 over `heads`",
        )?;
        if let Some(rotary) = &attention.rotary {
            rotary.validate(head_dim)?;
        }
        if let Some(norm) = attention.head_norm {
            NormSpec { norm, bias: false }.validate()?;
            ensure(!attention.fused, "head norm", 1, "separate matrices of queries and keys")?;
        }
        within("mlp width", self.mlp.width, MLP_WIDTH, "1 to 1048576")?;
        if let Some(experts) = &self.experts {
            experts.validate()?;
            let MlpSpec { activation, gated, bias, .. } = self.mlp;
            let known = !bias
                && match activation {
                    Activation::Silu => gated,
                    Activation::Relu => !gated,
                    Activation::Gelu | Activation::GeluTanh => false,
                };
            let expected = "SiLU with a gate or ReLU without, and no biases in experts";
            return ensure(known, "gated", usize::from(gated), expected);
        }
        let known = match self.mlp.activation {
            Activation::Gelu | Activation::GeluTanh => !self.mlp.gated && self.mlp.bias,
            Activation::Silu => self.mlp.gated,
            Activation::Relu => false,
        };
        ensure(known, "gated", usize::from(self.mlp.gated), "a gate for SiLU, and none but biases for GELU")
    }
}

impl ExpertsSpec {
    fn validate(&self) -> Result<(), ZooError> {
        within("experts", self.count, EXPERTS, "1 to 4096")?;
        within("experts per token", self.per_token, self.count, "1 to `experts`")?;
        match self.capacity {
            Capacity::None => {}
            Capacity::Tokens(most) => within("expert capacity", most, CONTEXT, "1 to 16777216")?,
            Capacity::Factor(factor) => real("capacity factor", factor, factor > 0.0, "above 0")?,
        }
        real("balance loss", self.losses.balance, self.losses.balance >= 0.0, "at least 0")?;
        real("z loss", self.losses.z, self.losses.z >= 0.0, "at least 0")
    }
}

impl RotarySpec {
    fn validate(&self, head_dim: usize) -> Result<(), ZooError> {
        let fits = self.width >= 2 && self.width.is_multiple_of(2) && self.width <= head_dim;
        ensure(fits, "rotary width", self.width, "even, at least 2 and at most `head dim`")?;
        real("rotary base", self.base, self.base > 1.0, "above 1")?;
        match self.scaling {
            RotaryScaling::None => Ok(()),
            RotaryScaling::Linear { factor } => real("rotary factor", factor, factor > 0.0, "above 0"),
            RotaryScaling::Llama3 { factor, low_turns, high_turns, original_context } => {
                real("rotary factor", factor, factor > 0.0, "above 0")?;
                real("low frequency factor", low_turns, low_turns > 0.0, "above 0")?;
                let higher = high_turns > low_turns;
                real("high frequency factor", high_turns, higher, "above the low frequency factor")?;
                within("original context", original_context, CONTEXT, "1 to 16777216")
            }
            RotaryScaling::Dynamic { factor, original_context } => {
                real("rotary factor", factor, factor > 0.0, "above 0")?;
                within("original context", original_context, CONTEXT, "1 to 16777216")
            }
            RotaryScaling::Yarn { factor, fast_turns, slow_turns, original_context, amplitude, .. } => {
                real("rotary factor", factor, factor > 0.0, "above 0")?;
                real("slow turns", slow_turns, slow_turns > 0.0, "above 0")?;
                real("fast turns", fast_turns, fast_turns > slow_turns, "above the slow turns")?;
                real("rotary amplitude", amplitude, amplitude > 0.0, "above 0")?;
                within("original context", original_context, CONTEXT, "1 to 16777216")
            }
        }
    }
}
