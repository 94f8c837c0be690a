//! A file of JSON lines that a run appends to, such as `events.jsonl` or `times.jsonl`. Lines of earlier starts
//! of the run are kept.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::{Error, Result};

/// A file of JSON lines, opened when the first line is appended.
#[derive(Debug)]
pub(crate) struct LineFile {
    path: PathBuf,
    file: Option<File>,
}

impl LineFile {
    pub(crate) const fn new(path: PathBuf) -> Self {
        Self { path, file: None }
    }

    /// Appends a line. When the file is opened, a last line without a newline, as a crash leaves it, is
    /// removed.
    ///
    /// Errors: [`Error::Io`].
    pub(crate) fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(line).expect("numbers and texts can be written as JSON");
        line.push(b'\n');
        if self.file.is_none() {
            self.file = Some(open(&self.path).map_err(Error::io("open", &self.path))?);
        }
        let file = self.file.as_mut().expect("it was opened");
        file.write_all(&line).map_err(Error::io("write", &self.path))
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    let mut file = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
    let bytes = fs::read(path)?;
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
    file.set_len(whole as u64)?;
    file.seek(SeekFrom::End(0))?;
    Ok(file)
}
