//! Reads the topology file of a command, writes what it makes.

use std::path::Path;

use farflung::parallel::{Cluster, shipped};
use farflung::{Error, Result};

/// Reads a topology file, or where there is none of this path the shipped one of this name.
pub(super) fn read(path: &Path) -> Result<Cluster> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.parse()?),
        Err(source) => {
            let name = path.to_string_lossy();
            if shipped::SHIPPED.iter().any(|shipped| shipped.name == name) {
                return Ok(shipped::cluster(&name)?);
            }
            Err(Error::Io { action: "read", path: path.to_owned(), source })
        }
    }
}

/// Writes a file; `action` says what failed if it cannot be.
pub(super) fn write(path: &Path, action: &'static str, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|source| Error::Io { action, path: path.to_owned(), source })
}
