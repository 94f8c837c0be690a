//! What a member offers newcomers in the background, and again in the transfer for which all wait.

use std::sync::Arc;

use farflung_base::Rank;

use super::blobs::{Blob, Label, OfferedBlobs};
use super::fetching::Wanted;
use super::offers::Logged;
use crate::train::run_state::RunState;

/// Records of steps that a member can send to others, with their bytes, and with local steps its optimizer
/// after the synchronisation before the last one.
#[derive(Debug, Default)]
pub(super) struct StepRecords {
    records: Vec<(Logged, Arc<Blob>)>,
    optimizer: Option<Arc<Blob>>,
}

impl StepRecords {
    /// Takes these records and this optimizer from the offered blobs.
    pub(super) fn new(records: &[Logged], optimizer: Option<Label>, blobs: &OfferedBlobs) -> Self {
        let lend = |&logged: &Logged| Some((logged, blobs.get_shared(&logged.label)?));
        let records = records.iter().filter_map(lend).collect();
        Self { records, optimizer: optimizer.and_then(|label| blobs.get_shared(&label)) }
    }

    /// Returns the records.
    pub(super) fn records(&self) -> Vec<Logged> {
        self.records.iter().map(|(logged, _)| *logged).collect()
    }

    /// Returns the optimizer.
    pub(super) fn optimizer(&self) -> Option<RunState> {
        RunState::from_bytes(self.optimizer.as_ref()?.bytes())
    }

    /// Offers the records in another set of blobs, too.
    pub(super) fn offer_in(self, blobs: &mut OfferedBlobs) {
        for (logged, blob) in self.records {
            blobs.put_shared(&logged.label, blob);
        }
    }
}

/// Returns the records of the steps after `step` up to `until`, each with the ranks that offer it. `offered`
/// has each rank's records. `None` if one is missing.
pub(super) fn records_between(offered: &[&[Logged]], step: u64, until: u64) -> Option<Vec<Wanted>> {
    let (mut at, mut records) = (step, Vec::new());
    while at < until {
        let next = |records: &[Logged]| {
            records.iter().find(|record| record.after == at && record.step > at).copied()
        };
        let found = || (0..).map(Rank).zip(offered).filter_map(|(rank, has)| Some((rank, next(has)?)));
        let (_, first) = found().next()?;
        let holders = found().filter(|(_, record)| *record == first).map(|(rank, _)| rank).collect();
        records.push(Wanted { label: first.label, holders });
        at = first.step;
    }
    (at == until).then_some(records)
}

/// Returns the bytes of these blobs together.
pub(super) fn bytes_of(wanted: &[Wanted]) -> u64 {
    wanted.iter().map(|wanted| wanted.label.len).sum()
}
