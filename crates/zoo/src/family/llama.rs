//! LLaMA 1 to 3 and models of the same shape, such as TinyLlama and SmolLM2 (Touvron et al. 2023; Grattafiori
//! et al. 2024): RMS norms, rotary positions, grouped queries, SwiGLU, no biases.

use serde_json::{Map, Value};

use super::gated::{self, Generation, Reading, Sizes};
use super::{Family, Preset};
use crate::ZooError;
use crate::json_fields::Fields;
use crate::naming::Names;
use crate::spec::{AttentionBias, HeadSpec, ModelSpec, RotaryScaling};

/// LLaMA's family. Presets: three small ones with GPT-2's sizes, then published models.
pub(super) static FAMILY: Family = Family {
    names: &TENSORS,
    model_type: "llama",
    presets: &[
        Preset { name: "llama-nano", spec: || shape(&SMALL, 4, (4, 4), 128, 344, 64, 256) },
        Preset { name: "llama-baby", spec: || shape(&SMALL, 6, (6, 2), 384, 1024, 256, 256) },
        Preset { name: "llama-124m", spec: || shape(&SMALL, 12, (12, 12), 768, 2048, 1024, 50257) },
        Preset { name: "smollm2-135m", spec: || shape(&SMOLLM2, 30, (9, 3), 576, 1536, 8192, 49152) },
        Preset { name: "smollm2-360m", spec: || shape(&SMOLLM2, 32, (15, 5), 960, 2560, 8192, 49152) },
        Preset {
            name: "smollm2-1.7b",
            spec: || shape(&SMOLLM2_LARGE, 24, (32, 32), 2048, 8192, 8192, 49152),
        },
        Preset { name: "tinyllama-1.1b", spec: || shape(&LLAMA, 22, (32, 4), 2048, 5632, 2048, 32000) },
        Preset { name: "llama-7b", spec: || shape(&LLAMA, 32, (32, 32), 4096, 11008, 2048, 32000) },
        Preset { name: "llama-13b", spec: || shape(&LLAMA, 40, (40, 40), 5120, 13824, 2048, 32000) },
        Preset { name: "llama-33b", spec: || shape(&LLAMA, 60, (52, 52), 6656, 17920, 2048, 32000) },
        Preset { name: "llama-65b", spec: || shape(&LLAMA, 80, (64, 64), 8192, 22016, 2048, 32000) },
        Preset { name: "llama2-7b", spec: || shape(&LLAMA, 32, (32, 32), 4096, 11008, 4096, 32000) },
        Preset { name: "llama2-13b", spec: || shape(&LLAMA, 40, (40, 40), 5120, 13824, 4096, 32000) },
        // Of the second version, as papers call it.
        Preset { name: "llama2-70b", spec: || shape(&LLAMA, 80, (64, 8), 8192, 28672, 4096, 32000) },
        Preset { name: "llama3-8b", spec: || shape(&LLAMA3, 32, (32, 8), 4096, 14336, 8192, 128_256) },
        Preset { name: "llama3-70b", spec: || shape(&LLAMA3, 80, (64, 8), 8192, 28672, 8192, 128_256) },
        Preset {
            name: "llama3.1-405b",
            spec: || shape(&LLAMA31, 126, (128, 8), 16384, 53248, 131_072, 128_256),
        },
        Preset { name: "llama3.2-1b", spec: || shape(&LLAMA32, 16, (32, 8), 2048, 8192, 131_072, 128_256) },
        Preset { name: "llama3.2-3b", spec: || shape(&LLAMA32, 28, (24, 8), 3072, 8192, 131_072, 128_256) },
    ],
    read,
    write,
};

static TENSORS: Names = gated::names("llama");

const SMALL: Generation = Generation::new(&TENSORS, 10_000.0, HeadSpec::Tied);
const SMOLLM2: Generation = Generation::new(&TENSORS, 100_000.0, HeadSpec::Tied);
const SMOLLM2_LARGE: Generation = Generation::new(&TENSORS, 130_000.0, HeadSpec::Tied);
const LLAMA: Generation = Generation::new(&TENSORS, 10_000.0, HeadSpec::Own);
const LLAMA3: Generation = Generation::new(&TENSORS, 500_000.0, HeadSpec::Own);
const LLAMA31: Generation = Generation { scaling: longer(8.0), ..LLAMA3 };
const LLAMA32: Generation = Generation { scaling: longer(32.0), head: HeadSpec::Tied, ..LLAMA3 };

/// Returns LLaMA 3.1's scaling, by which a context of 8192 tokens becomes longer.
const fn longer(factor: f64) -> RotaryScaling {
    RotaryScaling::Llama3 { factor, low_turns: 1.0, high_turns: 4.0, original_context: 8192 }
}

fn shape(
    generation: &Generation,
    layers: usize,
    heads: (usize, usize),
    dim: usize,
    width: usize,
    context: usize,
    vocab: usize,
) -> ModelSpec {
    generation.model(Sizes { layers, heads, dim, width, context, vocab })
}

fn read(fields: &Fields<'_>) -> Result<ModelSpec, ZooError> {
    let bias = fields.flag_or("attention_bias", false)?;
    let reading = Reading { names: &TENSORS, kv: None, head_dim: None, eps: 1e-6, context: 2048 };
    gated::read(fields, reading, |spec| {
        let bias = if bias { AttentionBias::All } else { AttentionBias::None };
        spec.blocks.iter_mut().for_each(|run| run.block.attention.bias = bias);
        Ok(())
    })
}

fn write(spec: &ModelSpec) -> Map<String, Value> {
    let mut json = gated::write(spec, "LlamaForCausalLM");
    let block = spec.blocks.first().map(|run| run.block);
    let bias = block.is_some_and(|block| block.attention.bias == AttentionBias::All);
    json.insert("attention_bias".to_owned(), bias.into());
    json.insert("mlp_bias".to_owned(), block.is_some_and(|block| block.mlp.bias).into());
    json
}
