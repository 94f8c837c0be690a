//! A published figure beside ours, for the record.

use serde_json::json;

use crate::harness::Report;

/// What a paper says and what we measured.
#[derive(Debug, Clone)]
pub(crate) struct Published<'a> {
    /// What was measured.
    pub what: &'a str,
    /// The paper's figure with its setting.
    pub paper: &'a str,
    /// Ours.
    pub ours: String,
    /// Our setting.
    pub setting: String,
    /// Whether the claim holds in our setting.
    pub holds: bool,
    /// Why not, or what the comparison leaves out.
    pub note: &'a str,
}

impl Published<'_> {
    /// Adds it to the bench's record.
    pub(crate) fn record(&self, report: &mut Report<'_>) {
        let Self { what, paper, ours, setting, holds, note } = self;
        let entry = json!({
            "what": what, "paper": paper, "ours": ours, "setting": setting, "holds": holds, "note": note,
        });
        report.add("published", entry);
    }
}
