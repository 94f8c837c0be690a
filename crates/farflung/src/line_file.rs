//! A file of JSON lines that a run appends to, such as `events.jsonl` or `times.jsonl`. Lines of earlier starts
//! of the run are kept.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
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
    let mut lines = LinesFromEnd::new(&file)?;
    let end = lines.end();
    let is_whole = lines.pop()?.is_none_or(|line| line.ends_with(b"\n"));
    file.set_len(if is_whole { end } else { lines.end() })?;
    file.seek(SeekFrom::End(0))?;
    Ok(file)
}

/// Reads the lines of a file from its end, so that the end of a long file is found quickly.
#[derive(Debug)]
pub(crate) struct LinesFromEnd<'a> {
    file: &'a File,
    /// Where `bytes` begins in the file.
    start: u64,
    bytes: Vec<u8>,
}

/// Least number of bytes read at a time.
const BLOCK: u64 = 64 << 10;

impl<'a> LinesFromEnd<'a> {
    pub(crate) fn new(file: &'a File) -> std::io::Result<Self> {
        Ok(Self { file, start: file.metadata()?.len(), bytes: Vec::new() })
    }

    /// Returns where the lines end that were not returned yet.
    pub(crate) const fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Returns the last line that was not returned yet, with its newline if it has one.
    pub(crate) fn pop(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        loop {
            let before = &self.bytes[..self.bytes.len().saturating_sub(1)];
            if let Some(at) = before.iter().rposition(|&byte| byte == b'\n') {
                return Ok(Some(self.bytes.split_off(at + 1)));
            }
            if self.start == 0 {
                let first = std::mem::take(&mut self.bytes);
                return Ok((!first.is_empty()).then_some(first));
            }
            let more = self.start.min(BLOCK.max(self.bytes.len() as u64));
            self.start -= more;
            let mut bytes = vec![0; usize::try_from(more).unwrap_or(usize::MAX)];
            let mut file = self.file;
            file.seek(SeekFrom::Start(self.start))?;
            file.read_exact(&mut bytes)?;
            bytes.append(&mut self.bytes);
            self.bytes = bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_from_the_end_are_those_from_the_start_in_reverse() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        let lengths = [3, 70_000, 0, 64 << 10, 200_000, 1, 64 << 9];
        for take in 0..=lengths.len() {
            for last in ["", "\n", "rest"] {
                let mut text: String = lengths[..take].iter().map(|&len| "x".repeat(len) + "\n").collect();
                text.push_str(last);
                fs::write(&path, &text).unwrap();
                let file = File::open(&path).unwrap();
                let mut lines = LinesFromEnd::new(&file).unwrap();
                let mut left = text.len();
                for line in text.split_inclusive('\n').rev() {
                    assert_eq!(lines.end(), left as u64);
                    assert!(lines.pop().unwrap().unwrap() == line.as_bytes(), "{take} {last:?} at {left}");
                    left -= line.len();
                }
                assert_eq!((lines.pop().unwrap(), lines.end()), (None, 0));
            }
        }
    }

    #[test]
    fn a_line_that_a_crash_has_cut_off_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        for (before, after) in [("1\n2\n", "1\n2\n3\n"), ("1\n2", "1\n3\n"), ("1", "3\n"), ("", "3\n")] {
            fs::write(&path, before).unwrap();
            LineFile::new(path.clone()).append(&3).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), after);
        }
    }
}
