//! The last records for newcomers that have followed their parts of the model: in the view that admits them,
//! they catch up with the members before the parts are assigned.

use std::collections::BTreeSet;
use std::ops::Range;

use farflung_base::Rank;
use farflung_comm::Communicator;
use serde::{Deserialize, Serialize};

use super::all_gather::all_gather;
use super::blobs::{Label, OfferedBlobs, label_of};
use super::fetch::{FetchRole, fetch};
use super::fetching::{ChunkStore, Wanted};
use super::offers::Logged;
use super::step_records::{StepRecords, bytes_of, records_between};
use crate::Result;
use crate::train::run_state::RunState;
use crate::train::trainer::ReplayedParts;

/// What a member of a view has before newcomers catch up.
pub(super) struct BeforeCatchUp<'a> {
    /// For each member, the number of steps after which it has followed parts; `None` if it has not.
    pub(super) at: &'a [Option<u64>],
    /// The member's own parts; `None` on a newcomer.
    pub(super) own: Option<&'a RunState>,
    /// Records of the member's last steps.
    pub(super) lent: StepRecords,
    /// The parts that a newcomer has followed.
    pub(super) followed: Option<&'a mut ReplayedParts>,
}

/// What newcomers have received.
#[derive(Debug, Default)]
pub(super) struct CaughtUp {
    /// The tensors of the parts that this newcomer has followed, after the members' last step. `None` on
    /// others, and if the newcomer must receive its parts as a whole.
    pub(super) tensors: Option<RunState>,
    /// Bytes of the records of all newcomers, and number of members that sent them.
    pub(super) taken: (u64, usize),
}

/// What a member tells the others before the transfer.
#[derive(Debug, Serialize, Deserialize)]
struct RecordsOffer {
    /// Number of steps done; `None` on a newcomer.
    step: Option<u64>,
    /// The layers of each of its parts, or of those that it has followed.
    layers: Vec<Range<usize>>,
    records: Vec<Logged>,
    /// The copy of its parts after the last step, if it has records.
    copy: Option<Label>,
}

/// Sends newcomers the records of the steps that they lack, and replays them there. All members of a view call
/// it. A newcomer whose parts then differ from the members' drops them.
///
/// Errors: [`Error::Message`](crate::Error::Message) if no remaining member sends a record with the announced
/// hashes; [`Error::PeerLost`](crate::Error::PeerLost).
pub(super) fn catch_up(
    all: &Communicator,
    holds: BeforeCatchUp<'_>,
    store: &mut ChunkStore,
) -> Result<CaughtUp> {
    let BeforeCatchUp { at, own, lent, followed } = holds;
    let takers: Vec<Rank> =
        (0..).map(Rank).zip(at).filter(|(_, at)| at.is_some()).map(|(rank, _)| rank).collect();
    if takers.is_empty() {
        return Ok(CaughtUp::default());
    }
    let records = lent.records();
    let copy = own.filter(|_| !records.is_empty()).map(|own| label_of(&own.to_bytes()));
    // A spare may still have the parts that it held before it was one.
    let own = own.filter(|_| followed.is_none());
    let layers = followed.as_ref().map(|parts| parts.layers()).or_else(|| own.map(|own| &own.layers[..]));
    let layers = layers.unwrap_or_default().to_vec();
    let step = own.map(RunState::step);
    let told: Vec<RecordsOffer> = all_gather(all, &RecordsOffer { step, layers, records, copy })?;
    let until = told.iter().filter_map(|told| told.step).max().unwrap_or(0);
    let lacks = |rank: &Rank| {
        let layers = &told[rank.index()].layers;
        // The members that hold the parts that it has followed.
        let hold = |offer: &&RecordsOffer| offer.step.is_some() && offer.layers == *layers;
        let mut offered: Vec<&[Logged]> = Vec::with_capacity(told.len());
        for offer in &told {
            offered.push(if hold(&offer) { &offer.records } else { &[] });
        }
        // If the records are more than the parts, it takes the parts.
        let whole = told.iter().filter(hold).filter_map(|told| told.copy).map(|copy| copy.len).max();
        let records = records_between(&offered, at[rank.index()]?, until);
        records.filter(|records| bytes_of(records) <= whole.unwrap_or(0))
    };
    let wanted: Vec<Wanted> =
        takers.iter().find(|&&rank| rank == all.rank()).and_then(lacks).unwrap_or_default();
    let all_wanted: Vec<Wanted> = takers.iter().filter_map(lacks).flatten().collect();
    let donors: BTreeSet<Rank> = all_wanted.iter().flat_map(|wanted| wanted.holders.clone()).collect();
    let mut blobs = OfferedBlobs::default();
    lent.offer_in(&mut blobs);
    fetch(
        all,
        FetchRole { takers: &takers, wanted: wanted.clone(), blobs, store: &mut *store, follow_up: None },
    )?;
    let tensors = match followed {
        Some(followed) => replayed(followed, &wanted, store, (until, &told))?,
        None => None,
    };
    Ok(CaughtUp { tensors, taken: (bytes_of(&all_wanted), donors.len()) })
}

/// Replays the records that have arrived. Returns the tensors of the parts if they are those of the members.
fn replayed(
    followed: &mut ReplayedParts,
    wanted: &[Wanted],
    store: &mut ChunkStore,
    (until, told): (u64, &[RecordsOffer]),
) -> Result<Option<RunState>> {
    for record in wanted {
        let bytes = store.take(&record.label).unwrap_or_default();
        if let Err(error) = followed.replay(&bytes) {
            tracing::warn!(%error, "a step cannot be replayed: this newcomer takes its parts as a whole");
            return Ok(None);
        }
    }
    let copy = followed.shared_state()?;
    let own = label_of(&copy.to_bytes());
    if copy.step() != until || told.iter().all(|told| told.copy != Some(own)) {
        tracing::warn!("this newcomer's parts are not those of the members: it takes them as a whole");
        return Ok(None);
    }
    Ok(Some(followed.with_optimizer(copy)?))
}
