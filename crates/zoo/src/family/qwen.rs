//! Qwen 2, 2.5 and 3 (Yang et al. 2024, 2025): LLaMA's shape; the second has biases of queries, keys and
//! values, the third a norm of each head of queries and keys instead.

use farflung_base::AttentionPattern;
use farflung_tensor::Norm;
use serde_json::{Map, Value};

use super::gated::{self, Generation, Reading, Sizes};
use super::{Family, Preset};
use crate::ZooError;
use crate::json_fields::Fields;
use crate::naming::Names;
use crate::spec::{AttentionBias, HeadSpec, ModelSpec, Run};

/// Qwen 2 and 2.5.
pub(super) static QWEN2: Family = Family {
    names: &QWEN2_TENSORS,
    model_type: "qwen2",
    presets: &[
        Preset { name: "qwen2.5-0.5b", spec: || shape(&SECOND_TIED, 24, (14, 2), 896, 4864, 151_936) },
        Preset { name: "qwen2.5-1.5b", spec: || shape(&SECOND_TIED, 28, (12, 2), 1536, 8960, 151_936) },
        Preset { name: "qwen2.5-3b", spec: || shape(&SECOND_TIED, 36, (16, 2), 2048, 11008, 151_936) },
        Preset { name: "qwen2.5-7b", spec: || shape(&SECOND, 28, (28, 4), 3584, 18944, 152_064) },
        Preset { name: "qwen2.5-14b", spec: || shape(&SECOND, 48, (40, 8), 5120, 13824, 152_064) },
        Preset { name: "qwen2.5-32b", spec: || shape(&SECOND, 64, (40, 8), 5120, 27648, 152_064) },
        Preset { name: "qwen2.5-72b", spec: || shape(&SECOND, 80, (64, 8), 8192, 29568, 152_064) },
    ],
    read: |fields| read(fields, &QWEN2_TENSORS, None),
    write: |spec| write(spec, "Qwen2ForCausalLM"),
};

/// Qwen 3.
pub(super) static QWEN3: Family = Family {
    names: &QWEN3_TENSORS,
    model_type: "qwen3",
    presets: &[
        Preset { name: "qwen3-0.6b", spec: || shape(&THIRD_TIED, 28, (16, 8), 1024, 3072, 151_936) },
        Preset { name: "qwen3-1.7b", spec: || shape(&THIRD_TIED, 28, (16, 8), 2048, 6144, 151_936) },
        Preset { name: "qwen3-4b", spec: || shape(&THIRD_TIED, 36, (32, 8), 2560, 9728, 151_936) },
        Preset { name: "qwen3-8b", spec: || shape(&THIRD, 36, (32, 8), 4096, 12288, 151_936) },
    ],
    read: |fields| read(fields, &QWEN3_TENSORS, Some(128)),
    write: |spec| write(spec, "Qwen3ForCausalLM"),
};

static QWEN2_TENSORS: Names = gated::names("qwen2");
static QWEN3_TENSORS: Names = gated::names("qwen3");

const SECOND: Generation = Generation {
    eps: 1e-6,
    bias: AttentionBias::Inputs,
    ..Generation::new(&QWEN2_TENSORS, 1e6, HeadSpec::Own)
};
const SECOND_TIED: Generation = Generation { head: HeadSpec::Tied, ..SECOND };
const THIRD: Generation = Generation {
    eps: 1e-6,
    head_dim: Some(128),
    head_norm: true,
    ..Generation::new(&QWEN3_TENSORS, 1e6, HeadSpec::Own)
};
const THIRD_TIED: Generation = Generation { head: HeadSpec::Tied, ..THIRD };

fn shape(
    generation: &Generation,
    layers: usize,
    heads: (usize, usize),
    dim: usize,
    width: usize,
    vocab: usize,
) -> ModelSpec {
    generation.model(Sizes { layers, heads, dim, width, context: 32768, vocab })
}

/// Reads a model. `head_dim` is that of files that do not say it: the third generation's.
fn read(fields: &Fields<'_>, names: &'static Names, head_dim: Option<usize>) -> Result<ModelSpec, ZooError> {
    let is_third = head_dim.is_some();
    let bias = match (is_third, is_third && fields.flag_or("attention_bias", false)?) {
        (false, _) => AttentionBias::Inputs,
        (true, true) => AttentionBias::All,
        (true, false) => AttentionBias::None,
    };
    // `sliding_window` means nothing without this, and then only from `max_window_layers` on.
    let window = if fields.flag_or("use_sliding_window", false)? && !fields.is_null("sliding_window") {
        Some((fields.number_or("max_window_layers", 28)?, fields.number_or("sliding_window", 4096)?))
    } else {
        None
    };
    let (first, window) = window.unzip();
    let sliding = gated::sliding(fields, window)?;
    let reading = Reading { names, kv: Some(32), head_dim, eps: 1e-6, context: 32768 };
    let spec = gated::read(fields, reading, |spec| {
        let Some(Run { count, mut block }) = spec.blocks.pop() else { return Ok(()) };
        block.attention.bias = bias;
        let Norm { kind, eps } = block.norm.norm;
        block.attention.head_norm = is_third.then_some(Norm { kind, eps });
        let whole = first.unwrap_or(count).min(count);
        let runs = [(whole, AttentionPattern::FULL), (count - whole, sliding)];
        spec.blocks.extend(runs.into_iter().filter(|(count, _)| *count > 0).map(|(count, pattern)| {
            block.attention.pattern = pattern;
            Run { count, block }
        }));
        Ok(())
    })?;
    check_layer_types(fields, &spec)?;
    Ok(spec)
}

/// Checks that `layer_types`, which transformers 5 writes, says the same as the other fields.
fn check_layer_types(fields: &Fields<'_>, spec: &ModelSpec) -> Result<(), ZooError> {
    let Some(found) = fields.get("layer_types") else { return Ok(()) };
    let of = |window: Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
    let expected: Vec<&str> = spec.each_block().map(|block| of(block.attention.pattern.window())).collect();
    if found
        .as_array()
        .is_some_and(|found| found.iter().map(Value::as_str).eq(expected.iter().map(|&t| Some(t))))
    {
        return Ok(());
    }
    let expected = "what `use_sliding_window` and `max_window_layers` say of each layer".to_owned();
    Err(fields.wrong("layer_types", expected))
}

fn write(spec: &ModelSpec, architecture: &str) -> Map<String, Value> {
    let mut json = gated::write(spec, architecture);
    let window = spec.each_block().find_map(|block| block.attention.pattern.window());
    let first = spec.each_block().take_while(|block| block.attention.pattern.window().is_none()).count();
    let bias = spec.each_block().any(|block| block.attention.bias == AttentionBias::All);
    for (field, value) in [
        ("attention_bias", Value::from(bias)),
        ("use_sliding_window", window.is_some().into()),
        ("sliding_window", window.into()),
        ("max_window_layers", first.into()),
    ] {
        json.insert(field.to_owned(), value);
    }
    json
}
