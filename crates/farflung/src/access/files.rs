//! Files that hold secrets: created with access for their owner only, and rejected if other users can access
//! them. Files that users provide (tickets, secrets) may be accessible to their group.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use farflung_comm::secure::JoinSecret;

use crate::{Error, Result};

/// Mode bits with which the group or others can access a file.
const NOT_OWNER: u32 = 0o077;
/// Mode bits with which users outside a file's group can access it. Tickets and secrets are checked for these
/// alone, since they may be mounted for a group.
const OTHERS: u32 = 0o007;

/// Reads a private file of exactly `length` bytes; `None` if it does not exist.
///
/// Errors: [`Error::Exposed`] if any other user can access it, [`Error::Io`], [`Error::KeyFile`] for another
/// length.
pub(super) fn read_own(path: &Path, length: usize) -> Result<Option<Vec<u8>>> {
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read the key", path)(error)),
        Ok(file) => {
            let bytes = read(file, path, NOT_OWNER, length as u64 + 1)?;
            if bytes.len() != length {
                return Err(Error::KeyFile { path: path.to_owned(), got: bytes.len(), want: length });
            }
            Ok(Some(bytes))
        }
    }
}

/// Reads at most `most` bytes of a file that its group may read.
///
/// Errors: [`Error::Exposed`] if users outside the group can access it, [`Error::Io`].
pub(super) fn read_shared(path: &Path, most: u64) -> Result<Vec<u8>> {
    read(File::open(path).map_err(Error::io("read", path))?, path, OTHERS, most)
}

fn read(file: File, path: &Path, forbidden: u32, most: u64) -> Result<Vec<u8>> {
    let about = file.metadata().map_err(Error::io("read", path))?;
    if about.is_file() && about.mode() & forbidden != 0 {
        return Err(Error::Exposed { path: path.to_owned(), mode: about.mode() & 0o777 });
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    Ok(bytes)
}

/// Writes `bytes` to a new file of mode 600, atomically. Returns false if the file exists already.
pub(super) fn create(path: &Path, bytes: &[u8]) -> Result<bool> {
    let beside = beside(path)?;
    write(&beside, bytes)?;
    let made = match fs::hard_link(&beside, path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(Error::io("make", path)(error)),
    };
    // A leftover temporary file would be another copy of a secret.
    fs::remove_file(&beside).map_err(Error::io("remove", &beside))?;
    made
}

/// Writes `bytes` to a file of mode 600, which replaces the file at `path`.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let beside = beside(path)?;
    write(&beside, bytes)?;
    fs::rename(&beside, path).map_err(Error::io("replace", path))
}

/// Returns the path of the temporary file that is written before it is moved to `path`. Creates the folder.
fn beside(path: &Path) -> Result<PathBuf> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(Error::io("create the folder (or give --key-file or FARFLUNG_HOME)", folder))?;
    }
    let chance = JoinSecret::generate()?;
    let chance =
        chance.bytes().iter().take(8).fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    Ok(path.with_extension(format!("{chance}.new")))
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(Error::io("write (or give --key-file or FARFLUNG_HOME)", path))
}
