//! The settings that are one word out of a few.

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
use farflung_zoo::Sharding;
use farflung_zoo::data::NoSharding;
use toml::Value;

use super::recipe::{self, Recipe};
use super::value::Setting;
use crate::transports::{self, TransportMethod};

/// An enum of words: the words, the parser and the printer from one list.
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

choice!(
    /// How text becomes tokens.
    TokenizerKind {
        /// A token a byte; vocabulary 256.
        Byte = "byte",
        /// GPT-2's byte-pair encoding; vocabulary 50257.
        Gpt2 = "gpt2",
    }
);
choice!(
    /// Shares of a step among members that come and leave.
    BalanceKind {
        /// As many microbatches as make steps short, by what was measured.
        BySpeed = "by-speed",
        /// As many for each.
        Equal = "equal",
    }
);
choice!(
    /// How the learning rate goes after its warm-up.
    LrScheduleKind {
        /// Half a cosine down to `min-lr`.
        Cosine = "cosine",
        /// A line down to `min-lr`.
        Linear = "linear",
        /// Stays.
        Constant = "constant",
        /// Warm-up, stable, decay: stays, and at the end a line down to `min-lr`.
        Wsd = "wsd",
        /// Falls with the root of the step, not below `min-lr`.
        InverseSqrt = "inverse-sqrt",
    }
);
choice!(
    /// How far Muon moves hidden matrices.
    MuonScaleKind {
        /// About as far as AdamW, so that one learning rate suits both.
        MatchAdamW = "match-adamw",
        /// By the root of outputs over inputs, if that is above 1.
        Original = "original",
    }
);
choice!(
    /// Which sequences a step trains on.
    SamplingKind {
        /// Windows at random places.
        Random = "random",
        /// Windows that do not overlap, in shuffled epochs: each has a number and comes again.
        Epochs = "epochs",
    }
);
choice!(
    /// Where boundary codecs that remember hold their samples.
    StoreKind {
        /// In memory; checkpoints hold it.
        Memory = "memory",
        /// In files of the rank's folder, read and written.
        File = "file",
        /// In files of the rank's folder, mapped.
        Mapped = "mapped",
    }
);
choice!(
    /// Where the servers of asynchronous methods are.
    ServersKind {
        /// Each worker serves its part of the model.
        Sharded = "sharded",
        /// The first worker serves all of it.
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

/// A setting whose values are the rows of a table, by their names.
macro_rules! row {
    ($(#[$doc:meta])* $name:ident, $row:ty, $table:expr $(, or $other:expr)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name(&'static $row);

        impl $name {
            /// A row of the table, or of your own.
            #[must_use]
            pub const fn of(row: &'static $row) -> Self {
                Self(row)
            }

            /// The row.
            #[must_use]
            pub const fn row(self) -> &'static $row {
                self.0
            }

            /// All rows of the table.
            pub fn all() -> impl Iterator<Item = Self> {
                $table.iter().map(Self)
            }
        }

        /// The first row.
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
    /// How replicas stay one model: a row of [`sync::METHODS`], or a registered one.
    SyncKind, SyncMethod, sync::METHODS, or SyncMethod::by_name
);

row!(
    /// A published method that is several settings: a row of [`recipe::RECIPES`].
    RecipeKind, Recipe, recipe::RECIPES
);

row!(
    /// What carries bytes between workers: a row of [`transports::TRANSPORTS`].
    TransportName, TransportMethod, transports::TRANSPORTS
);

/// What carries bytes between workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportKind {
    /// The first of the table for threads of one process, or for several processes.
    Auto,
    /// This one.
    Named(TransportName),
}

impl TransportKind {
    /// A row of the table, or of your own.
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

/// Where tensors live: one device for all ranks, or several that the ranks take in turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices(Vec<DeviceName>);

impl Devices {
    /// The processor for all.
    #[must_use]
    pub fn cpu() -> Self {
        Self(vec![DeviceName::Cpu])
    }

    /// The device of a rank.
    #[must_use]
    pub fn of(&self, rank: usize) -> DeviceName {
        self.0[rank % self.0.len()]
    }

    /// Whether all of them are processors.
    #[must_use]
    pub fn are_processors(&self) -> bool {
        self.0.iter().all(|device| *device == DeviceName::Cpu)
    }
}

impl Setting for Devices {
    fn expected() -> String {
        "auto, cpu, wgpu[:n] or cuda[:n], or several with commas that ranks take in turn".to_owned()
    }
    fn parse(text: &str) -> Option<Self> {
        text.split(',').map(|name| name.parse().ok()).collect::<Option<_>>().map(Self)
    }
    fn value(&self) -> Value {
        Value::String(self.0.iter().map(DeviceName::to_string).collect::<Vec<_>>().join(","))
    }
}

/// A type that reads its own names and prints them: what is expected instead of another.
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

/// A codec by name: a name that nobody has is answered with those that there are, any other with what is wrong
/// with it.
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
    "a codec such as int8, int4:128, sign or topk:0.01/f16: selections, then one of {}, joined by /"
);
codec!(
    AverageSpec,
    Self::names(),
    "a codec such as int8, int4:128, sign, topk:0.01/f16 or powersgd:4: selections, then one of {}, joined by /"
);
codec!(
    LinkSpec,
    link::names().into_iter().map(str::to_owned).chain(farflung_compress::names()).collect(),
    "a boundary's codec, one of {}"
);

/// What gradients are multiplied with where products round them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScaling {
    /// As large as overflows nothing in f16; 1 in others, which have the range of f32.
    Auto,
    /// A power of two.
    Fixed(f32),
}

impl LossScaling {
    /// The scale of a run's first step, and how it goes on.
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

impl Setting for Sharding {
    fn expected() -> String {
        NoSharding.to_string().replacen("expected ", "", 1)
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        Value::String(self.to_string())
    }
}

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
        "rules such as `*.bias:lr=0.1,decay=0` with `;` between them".to_owned()
    }
    fn expected_not(text: &str) -> String {
        match text.parse::<Self>() {
            Err(error) => format!("{}: {error}", Self::expected()),
            Ok(_) => Self::expected(),
        }
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
        "none, full, a number of layers, or the memory of activations such as 2GB".to_owned()
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

/// Where a run begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// From the newest good checkpoint of the run's folder, or at step 0 if there is none.
    Auto,
    /// At step 0, in a folder without a run.
    No,
    /// From this checkpoint.
    Path(PathBuf),
}

impl Setting for Resume {
    fn expected() -> String {
        "auto, no, or the path of a checkpoint".to_owned()
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
