//! A small file that can be replaced on a full disk.
//!
//! Two files of one length take turns: the new content is written over the older one, and the two exchange
//! their names. So no replacement after the first needs room, and a failure in the middle leaves the file as it
//! was.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::{Error, Result};

/// Both files grow by whole blocks. What follows the content is spaces, as JSON allows.
const BLOCK: usize = 4096;

/// Returns the name of the other file.
fn other(path: &Path) -> PathBuf {
    path.with_extension("spare")
}

/// Replaces a file of JSON.
///
/// Errors: [`Error::Io`]; the file is then as it was.
pub(super) fn replace(path: &Path, json: &[u8]) -> Result<()> {
    exchange(path, json).map_err(Error::io("write", path))
}

fn exchange(path: &Path, json: &[u8]) -> io::Result<()> {
    let spare = other(path);
    // A longer file keeps its room.
    let before = fs::metadata(&spare).map_or(0, |file| file.len() as usize);
    let length = json.len().next_multiple_of(BLOCK).max(before);
    let padded = [json, &vec![b' '; length - json.len()]].concat();
    write_over(&spare, &padded)?;
    if path.exists() {
        match renameat_with(CWD, &spare, CWD, path, RenameFlags::EXCHANGE) {
            Ok(()) => return synced(path),
            Err(error) => tracing::debug!(%error, "this file system does not exchange names"),
        }
    }
    fs::rename(&spare, path)?;
    synced(path)?;
    // Where there is no room for it now, the next replacement needs some.
    let kept = write_over(&spare, &padded);
    if let Err(error) = kept {
        tracing::debug!(%error, "no room is kept for the next replacement");
    }
    Ok(())
}

/// Writes over a file that is no longer.
fn write_over(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).create(true).truncate(false).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

fn synced(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_replacement_takes_no_new_room_and_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("promises.json");
        let on_disk = || {
            let entries =
                fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
            entries.map(|file| (file.ino(), file.len(), file.blocks())).collect::<BTreeSet<_>>()
        };
        replace(&path, b"{\"epoch\": 1}").unwrap();
        let first = on_disk();
        assert_eq!(first.len(), 2);
        for epoch in 2..6 {
            replace(&path, format!("{{\"epoch\": {epoch}}}").as_bytes()).unwrap();
            let read: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            assert_eq!(read["epoch"], epoch);
            assert_eq!(on_disk(), first, "no file has come, gone or grown");
        }
        let long = format!("{{\"epoch\": \"{}\"}}", "x".repeat(BLOCK));
        replace(&path, long.as_bytes()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().trim_end(), long);
        // The longer file takes its turn.
        replace(&path, b"{}").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().trim_end(), "{}");
    }
}
