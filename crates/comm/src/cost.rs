//! The cost of a collective on declared links: the alpha-beta model, in which each rank's access link is a
//! shared resource.
//!
//! Pure. The simulated transport moves real bytes over the same [`Network`](farflung_base::network::Network),
//! and a test checks that both take the same time.

use farflung_base::operation::{self, OperationStep, RankPart, SendOrder};
use farflung_base::{Bytes, Nanos, Operation, Rank, Topology};

use crate::FRAME_BYTES;
use crate::steps::{Code, CodedMessage, Program, Step};

/// Maximum number of frames into which the whole buffer is cut to compute a cost; smaller frames hardly change
/// the cost.
const FRAMES: u64 = 4096;

/// Sizes of the transfers of a program.
struct Sizes<'a> {
    /// Bytes of the whole buffer, for plain transfers.
    bytes: u64,
    /// Number of values in the buffer, for coded messages.
    len: usize,
    payload: &'a dyn Fn(usize) -> usize,
}

impl Sizes<'_> {
    /// Returns the size of a message in bytes.
    fn message(&self, program: &Program, number: usize) -> u64 {
        let CodedMessage { block, code } = program.messages[number];
        let values = program.elements(&(block..block + 1), self.len).len();
        match code {
            Code::Plain => (values * size_of::<f32>()) as u64,
            Code::Coded(_) => (self.payload)(values) as u64,
        }
    }

    /// Returns the sends and receives of a step, in bytes.
    fn turn(&self, program: &Program, step: &Step) -> OperationStep {
        let plain = |blocks| Bytes(program.bytes(blocks, self.bytes));
        let coded = |number| Bytes(self.message(program, number));
        let sends = step.sends.iter().map(|(to, blocks)| (*to, plain(blocks)));
        let receives = step.recvs.iter().map(|(from, blocks, _)| (*from, plain(blocks)));
        // Coded messages are sent one after the other, and messages to the same rank follow each other
        // directly. Plain values are sent to all ranks side by side, one frame to each in turn.
        let mut messages: Vec<(Rank, Bytes)> =
            step.coding.sends.iter().map(|&(to, n)| (to, coded(n))).collect();
        let first = |to: Rank| step.coding.sends.iter().position(|(other, _)| *other == to);
        messages.sort_by_key(|&(to, _)| first(to));
        OperationStep {
            sends: sends.chain(messages).collect(),
            order: if step.coding.is_empty() { SendOrder::RoundRobin } else { SendOrder::Sequential },
            receives: receives.chain(step.coding.recvs.iter().map(|&(from, n)| (from, coded(n)))).collect(),
        }
    }

    /// Returns the transfers of the programs.
    fn operation(&self, programs: &[Program]) -> Operation {
        let side = |program: &Program| {
            let lane = |steps: &Vec<Step>| steps.iter().map(|step| self.turn(program, step)).collect();
            RankPart { lanes: program.lanes.iter().map(lane).collect(), window: program.window }
        };
        let frame = Bytes((self.bytes / FRAMES).max(FRAME_BYTES as u64));
        Operation { parts: (0..).map(Rank).zip(programs.iter().map(side)).collect(), frame }
    }
}

/// Returns the transfers of programs over a buffer of `bytes`, for callers that simulate several collectives at
/// once.
///
/// `programs` has one program per rank.
#[must_use]
pub fn operation(programs: &[Program], bytes: Bytes) -> Operation {
    let len = bytes.0 as usize / size_of::<f32>();
    Sizes { bytes: bytes.0, len, payload: &|values| values * size_of::<f32>() }.operation(programs)
}

/// Returns the transfers of coded programs over a buffer of `len` values; `payload(k)` is the maximum size in
/// bytes of `k` encoded values.
#[must_use]
pub fn operation_coded(programs: &[Program], len: usize, payload: &dyn Fn(usize) -> usize) -> Operation {
    Sizes { bytes: (len * size_of::<f32>()) as u64, len, payload }.operation(programs)
}

/// Returns the transfers of one message of `bytes`.
#[must_use]
pub fn message_operation(from: Rank, to: Rank, bytes: Bytes) -> Operation {
    Operation::message(from, to, bytes, Bytes(FRAME_BYTES as u64))
}

/// Returns the operation of a [`Communicator::all_to_all_bytes`](crate::Communicator::all_to_all_bytes) of
/// `ranks` ranks, of which each sends `bytes(from, to)` to each other.
#[must_use]
pub fn all_to_all_operation(ranks: usize, bytes: impl Fn(usize, usize) -> Bytes) -> Operation {
    let at = |rank: usize| Rank(rank as u32);
    let part = |me: usize| {
        // Each rank starts with its neighbour.
        let sends = (1..ranks).map(|i| (me + i) % ranks).map(|to| (at(to), bytes(me, to)));
        let receives = (1..ranks).map(|i| (me + ranks - i) % ranks).map(|from| (at(from), bytes(from, me)));
        let step = OperationStep {
            sends: sends.collect(),
            order: SendOrder::Sequential,
            receives: receives.collect(),
        };
        (at(me), RankPart { lanes: vec![vec![step]], window: usize::MAX })
    };
    Operation { parts: (0..ranks).map(part).collect(), frame: Bytes(FRAME_BYTES as u64) }
}

/// Returns the virtual time from a common start until the last rank has finished its program over a buffer of
/// `bytes`.
///
/// `programs` has one program per rank of `topology`. Returns [`Nanos::MAX`] if a rank would wait forever or a
/// link is dead.
#[must_use]
pub fn cost(programs: &[Program], bytes: Bytes, topology: &Topology) -> Nanos {
    operation::isolated_time(&operation(programs, bytes), topology)
}

/// Returns the [`cost`] of coded programs over a buffer of `len` values; `payload(k)` is the maximum size in
/// bytes of `k` encoded values.
///
/// Encoding and decoding take no time.
#[must_use]
pub fn cost_coded(
    programs: &[Program],
    len: usize,
    payload: &dyn Fn(usize) -> usize,
    topology: &Topology,
) -> Nanos {
    operation::isolated_time(&operation_coded(programs, len, payload), topology)
}
