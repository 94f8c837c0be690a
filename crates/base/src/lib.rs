#![doc = include_str!("../README.md")]

pub mod axis;
pub mod chain;
pub mod context;
pub mod id;
pub mod memory;
pub mod name;
pub mod network;
pub mod operation;
pub mod pending;
pub mod philox;
pub mod sparse;
pub mod text_encoding;
pub mod topology;
pub mod unit;

// For all users: axes, ids, kinds of memory, names, links and units.
pub use axis::Axis;
pub use context::{ContextCut, ContextOrder};
pub use id::{PeerId, Rank, StageId};
pub use memory::{MemoryByKind, MemoryKind};
pub use name::{Algorithm, Pattern, Precision, UnknownName};
pub use sparse::{AttentionPattern, HeadTiles, LayerPatterns, ParsePatternError, Tile, TileLists};
pub use topology::{AccessLink, Link, ParseLinkError, Topology};
pub use unit::{Bandwidth, Bytes, Nanos, ParseUnitError};

// For authors of transports, simulators and codecs.
pub use chain::ChainStep;
pub use operation::Operation;
pub use pending::{Pending, PendingOp};
pub use philox::Philox;
