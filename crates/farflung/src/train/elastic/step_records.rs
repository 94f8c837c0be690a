//! What a member offers newcomers in the background, and again in the transfer for which all wait.

use std::sync::Arc;

use super::blobs::{Blob, Label, OfferedBlobs};
use super::offers::Logged;
use crate::train::trainer::Snapshot;

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
    pub(super) fn optimizer(&self) -> Option<Snapshot> {
        Snapshot::from_bytes(self.optimizer.as_ref()?.bytes())
    }

    /// Offers the records in another set of blobs, too.
    pub(super) fn offer_in(self, blobs: &mut OfferedBlobs) {
        for (logged, blob) in self.records {
            blobs.put_shared(&logged.label, blob);
        }
    }
}
