//! Tensors of the run's state on their way from members that have them to members that need them.

use std::collections::BTreeMap;

use farflung_base::Rank;
use farflung_comm::Communicator;
use farflung_parallel::plan::Move;

use super::team::tell_all;
use crate::train::floats::floats;
use crate::train::trainer::Pieces;
use crate::{Error, Result};

/// The tag of what moves.
const MOVES: u32 = u32::MAX / 2 - 10;

/// What is sent at a time.
const CHUNK: usize = 4 << 20;

/// The hash of each tensor that moves.
pub(super) type Hashes = BTreeMap<String, [u8; 32]>;

fn wrong(problem: &'static str) -> Error {
    Error::Message { message: "a tensor of the run's state".to_owned(), problem }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The hashes that all members give of tensors that move, of which `own` are this one's. All members call it.
///
/// Errors: [`Error::Message`] where members that hold the same tensor have other values.
pub(super) fn hashes(all: &Communicator, own: Option<&Pieces>, moving: &[Move]) -> Result<Hashes> {
    if moving.is_empty() {
        return Ok(Hashes::new());
    }
    let mut mine = Hashes::new();
    for name in moving.iter().map(|moving| &moving.name) {
        if let Some(values) = own.and_then(|own| own.tensors.get(name)) {
            mine.entry(name.clone()).or_insert_with(|| *blake3::hash(&bytes_of(values)).as_bytes());
        }
    }
    let mut agreed = Hashes::new();
    for (name, hash) in tell_all(all, &mine)?.into_iter().flatten() {
        if *agreed.entry(name.clone()).or_insert(hash) != hash {
            tracing::error!(name, "members that hold this tensor have other values");
            return Err(wrong("is not the same on all members that have it"));
        }
    }
    Ok(agreed)
}

/// What one member sends another, or gets from it.
struct Stream {
    with: Rank,
    bytes: Vec<u8>,
    len: usize,
}

/// The streams of this member, by the other's number, in the order of the moves.
fn streams(moving: &[Move], other: impl Fn(&Move) -> Option<usize>) -> Vec<Stream> {
    let mut lens: BTreeMap<usize, usize> = BTreeMap::new();
    for moved in moving {
        if let Some(with) = other(moved) {
            *lens.entry(with).or_default() += moved.bytes as usize;
        }
    }
    lens.into_iter().map(|(with, len)| Stream { with: Rank(with as u32), bytes: Vec::new(), len }).collect()
}

/// Has tensors move: gives those that came. All that send or get any call it.
///
/// Errors: [`Error::Message`] where one does not have the hash that its holders told; [`Error::PeerLost`].
pub(super) fn exchange(
    all: &Communicator,
    own: Option<&Pieces>,
    moving: &[Move],
    hashes: &Hashes,
) -> Result<BTreeMap<String, Vec<f32>>> {
    let me = all.rank().index();
    let mut leaving = streams(moving, |moved| (moved.from == me).then_some(moved.to));
    for stream in &mut leaving {
        for moved in moving.iter().filter(|moved| moved.from == me && moved.to == stream.with.index()) {
            let values = own
                .and_then(|own| own.tensors.get(&moved.name))
                .filter(|v| 4 * v.len() as u64 == moved.bytes);
            stream.bytes.extend(bytes_of(values.ok_or_else(|| wrong("is not as long as was told"))?));
        }
    }
    let mut coming = streams(moving, |moved| (moved.to == me).then_some(moved.from));
    let longest = leaving.iter().chain(&coming).map(|stream| stream.len).max().unwrap_or(0);
    for start in (0..longest).step_by(CHUNK) {
        // With all others at once, so that no link waits for another.
        let due = |stream: &&mut Stream| start < stream.len;
        let sending: Vec<_> = (leaving.iter_mut().filter(due))
            .map(|stream| {
                let chunk = stream.bytes[start..stream.len.min(start + CHUNK)].to_vec();
                all.start_send(stream.with, MOVES, chunk)
            })
            .collect();
        let arriving: Vec<_> = (coming.iter_mut().filter(due))
            .map(|stream| (all.start_recv(stream.with, MOVES), stream))
            .collect();
        for (chunk, stream) in arriving {
            let chunk = chunk.wait()?;
            if chunk.len() != stream.len.min(start + CHUNK) - start {
                return Err(wrong("comes in other pieces than its length says"));
            }
            stream.bytes.extend(chunk);
        }
        for sent in sending {
            sent.wait()?;
        }
    }
    let mut came = BTreeMap::new();
    for stream in &coming {
        let mut rest = &stream.bytes[..];
        for moved in moving.iter().filter(|moved| moved.to == me && moved.from == stream.with.index()) {
            let (bytes, behind) = rest.split_at(moved.bytes as usize);
            rest = behind;
            if hashes.get(&moved.name) != Some(blake3::hash(bytes).as_bytes()) {
                return Err(wrong("does not have the hash that its members told"));
            }
            let values = floats(bytes, bytes.len() / 4).ok_or_else(|| wrong("is cut off"))?;
            came.insert(moved.name.clone(), values);
        }
    }
    Ok(came)
}
