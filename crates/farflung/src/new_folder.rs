//! A folder that is there as a whole or not at all.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::ModelError;
use crate::model_source::folder_of;
use crate::{Error, Result};

/// A folder in the making. It is removed if it is dropped before it is committed.
#[derive(Debug)]
pub struct NewFolder {
    partial: PathBuf,
    path: PathBuf,
}

impl NewFolder {
    /// Makes one, `.NAME.PROCESS.tmp` beside its path. A path at which there is an empty folder is as good as
    /// a new one.
    ///
    /// Errors: [`ModelError::NotNew`] for a folder that has something in it; [`Error::Io`].
    pub fn beside(path: &Path) -> Result<Self> {
        let not_new = || Error::from(ModelError::NotNew { path: path.to_owned() });
        let name = path.file_name().ok_or_else(not_new)?;
        let path = path.with_file_name(name);
        match path.symlink_metadata() {
            // What cannot be removed could not be replaced after all the work.
            Ok(metadata) if metadata.is_dir() => {
                fs::remove_dir(&path).map_err(|error| match error.kind() {
                    ErrorKind::DirectoryNotEmpty => not_new(),
                    _ => Error::io("replace", &path)(error),
                })?;
            }
            Ok(_) => return Err(not_new()),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("open", &path)(error)),
        }
        let process = std::process::id();
        let partial = path.with_file_name(format!(".{}.{process}.tmp", name.to_string_lossy()));
        let parent = folder_of(&path);
        fs::create_dir_all(&parent).map_err(Error::io("create folder", &parent))?;
        fs::create_dir(&partial).map_err(Error::io("create folder", &partial))?;
        Ok(Self { partial, path })
    }

    /// Returns the folder in which its files are written.
    #[must_use]
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Writes a file to it, and waits until it is on the disk.
    ///
    /// Errors: [`Error::Io`].
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.partial.join(name);
        fs::write(&path, bytes).map_err(Error::io("write", &path))?;
        sync(&path)
    }

    /// Puts it in its place.
    ///
    /// Errors: [`Error::Io`].
    pub fn commit(self) -> Result<()> {
        sync(&self.partial)?;
        fs::rename(&self.partial, &self.path).map_err(Error::io("rename to", &self.path))?;
        sync(&folder_of(&self.path))
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // After a commit it is not there. The first error is the one that is reported.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

/// Waits until a file or a folder is on the disk.
pub(crate) fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io("sync", path))
}
