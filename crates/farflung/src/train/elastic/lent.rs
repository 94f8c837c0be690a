//! Records of steps that a member keeps on one shelf and offers on another one, too.

use std::sync::Arc;

use super::offers::Logged;
use super::shelf::{Blob, Shelf};

/// Records of steps that a member can send to others, with their bytes.
#[derive(Debug, Default)]
pub(super) struct Lent(Vec<(Logged, Arc<Blob>)>);

impl Lent {
    /// Takes the records that are on a shelf.
    pub(super) fn new(records: &[Logged], shelf: &Shelf) -> Self {
        let lend = |&logged: &Logged| Some((logged, shelf.lend(&logged.label)?));
        Self(records.iter().filter_map(lend).collect())
    }

    /// Returns the records.
    pub(super) fn records(&self) -> Vec<Logged> {
        self.0.iter().map(|(logged, _)| *logged).collect()
    }

    /// Puts the records on another shelf.
    pub(super) fn put_on(self, shelf: &mut Shelf) {
        for (logged, blob) in self.0 {
            shelf.borrow(&logged.label, blob);
        }
    }
}
