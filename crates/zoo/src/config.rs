//! Configuration of a model of the GPT-2 family: five numbers, from which follow the list of tensors, their
//! initial values, parameter counts and FLOPs per token.

use farflung_base::Philox;
use serde::{Deserialize, Serialize};

use crate::ZooError;

/// Configuration of a GPT: pre-norm blocks, learned positions, biases everywhere, GELU (tanh form), and a head
/// tied to the token embedding.
///
/// Fields are public so that a preset can be varied (`GptConfig { vocab: 256, ..preset }`).
/// [`Stage::new`](crate::Stage::new), [`weights::write`](crate::weights::write) and deserialization call
/// [`GptConfig::validate`] first.
///
/// Sources: Radford et al. 2019 (GPT-2); Brown et al. 2020, table 2.1 (GPT-3; its XL row has 24 x 128 heads
/// where the width is 2048, here 16 x 128; its 13B row has width 5140, here 5120; all its layers are dense
/// here).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct GptConfig {
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads per block. Must divide `dim`.
    pub heads: usize,
    /// Width of the hidden states.
    pub dim: usize,
    /// Maximum sequence length in tokens: number of rows of the position table.
    pub context: usize,
    /// Number of rows of the token table.
    pub vocab: usize,
}

/// The fields as deserialized, before validation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    layers: usize,
    heads: usize,
    dim: usize,
    context: usize,
    vocab: usize,
}

impl TryFrom<Unchecked> for GptConfig {
    type Error = ZooError;

    fn try_from(c: Unchecked) -> Result<Self, ZooError> {
        Self::new(c.layers, c.heads, c.dim, c.context, c.vocab)
    }
}

/// Initial values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normally distributed, with mean 0 and this standard deviation.
    Normal(f32),
    /// All zero.
    Zeros,
    /// All one.
    Ones,
}

/// One parameter tensor of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// Name in Hugging Face's GPT-2, without the `transformer.` prefix.
    pub name: String,
    /// Shape. A matrix is `[inputs, outputs]`: `y = x W + b`.
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
}

impl TensorSpec {
    /// Returns the number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Fills `out` with the initial values. `index` is the tensor's index in [`GptConfig::tensors`] of the
    /// whole model, so that a stage with a part of the model has the same initial values as the whole model.
    pub fn fill(&self, seed: u64, index: usize, out: &mut [f32]) {
        match self.init {
            Init::Normal(std) => Philox::new(seed, index as u64).fill_normal(std, out),
            Init::Zeros => out.fill(0.0),
            Init::Ones => out.fill(1.0),
        }
    }
}

const fn gpt(layers: usize, heads: usize, dim: usize, context: usize, vocab: usize) -> GptConfig {
    GptConfig { layers, heads, dim, context, vocab }
}

/// The presets by name: two small ones, then those of GPT-2 and of GPT-3, each in increasing size.
pub const PRESETS: [(&str, GptConfig); 14] = [
    ("nano", gpt(4, 4, 128, 64, 256)),
    ("baby", gpt(6, 6, 384, 256, 256)),
    ("gpt2", gpt(12, 12, 768, 1024, 50257)),
    ("gpt2-medium", gpt(24, 16, 1024, 1024, 50257)),
    ("gpt2-large", gpt(36, 20, 1280, 1024, 50257)),
    ("gpt2-xl", gpt(48, 25, 1600, 1024, 50257)),
    ("gpt3-small", gpt(12, 12, 768, 2048, 50257)),
    ("gpt3-medium", gpt(24, 16, 1024, 2048, 50257)),
    ("gpt3-large", gpt(24, 16, 1536, 2048, 50257)),
    ("gpt3-xl", gpt(24, 16, 2048, 2048, 50257)),
    ("gpt3-2.7b", gpt(32, 32, 2560, 2048, 50257)),
    ("gpt3-6.7b", gpt(32, 32, 4096, 2048, 50257)),
    ("gpt3-13b", gpt(40, 40, 5120, 2048, 50257)),
    ("gpt3-175b", gpt(96, 96, 12288, 2048, 50257)),
];

/// Standard deviation of the initial weights.
const INIT_STD: f32 = 0.02;

impl GptConfig {
    /// Creates a validated configuration.
    ///
    /// Errors: [`ZooError::Config`] with the invalid field.
    pub fn new(
        layers: usize,
        heads: usize,
        dim: usize,
        context: usize,
        vocab: usize,
    ) -> Result<Self, ZooError> {
        let config = gpt(layers, heads, dim, context, vocab);
        config.validate()?;
        Ok(config)
    }

