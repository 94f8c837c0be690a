//! The name of a run's model in reports and folders. A preset's name is used only for a model of that preset's
//! shape.

use farflung_zoo::GptConfig;
use farflung_zoo::config::PRESETS;

/// Returns the name of the preset with this shape (the vocabulary may differ), or layers and width, such as
/// `gpt-4x96`.
#[must_use]
pub fn model_name(model: &GptConfig) -> String {
    let shape = |preset: &GptConfig| GptConfig { vocab: model.vocab, ..*preset };
    match PRESETS.iter().find(|(_, preset)| shape(preset) == *model) {
        Some((name, _)) => (*name).to_owned(),
        None => format!("gpt-{}x{}", model.layers, model.dim),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_is_called_by_its_name_and_another_shape_by_itself() {
        for (name, preset) in PRESETS {
            assert_eq!(model_name(&preset), name);
            assert_eq!(model_name(&GptConfig { vocab: 300, ..preset }), name);
        }
        let nano = GptConfig::preset("nano").unwrap();
        assert_eq!(model_name(&GptConfig { layers: 2, ..nano }), "gpt-2x128");
        assert_eq!(model_name(&GptConfig { heads: 2, ..nano }), "gpt-4x128");
        assert_eq!(model_name(&GptConfig { dim: 64, ..nano }), "gpt-4x64");
        assert_eq!(model_name(&GptConfig { context: 65, ..nano }), "gpt-4x128");
    }
}
