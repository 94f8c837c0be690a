//! A file of JSON lines that a run appends to: `metrics.jsonl`, `events.jsonl`, `times.jsonl`, `peers.jsonl`.
//! Lines of earlier starts of the run are kept.
//!
//! These files never end a run. On a full disk lines are dropped, and no half of a line is left. A file that
//! was rotated is begun again, and a damaged one is put aside (`repair.rs`).

mod lines;
mod repair;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};
pub(crate) use lines::{LineRead, Lines};

/// Returns the step of a line, or `None` if the line does not belong in the file.
pub(crate) type StepOf = fn(&[u8]) -> Option<u64>;

/// A file of JSON lines, opened when the first line is appended.
#[derive(Debug)]
pub(crate) struct LineFile {
    path: PathBuf,
    step_of: StepOf,
    file: Option<File>,
    /// Number of lines dropped since the last one that was written.
    dropped: u64,
    /// Whether the user was told that lines are dropped.
    has_warned: bool,
}

impl LineFile {
    /// Makes a file whose lines have a field `step`.
    pub(crate) const fn new(path: PathBuf) -> Self {
        Self::of(path, step_of)
    }

    const fn of(path: PathBuf, step_of: StepOf) -> Self {
        Self { path, step_of, file: None, dropped: 0, has_warned: false }
    }

    /// Opens a file now. Lines of steps after `up_to` are removed. Also returns the step of its last line.
    ///
    /// Errors: [`Error::Io`], [`Error::NotAFile`].
    pub(crate) fn open(path: PathBuf, step_of: StepOf, up_to: u64) -> Result<(Self, Option<u64>)> {
        let repair::Opened { file, last } = repair::open(&path, step_of, up_to)?;
        Ok((Self { file: Some(file), ..Self::of(path, step_of) }, last))
    }

    /// Returns the file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a line. When the file is opened, a last line without a newline, as a crash leaves it, is
    /// removed. A line that cannot be written is dropped, with a warning at the first one.
    pub(crate) fn append(&mut self, line: &impl Serialize) {
        let mut line = serde_json::to_vec(line).expect("numbers and texts can be written as JSON");
        line.push(b'\n');
        let written = self.try_append(&line);
        let path = self.path.display();
        match written {
            Ok(()) if self.dropped > 0 => {
                tracing::warn!("{path} is written again; {} of its lines are missing", self.dropped);
                self.dropped = 0;
            }
            Ok(()) => {}
            Err(error) => {
                self.dropped += 1;
                if !self.has_warned {
                    self.has_warned = true;
                    let causes = crate::error::causes(&error);
                    tracing::warn!("{causes}: the run goes on, and lines of {path} are dropped meanwhile");
                }
            }
        }
    }

    fn try_append(&mut self, line: &[u8]) -> Result<()> {
        let Self { path, step_of, file, .. } = self;
        if file.as_ref().is_some_and(|file| !is_at(file, path)) {
            tracing::info!(path = %path.display(), "the file was moved or deleted: its lines continue in a new one");
            *file = None;
        }
        let open = match file {
            Some(file) => file,
            None => file.insert(repair::open(path, *step_of, u64::MAX)?.file),
        };
        let length = |file: &File| file.metadata().map(|metadata| metadata.len());
        let written = length(open).and_then(|before| {
            open.write_all(line).inspect_err(|_| {
                // Half of the line may be there. If it cannot be removed now, it is when the file is opened.
                if open.set_len(before).is_err() {
                    tracing::debug!(path = %path.display(), "half of a line is left");
                }
            })
        });
        written.map_err(|source| {
            *file = None;
            Error::Io { action: "write", path: path.clone(), source }
        })
    }
}

/// Returns the step of a line of any kind of these files.
fn step_of(line: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
    }
    serde_json::from_slice::<Line>(line).ok().map(|line| line.step)
}

/// Returns whether an open file is still the one at this path.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let there = fs::metadata(path).ok().map(id);
    there.is_some() && file.metadata().ok().map(id) == there
}

/// Checks that a path is free or has a regular file. Opening a pipe would block.
///
/// Errors: [`Error::NotAFile`].
pub(crate) fn check_kind(path: &Path) -> Result<()> {
    let Ok(found) = fs::metadata(path).map(|metadata| metadata.file_type()) else { return Ok(()) };
    if found.is_file() {
        return Ok(());
    }
    let what = if found.is_dir() { "a folder" } else { "a pipe or a device" };
    Err(Error::NotAFile { path: path.to_owned(), what })
}

#[cfg(test)]
mod tests;
