//! What a file is, by its first bytes and its name.

use std::path::Path;

use super::decode::has_utf16_mark;

/// Number of bytes at the start of a file that tell what it is.
pub(in crate::data) const LOOK: usize = 8192;

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::data) enum Form {
    /// Text, or at least nothing that is known to be something else.
    Text,
    /// A `.bin` file of tokens.
    Tokens,
    /// A compressed file.
    Packed(Packing),
    /// A pointer of Git LFS in place of a file.
    LfsPointer,
    /// A page in HTML, in a file whose name says that it is something else.
    Html,
    /// A file of this kind, which holds no plain text.
    Other(&'static str),
    /// A file with a zero byte near its start, as in no text.
    Binary,
}

/// The formats of compressed files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::data) enum Packing {
    Gzip,
    Zstd,
    Xz,
    Bzip2,
}

impl Packing {
    /// Returns the format's name.
    pub(in crate::data) const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Bzip2 => "bzip2",
        }
    }
}

/// First bytes of files that hold no plain text, and what they are.
const OTHERS: [(&[u8], &str); 30] = [
    (b"PK\x03\x04", "a zip archive"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"ORC", "an ORC file"),
    (b"Obj\x01", "an Avro file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"GGUF", "a GGUF file of weights"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"MMIDIDX\0\0", "an index of Megatron's, whose tokens are in the .bin file beside it"),
    (b"%PDF-", "a PDF document"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document"),
    (b"{\\rtf", "an RTF document"),
    (b"%!PS", "a PostScript document"),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x1f\x9d", "a file compressed by `compress`"),
    (b"\x1f\xa0", "a file compressed by `compress`"),
    (b"\x04\x22\x4d\x18", "a file compressed by lz4"),
    (b"LZIP\x01", "a file compressed by lzip"),
    (b"\x89LZO\0\r\n\x1a\n", "a file compressed by lzop"),
    (b"\x7fELF", "a program"),
    (b"\x80\x02}", "a pickle of Python's"),
    (b"\x80\x03}", "a pickle of Python's"),
    (b"\x80\x04\x95", "a pickle of Python's"),
    (b"\x80\x05\x95", "a pickle of Python's"),
];

/// First bytes of compressed files. A block of bzip2 begins with the digits of pi.
const PACKINGS: [(&[u8], Packing); 4] = [
    (b"\x1f\x8b\x08", Packing::Gzip),
    (b"\x28\xb5\x2f\xfd", Packing::Zstd),
    (b"\xfd7zXZ\0", Packing::Xz),
    (b"BZh", Packing::Bzip2),
];

const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Where the magic word of a tar archive stands.
const TAR: (usize, &[u8]) = (257, b"ustar");

impl Form {
    /// Returns what a file is, from its first [`LOOK`] bytes.
    pub(in crate::data) fn of(path: &Path, start: &[u8]) -> Self {
        if let Some(packing) = packing(start) {
            return Self::Packed(packing);
        }
        if start.starts_with(LFS_POINTER) {
            return Self::LfsPointer;
        }
        if let Some((_, what)) = OTHERS.iter().find(|(magic, _)| start.starts_with(magic)) {
            return Self::Other(what);
        }
        if start.get(TAR.0..).is_some_and(|rest| rest.starts_with(TAR.1)) {
            return Self::Other("a tar archive");
        }
        if is_safetensors(start) {
            return Self::Other("a safetensors file of weights");
        }
        if !is_named_html(path) && is_html(start) {
            return Self::Html;
        }
        if has_token_name(path) {
            return Self::Tokens;
        }
        let is_binary = start.contains(&0) && !has_utf16_mark(start);
        if is_binary { Self::Binary } else { Self::Text }
    }
}

fn packing(start: &[u8]) -> Option<Packing> {
    let (_, packing) = PACKINGS.into_iter().find(|(magic, _)| start.starts_with(magic))?;
    // Text may begin with the three letters of bzip2.
    let block = start.get(4..10);
    let is_block = block.is_some_and(|block| {
        block == [0x31, 0x41, 0x59, 0x26, 0x53, 0x59] || block == [0x17, 0x72, 0x45, 0x38, 0x50, 0x90]
    });
    (packing != Packing::Bzip2 || is_block).then_some(packing)
}

/// Returns whether a file's name, without the ending of a compressed file, is that of a file of tokens.
pub(in crate::data) fn has_token_name(path: &Path) -> bool {
    let packed = ["gz", "zst", "xz", "bz2"];
    let is_packed = path.extension().is_some_and(|e| packed.iter().any(|known| e == *known));
    let inner = if is_packed { path.with_extension("") } else { path.to_owned() };
    inner.extension().is_some_and(|e| e == "bin")
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

fn is_html(start: &[u8]) -> bool {
    let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    let begins =
        |word: &str| text.get(..word.len()).is_some_and(|head| head.eq_ignore_ascii_case(word.as_bytes()));
    begins("<!doctype html") || begins("<html")
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
        assert_eq!(of("train.bin.gz", b"\x1f\x8b\x08\0"), Form::Packed(Packing::Gzip));
        assert!(has_token_name(Path::new("d/train.bin.zst")) && !has_token_name(Path::new("binary.gz")));
        assert_eq!(of("x", b"BZh91AY&SY"), Form::Packed(Packing::Bzip2));
        assert_eq!(of("x", b"BZh is how the text begins"), Form::Text);
        assert_eq!(of("a.txt", b"version https://git-lfs.github.com/spec/v1\n"), Form::LfsPointer);
        assert_eq!(of("train.bin", b"version https://git-lfs.github.com/spec/v1\n"), Form::LfsPointer);
        assert_eq!(of("a.txt", b"\n <!DocType HTML><html>"), Form::Html);
        assert_eq!(of("a.html", b"<html>"), Form::Text);
        assert_eq!(of("m.bin", b"PK\x03\x04"), Form::Other("a zip archive"));
        assert_eq!(of("m", b"\x40\0\0\0\0\0\0\0{\"__m"), Form::Other("a safetensors file of weights"));
        let mut tar = vec![b'n'; 257];
        tar.extend(b"ustar\x0000");
        assert_eq!(of("x.tar", &tar), Form::Other("a tar archive"));
    }
}
