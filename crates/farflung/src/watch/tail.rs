//! Follows a growing file of lines: reads only new bytes, in bounded pieces.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Longest line that is accepted, in bytes; longer ones are skipped.
pub const LONGEST_LINE: usize = 64 * 1024;
/// Number of bytes before the current position that are compared, to detect a file that was cut and has grown
/// again.
const MARK: usize = 64;
/// Bytes read at once.
const CHUNK: usize = 256 * 1024;

/// An item that is new in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News<'a> {
    /// The file was replaced or cut: everything read before is invalid.
    Restarted,
    /// A complete line, without its newline.
    Line(&'a [u8]),
    /// A line of more than [`LONGEST_LINE`] bytes, which was skipped.
    TooLong,
}

/// Position in a file that is being read.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    /// Bytes read so far.
    offset: u64,
    /// The last of the bytes read, at most [`MARK`].
    mark: Vec<u8>,
    /// The beginning of a line whose newline was not read yet.
    open: Vec<u8>,
    /// Whether the line in `open` is too long already.
    skips: bool,
}

impl Tail {
    /// Starts at the beginning of a file, which need not exist yet.
    #[must_use]
    pub const fn new(path: PathBuf) -> Self {
        Self { path, offset: 0, mark: Vec::new(), open: Vec::new(), skips: false }
    }

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the next bytes, at most `budget`. Returns whether the file has more bytes now.
    ///
    /// A file that cannot be read, or is not a regular file, has no news. Text after the last newline is kept
    /// until its line is complete.
    pub fn read(&mut self, budget: usize, mut tell: impl FnMut(News<'_>)) -> bool {
        self.try_read(budget, &mut tell).unwrap_or(false)
    }

    fn try_read(&mut self, budget: usize, tell: &mut impl FnMut(News<'_>)) -> std::io::Result<bool> {
        // Opening a pipe would block until its other end is opened.
        if !std::fs::metadata(&self.path)?.is_file() {
            return Ok(false);
        }
        let mut file = File::open(&self.path)?;
        if !self.is_same(&mut file)? {
            *self = Self::new(std::mem::take(&mut self.path));
            tell(News::Restarted);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut chunk = vec![0; CHUNK];
        let mut left = budget;
        while left > 0 {
            let count = file.read(&mut chunk[..CHUNK.min(left)])?;
            if count == 0 {
                return Ok(false);
            }
            left -= count;
            self.take(&chunk[..count], tell);
        }
        Ok(file.metadata()?.len() > self.offset)
    }

    /// Returns whether the bytes before the current position are unchanged.
    fn is_same(&self, file: &mut File) -> std::io::Result<bool> {
        let mut there = vec![0; self.mark.len()];
        file.seek(SeekFrom::Start(self.offset - self.mark.len() as u64))?;
        match file.read_exact(&mut there) {
            Ok(()) => Ok(there == self.mark),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn take(&mut self, bytes: &[u8], tell: &mut impl FnMut(News<'_>)) {
        self.offset += bytes.len() as u64;
        self.mark.extend_from_slice(&bytes[bytes.len().saturating_sub(MARK)..]);
        self.mark.drain(..self.mark.len().saturating_sub(MARK));
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, ends) = piece.strip_suffix(b"\n").map_or((piece, false), |text| (text, true));
            if self.open.len() + text.len() > LONGEST_LINE {
                self.skips = true;
                self.open.clear();
            }
            if !self.skips {
                self.open.extend_from_slice(text);
            }
            if ends {
                tell(if self.skips { News::TooLong } else { News::Line(&self.open) });
                self.skips = false;
                self.open.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    fn read(tail: &mut Tail) -> Vec<String> {
        let mut told = Vec::new();
        while tail.read(1000, |news| {
            told.push(match news {
                News::Restarted => "restarted".to_owned(),
                News::Line(line) => String::from_utf8_lossy(line).into_owned(),
                News::TooLong => "too long".to_owned(),
            });
        }) {}
        told
    }

    fn append(path: &Path, bytes: &[u8]) {
        File::options().append(true).create(true).open(path).unwrap().write_all(bytes).unwrap();
    }

    #[test]
    fn lines_come_once_each_when_they_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut tail = Tail::new(path.clone());
        assert!(read(&mut tail).is_empty());
        append(&path, b"one\ntw");
        assert_eq!(read(&mut tail), ["one"]);
        assert!(read(&mut tail).is_empty());
        append(&path, b"o\n\nthree\nfo");
        assert_eq!(read(&mut tail), ["two", "", "three"]);
        append(&path, b"ur\n");
        assert_eq!(read(&mut tail), ["four"]);
    }

    #[test]
    fn a_file_that_was_cut_or_replaced_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut tail = Tail::new(path.clone());
        append(&path, b"one\ntwo\nthree\n");
        assert_eq!(read(&mut tail).len(), 3);
        fs::write(&path, "one\n").unwrap();
        assert_eq!(read(&mut tail), ["restarted", "one"]);
        // The new file is longer than the old one, and begins differently.
        fs::write(&path, "eins\nzwei\ndrei\nvier\n").unwrap();
        assert_eq!(read(&mut tail), ["restarted", "eins", "zwei", "drei", "vier"]);
        fs::remove_file(&path).unwrap();
        assert!(read(&mut tail).is_empty());
        fs::create_dir(&path).unwrap();
        assert!(read(&mut tail).is_empty());
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped_in_bounded_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut tail = Tail::new(path.clone());
        let exact = vec![b'x'; LONGEST_LINE];
        append(&path, &[b"a\n", &exact[..], b"x\nb\n", &exact[..], b"\nc\n"].concat());
        let told = read(&mut tail);
        assert_eq!(told.iter().map(String::len).collect::<Vec<_>>(), [1, 8, 1, LONGEST_LINE, 1]);
        assert_eq!(told[1], "too long");
        for _ in 0..40 {
            append(&path, &exact);
            assert!(read(&mut tail).is_empty());
            assert!(tail.open.len() <= LONGEST_LINE);
        }
        append(&path, b"\nd\n");
        assert_eq!(read(&mut tail), ["too long", "d"]);
    }
}
