//! Names of GPT-2's tensors as programs store them, with the prefixes of wrappers.

/// Parts of names that wrappers insert anywhere: torch.compile, FSDP, activation checkpointing, Lightning and
/// DDP.
const WRAPPERS: [&str; 5] =
    ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module"];

/// First parts of the names of a GPT-2.
const ROOTS: [&str; 5] = ["wte", "wpe", "h", "ln_f", "lm_head"];

/// The name of the head, which shares its values with [`TOKEN_TABLE`].
pub(super) const HEAD: &str = "lm_head.weight";
/// The name of the token table.
pub(super) const TOKEN_TABLE: &str = "wte.weight";

/// Returns the tensor's name in the model, such as `h.0.ln_1.weight` for
/// `module._orig_mod.transformer.h.0.ln_1.weight`: without parts that wrappers insert, and without everything
/// before the first part of a name of GPT-2. A name without such a part is returned as it is.
pub(super) fn in_model(stored: &str) -> String {
    let parts: Vec<&str> = stored.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
    match parts.iter().position(|part| ROOTS.contains(part)) {
        Some(root) => parts[root..].join("."),
        None => stored.to_owned(),
    }
}

/// Returns whether this is a bias of a model, if it is no constant buffer.
pub(super) fn is_bias(name: &str) -> bool {
    name.rsplit('.').next() == Some("bias")
}

/// Returns whether this is a constant mask of old exports: `h.N.attn.bias` or `h.N.attn.masked_bias`.
pub(super) fn is_buffer(name: &str) -> bool {
    name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_and_wrappers_are_left_out() {
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
                assert_eq!(in_model(&format!("{prefix}{name}")), name, "{prefix}");
            }
        }
        assert_eq!(in_model("transformer.h.3._orig_mod.ln_1.weight"), "h.3.ln_1.weight");
        assert_eq!(in_model("h.3._checkpoint_wrapped_module.mlp.c_fc.bias"), "h.3.mlp.c_fc.bias");
        assert_eq!(in_model("module.score.weight"), "module.score.weight");
    }
}
