//! Atomic writing of files: a file is either complete or absent.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::ZooError;

/// Writes `path` through `fill`: writes to `NAME.tmp` in the same folder, syncs, and renames it to `path`. On
/// an error the temporary file is removed; `path` is unchanged unless only the final sync of the folder failed.
pub(super) fn write_file<E: From<ZooError>>(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let result = write_then_rename(&temporary, path, fill);
    if result.is_err() {
        // Report the first error. A remaining temporary file is overwritten by the next attempt.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn write_then_rename<E: From<ZooError>>(
    temporary: &Path,
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    let file = File::create(temporary).map_err(ZooError::io("create", temporary))?;
    let mut writer = BufWriter::with_capacity(1 << 18, file);
    fill(&mut writer)?;
    let file = writer.into_inner().map_err(|e| ZooError::io("write", temporary)(e.into_error()))?;
    file.sync_all().map_err(ZooError::io("sync", temporary))?;
    drop(file);
    fs::rename(temporary, path).map_err(ZooError::io("rename to", path))?;
    sync_folder(path)?;
    Ok(())
}

/// Syncs the folder, so that the rename is durable. Unix only.
fn sync_folder(path: &Path) -> Result<(), ZooError> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if cfg!(unix) {
        let sync = File::open(folder).and_then(|f| f.sync_all());
        sync.map_err(ZooError::io("sync folder", folder))?;
    }
    Ok(())
}
