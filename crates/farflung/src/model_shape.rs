//! The shape of the model that settings name: a preset, a `config.json`, or the text of one.

use std::path::Path;

use farflung_zoo::family::{preset, presets};
use farflung_zoo::weights::{Dtype, TokenIds, config_from_text, config_text, read_config};
use farflung_zoo::{ModelSpec, Resize};

use crate::config::nearest::with_nearest;
use crate::{Error, Result};

/// Returns the description of a model by the value of `--model`: the name of a preset, the path of a
/// `config.json` or of its folder, or the text of one, which begins with a brace.
///
/// Errors: [`Error::Setting`] with the known names; a file that cannot be read, or a field that is not
/// supported.
pub fn model_shape(model: &str) -> Result<ModelSpec> {
    if model.starts_with('{') {
        return Ok(config_from_text(Path::new("--model"), model)?);
    }
    if let Some(preset) = preset(model) {
        return Ok(preset.spec());
    }
    let path = Path::new(model);
    if path.is_dir() && path.join("config.json").exists() {
        return Ok(read_config(&path.join("config.json"))?);
    }
    if path.extension().is_some_and(|ending| ending == "json") {
        return Ok(read_config(path)?);
    }
    let names: Vec<_> = presets().map(|preset| preset.name).collect();
    let expected = format!("one of {}, or the path of a config.json", names.join(", "));
    let expected = with_nearest(expected, model, &names);
    Err(Error::Setting { field: "model", value: model.to_owned(), expected })
}

/// Returns whether a value of `--model` is the path of a file, or no value that is known.
pub(crate) fn is_model_path(model: &str) -> bool {
    !model.starts_with('{') && preset(model).is_none()
}

/// Returns a value of `--model` that describes a model by itself; `None` if it is a GPT-2 that differs from the
/// preset `nano` in sizes only, which settings have by themselves.
pub(crate) fn model_text(spec: &ModelSpec) -> Option<String> {
    let sizes = Resize {
        layers: Some(spec.layers()),
        heads: spec.blocks.first().map(|run| run.block.attention.heads.query),
        dim: Some(spec.dim),
        context: Some(spec.context),
        vocab: Some(spec.vocab),
    };
    let plain = ModelSpec::preset("nano").and_then(|nano| nano.resized(sizes));
    let is_plain = plain.is_ok_and(|plain| plain == *spec);
    (!is_plain).then(|| {
        let text = config_text(spec, Dtype::F32, &TokenIds::default());
        // On one line, as settings are.
        text.lines().map(str::trim_start).collect::<Vec<_>>().join(" ").trim_end().to_owned()
    })
}

/// Returns the fields of the description that [`model_text`] returns.
pub(crate) fn model_fields(spec: &ModelSpec) -> Option<serde_json::Map<String, serde_json::Value>> {
    model_text(spec).map(|text| serde_json::from_str(&text).expect("a description is JSON"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_described_by_its_text() {
        for preset in presets() {
            let (name, spec) = (preset.name, preset.spec());
            match model_text(&spec) {
                Some(text) => assert_eq!(model_shape(&text).unwrap(), spec, "{name}: {text}"),
                None => assert_eq!(spec.names.family, "gpt2", "{name}"),
            }
        }
    }

    #[test]
    fn a_wrong_name_is_told_the_nearest_and_a_wrong_text_its_field() {
        let said = |model: &str| model_shape(model).unwrap_err().to_string();
        assert!(said("lama-nano").contains("llama-nano"), "{}", said("lama-nano"));
        assert!(said("no/such/config.json").contains("no/such/config.json"));
        let text = model_text(&ModelSpec::preset("llama-nano").unwrap()).unwrap();
        assert!(said(&text.replace("silu", "relu")).contains("`hidden_act`"));
        assert!(said("{").contains("JSON"));
    }
}
