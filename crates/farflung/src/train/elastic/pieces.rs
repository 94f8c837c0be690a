//! Transfer of tensors of the run's state from members that have them to members that need them.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Rank;
use farflung_comm::Communicator;
use farflung_parallel::plan::Move;

use super::all_gather::all_gather;
use super::blobs::{Label, OfferedBlobs};
use super::fetch::{FetchRole, fetch};
use super::fetching::{ChunkStore, Wanted};
use crate::floats::floats;
use crate::floats::le_bytes;
use crate::train::pieces::StateKind;
use crate::train::run_state::RunState;
use crate::{Error, Result};

/// Tensors that move, by name: the blob with the values, and the ranks that have it.
pub(super) type Holders = BTreeMap<String, Wanted>;

fn wrong(problem: &'static str) -> Error {
    Error::Message { message: "a tensor of the run's state".to_owned(), problem }
}

/// Returns the bytes that all members together receive. Equal tensors of a member are received once.
pub(super) fn moved_bytes(held: &Holders, moving: &[Move]) -> u64 {
    let received = moving.iter().filter_map(|moved| Some((moved.to, held.get(&moved.name)?.label)));
    let received: BTreeSet<(usize, Label)> = received.collect();
    received.into_iter().map(|(_, label)| label.len).sum()
}

/// Offers the moving tensors that this member has. Returns the offered blobs, and which ranks hold each
/// tensor. Unless gradients are averaged at `each_step`, the members of a part have different optimizers: of
/// each tensor, newcomers receive the states of the first member by rank that has it. All members call it.
///
/// Errors: [`Error::Message`] if members have different values of the same tensor.
pub(super) fn offered(
    all: &Communicator,
    own: Option<&RunState>,
    moving: &[Move],
    each_step: bool,
) -> Result<(OfferedBlobs, Holders)> {
    let (mut blobs, mut mine) = (OfferedBlobs::default(), BTreeMap::new());
    if moving.is_empty() {
        return Ok((blobs, Holders::new()));
    }
    for name in moving.iter().map(|moving| &moving.name) {
        if let Some(values) = own.and_then(|own| own.get(name))
            && !mine.contains_key(name)
        {
            mine.insert(name.clone(), blobs.put(le_bytes(values)));
        }
    }
    let told: Vec<BTreeMap<String, Label>> = all_gather(all, &mine)?;
    let mut held = Holders::new();
    for (rank, told) in (0..).map(Rank).zip(told) {
        for (name, label) in told {
            let new = || Wanted { label, holders: BTreeSet::new() };
            let wanted = held.entry(name.clone()).or_insert_with(new);
            if wanted.label != label {
                if !each_step && StateKind::is_optimizer(&name) {
                    continue;
                }
                tracing::error!(name, "members have different values of this tensor");
                return Err(wrong("differs between the members that have it"));
            }
            wanted.holders.insert(rank);
        }
    }
    Ok((blobs, held))
}

/// Transfers tensors and returns those that this member received. Each tensor comes from all members that have
/// it, in proportion to their rates. All members call it.
///
/// Errors: [`Error::Message`] if no remaining holder sends values with the announced hash; [`Error::PeerLost`].
pub(super) fn exchange(
    all: &Communicator,
    (blobs, held): (OfferedBlobs, &Holders),
    moving: &[Move],
    store: &mut ChunkStore,
) -> Result<BTreeMap<String, Vec<f32>>> {
    if moving.is_empty() {
        return Ok(BTreeMap::new());
    }
    let me = all.rank().index();
    let takers: BTreeSet<Rank> = moving.iter().map(|moved| Rank(moved.to as u32)).collect();
    let takers: Vec<Rank> = takers.into_iter().collect();
    let mut coming: BTreeMap<&String, &Wanted> = BTreeMap::new();
    for moved in moving.iter().filter(|moved| moved.to == me) {
        let wanted = held.get(&moved.name).filter(|wanted| wanted.label.len == moved.bytes);
        coming.insert(&moved.name, wanted.ok_or_else(|| wrong("does not have the reported length"))?);
    }
    // Tensors with equal values are the same blob, which is fetched once.
    let unlike: BTreeMap<Label, &Wanted> = coming.values().map(|wanted| (wanted.label, *wanted)).collect();
    let wanted = unlike.values().map(|&wanted| wanted.clone()).collect();
    fetch(all, FetchRole { takers: &takers, wanted, blobs, store: &mut *store, follow_up: None })?;
    let mut blobs = BTreeMap::new();
    for label in unlike.into_keys() {
        blobs.insert(label, store.take(&label).ok_or_else(|| wrong("does not have the reported length"))?);
    }
    let mut came = BTreeMap::new();
    for (name, wanted) in coming {
        let bytes = &blobs[&wanted.label];
        let values = floats(bytes, bytes.len() / 4).ok_or_else(|| wrong("is truncated"))?;
        came.insert(name.clone(), values);
    }
    Ok(came)
}
