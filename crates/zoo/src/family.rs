//! Families of models: how each names its tensors and the fields of its `config.json`, and its presets. A
//! family is a file here and a row of [`FAMILIES`].

mod gated;
mod gpt2;
mod gptj;
mod llama;
mod mistral;
mod neox;
mod qwen;
mod rotary_json;

use serde_json::{Map, Value};

use crate::ZooError;
use crate::json_fields::Fields;
use crate::naming::Names;
use crate::spec::ModelSpec;

pub use gpt2::gpt2;

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
pub static FAMILIES: [&Family; 7] = [
    &gpt2::FAMILY,
    &gptj::FAMILY,
    &neox::FAMILY,
    &llama::FAMILY,
    &mistral::FAMILY,
    &qwen::QWEN2,
    &qwen::QWEN3,
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

    /// Exact counts of published models.
    #[test]
    fn parameter_counts_are_the_published_ones() {
        for (name, count) in [
            ("gpt2", 124_439_808),
            ("gpt2-xl", 1_557_611_200),
            ("gpt-j-6b", 6_050_882_784),
            ("gpt-neox-20b", 20_554_567_680),
            ("pythia-70m", 70_426_624),
            ("pythia-160m", 162_322_944),
            ("pythia-410m", 405_334_016),
            ("pythia-1b", 1_011_781_632),
            ("pythia-1.4b", 1_414_647_808),
            ("pythia-2.8b", 2_775_208_960),
            ("pythia-6.9b", 6_857_302_016),
            ("pythia-12b", 11_846_072_320),
            ("smollm2-135m", 134_515_008),
            ("smollm2-360m", 361_821_120),
            ("smollm2-1.7b", 1_711_376_384),
            ("tinyllama-1.1b", 1_100_048_384),
            ("llama-7b", 6_738_415_616),
            ("llama-13b", 13_015_864_320),
            ("llama-33b", 32_528_943_616),
            ("llama-65b", 65_285_660_672),
            ("llama2-7b", 6_738_415_616),
            ("llama2-13b", 13_015_864_320),
            ("llama2-70b", 68_976_648_192),
            ("llama-70b", 68_976_648_192),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
            ("llama3.1-405b", 405_853_388_800),
            ("llama3.2-1b", 1_235_814_400),
            ("llama3.2-3b", 3_212_749_824),
            ("mistral-7b", 7_241_732_096),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-3b", 3_085_938_688),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen2.5-72b", 72_706_203_648),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
        ] {
            assert_eq!(ModelSpec::preset(name).unwrap().parameters(), count, "{name}");
        }
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
