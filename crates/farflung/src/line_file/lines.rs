//! Reads the lines of a file one after the other, in bounded memory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

/// Longest line that is read, in bytes. A row of metrics has some hundred bytes for each peer.
const LONGEST: u64 = 16 << 20;

/// The lines of a file.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    from: R,
    line: Vec<u8>,
}

/// A piece of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LineRead<'a> {
    /// A line with its newline.
    Whole(&'a [u8]),
    /// The bytes after the last newline.
    Open(&'a [u8]),
    /// A piece of a line that is longer than any line of a run.
    TooLong(&'a [u8]),
}

impl<'a> LineRead<'a> {
    /// Returns its bytes.
    pub(crate) const fn bytes(self) -> &'a [u8] {
        let (Self::Whole(bytes) | Self::Open(bytes) | Self::TooLong(bytes)) = self;
        bytes
    }
}

impl Lines<BufReader<File>> {
    /// Reads a file from its current position.
    pub(crate) fn of(file: File) -> Self {
        Self { from: BufReader::with_capacity(1 << 18, file), line: Vec::new() }
    }
}

impl<R: BufRead> Lines<R> {
    /// Returns the next line; `None` at the end.
    pub(crate) fn next(&mut self) -> io::Result<Option<LineRead<'_>>> {
        self.line.clear();
        let Self { from, line } = self;
        from.by_ref().take(LONGEST).read_until(b'\n', line)?;
        Ok(match line.last() {
            None => None,
            Some(b'\n') => Some(LineRead::Whole(line)),
            Some(_) if line.len() as u64 == LONGEST => Some(LineRead::TooLong(line)),
            Some(_) => Some(LineRead::Open(line)),
        })
    }
}
