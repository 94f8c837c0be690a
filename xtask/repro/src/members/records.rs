//! What a member's process has written in its folder.

use std::path::Path;

use anyhow::Result;
use farflung::{Event, StepMetrics};

/// Returns the events in a member's folder; none if it has written none.
pub(super) fn events(folder: &Path) -> Result<Vec<Event>> {
    let path = folder.join("events.jsonl");
    if path.exists() { Ok(farflung::events::read(&path)?) } else { Ok(Vec::new()) }
}

/// Returns the steps in a member's folder; none if it has written none.
pub(super) fn metrics(folder: &Path) -> Result<Vec<StepMetrics>> {
    let path = folder.join("metrics.jsonl");
    if path.exists() { Ok(farflung::metrics::read(&path)?) } else { Ok(Vec::new()) }
}
