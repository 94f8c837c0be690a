//! Mistral (Jiang et al. 2023): LLaMA's shape, with a sliding window of attention in its first version.

use farflung_base::AttentionPattern;
use serde_json::{Map, Value};

use super::gated::{self, Generation, Reading, Sizes};
use super::{Family, Preset};
use crate::ZooError;
use crate::json_fields::Fields;
use crate::naming::Names;
use crate::spec::{HeadSpec, ModelSpec};

/// Mistral's family.
pub(super) static FAMILY: Family = Family {
    names: &TENSORS,
    model_type: "mistral",
    presets: &[Preset {
        name: "mistral-7b",
        spec: || {
            let sizes =
                Sizes { layers: 32, heads: (32, 8), dim: 4096, width: 14336, context: 32768, vocab: 32000 };
            let pattern = AttentionPattern::windowed(WINDOW).expect("a window has some keys");
            Generation { pattern, ..Generation::new(&TENSORS, 10_000.0, HeadSpec::Own) }.model(sizes)
        },
    }],
    read,
    write,
};

static TENSORS: Names = gated::names("mistral");

/// The window of the first version, and of files that do not say.
const WINDOW: usize = 4096;

fn read(fields: &Fields<'_>) -> Result<ModelSpec, ZooError> {
    let whole = fields.is_null("sliding_window");
    let window = if whole { None } else { Some(fields.number_or("sliding_window", WINDOW)?) };
    let pattern = gated::sliding(fields, window)?;
    let reading = Reading { names: &TENSORS, kv: Some(8), head_dim: None, eps: 1e-6, context: 131_072 };
    gated::read(fields, reading, |spec| {
        spec.blocks.iter_mut().for_each(|run| run.block.attention.pattern = pattern);
        Ok(())
    })
}

fn write(spec: &ModelSpec) -> Map<String, Value> {
    let mut json = gated::write(spec, "MistralForCausalLM");
    json.insert("sliding_window".to_owned(), spec.window_of_all().into());
    json
}
