//! A published figure and ours, for the record.

use serde_json::json;

use crate::harness::Report;

/// A figure from a paper, and our measurement.
#[derive(Debug, Clone)]
pub(crate) struct Published<'a> {
    /// The measured quantity.
    pub what: &'a str,
    /// The paper's figure with its setting.
    pub paper: &'a str,
    /// Our figure.
    pub ours: String,
    /// Our setting.
    pub setting: String,
    /// True if the claim holds in our setting.
    pub holds: bool,
    /// Reason why it does not hold, or limits of the comparison.
    pub note: &'a str,
}

impl Published<'_> {
    /// Adds this to the bench's record.
    pub(crate) fn record(&self, report: &mut Report<'_>) {
        let Self { what, paper, ours, setting, holds, note } = self;
        let entry = json!({
            "what": what, "paper": paper, "ours": ours, "setting": setting, "holds": holds, "note": note,
        });
        report.add("published", entry);
    }
}
