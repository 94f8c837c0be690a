//! Records of steps that are offered in the background, and again in the transfer for which all wait.

use std::sync::Arc;

use super::blobs::{Blob, OfferedBlobs};
use super::offers::Logged;

/// Records of steps that a member can send to others, with their bytes.
#[derive(Debug, Default)]
pub(super) struct StepRecords(Vec<(Logged, Arc<Blob>)>);

impl StepRecords {
    /// Takes the records that are among the offered blobs.
    pub(super) fn new(records: &[Logged], blobs: &OfferedBlobs) -> Self {
        let lend = |&logged: &Logged| Some((logged, blobs.get_shared(&logged.label)?));
        Self(records.iter().filter_map(lend).collect())
    }

    /// Returns the records.
    pub(super) fn records(&self) -> Vec<Logged> {
        self.0.iter().map(|(logged, _)| *logged).collect()
    }

    /// Offers the records in another set of blobs, too.
    pub(super) fn offer_in(self, blobs: &mut OfferedBlobs) {
        for (logged, blob) in self.0 {
            blobs.put_shared(&logged.label, blob);
        }
    }
}
