//! Settings whose value is one of a few words.

use std::fmt;
use std::path::PathBuf;

use farflung_comm::Algorithm;
use farflung_compress::link::{self, LinkSpec};
use farflung_compress::{AverageSpec, CodecSpec, CompressError};
use farflung_optim::local::{self, LocalMethod};
use farflung_optim::sync::{self, Servers, SyncMethod};
use farflung_optim::{Groups, LossScale};
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::{Method, VersionSync};
use farflung_tensor::{DeviceName, Precision};
use farflung_zoo::data::{
    LossOn, NoEncoding, NoObjective, NoSharding, NoTokenType, Packing, TextEncoding, TokenType,
};
use farflung_zoo::spec::BalanceOver;
use farflung_zoo::{Objective, Sharding};
use toml::Value;

use super::recipe::{self, Recipe};
use super::value::{Setting, expected_with_reason};
use crate::transports::{self, TransportMethod};

/// Declares an enum of words, with its parser and its printer, from one list.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)+
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $word,)+ })
            }
        }

        impl Setting for $name {
            fn names() -> Vec<String> {
                vec![$($word.to_owned()),+]
            }
            fn parse(text: &str) -> Option<Self> {
                match text {
                    $($word => Some(Self::$variant),)+
                    _ => None,
                }
            }
            fn value(&self) -> Value {
                Value::String(self.to_string())
            }
        }
    };
}

/// Method that splits text into tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerKind {
    /// One token per byte; vocabulary 256.
    Byte,
    /// GPT-2's byte-pair encoding; vocabulary 50257.
    Gpt2,
    /// That of a `tokenizer.json`, a folder with it, a GGUF file, a checkpoint or a run's folder.
    File(PathBuf),
}

impl fmt::Display for TokenizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Byte => f.write_str("byte"),
            Self::Gpt2 => f.write_str("gpt2"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl Setting for TokenizerKind {
    fn expected() -> String {
        "byte, gpt2, or the path of a tokenizer.json, a model or a run".to_owned()
    }
    fn names() -> Vec<String> {
        vec!["byte".to_owned(), "gpt2".to_owned()]
    }
    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => None,
            "byte" => Some(Self::Byte),
            "gpt2" => Some(Self::Gpt2),
            path => Some(Self::File(path.into())),
        }
    }
    fn value(&self) -> Value {
        match self {
            Self::File(path) => path.value(),
            word => Value::String(word.to_string()),
        }
    }
}

choice!(
    /// Method that distributes the microbatches of a step among members that may join and leave.
    BalanceKind {
        /// The numbers of microbatches that make steps shortest, by the members' measured times.
        BySpeed = "by-speed",
        /// The same number for each member.
        Equal = "equal",
    }
);
choice!(
    /// Shape of the learning rate after the warm-up.
    LrScheduleKind {
        /// Falls along half a cosine to `min-lr`.
        Cosine = "cosine",
        /// Falls linearly to `min-lr`.
        Linear = "linear",
        /// Stays constant.
        Constant = "constant",
        /// Warm-up, stable, decay: stays constant, then falls linearly to `min-lr` at the end.
        Wsd = "wsd",
        /// Falls in proportion to one over the square root of the step, not below `min-lr`.
        InverseSqrt = "inverse-sqrt",
    }
);
choice!(
    /// Scale of Muon's updates for hidden matrices.
    MuonScaleKind {
        /// Scales updates to about the size of AdamW's, so that one learning rate suits both.
        MatchAdamW = "match-adamw",
        /// Scales updates by the square root of outputs over inputs, if that is above 1.
        Original = "original",
    }
);
choice!(
    /// Method that chooses the sequences of a step.
    SamplingKind {
        /// Windows at random places of the text.
        Random = "random",
        /// Windows that do not overlap, in epochs of shuffled order. Each window has a number and returns in
        /// each epoch.
        Epochs = "epochs",
    }
);
choice!(
    /// Place in which stateful boundary codecs store their samples.
    StoreKind {
        /// Samples are in memory; checkpoints contain them.
        Memory = "memory",
        /// Samples are in files in the rank's folder, which are read and written.
        File = "file",
        /// Samples are in files in the rank's folder, which are mapped into memory.
        Mapped = "mapped",
    }
);
choice!(
    /// Place in which a rank's optimizer keeps its state between updates.
    StatePlace {
        /// In the memory of the rank's device.
        Device = "device",
        /// In a file, from which each update reads it.
        Disk = "disk",
    }
);
choice!(
    /// The workers that run the servers of asynchronous methods.
    ServersKind {
        /// Each worker serves its part of the model.
        Sharded = "sharded",
        /// The first worker serves the whole model.
        Central = "central",
    }
);

impl From<ServersKind> for Servers {
    fn from(kind: ServersKind) -> Self {
        match kind {
            ServersKind::Sharded => Self::Sharded,
            ServersKind::Central => Self::Central,
        }
    }
}

