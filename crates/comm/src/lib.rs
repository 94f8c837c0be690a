#![doc = include_str!("../README.md")]

mod cancel;
mod error;
mod frame;
mod shared;
mod sizes;

#[cfg_attr(not(feature = "iroh"), expect(dead_code, reason = "QUIC is the only such network"))]
mod second_network;
mod endpoint;
mod credit;
mod inbox;
mod interfaces;
pub mod memory;
pub mod mixed;
#[cfg(feature = "mpi")]
pub mod mpi;
mod path;
#[cfg(feature = "iroh")]
pub mod quic;
mod rate;
pub mod simulated;
mod started;
pub mod tcp;
mod transport;
mod deadline;

mod control;
pub mod secure;
mod wire;

mod steps;

mod all_to_all;
mod butterfly;
mod doubling;
mod grouped;
mod ordered;
mod owners;
mod ring;
mod scan;
mod tree;

mod algorithm;
mod cost;

mod coded;
mod non_temporal_copy;
mod communicator;
mod element;
mod interpret;
mod message;
mod native;
mod operation;
mod plain;
mod plans;
mod reduction;
mod service;

// Values are sent as the bytes that they have in memory.
const _: () = assert!(cfg!(target_endian = "little"), "farflung-comm needs a little-endian machine");

// For all users: communicators, their operations and their errors.
pub use algorithm::{AllReduce, regions};
pub use cancel::Cancel;
pub use coded::{Coded, CodedAllReduce, CodedBuffer, CodedSlice, CodedValues, Coder};
pub use communicator::{Communicator, Counter, WaitMode, shift_one};
pub use element::{Element, Located, ReduceOp};
pub use error::{CoderError, CommError, DownReason, Refusal, WireError};
pub use farflung_base::Algorithm;
pub use interfaces::reachable_addresses;
pub use message::MAX_MESSAGE;
pub use path::PathStats;
pub use reduction::{Reduction, UserOp};
pub use transport::{PeerEvent, Stats, Traffic, Transport};

/// 16-bit float types that implement [`Element`].
pub use half::{bf16, f16};

// For algorithms as data: lists of steps that can be printed, simulated, compared, or written by hand.
pub use all_to_all::{bruck_all_to_all, direct_all_to_all, pairwise_all_to_all};
pub use butterfly::{
    butterfly, direct, direct_all_gather, direct_gather, direct_reduce_scatter, direct_scatter, shares,
};
pub use coded::{coded_all_gather, coded_exchange, coded_exchange_of, coded_ring, two_level};
pub use cost::{all_to_all_operation, cost, cost_coded, message_operation, operation, operation_coded};
pub use doubling::{halving_doubling, recursive_doubling};
pub use grouped::{hierarchical, moshpit, square};
pub use ordered::{
    ordered_direct, ordered_direct_reduce, ordered_reduce_scatter, ordered_tree, ordered_tree_all_reduce,
    ordered_tree_reduce,
};
pub use owners::{
    gather_from_owners, owners_operation, scatter_to_owners, uneven_all_to_all, uneven_all_to_all_operation,
    waiting_at_owner,
};
pub use ring::{bidirectional_ring, pipelined_ring, ring, ring_all_gather, ring_reduce_scatter};
pub use scan::{chain_exclusive_scan, chain_scan, doubling_exclusive_scan, doubling_scan};
pub use steps::{Code, CodedMessage, Coding, Merge, Phase, Program, Step};
pub use tree::{binomial_broadcast, binomial_reduce, chain_broadcast, dissemination_barrier, double_tree};

// For a transport of your own: implement `Driver`, and make an `Endpoint` of it. `examples/transport` shows it.
pub use endpoint::{Driver, Endpoint, Wake};
pub use frame::{Frame, Pool};
pub use inbox::{BlockedFor, Inbox, WINDOW};
pub use native::{NativeCall, NativeCollectives, NativeKind};
pub use sizes::{FRAME_BYTES, HEADER_BYTES};
pub use transport::{Channel, MPI_IS_FIXED, Source, Tag};

// For an operation of your own: a `Task` is polled with a `Port`.
pub use service::{Answer, Question, Service, ServiceTags};
pub use started::Started;
pub use transport::{Port, Task};

// For tools that read or write the bytes of the wire.
pub use control::{BoundedVec, Control, SharedMemoryMessage};
pub use wire::{Message, Parsed, VERSION, parse};
