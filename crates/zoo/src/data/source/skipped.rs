//! Files of a data set that are not read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A file or folder that is left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Its path from the data set's folder.
    #[serde(serialize_with = "as_text")]
    pub path: PathBuf,
    /// Why it is not read.
    pub why: String,
}

/// Writes a path as text. What is not UTF-8 becomes U+FFFD.
fn as_text<S: serde::Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// Returns a path as it is shown on a terminal: without characters that control it.
pub(super) fn shown(path: &Path) -> String {
    let text = path.to_string_lossy();
    text.chars().map(|c| if c.is_control() { c.escape_debug().to_string() } else { c.to_string() }).collect()
}

/// Number of names that are listed for each reason.
const NAMES: usize = 3;

/// Returns the files that were left out by the reason.
pub(super) fn grouped(skipped: &[Skipped]) -> String {
    let mut by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for Skipped { path, why } in skipped {
        by_reason.entry(why).or_default().push(format!("`{}`", shown(path)));
    }
    let groups = by_reason.into_iter().map(|(why, mut names)| {
        let more = names.len().saturating_sub(NAMES);
        names.truncate(NAMES);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more} ({why})", names.join(", "))
    });
    groups.collect::<Vec<_>>().join("; ")
}
