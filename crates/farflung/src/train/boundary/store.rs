//! Where stateful codecs store samples: in memory, or in files in the rank's folder.
#![expect(
    unsafe_code,
    reason = "a mapped file is memory that others could change: the run has its folder locked for itself"
)]

use std::io;
use std::path::{Path, PathBuf};

use farflung_compress::CompressError;
use farflung_compress::link::{FileStore, MappedStore, MemoryStore, Samples, Staged, Store};

use crate::disk;

/// Name of the folder with samples within a rank's folder.
const FOLDER: &str = "boundaries";

/// Kind of a store, and how to open it. In each kind, the values that a step writes take effect at its commit.
#[derive(Debug, Clone)]
pub(in crate::train) enum Stores {
    /// Stores samples in memory; checkpoints contain them.
    Memory,
    /// Stores samples in files; checkpoints do not contain them.
    Files {
        /// The folder of the files.
        folder: PathBuf,
        /// Whether files are mapped into memory.
        mapped: bool,
        /// Number of windows of the run.
        windows: u64,
    },
}

impl Stores {
    /// Returns stores in files in a rank's folder, for samples with numbers below `windows`.
    pub(in crate::train) fn files(rank: &Path, mapped: bool, windows: u64) -> Self {
        Self::Files { folder: rank.join(FOLDER), mapped, windows }
    }

    /// Opens the store of this name, which may contain samples already.
    ///
    /// Errors: [`CompressError::Store`].
    pub(super) fn open(&self, name: &str, samples: Samples) -> Result<Box<dyn Store>, CompressError> {
        let Self::Files { folder, mapped, windows } = self else {
            return Ok(Box::new(Staged::new(MemoryStore::new(samples))));
        };
        let failed = |source: io::Error| CompressError::Store {
            action: "create the folder of",
            kind: source.kind(),
            why: format!("{}: {source}", folder.display()),
        };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let path = folder.join(format!("{name}.samples"));
        let file = match FileStore::open(&path, samples, *windows) {
            // Ranks divided the model otherwise, or stored values in another format. What they have stored only
            // saves bytes.
            Err(CompressError::Store { kind: io::ErrorKind::InvalidData, why, .. }) => {
                tracing::warn!("{} is made anew: {why}", path.display());
                std::fs::remove_file(&path).map_err(failed)?;
                FileStore::open(&path, samples, *windows)?
            }
            other => other?,
        };
        // A write to a part of a mapped file for which the disk has no room would end the process.
        let is_mapped = *mapped && disk::reserve(&path);
        if *mapped && !is_mapped {
            let path = path.display();
            tracing::warn!("{path} is not mapped, since the disk cannot reserve room for all of its samples");
        }
        if !is_mapped {
            return Ok(Box::new(Staged::new(file)));
        }
        drop(file);
        // SAFETY: the run's folder is locked, each rank has its own folder in it, and each name is opened once.
        Ok(Box::new(Staged::new(unsafe { MappedStore::open(&path, samples, *windows) }?)))
    }
}
