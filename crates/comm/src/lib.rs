#![doc = include_str!("../README.md")]

mod error;
mod frame;

mod endpoint;
mod inbox;
pub mod memory;
pub mod simulated;
pub mod tcp;
mod transport;
mod wire;

mod cost;
mod halving_doubling;
mod ring;
mod steps;
mod tree;

mod coded;
mod communicator;
mod element;
mod interpret;
mod message;

// Values travel as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"), "farflung-comm needs a little-endian machine");

pub use coded::{Coded, Coder, Phase};
pub use communicator::Communicator;
pub use cost::{Algorithm, cost};
pub use element::{Element, ReduceOp};
pub use endpoint::{Driver, Endpoint, Job, Role, Wake};
pub use error::{CoderError, CommError, DownReason, Refusal, WireError};
pub use frame::{FRAME_BYTES, Frame, Pool};
pub use halving_doubling::halving_doubling;
pub use inbox::{Inbox, WINDOW};
pub use message::MAX_MESSAGE;
pub use ring::{ring, ring_all_gather, ring_reduce_scatter};
pub use steps::{Merge, Program, Step};
pub use transport::{Channel, PeerEvent, Port, Source, Stats, Tag, Task, Traffic, Transport};
pub use tree::{binomial_broadcast, chain_broadcast, dissemination_barrier};
pub use wire::{HEADER_BYTES, VERSION};
