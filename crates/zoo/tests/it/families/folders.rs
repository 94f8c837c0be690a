//! Models with values that `transformers` computed.

/// The folders of models with expected values.
pub(crate) const FAMILIES: [&str; 11] = [
    "gptj",
    "llama-gqa-tied",
    "llama-mha",
    "llama3-rope-bf16",
    "mistral-window",
    "mixtral",
    "neox-parallel",
    "neox-sequential",
    "qwen2",
    "qwen3",
    "switch-gpt2",
];