    /// Returns the preset of this name.
    ///
    /// Errors: [`ZooError::UnknownPreset`], whose message lists the presets.
    pub fn preset(name: &str) -> Result<Self, ZooError> {
        PRESETS
            .iter()
            .find(|(known, _)| *known == name)
            .map(|&(_, config)| config)
            .ok_or_else(|| ZooError::UnknownPreset { name: name.to_owned() })
    }

    /// Checks that every field is at least 1 and within bounds that keep all counts in 64 bits, and that the
    /// heads divide the width.
    ///
    /// Errors: [`ZooError::Config`] with the invalid field.
    pub fn validate(&self) -> Result<(), ZooError> {
        let bounds = [
            ("layers", self.layers, 1 << 14, "1 to 16384"),
            ("heads", self.heads, 1 << 14, "1 to 16384"),
            ("dim", self.dim, 1 << 18, "1 to 262144"),
            ("context", self.context, 1 << 24, "1 to 16777216"),
            ("vocab", self.vocab, 1 << 24, "1 to 16777216"),
        ];
        for (field, value, most, expected) in bounds {
            if value == 0 || value > most {
                return Err(ZooError::Config { field, value, expected });
            }
        }
        if !self.dim.is_multiple_of(self.heads) {
            return Err(ZooError::Config {
                field: "heads",
                value: self.heads,
                expected: "a divisor of `dim`",
            });
        }
        Ok(())
    }

