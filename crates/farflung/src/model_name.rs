//! The name of a run's model in reports and folders. A preset's name is used only for a model of that preset's
//! shape.

use farflung_zoo::ModelSpec;
use farflung_zoo::family::presets;

/// Returns the name of the preset with this shape (the vocabulary may differ), or layers and width, such as
/// `gpt-4x96` and `llama-4x96`.
#[must_use]
pub fn model_name(model: &ModelSpec) -> String {
    let is_shape = |preset: ModelSpec| ModelSpec { vocab: model.vocab, ..preset } == *model;
    if let Some(preset) = presets().find(|preset| is_shape(preset.spec())) {
        return preset.name.to_owned();
    }
    let family = match model.names.family {
        "gpt2" => "gpt",
        family => family,
    };
    format!("{family}-{}x{}", model.layers(), model.dim)
}

#[cfg(test)]
mod tests {
    use farflung_zoo::Resize;

    use super::*;

    #[test]
    fn a_preset_is_called_by_its_name_and_another_shape_by_itself() {
        for preset in presets() {
            let name = preset.name;
            assert_eq!(model_name(&preset.spec()), name);
            assert_eq!(model_name(&ModelSpec { vocab: 300, ..preset.spec() }), name);
        }
        let nano = ModelSpec::preset("nano").unwrap();
        let named = |to: Resize| model_name(&nano.resized(to).unwrap());
        assert_eq!(named(Resize { layers: Some(2), ..Resize::default() }), "gpt-2x128");
        assert_eq!(named(Resize { heads: Some(2), ..Resize::default() }), "gpt-4x128");
        assert_eq!(named(Resize { dim: Some(64), ..Resize::default() }), "gpt-4x64");
        assert_eq!(named(Resize { context: Some(65), ..Resize::default() }), "gpt-4x128");
    }
}
