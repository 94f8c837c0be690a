//! Families of models: how each names its tensors and the fields of its `config.json`, and its presets. A
//! family is a file here and a row of [`FAMILIES`].

mod gated;
mod gpt2;
mod gptj;
mod llama;
mod mistral;
mod mixtral;
mod neox;
mod qwen;
mod rotary_json;
mod router_json;
mod switch;

use serde_json::{Map, Value};

use crate::ZooError;
use crate::json_fields::Fields;
use crate::naming::Names;
use crate::spec::ModelSpec;

pub use gpt2::gpt2;
pub(crate) use switch::MODEL_TYPE as SWITCH;
pub use switch::published_count as published_switch_count;

/// A family of models.
#[derive(Debug)]
pub struct Family {
    /// The names of its tensors, and its own name, such as `gpt2`.
    pub names: &'static Names,
    /// Hugging Face's `model_type`.
    pub model_type: &'static str,
    /// Its presets by name.
    pub presets: &'static [Preset],
    /// Reads a `config.json`.
    pub(crate) read: fn(&Fields<'_>) -> Result<ModelSpec, ZooError>,
    /// Returns the fields of a `config.json`, without those that all families have.
    pub(crate) write: fn(&ModelSpec) -> Map<String, Value>,
}

/// A model that has a name.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// Makes its description.
    spec: fn() -> ModelSpec,
}

impl Preset {
    /// Returns its description.
    #[must_use]
    pub fn spec(&self) -> ModelSpec {
        (self.spec)()
    }
}

/// All families.
pub static FAMILIES: [&Family; 9] = [
    &gpt2::FAMILY,
    &gptj::FAMILY,
    &neox::FAMILY,
    &llama::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &switch::FAMILY,
];

/// Returns the presets of all families.
pub fn presets() -> impl Iterator<Item = &'static Preset> {
    FAMILIES.iter().flat_map(|family| family.presets)
}

/// Other names of presets.
const ALIASES: [(&str, &str); 1] = [("llama-70b", "llama2-70b")];

/// Returns the preset of this name, of any family. `llama-70b` is `llama2-70b`: the first LLaMA had no such
/// size.
#[must_use]
pub fn preset(name: &str) -> Option<&'static Preset> {
    let (_, name) = ALIASES.into_iter().find(|(alias, _)| *alias == name).unwrap_or((name, name));
    presets().find(|preset| preset.name == name)
}

impl ModelSpec {
    /// Returns the shape of a preset ([`preset`]).
    ///
    /// Errors: [`ZooError::UnknownPreset`], whose message lists the presets.
    pub fn preset(name: &str) -> Result<Self, ZooError> {
        preset(name).map(Preset::spec).ok_or_else(|| {
            let known = presets().map(|preset| preset.name).collect();
            ZooError::UnknownPreset { name: name.to_owned(), known }
        })
    }

    /// Returns the model's family.
    ///
    /// # Panics
    /// If the names are not those of a family of [`FAMILIES`].
    #[must_use]
    pub fn family(&self) -> &'static Family {
        let family = FAMILIES.iter().find(|family| family.names == self.names);
        family.expect("a description has the names of a family")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_valid_and_its_tensors_add_up_to_its_parameters() {
        for preset in presets() {
            let spec = preset.spec();
            spec.validate().unwrap();
            let sum: u64 = spec.tensors().iter().map(|t| t.count() as u64).sum();
            assert_eq!(sum, spec.parameters(), "{}", preset.name);
        }
    }

    #[test]
    fn prefixes_and_wrappers_are_left_out() {
        let [gpt2, _, _, llama, ..] = FAMILIES;
        for prefix in [
            "",
            "transformer.",
            "model.",
            "_orig_mod.",
            "module.",
            "_orig_mod.transformer.",
            "module._orig_mod.transformer.",
            "model._orig_mod.transformer.",
            "_fsdp_wrapped_module.transformer._fsdp_wrapped_module.",
            "state_dict.model.",
        ] {
            for name in ["wte.weight", "h.11.attn.c_attn.bias", "ln_f.bias", "lm_head.weight"] {
                assert_eq!(gpt2.names.in_model(&format!("{prefix}{name}")), name, "{prefix}");
            }
            for name in ["embed_tokens.weight", "layers.11.self_attn.q_proj.weight", "norm.weight"] {
                assert_eq!(
                    llama.names.in_model(&format!("{prefix}{name}")),
                    format!("model.{name}"),
                    "{prefix}"
                );
            }
            assert_eq!(
                llama.names.in_model(&format!("{prefix}lm_head.weight")),
                "lm_head.weight",
                "{prefix}"
            );
        }
        assert_eq!(gpt2.names.in_model("transformer.h.3._orig_mod.ln_1.weight"), "h.3.ln_1.weight");
        assert_eq!(gpt2.names.in_model("h.3._checkpoint_wrapped_module.mlp.c_fc.bias"), "h.3.mlp.c_fc.bias");
        assert_eq!(gpt2.names.in_model("module.score.weight"), "module.score.weight");
    }
}
