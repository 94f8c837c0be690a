//! The rotary embedding in a `config.json`.

use serde_json::{Value, json};

use crate::ZooError;
use crate::json_fields::Fields;
use crate::spec::{RotaryScaling, RotarySpec};

/// What a family's files do not say, or say in fields of their own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Defaults {
    pub(super) base: f64,
    /// Share of a head's values that are rotated.
    pub(super) share: f64,
}

impl Defaults {
    /// Those of most families: all values are rotated.
    pub(super) const ALL: Self = Self { base: 10_000.0, share: 1.0 };
}

/// Reads the rotary embedding: `rope_parameters` of transformers 5, else `rope_theta` and `rope_scaling` of 4.
pub(super) fn read(
    fields: &Fields<'_>,
    (head_dim, context): (usize, usize),
    defaults: Defaults,
) -> Result<RotarySpec, ZooError> {
    let new = fields.object("rope_parameters", "rope_parameters.")?;
    let scaling = match new {
        Some(new) => Some(new),
        None => fields.object("rope_scaling", "rope_scaling.")?,
    };
    let base = match new {
        Some(new) if new.get("rope_theta").is_some() => new.real("rope_theta")?,
        _ => fields.real_or("rope_theta", defaults.base)?,
    };
    let mut share = fields.real_or("partial_rotary_factor", defaults.share)?;
    if let Some(scaling) = &scaling {
        share = scaling.real_or("partial_rotary_factor", share)?;
    }
    let width = (head_dim as f64 * share) as usize;
    let plain = RotarySpec { width, base, scaling: RotaryScaling::None };
    let Some(scaling) = scaling else { return Ok(plain) };
    let kind = if scaling.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match scaling.get(kind).and_then(Value::as_str) {
        None if scaling.get(kind).is_none() => RotaryScaling::None,
        Some("default") => RotaryScaling::None,
        Some("linear") => RotaryScaling::Linear { factor: scaling.real("factor")? },
        Some("llama3") => RotaryScaling::Llama3 {
            factor: scaling.real("factor")?,
            low_turns: scaling.real("low_freq_factor")?,
            high_turns: scaling.real("high_freq_factor")?,
            original_context: scaling.number_or("original_max_position_embeddings", context)?,
        },
        Some("dynamic") => {
            RotaryScaling::Dynamic { factor: scaling.real("factor")?, original_context: context }
        }
        Some("yarn") => yarn(&scaling, context)?,
        _ => {
            let known = "\"default\", \"linear\", \"dynamic\", \"yarn\" or \"llama3\"";
            return Err(scaling.wrong(kind, known.to_owned()));
        }
    };
    Ok(RotarySpec { scaling, ..plain })
}

/// Reads `YaRN`'s scaling. Its factor is given or follows from the two contexts, and that of cosines and sines
/// is given or follows from it.
fn yarn(scaling: &Fields<'_>, context: usize) -> Result<RotaryScaling, ZooError> {
    let original_context = scaling.number_or("original_max_position_embeddings", context)?;
    let factor = match scaling.get("original_max_position_embeddings") {
        Some(_) => scaling.real_or("factor", context as f64 / original_context.max(1) as f64)?,
        None => scaling.real("factor")?,
    };
    // Peng et al. 2023, section 3.4; with other weights in DeepSeek-V2.
    let magnitude = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
    let weights = (scaling.real_or("mscale", 0.0)?, scaling.real_or("mscale_all_dim", 0.0)?);
    let amplitude = match weights {
        _ if scaling.get("attention_factor").is_some() => scaling.real("attention_factor")?,
        (one, all) if one != 0.0 && all != 0.0 => magnitude(one) / magnitude(all),
        _ => magnitude(1.0),
    };
    Ok(RotaryScaling::Yarn {
        factor,
        fast_turns: scaling.real_or("beta_fast", 32.0)?,
        slow_turns: scaling.real_or("beta_slow", 1.0)?,
        original_context,
        amplitude,
        rounds: scaling.flag_or("truncate", true)?,
    })
}

/// Returns the value of `rope_scaling`, as transformers 4 has it.
pub(super) fn scaling(rotary: Option<RotarySpec>) -> Value {
    match rotary.map_or(RotaryScaling::None, |rotary| rotary.scaling) {
        RotaryScaling::None => Value::Null,
        RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RotaryScaling::Dynamic { factor, .. } => json!({ "rope_type": "dynamic", "factor": factor }),
        RotaryScaling::Yarn { factor, fast_turns, slow_turns, original_context, amplitude, rounds } => {
            json!({
                "rope_type": "yarn",
                "factor": factor,
                "attention_factor": amplitude,
                "beta_fast": fast_turns,
                "beta_slow": slow_turns,
                "original_max_position_embeddings": original_context,
                "truncate": rounds,
            })
        }
        RotaryScaling::Llama3 { factor, low_turns, high_turns, original_context } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_turns,
            "high_freq_factor": high_turns,
            "original_max_position_embeddings": original_context,
        }),
    }
}
