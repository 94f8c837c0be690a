#![doc = include_str!("../README.md")]
#![recursion_limit = "256"]

pub mod access;
pub mod checkpoint;
pub mod config;
pub mod convert;
pub mod corpus;
pub mod data_notes;
pub mod diff;
mod disk;
pub mod error;
pub mod events;
pub mod finite;
mod floats;
mod heap;
pub mod launch;
pub mod launch_env;
mod line_file;
pub mod measure;
pub mod metrics;
pub mod model_name;
pub mod model_shape;
pub mod model_source;
mod path_models;
pub mod new_folder;
pub mod notice;
pub mod observe;
pub mod peer_counters;
pub mod peers;
pub mod plot;
pub mod progress;
pub mod relay;
pub mod run_dir;
pub mod shell_word;
pub mod signals;
pub mod step_memory;
pub mod step_times;
pub mod terminal;
pub mod threads;
mod tokenizer_files;
pub mod tokenizers;
mod link_payload;
mod over_ranks;
mod row_messages;
pub mod train;
pub mod transports;
#[cfg(feature = "watch")]
pub mod watch;

// Items that every user of the crate needs: settings, a run and its errors. `train::run` trains.
pub use config::flags::TrainFlags;
pub use config::{RunSettings, TrainArgs, TrainConfig};
pub use error::{Error, LaunchError, ModelError, Result, StateError};
pub use model_name::model_name;
pub use model_shape::model_shape;
pub use model_source::ModelSource;
pub use over_ranks::OverRanks;
pub use path_models::{PathModel, PathModels};
pub use signals::{Signal, Stop, ignore_file_size_signal};

// Items for programs that read a run's folder.
pub use checkpoint::{Checkpoint, CheckpointWriter, Packing};
pub use events::{Event, EventKind, LostSequences};
pub use metrics::{MetricsWriter, StepMetrics};
pub use peer_counters::{PathCounters, PeerCounters};
pub use plot::loss_curve_svg;
pub use run_dir::{Existing, RunDir};
pub use step_memory::{CountedMemory, StepMemory};
pub use step_times::StepTimes;

// Items for programs with their own command line or launcher.
pub use access::{AccessArgs, Home};
pub use launch::Launch;
pub use launch_env::LaunchEnv;
pub use notice::{MemberNoticeArgs, NoticeArgs};
pub use observe::ObserveArgs;
pub use progress::{Progress, Show};

// The crates below this one.
pub use farflung_base as base;
pub use farflung_comm as comm;
pub use farflung_compress as compress;
pub use farflung_optim as optim;
pub use farflung_parallel as parallel;
pub use farflung_store as store;
pub use farflung_tensor as tensor;
pub use farflung_zoo as zoo;
