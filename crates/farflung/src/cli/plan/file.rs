//! Reads the topology file of a command.

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
