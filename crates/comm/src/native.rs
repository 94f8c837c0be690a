//! Collectives of a network's own library, such as those of MPI, in place of ours. Their results may differ in
//! rounding. Independent of the network.

use farflung_base::{PeerId, Rank};

use crate::ReduceOp;

/// A collective that a library has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NativeKind {
    /// All ranks get the reduction of all buffers.
    AllReduce,
    /// Each rank gets its shard of the reduction.
    ReduceScatter,
    /// All ranks get the shards of all.
    AllGather,
    /// All ranks get the buffer of this one.
    Broadcast(Rank),
}

/// A collective that is to be started.
#[derive(Debug, Clone)]
pub struct NativeCall {
    /// Context of the communicator.
    pub context: u64,
    /// Which collective.
    pub kind: NativeKind,
    /// Name of the element type, as in errors.
    pub element: &'static str,
    /// How elements are reduced. For a mean, the library computes the sum, and the communicator divides it.
    /// Unused by all-gathers and broadcasts.
    pub op: ReduceOp,
    /// Number of elements in each rank's shard.
    pub shards: Vec<usize>,
    /// This rank.
    pub rank: usize,
}

/// The collectives of a network's own library. They are started in the same order on all ranks of a
/// communicator, as ours are.
pub trait NativeCollectives: Send + Sync {
    /// Prepares collectives among the members of a new communicator. Blocks until all members call it.
    fn add_group(&self, context: u64, members: &[PeerId]);
    /// Returns whether the library has this collective for a communicator that was prepared.
    fn has(&self, call: &NativeCall) -> bool;
    /// Starts a collective on a copy of these bytes; returns its number, or `None` if the network has ended.
    fn start(&self, call: &NativeCall, data: &[u8]) -> Option<u64>;
    /// Returns whether the collective is complete. If it is, writes the result to `data`; then the number is no
    /// longer valid.
    fn finish(&self, number: u64, data: &mut [u8]) -> bool;
}
