//! How a family names the tensors of its models.

use std::borrow::Cow;

use crate::tensor_spec::TensorKind;

/// The place of a tensor in a model, which a family gives a name. Those of experts have the number of the
/// expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Slot {
    TokenTable,
    PositionTable,
    AttentionNorm,
    Qkv,
    Query,
    Key,
    Value,
    QueryNorm,
    KeyNorm,
    AttentionOut,
    MlpNorm,
    Gate,
    Up,
    Down,
    Router,
    ExpertGate(usize),
    ExpertUp(usize),
    ExpertDown(usize),
    FinalNorm,
    Head,
}

/// The names of a family's tensors. Hugging Face's models of the family have these.
#[derive(Debug)]
pub struct Names {
    /// The family.
    pub family: &'static str,
    /// First part of the names of all tensors but the head's.
    pub prefix: &'static str,
    /// Name of the list of blocks.
    pub block: &'static str,
    /// Name of a tensor within its block or the model, without `.weight` and `.bias`, and with `{}` for the
    /// number of an expert.
    pub slot: fn(Slot) -> &'static str,
    /// Whether files have matrices as `[outputs, inputs]`. Those of routers and experts always are.
    pub outputs_first: bool,
    /// The order of the heads' values in files.
    pub heads: HeadsInFiles,
}

/// The order in which files have the values of heads. In memory, pairs that are rotated together are half of
/// the rotated width apart, and a fused matrix has all queries first, then all keys, then all values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadsInFiles {
    /// That of memory.
    AsInMemory,
    /// Values that are rotated together are neighbours (GPT-J, and LLaMA as Meta published it).
    Interleaved,
    /// A fused matrix has the query, key and value of each head side by side (GPT-NeoX).
    ByHead,
}

/// Parts of names that wrappers insert anywhere: torch.compile, FSDP, activation checkpointing, Lightning and
/// DDP.
const WRAPPERS: [&str; 5] =
    ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module"];

impl PartialEq for Names {
    fn eq(&self, other: &Self) -> bool {
        self.family == other.family
    }
}

impl Eq for Names {}

impl Names {
    /// Returns the name of a tensor.
    #[must_use]
    pub fn of(&self, block: Option<usize>, slot: Slot, kind: TensorKind) -> String {
        let (prefix, mut name) = (self.prefix, Cow::Borrowed((self.slot)(slot)));
        if let Slot::ExpertGate(expert) | Slot::ExpertUp(expert) | Slot::ExpertDown(expert) = slot {
            name = name.replace("{}", &expert.to_string()).into();
        }
        let part = if kind == TensorKind::Bias { "bias" } else { "weight" };
        match block {
            Some(layer) => format!("{prefix}{}.{layer}.{name}.{part}", self.block),
            None if slot == Slot::Head => format!("{name}.{part}"),
            None => format!("{prefix}{name}.{part}"),
        }
    }

    /// Returns the tensor's name in the model, such as `h.0.ln_1.weight` for
    /// `module._orig_mod.transformer.h.0.ln_1.weight`: without parts that wrappers insert, and without other
    /// prefixes than the family's. A name of no tensor of the family is returned as it is.
    #[must_use]
    pub fn in_model(&self, stored: &str) -> String {
        let parts: Vec<&str> = stored.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
        let head = (self.slot)(Slot::Head);
        let tables = [Slot::TokenTable, Slot::PositionTable, Slot::FinalNorm].map(self.slot);
        let is_first = |part: &&str| *part == head || *part == self.block || tables.contains(part);
        match parts.iter().position(is_first) {
            Some(at) if parts[at] == head => parts[at..].join("."),
            Some(at) => format!("{}{}", self.prefix, parts[at..].join(".")),
            None => stored.to_owned(),
        }
    }

    /// Returns the names of the token table and of the head.
    #[must_use]
    pub fn table_and_head(&self) -> [String; 2] {
        [Slot::TokenTable, Slot::Head].map(|slot| self.of(None, slot, TensorKind::Table))
    }
}