    /// Returns the width of one attention head.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.dim / self.heads
    }

    /// Returns the exact number of parameters, with the tied head counted once:
    /// `V d + T d + L (12 d^2 + 13 d) + 2 d`.
    #[must_use]
    pub const fn parameters(&self) -> u64 {
        (self.vocab as u64 + self.context as u64) * self.dim as u64 + self.non_embedding_parameters()
    }

    /// Returns the number of parameters without the token and position tables, the `N` of scaling laws (Kaplan
    /// et al. 2020): `L (12 d^2 + 13 d) + 2 d`.
    #[must_use]
    pub const fn non_embedding_parameters(&self) -> u64 {
        let (l, d) = (self.layers as u64, self.dim as u64);
        l * (12 * d * d + 13 * d) + 2 * d
    }

    /// Returns the floating-point operations of the matrix products of forward and backward pass, per token of
    /// a sequence of `context` tokens: `6 (12 L d^2 + V d) + 12 L d T`. Attention is counted in full, even if a
    /// causal kernel skips half of it.
    #[must_use]
    pub const fn flops_per_token(&self, context: usize) -> u64 {
        let (l, d) = (self.layers as u64, self.dim as u64);
        6 * (12 * l * d * d + self.vocab as u64 * d) + 12 * l * d * context as u64
    }

    /// Returns all tensors of the model, with Hugging Face's names, order and `Conv1D` layout:
    /// `[inputs, outputs]`.
    ///
    /// Initial values are those of nanoGPT: weights N(0, 0.02), projections onto the residual stream N(0, 0.02
    /// / sqrt(2 L)), biases 0, norm gains 1 and norm biases 0.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let d = self.dim;
        let weight = Init::Normal(INIT_STD);
        let onto_residual = Init::Normal((f64::from(INIT_STD) / (2.0 * self.layers as f64).sqrt()) as f32);
        let mut all = Vec::with_capacity(4 + 12 * self.layers);
        let mut push = |name: String, shape: &[usize], init| {
            all.push(TensorSpec { name, shape: shape.to_vec(), init });
        };
        push("wte.weight".to_owned(), &[self.vocab, d], weight);
        push("wpe.weight".to_owned(), &[self.context, d], weight);
        for layer in 0..self.layers {
            let mut block =
                |name: &str, shape: &[usize], init| push(format!("h.{layer}.{name}"), shape, init);
            block("ln_1.weight", &[d], Init::Ones);
            block("ln_1.bias", &[d], Init::Zeros);
            block("attn.c_attn.weight", &[d, 3 * d], weight);
            block("attn.c_attn.bias", &[3 * d], Init::Zeros);
            block("attn.c_proj.weight", &[d, d], onto_residual);
            block("attn.c_proj.bias", &[d], Init::Zeros);
            block("ln_2.weight", &[d], Init::Ones);
            block("ln_2.bias", &[d], Init::Zeros);
            block("mlp.c_fc.weight", &[d, 4 * d], weight);
            block("mlp.c_fc.bias", &[4 * d], Init::Zeros);
            block("mlp.c_proj.weight", &[4 * d, d], onto_residual);
            block("mlp.c_proj.bias", &[d], Init::Zeros);
        }
        push("ln_f.weight".to_owned(), &[d], Init::Ones);
        push("ln_f.bias".to_owned(), &[d], Init::Zeros);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_are_the_published_ones() {
        let counts = [
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200),
            ("gpt3-small", 125_226_240),
            ("gpt3-medium", 355_871_744),
            ("gpt3-large", 760_300_032),
            ("gpt3-xl", 1_315_723_264),
            ("gpt3-2.7b", 2_651_553_280),
            ("gpt3-6.7b", 6_658_404_352),
            ("gpt3-13b", 12_853_386_240),
            ("gpt3-175b", 174_604_259_328),
        ];
        for (name, count) in counts {
            assert_eq!(GptConfig::preset(name).unwrap().parameters(), count, "{name}");
        }
        assert_eq!(counts.len() + 2, PRESETS.len());
    }

    #[test]
    fn tensors_add_up_to_the_parameters_of_every_preset() {
        for (name, config) in PRESETS {
            config.validate().unwrap();
            let tensors = config.tensors();
            let sum: u64 = tensors.iter().map(|t| t.count() as u64).sum();
            assert_eq!(sum, config.parameters(), "{name}");
            let tables: u64 = tensors[..2].iter().map(|t| t.count() as u64).sum();
            assert_eq!(sum - tables, config.non_embedding_parameters(), "{name}");
        }
    }

    #[test]
    fn names_shapes_and_starts_are_those_of_hugging_face_and_nanogpt() {
        let tensors = GptConfig::preset("nano").unwrap().tensors();
        assert_eq!(tensors.len(), 4 + 12 * 4);
        let find = |name: &str| tensors.iter().find(|t| t.name == name).unwrap();
        assert_eq!(tensors[0].name, "wte.weight");
        assert_eq!(tensors[51].name, "ln_f.bias");
        assert_eq!(find("h.3.attn.c_attn.weight").shape, [128, 384]);
        assert_eq!(find("h.3.mlp.c_proj.weight").shape, [512, 128]);
        assert_eq!(find("h.0.mlp.c_proj.weight").init, Init::Normal(0.02 / 8.0_f32.sqrt()));
        assert_eq!(find("h.0.attn.c_attn.weight").init, Init::Normal(0.02));
        assert_eq!(find("h.0.ln_2.weight").init, Init::Ones);
    }

    #[test]
    fn starting_values_depend_on_the_place_in_the_whole_model() {
        let tensors = GptConfig::preset("nano").unwrap().tensors();
        let start = |tensor: usize, index| {
            let mut values = vec![0.0; 64];
            tensors[tensor].fill(7, index, &mut values);
            values
        };
        assert_eq!(start(4, 4), start(4, 4));
        assert_ne!(start(4, 4), start(4, 16));
        assert_eq!(start(2, 2), vec![1.0; 64]);
    }

    #[test]
    fn flops_match_the_closed_form() {
        // 6 (12 L d^2 + V d) + 12 L d T for nano: L = 4, d = 128, V = 256, and T = 64.
        assert_eq!(
            GptConfig::preset("nano").unwrap().flops_per_token(64),
            6 * (12 * 4 * 16384 + 32768) + 12 * 4 * 128 * 64
        );
    }

    #[test]
    fn bad_shapes_are_refused_with_their_field() {
        let cases = [
            (GptConfig::new(0, 4, 128, 64, 256), "layers"),
            (GptConfig::new(4, 0, 128, 64, 256), "heads"),
            (GptConfig::new(4, 3, 128, 64, 256), "heads"),
            (GptConfig::new(4, 4, usize::MAX, 64, 256), "dim"),
            (GptConfig::new(4, 4, 128, 0, 256), "context"),
            (GptConfig::new(4, 4, 128, 64, usize::MAX), "vocab"),
        ];
        for (result, field) in cases {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
        let message = GptConfig::preset("gpt5").unwrap_err().to_string();
        assert!(message.contains("gpt5") && message.contains("nano") && message.contains("gpt3-175b"));
        let json = r#"{"layers":4,"heads":3,"dim":128,"context":64,"vocab":256}"#;
        assert!(serde_json::from_str::<GptConfig>(json).unwrap_err().to_string().contains("heads"));
        let nano = GptConfig::preset("nano").unwrap();
        let json = serde_json::to_string(&nano).unwrap();
        assert_eq!(serde_json::from_str::<GptConfig>(&json).unwrap(), nano);
    }
}
