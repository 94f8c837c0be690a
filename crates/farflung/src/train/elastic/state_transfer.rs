//! Transfer of the run's state in memory to members without it: newcomers, and ranks that are one step (with
//! local steps: one average) behind after a loss. A newcomer that has followed the run takes only the records
//! of the steps that it lacks. With local steps, it also takes the first member's optimizer, unless it has
//! fetched that before.

use farflung_base::{Bytes, Rank};
use farflung_comm::Communicator;
use serde::{Deserialize, Serialize};

use super::all_gather::all_gather;
use super::blobs::{Label, OfferedBlobs, label_of};
use super::fetch::{FetchRole, fetch};
use super::fetching::{ChunkStore, Wanted};
use super::offers::Logged;
use super::step_records::{StepRecords, bytes_of, records_between};
use crate::train::fault::{Fault, FaultyValue};
use crate::train::job::Job;
use crate::train::pieces::StateKind;
use crate::train::run_state::{OptimizerCounters, RunState};
use crate::train::trainer::{Progress, ReplayedParts, Trainer};
use crate::{Error, Result};

/// Which ranks send the state, and which receive it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StateTransfer {
    /// Ranks that have the newest state on which the ranks have agreed.
    pub(super) donors: Vec<Rank>,
    /// All other ranks.
    pub(super) takers: Vec<Rank>,
    /// Progress of the donor that has done the most steps.
    pub(super) progress: Progress,
    /// Rank of that donor.
    pub(super) furthest: Rank,
}

impl StateTransfer {
    /// Computes the exchange from each rank's progress, which is `None` for a rank without the state. With
    /// `each_step`, ranks agree at each step, and a rank that is a step behind receives it from the others.
    /// Otherwise steps are local: a rank that missed an average receives the state after that average, and then
    /// does the local steps since then.
    ///
    /// Returns `None` if no rank has the state.
    pub(super) fn new(standing: &[Option<Progress>], each_step: bool) -> Option<Self> {
        let agreed = |at: Progress| if each_step { at.step } else { at.outer_step };
        let newest = standing.iter().flatten().map(|&at| agreed(at)).max()?;
        let has_all = |rank: &Rank| standing[rank.index()].is_some_and(|at| agreed(at) == newest);
        let (donors, takers): (Vec<Rank>, Vec<Rank>) =
            (0..standing.len() as u32).map(Rank).partition(has_all);
        let furthest =
            donors.iter().copied().max_by_key(|rank| (standing[rank.index()], std::cmp::Reverse(*rank)))?;
        Some(Self { donors, takers, progress: standing[furthest.index()]?, furthest })
    }
}

/// Statistics of a transfer of the state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TransferStats {
    /// Bytes that a taker received; on a donor: those of the taker that receives most.
    pub(super) state: Bytes,
    /// Number of donors that sent chunks. On a donor: the number of all donors.
    pub(super) donors: usize,
}

/// State received by a rank that had none, or an older one.
#[derive(Debug)]
pub(super) struct ReceivedState {
    /// The part of the state that is the same on all replicas.
    shared: RunState,
    /// The first donor's own optimizer state, for a newcomer in a run with local steps.
    own: Option<RunState>,
}

impl ReceivedState {
    /// Gives it to a trainer. Where optimizers differ between replicas, a member keeps its own.
    ///
    /// Errors: those of [`Trainer::take_state`].
    pub(super) fn give(&self, trainer: &mut Trainer, job: &Job) -> Result<()> {
        let from = self.own.as_ref().or_else(|| job.averages_each_step().then_some(&self.shared));
        let optimizer = from.map(|from| &from.counted.optimizer);
        // All donors have the same shared state, so no donor's optimizer may replace a tensor of it.
        let own = self.own.as_ref();
        let get = |name: &str| match own.filter(|_| StateKind::is_optimizer(name)) {
            Some(own) => own.get(name),
            None => self.shared.get(name),
        };
        trainer.take_state((&self.shared.counted, optimizer), &get)
    }
}

/// Labels of the state that a donor offers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct StateLabels {
    shared: Label,
    /// The donor's optimizer, with local steps; only the first donor offers it.
    own: Option<OwnOptimizer>,
    /// Records of the newest steps.
    records: Vec<Logged>,
}

/// A replica's optimizer: its state without counters, and its counters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct OwnOptimizer {
    label: Label,
    counters: OptimizerCounters,
}

/// Returns the optimizer that newcomers take from the first donor. Its state is that after the synchronisation
/// before the last one, if the donor has kept it: newcomers that follow the run have fetched it meanwhile.
fn optimizer_for_newcomers(trainer: &Trainer, lent: &StepRecords) -> Result<RunState> {
    match lent.optimizer() {
        Some(earlier) => trainer.with_averaged_states(earlier),
        None => trainer.optimizer(),
    }
}

