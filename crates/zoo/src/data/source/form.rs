//! What a file is, by its first bytes and its name.

use std::path::{Path, PathBuf};

use super::decode::has_utf16_mark;
use crate::file_kind::{Compression, FileKind, START};

/// Number of bytes at the start of a file that tell what it is.
pub(in crate::data) const LOOK: usize = 8192;

/// What a file is to a reader of data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::data) enum Form {
    /// Text, or at least nothing that is known to be something else.
    Text,
    /// A `.bin` file of tokens.
    Tokens,
    /// A compressed file.
    Packed(Compression),
    /// A pointer of Git LFS or git-annex in place of a file.
    Pointer(FileKind),
    /// A page in HTML, in a file whose name says that it is something else.
    Html,
    /// A file of a kind that holds no plain text.
    Other(FileKind),
    /// A file with a zero byte near its start, as in no text.
    Binary,
}

impl Form {
    /// Returns what a file is, from its first [`LOOK`] bytes.
    pub(in crate::data) fn of(path: &Path, start: &[u8]) -> Self {
        match FileKind::of(&start[..start.len().min(START)]) {
            Some(FileKind::Compressed(format)) => return Self::Packed(format),
            Some(kind @ (FileKind::LfsPointer(_) | FileKind::AnnexPointer)) => return Self::Pointer(kind),
            Some(FileKind::Html) if !is_named_html(path) => return Self::Html,
            Some(
                kind @ (FileKind::Zip
                | FileKind::Pickle
                | FileKind::Gguf
                | FileKind::Hdf5
                | FileKind::Numpy
                | FileKind::Other(_)),
            ) => return Self::Other(kind),
            Some(FileKind::Empty | FileKind::Zeros | FileKind::Html | FileKind::Xml | FileKind::Text(_))
            | None => {}
        }
        if is_safetensors(start) {
            return Self::Other(FileKind::Other("a safetensors file of weights"));
        }
        if has_token_name(path) {
            return Self::Tokens;
        }
        let is_binary = start.contains(&0) && !has_utf16_mark(start);
        if is_binary { Self::Binary } else { Self::Text }
    }
}

/// Returns whether a file's name, without the ending of a compressed file, is that of a file of tokens.
pub(in crate::data) fn has_token_name(path: &Path) -> bool {
    unpacked_name(path).extension().is_some_and(|e| e.eq_ignore_ascii_case("bin"))
}

/// Returns a file's path without the ending of a compressed file.
pub(in crate::data) fn unpacked_name(path: &Path) -> PathBuf {
    let packed = ["gz", "zst", "xz", "bz2"];
    let is_packed = path.extension().is_some_and(|e| packed.iter().any(|known| e == *known));
    if is_packed { path.with_extension("") } else { path.to_owned() }
}

/// Returns whether the bytes begin with a header of safetensors: its length, and an object in JSON.
fn is_safetensors(start: &[u8]) -> bool {
    let length = start.first_chunk().map(|&eight| u64::from_le_bytes(eight));
    length.is_some_and(|length| length < 1 << 32) && start.get(8..10) == Some(b"{\"")
}

fn is_named_html(path: &Path) -> bool {
    let endings = ["html", "htm", "xhtml", "xml"];
    path.extension().is_some_and(|e| endings.iter().any(|known| e.eq_ignore_ascii_case(known)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, start: &[u8]) -> Form {
        Form::of(Path::new(name), start)
    }

    #[test]
    fn files_are_what_their_first_bytes_say() {
        assert_eq!(of("a.txt", b"plain"), Form::Text);
        assert_eq!(of("a", b""), Form::Text);
        assert_eq!(of("a.txt", b"a\0b"), Form::Binary);
        assert_eq!(of("a.txt", b"\xff\xfea\0b\0"), Form::Text, "UTF-16 with a byte-order mark");
        assert_eq!(of("train.bin", b"a\0b\0"), Form::Tokens);
        assert_eq!(of("train.bin.gz", b"\x1f\x8b\x08\0"), Form::Packed(Compression::Gzip));
        assert!(has_token_name(Path::new("d/train.bin.zst")) && !has_token_name(Path::new("binary.gz")));
        assert_eq!(of("x", b"BZh91AY&SY"), Form::Packed(Compression::Bzip2));
        assert_eq!(of("x", b"BZh is how the text begins"), Form::Text);
        let pointer = Form::Pointer(FileKind::LfsPointer(None));
        assert_eq!(of("a.txt", b"version https://git-lfs.github.com/spec/v1\n"), pointer);
        assert_eq!(of("train.bin", b"version https://git-lfs.github.com/spec/v1\n"), pointer);
        assert_eq!(of("a.md", b"<!-- a comment -->"), Form::Text);
        assert_eq!(of("a.txt", b"\n <!DocType HTML><html>"), Form::Html);
        assert_eq!(of("a.html", b"<html>"), Form::Text);
        assert_eq!(of("m.bin", b"PK\x03\x04"), Form::Other(FileKind::Zip));
        assert_eq!(
            of("m", b"\x40\0\0\0\0\0\0\0{\"__m"),
            Form::Other(FileKind::Other("a safetensors file of weights"))
        );
        let mut tar = vec![b'n'; 257];
        tar.extend(b"ustar\x0000");
        assert_eq!(of("x.tar", &tar), Form::Other(FileKind::Other("a tar archive")));
    }
}
