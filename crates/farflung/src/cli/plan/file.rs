//! Writes the output files of `farflung plan`.

use std::path::Path;

use farflung::{Error, Result};

/// Writes a file; `action` describes the operation in error messages.
pub(super) fn write(path: &Path, action: &'static str, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|source| Error::Io { action, path: path.to_owned(), source })
}