/// Declares a setting whose values are the names of a table's rows.
macro_rules! row {
    ($(#[$doc:meta])* $name:ident, $row:ty, $table:expr $(, or $other:expr)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name(&'static $row);

        impl $name {
            /// Returns the setting for a row, which may also be one that is not in the table.
            #[must_use]
            pub const fn of(row: &'static $row) -> Self {
                Self(row)
            }

            /// Returns the row.
            #[must_use]
            pub const fn row(self) -> &'static $row {
                self.0
            }

            /// Returns all rows of the table.
            pub fn all() -> impl Iterator<Item = Self> {
                $table.iter().map(Self)
            }
        }

        /// The first row of the table.
        impl Default for $name {
            fn default() -> Self {
                Self(&$table[0])
            }
        }

        impl std::ops::Deref for $name {
            type Target = $row;

            fn deref(&self) -> &$row {
                self.0
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.name == other.name
            }
        }

        impl Eq for $name {}

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name)
            }
        }

        impl Setting for $name {
            fn names() -> Vec<String> {
                Self::all().map(|row| row.name.to_owned()).collect()
            }
            fn parse(text: &str) -> Option<Self> {
                Self::all().find(|row| row.name == text)$(.or_else(|| $other(text).map(Self)))?
            }
            fn value(&self) -> Value {
                Value::String(self.name.to_owned())
            }
        }
    };
}

row!(
    /// The optimizer of one rank: a row of [`local::METHODS`].
    OptimizerKind, LocalMethod, local::METHODS
);
row!(
    /// Method that keeps replicas in agreement: a row of [`sync::METHODS`], or a registered one.
    SyncKind, SyncMethod, sync::METHODS, or SyncMethod::by_name
);

row!(
    /// A published method that consists of several settings: a row of [`recipe::RECIPES`].
    RecipeKind, Recipe, recipe::RECIPES
);

row!(
    /// The transport between workers: a row of [`transports::TRANSPORTS`].
    TransportName, TransportMethod, transports::TRANSPORTS
);

/// The setting `transport`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportKind {
    /// The first suitable row of the table: one for threads in a single process, one for processes in a job of
    /// several. With relays, processes also use QUIC ([`transports::meet_by_auto`]).
    Auto,
    /// The transport of this name.
    Named(TransportName),
}

impl TransportKind {
    /// Returns the setting for a row, which may also be one that is not in the table.
    #[must_use]
    pub const fn of(row: &'static TransportMethod) -> Self {
        Self::Named(TransportName::of(row))
    }
}

impl Setting for TransportKind {
    fn names() -> Vec<String> {
        std::iter::once("auto".to_owned()).chain(TransportName::names()).collect()
    }
    fn parse(text: &str) -> Option<Self> {
        if text == "auto" { Some(Self::Auto) } else { TransportName::parse(text).map(Self::Named) }
    }
    fn value(&self) -> Value {
        match self {
            Self::Auto => Value::String("auto".to_owned()),
            Self::Named(name) => name.value(),
        }
    }
}

/// The devices of the ranks: one for all ranks, or several that ranks use in turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices(Vec<DeviceName>);

impl Devices {
    /// Returns the CPU for all ranks.
    #[must_use]
    pub fn cpu() -> Self {
        Self(vec![DeviceName::Cpu])
    }

    /// Returns the device of a rank.
    #[must_use]
    pub fn of(&self, rank: usize) -> DeviceName {
        self.0[rank % self.0.len()]
    }

    /// Returns whether all devices are CPUs.
    #[must_use]
    pub fn are_processors(&self) -> bool {
        self.0.iter().all(|device| *device == DeviceName::Cpu)
    }
}

impl Setting for Devices {
    fn expected() -> String {
        "auto, cpu, wgpu[:n] or cuda[:n], or several separated by commas, which ranks use in turn".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        text.split(',').map(|name| name.parse().ok()).collect::<Option<_>>().map(Self)
    }
    fn value(&self) -> Value {
        Value::String(self.0.iter().map(DeviceName::to_string).collect::<Vec<_>>().join(","))
    }
}

/// Implements [`Setting`] for a type with a parser, a printer and a list of its names.
macro_rules! named {
    ($ty:ty, $known:expr) => {
        impl Setting for $ty {
            fn names() -> Vec<String> {
                $known.into_iter().map(|name| name.to_string()).collect()
            }
            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }
            fn value(&self) -> Value {
                Value::String(self.to_string())
            }
        }
    };
}

named!(Precision, Self::ALL);
named!(Algorithm, Self::ALL.into_iter().chain([Self::Auto]));
named!(Method, Self::ALL);

/// Implements [`Setting`] for a codec by name. An unknown name gets an error with the known names; any other
/// invalid text gets the parser's reason.
macro_rules! codec {
    ($ty:ty, $names:expr, $expected:literal) => {
        impl Setting for $ty {
            fn expected() -> String {
                format!($expected, Self::names().join(" "))
            }
            fn expected_not(text: &str) -> String {
                match text.parse::<Self>() {
                    // Other errors name the wrong part and the reason.
                    Err(reason) if !matches!(reason, CompressError::UnknownCodec { .. }) => {
                        format!("a valid codec: {reason}")
                    }
                    _ => Self::expected(),
                }
            }
            fn names() -> Vec<String> {
                $names
            }
            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }
            fn value(&self) -> Value {
                Value::String(self.to_string())
            }
        }
    };
}