/// What a rank tells the others before the transfer.
#[derive(Debug, Serialize, Deserialize)]
struct TransferOffer {
    /// What it offers; `None` if it is no donor.
    has: Option<StateLabels>,
    /// Steps after which a newcomer has the state; `None` without a state.
    at: Option<u64>,
}

/// What a rank has before the transfer.
pub(super) enum LocalState<'a> {
    /// A member's state, and records of its newest steps.
    Member(&'a Trainer, StepRecords),
    /// A newcomer's state, if it has followed the run.
    Newcomer(Option<&'a mut ReplayedParts>),
}

/// Transfers the run's state from the donors to the takers. Takers fetch chunks of the shared state from all
/// donors, in proportion to their rates. If steps are local, a newcomer also fetches the optimizer state of the
/// first donor. A newcomer that has followed the run fetches the records of the steps that it lacks, and the
/// state or the optimizer only if its own then differs. All ranks call it. `store` keeps received chunks until
/// the state is complete.
///
/// Errors: [`Error::Message`] if the donors' states differ, or if no remaining donor sends chunks with the
/// announced hashes; [`Error::PeerLost`] for a lost rank.
pub(super) fn transfer_state(
    holds: LocalState<'_>,
    comm: &Communicator,
    (job, exchange): (&Job, &StateTransfer),
    store: &mut ChunkStore,
) -> Result<(TransferStats, Option<ReceivedState>)> {
    let (me, donors) = (comm.rank(), &exchange.donors);
    let (trainer, lent, mut followed) = match holds {
        LocalState::Member(trainer, lent) => (Some(trainer), lent, None),
        LocalState::Newcomer(followed) => (None, StepRecords::default(), followed),
    };
    if exchange.takers.is_empty() {
        return Ok((TransferStats::default(), None));
    }
    let donor = donors.iter().position(|&rank| rank == me).zip(trainer);
    let mut blobs = OfferedBlobs::default();
    blobs.fault = chunk_fault(job, me, exchange.progress.step);
    let has =
        donor.map(|(number, trainer)| offer(trainer, number == 0, job, lent, &mut blobs)).transpose()?;
    let told =
        all_gather(comm, &TransferOffer { has, at: followed.as_ref().map(|followed| followed.step()) })?;
    let at: Vec<Option<u64>> = told.iter().map(|told| told.at).collect();
    let told: Vec<Option<StateLabels>> = told.into_iter().map(|told| told.has).collect();
    let first = told[donors[0].index()].as_ref().ok_or_else(|| wrong("was reported by no member"))?;
    let of = |rank: &Rank| told[rank.index()].as_ref().map(|has| has.shared);
    if let Some(other) = donors.iter().find(|donor| of(donor) != Some(first.shared)) {
        tracing::error!(rank = other.0, "the state of this member differs from that of the first member");
        return Err(wrong("differs between the members that have it"));
    }
    let is_taker = exchange.takers.contains(&me);
    let own = first.own.clone().filter(|_| trainer.is_none());
    let whole_optimizer = || own.as_ref().map(|own| Wanted { label: own.label, holders: [donors[0]].into() });
    let whole = || Wanted { label: first.shared, holders: donors.iter().copied().collect() };
    let whole_bytes = first.shared.len + first.own.as_ref().map_or(0, |own| own.label.len);
    let offered: Vec<&[Logged]> =
        told.iter().map(|has| has.as_ref().map_or(&[][..], |has| &has.records)).collect();
    let lacks = |rank: &Rank| {
        let lacks = records_between(&offered, at[rank.index()]?, exchange.progress.step)?;
        // The whole state is taken if that is less.
        (bytes_of(&lacks) < whole_bytes).then_some(lacks)
    };
    // Bytes that a taker receives: the records that it lacks, or the whole shared state.
    let takes = |rank: &Rank| lacks(rank).map_or(first.shared.len, |lacks| bytes_of(&lacks));
    let mut state = exchange.takers.iter().map(takes).max().unwrap_or(0);
    let lacks = is_taker.then(|| lacks(&me)).flatten();
    let mut wanted = Vec::new();
    if is_taker {
        wanted = lacks.clone().unwrap_or_else(|| [whole()].into_iter().chain(whole_optimizer()).collect());
    }
    // The state and the optimizer that this newcomer has after the steps that it lacked, if they are those of
    // the members.
    let (mut caught, mut caught_optimizer) = (None, None);
    let mut replay = |store: &mut ChunkStore| {
        let (Some(followed), Some(lacks)) = (&mut followed, &lacks) else { return Ok(Vec::new()) };
        for record in lacks {
            followed.replay(&store.take(&record.label).ok_or_else(|| wrong("lacks a record"))?)?;
        }
        let mut more = Vec::new();
        let state = followed.shared_state()?;
        if label_of(&state.to_bytes()) == first.shared {
            caught = Some(state);
        } else {
            tracing::warn!(
                "this newcomer's state differs from the members' after the same steps: it takes theirs"
            );
            more.push(whole());
        }
        if let Some(own) = &own {
            let optimizer = followed.optimizer()?;
            if label_of(&optimizer.to_bytes()) == own.label {
                caught_optimizer = Some(optimizer);
            } else {
                more.extend(whole_optimizer());
            }
        }
        Ok(more)
    };
    let then = lacks.is_some().then_some(&mut replay as _);
    let gave = fetch(
        comm,
        FetchRole { takers: &exchange.takers, wanted, blobs, store: &mut *store, follow_up: then },
    )?;
    if is_taker && caught.is_none() {
        state = first.shared.len;
    }
    let shared = TransferStats { state: Bytes(state), donors: if is_taker { gave } else { donors.len() } };
    if !is_taker {
        return Ok((shared, None));
    }
    let mut read = |label: &Label, caught: Option<RunState>| {
        if let Some(caught) = caught {
            return Ok(caught);
        }
        let bytes = store.take(label).ok_or_else(|| wrong("does not have the reported length"))?;
        RunState::from_bytes(&bytes).ok_or_else(|| wrong("cannot be parsed"))
    };
    let state = read(&first.shared, caught)?;
    let own = match own {
        Some(OwnOptimizer { label, counters }) => {
            let mut own = read(&label, caught_optimizer)?;
            own.counted.optimizer = counters;
            Some(own)
        }
        None => None,
    };
    Ok((shared, Some(ReceivedState { shared: state, own })))
}

/// Offers the state of a member, its optimizer if it is the `first` one and steps are local, and its records of
/// steps.
fn offer(
    trainer: &Trainer,
    first: bool,
    job: &Job,
    lent: StepRecords,
    blobs: &mut OfferedBlobs,
) -> Result<StateLabels> {
    let shared = blobs.put(trainer.shared_state(job)?.to_bytes());
    // If ranks agree at each step, the shared state already contains the optimizer's.
    let gives_own = first && !job.averages_each_step();
    let optimizer = gives_own.then(|| optimizer_for_newcomers(trainer, &lent)).transpose()?;
    let own = optimizer.map(|optimizer| {
        let label = blobs.put(optimizer.to_bytes());
        OwnOptimizer { label, counters: trainer.optimizer_counters() }
    });
    let records = lent.records();
    lent.offer_in(blobs);
    Ok(StateLabels { shared, own, records })
}

/// Returns the fault that a test injects into a chunk of the state that this rank sends after `step` steps.
pub(super) fn chunk_fault(job: &Job, me: Rank, step: u64) -> Option<Fault> {
    job.fault.filter(|fault| fault.is_in(me.0, step, FaultyValue::Chunk))
}

fn wrong(problem: &'static str) -> Error {
    Error::Message { message: "the state of the run".to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_are_furthest_give() {
        let at = |step, outer_step| Some(Progress { step, outer_step });
        let exchange = StateTransfer::new(&[at(7, 0), None, at(8, 0), at(8, 0)], true).unwrap();
        assert_eq!(exchange.donors, [Rank(2), Rank(3)]);
        assert_eq!(exchange.takers, [Rank(0), Rank(1)]);
        assert_eq!((exchange.furthest, exchange.progress.step), (Rank(2), 8));
        assert_eq!(StateTransfer::new(&[None, None], true), None);
    }

    /// The vectors of torchft's healing. Where it assigns one healthy replica to each of the others, here all
    /// healthy ones give chunks to all others; and if all are at the first step, they already have one state.
    #[test]
    fn the_same_replicas_heal_as_with_torchft() {
        let ranks = |ranks: &[u32]| ranks.iter().copied().map(Rank).collect::<Vec<_>>();
        let cases: [(&[u64], &[u32], &[u32]); 2] =
            [(&[0, 1, 0, 1, 0], &[1, 3], &[0, 2, 4]), (&[0, 0], &[0, 1], &[])];
        for (steps, healthy, healed) in cases {
            let at: Vec<Option<Progress>> =
                steps.iter().map(|&step| Some(Progress { step, outer_step: 0 })).collect();
            let exchange = StateTransfer::new(&at, true).unwrap();
            assert_eq!((exchange.donors, exchange.takers), (ranks(healthy), ranks(healed)), "{steps:?}");
            assert_eq!(exchange.furthest, Rank(healthy[0]));
        }
    }

    #[test]
    fn with_local_steps_those_give_that_have_the_last_average() {
        let at = |step, outer_step| Some(Progress { step, outer_step });
        let exchange = StateTransfer::new(&[at(2, 0), at(2, 1), at(4, 1), None, at(4, 1)], false).unwrap();
        assert_eq!(exchange.donors, [Rank(1), Rank(2), Rank(4)]);
        assert_eq!(exchange.takers, [Rank(0), Rank(3)]);
        assert_eq!((exchange.furthest, exchange.progress.step), (Rank(2), 4));
    }
}
