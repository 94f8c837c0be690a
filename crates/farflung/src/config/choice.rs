//! The settings that are one word out of a few.

use std::fmt;
use std::path::PathBuf;

use farflung_comm::Algorithm;
use farflung_compress::link::LinkSpec;
use farflung_compress::{CodecSpec, CompressError};
use farflung_optim::LossScale;
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::{Method, VersionSync};
use farflung_tensor::{DeviceName, Precision};
use toml::Value;

use super::value::Setting;

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
            fn expected() -> String {
                ["one of", $($word),+].join(" ")
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
    /// The inner optimizer.
    OptimizerKind {
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
        /// Stochastic gradient descent with momentum.
        Sgd = "sgd",
    }
);
choice!(
    /// How the learning rate goes after its warm-up.
    ScheduleKind {
        /// Half a cosine down to `min-lr`.
        Cosine = "cosine",
        /// A line down to `min-lr`.
        Linear = "linear",
        /// Stays.
        Constant = "constant",
    }
);
choice!(
    /// When workers average.
    SyncKind {
        /// Gradients, at each step.
        Ddp = "ddp",
        /// Parameters, every `sync-every` steps, through an outer Nesterov step.
        Diloco = "diloco",
    }
);
choice!(
    /// What carries bytes between workers.
    TransportKind {
        /// Simulated for several workers in one process, TCP for several processes.
        Auto = "auto",
        /// Within the process, as fast as memory.
        Memory = "memory",
        /// Within the process, over links of virtual time.
        Simulated = "simulated",
        /// Sockets.
        Tcp = "tcp",
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
    ($ty:ty, $expected:expr) => {
        impl Setting for $ty {
            fn expected() -> String {
                $expected
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

named!(Precision, format!("one of {}", Self::ALL.map(|p| p.to_string()).join(" ")));
named!(Algorithm, format!("one of {} auto", Self::ALL.map(|a| a.to_string()).join(" ")));
named!(Method, ["one of"].into_iter().chain(Self::ALL.map(Self::name)).collect::<Vec<_>>().join(" "));

impl Setting for LinkSpec {
    fn expected() -> String {
        let [own, codecs] =
            [farflung_compress::link::names().join(" "), farflung_compress::names().join(" ")];
        format!("a boundary's codec, one of {own} {codecs}")
    }
    fn expected_not(text: &str) -> String {
        match text.parse::<Self>() {
            Err(reason) if !matches!(reason, CompressError::UnknownCodec { .. }) => {
                format!("a valid codec: {reason}")
            }
            _ => Self::expected(),
        }
    }
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        Value::String(self.to_string())
    }
}

impl Setting for CodecSpec {
    fn expected() -> String {
        format!(
            "a codec such as int8, int4:128, sign or topk:0.01/f16: selections, then one of {}, joined by /",
            farflung_compress::names().join(" ")
        )
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
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn value(&self) -> Value {
        Value::String(self.to_string())
    }
}

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

impl Setting for Recompute {
    fn expected() -> String {
        "none, full, or a number of layers".to_owned()
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
