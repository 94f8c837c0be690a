//! Writes what a command makes.

use std::path::Path;

use farflung::{Error, Result};

/// Writes a file; `action` says what failed if it cannot be.
pub(super) fn write(path: &Path, action: &'static str, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|source| Error::Io { action, path: path.to_owned(), source })
}