codec!(
    CodecSpec,
    farflung_compress::names(),
    "a codec such as int8, int4:128, sign or topk:0.01/f16: selections (if any), then one of {}, joined by /"
);
codec!(
    AverageSpec,
    Self::names(),
    "a codec such as int8, int4:128, sign, topk:0.01/f16 or powersgd:4: selections (if any), then one of {}, \
     joined by /"
);
codec!(
    LinkSpec,
    link::names().into_iter().map(str::to_owned).chain(farflung_compress::names()).collect(),
    "a boundary's codec, one of {}"
);

/// Loss scale: the factor of gradients while matrix products round them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScaling {
    /// In f16, the largest scale that does not overflow, found by trial; 1 in other precisions, which have the
    /// range of f32.
    Auto,
    /// A fixed power of two.
    Fixed(f32),
}

impl LossScaling {
    /// Returns the loss scale of a run's first step, which also determines how the scale changes.
    #[must_use]
    pub const fn start(self, precision: Precision) -> LossScale {
        match (self, precision) {
            (Self::Auto, Precision::F16) => LossScale::dynamic(),
            (Self::Auto, _) => LossScale::fixed(1.0),
            (Self::Fixed(scale), _) => LossScale::fixed(scale),
        }
    }
}

impl Setting for LossScaling {
    fn expected() -> String {
        "auto, or a power of two from 1 to 16777216".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        if text == "auto" {
            return Some(Self::Auto);
        }
        let scale: u32 = text.parse().ok()?;
        (scale.is_power_of_two() && scale <= 1 << 24).then_some(Self::Fixed(scale as f32))
    }
    fn value(&self) -> Value {
        match self {
            Self::Auto => Value::String("auto".to_owned()),
            Self::Fixed(scale) => Value::Integer(*scale as i64),
        }
    }
}

/// Implements [`Setting`] for types whose `Display` and `FromStr` use the same text, and whose error says what
/// is expected.
macro_rules! by_text {
    ($($ty:ty: $error:expr),*) => {$(
        impl Setting for $ty {
            fn expected() -> String {
                $error.to_string().replacen("expected ", "", 1)
            }
            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }
            fn value(&self) -> Value {
                Value::String(self.to_string())
            }
        }
    )*};
}
impl Setting for LossOn {
    fn names() -> Vec<String> {
        Self::ALL.map(|loss_on| loss_on.name().to_owned()).to_vec()
    }

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|loss_on| loss_on.name() == text)
    }

    fn value(&self) -> Value {
        Value::String(self.name().to_owned())
    }
}

impl Setting for BalanceOver {
    fn names() -> Vec<String> {
        Self::ALL.map(|over| over.name().to_owned()).to_vec()
    }

    fn parse(text: &str) -> Option<Self> {
        Self::from_name(text)
    }

    fn value(&self) -> Value {
        Value::String(self.name().to_owned())
    }
}

by_text!(
    Objective: NoObjective,
    Sharding: NoSharding,
    TextEncoding: NoEncoding,
    TokenType: NoTokenType
);

impl Setting for VersionSync {
    fn expected() -> String {
        "newest or vertical".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        Value::String(self.name().to_owned())
    }
}

impl Setting for Groups {
    fn expected() -> String {
        "rules such as `*.bias:lr=0.1,decay=0`, separated by `;`".to_owned()
    }
    fn expected_not(text: &str) -> String {
        expected_with_reason::<Self>(text)
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        Value::String(self.to_string())
    }
}

impl Setting for Recompute {
    fn expected() -> String {
        "none, full, each-layer, a number of layers, or an amount of memory for activations such as 2GB"
            .to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        match self {
            Self::Layers(layers) => Value::Integer((*layers).into()),
            word => Value::String(word.to_string()),
        }
    }
}

/// The step at which a run starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The run starts at the newest valid checkpoint of its folder, or at step 0 if there is none.
    Auto,
    /// The run starts at step 0, in a folder without a run.
    No,
    /// The run starts at this checkpoint, or at the newest valid one of this run's folder.
    Path(PathBuf),
}

impl Setting for Resume {
    fn expected() -> String {
        "auto, no, or the path of a checkpoint or of a run's folder".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => None,
            "auto" => Some(Self::Auto),
            "no" => Some(Self::No),
            path => Some(Self::Path(path.into())),
        }
    }
    fn value(&self) -> Value {
        match self {
            Self::Auto => Value::String("auto".to_owned()),
            Self::No => Value::String("no".to_owned()),
            Self::Path(path) => path.value(),
        }
    }
}

/// Returns how examples are put into rows, by the setting.
#[must_use]
pub const fn packing_of(packing: bool) -> Packing {
    if packing { Packing::Packed } else { Packing::Alone }
}
