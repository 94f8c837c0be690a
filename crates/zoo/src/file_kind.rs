//! Recognises a file by its first bytes, to say what lies in place of a file that was expected.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Number of bytes at the beginning of a file that [`FileKind::of`] needs.
pub const START: usize = 512;

/// Kinds of files that people have in place of weights or of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A file of length 0.
    Empty,
    /// Zero bytes, as in a file whose room was reserved and whose content never came.
    Zeros,
    /// A Git LFS pointer, which stands for a file of this many bytes.
    LfsPointer(Option<u64>),
    /// A pointer of git-annex.
    AnnexPointer,
    /// An HTML page, such as a page to sign in.
    Html,
    /// An XML document, such as the error of a storage service.
    Xml,
    /// A zip archive, as `torch.save` and NumPy write it.
    Zip,
    /// A Python pickle, as older versions of `torch.save` wrote it.
    Pickle,
    /// A file compressed with this program.
    Compressed(&'static str),
    /// A GGUF file, as llama.cpp reads it.
    Gguf,
    /// An HDF5 file, as Keras writes it.
    Hdf5,
    /// An array of NumPy.
    Numpy,
    /// Another text, with its first line.
    Text(String),
}

impl FileKind {
    /// Returns the kind of a file that begins with these bytes; `None` for bytes of no known kind. `start` has
    /// the first [`START`] bytes, or all bytes of a shorter file.
    #[must_use]
    pub fn of(start: &[u8]) -> Option<Self> {
        const SIGNATURES: [(&[u8], FileKind); 11] = [
            (b"PK\x03\x04", FileKind::Zip),
            (b"PK\x05\x06", FileKind::Zip),
            (b"GGUF", FileKind::Gguf),
            (b"\x89HDF", FileKind::Hdf5),
            (b"\x93NUMPY", FileKind::Numpy),
            (b"\x1F\x8B", FileKind::Compressed("gzip")),
            (b"\x28\xB5\x2F\xFD", FileKind::Compressed("zstd")),
            (b"BZh", FileKind::Compressed("bzip2")),
            (b"\xFD7zXZ", FileKind::Compressed("xz")),
            (b"version https://hawser.github.com/spec/", FileKind::LfsPointer(None)),
            (b"/annex/objects/", FileKind::AnnexPointer),
        ];
        if start.is_empty() {
            return Some(Self::Empty);
        }
        if let Some((_, kind)) = SIGNATURES.iter().find(|(bytes, _)| start.starts_with(bytes)) {
            return Some(kind.clone());
        }
        if start.iter().all(|&byte| byte == 0) {
            return Some(Self::Zeros);
        }
        // Protocol 2 to 5 of pickle. Protocol 0 and 1, which have no signature, were never used for weights.
        if let [0x80, 2..=5, ..] = start {
            return Some(Self::Pickle);
        }
        Self::of_text(start)
    }

    /// Returns the kind of a file; `None` if it cannot be read.
    #[must_use]
    pub fn of_file(path: &Path) -> Option<Self> {
        let mut start = Vec::new();
        File::open(path).ok()?.take(START as u64).read_to_end(&mut start).ok()?;
        Self::of(&start)
    }

    fn of_text(start: &[u8]) -> Option<Self> {
        let start = start.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(start);
        let text = match std::str::from_utf8(start) {
            Ok(text) => text,
            // The last character may be cut.
            Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => {
                std::str::from_utf8(&start[..error.valid_up_to()]).ok()?
            }
            Err(_) => return None,
        };
        if text.chars().any(|c| c.is_control() && !c.is_whitespace()) {
            return None;
        }
        let text = text.trim_start();
        if text.starts_with("version https://git-lfs.github.com/spec/") {
            let size = text.lines().find_map(|line| line.strip_prefix("size ")?.trim().parse().ok());
            return Some(Self::LfsPointer(size));
        }
        let begins = |tag: &str| text.get(..tag.len()).is_some_and(|head| head.eq_ignore_ascii_case(tag));
        if ["<!doctype html", "<html", "<head", "<body", "<script", "<!--"].iter().any(|tag| begins(tag)) {
            return Some(Self::Html);
        }
        if begins("<?xml") || begins("<error") {
            return Some(Self::Xml);
        }
        let line: String = text.lines().next().unwrap_or_default().chars().take(60).collect();
        Some(Self::Text(line.trim_end().to_owned()))
    }

    /// Returns what to do about it.
    #[must_use]
    pub const fn advice(&self) -> &'static str {
        match self {
            Self::LfsPointer(_) => {
                "get the file itself with `git lfs pull` in its folder, or download it again"
            }
            Self::AnnexPointer => "get the file itself with `git annex get` in its folder",
            Self::Zip | Self::Pickle => {
                "convert it with the library that wrote it; for transformers: `python -c \"from transformers \
                 import AutoModelForCausalLM as M; M.from_pretrained('FOLDER').save_pretrained('NEW')\"`"
            }
            Self::Gguf | Self::Hdf5 | Self::Numpy => {
                "convert it to safetensors with Hugging Face's names, or download the model in that format"
            }
            Self::Compressed(_) => "unpack it first",
            Self::Empty | Self::Zeros | Self::Html | Self::Xml => {
                "the download failed or is not complete; download it again, signed in if the site asks for it"
            }
            Self::Text(_) => "if it was downloaded, the download failed",
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("empty"),
            Self::Zeros => f.write_str("a file that begins with zero bytes"),
            Self::LfsPointer(Some(bytes)) => {
                write!(f, "a Git LFS pointer, which stands for a file of {bytes} bytes")
            }
            Self::LfsPointer(None) => f.write_str("a Git LFS pointer, which stands for another file"),
            Self::AnnexPointer => f.write_str("a pointer of git-annex, which stands for another file"),
            Self::Html => f.write_str("an HTML page"),
            Self::Xml => f.write_str("an XML document"),
            Self::Zip => f.write_str("a zip archive, as PyTorch's torch.save writes it"),
            Self::Pickle => f.write_str("a Python pickle, as PyTorch's torch.save writes it"),
            Self::Compressed(program) => write!(f, "compressed with {program}"),
            Self::Gguf => f.write_str("a GGUF file of llama.cpp"),
            Self::Hdf5 => f.write_str("an HDF5 file, as Keras writes it"),
            Self::Numpy => f.write_str("an array of NumPy"),
            Self::Text(line) => write!(f, "a text that begins with {line:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_recognised_by_its_first_bytes() {
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n";
        let cases: [(&[u8], Option<FileKind>); 17] = [
            (b"", Some(FileKind::Empty)),
            (&[0; 400], Some(FileKind::Zeros)),
            (pointer.as_bytes(), Some(FileKind::LfsPointer(Some(548_105_171)))),
            (b"version https://git-lfs.github.com/spec/v1\r\n", Some(FileKind::LfsPointer(None))),
            (b"/annex/objects/SHA256E-s5--ab.bin\n", Some(FileKind::AnnexPointer)),
            (b"\xEF\xBB\xBF\n <!DOCTYPE HTML><html>", Some(FileKind::Html)),
            (b"<?xml version=\"1.0\"?><Error>AccessDenied</Error>", Some(FileKind::Xml)),
            (b"PK\x03\x04\0\0", Some(FileKind::Zip)),
            (b"\x80\x02\x8a\x0a", Some(FileKind::Pickle)),
            (b"\x1F\x8B\x08", Some(FileKind::Compressed("gzip"))),
            (b"GGUF\x03\0\0\0", Some(FileKind::Gguf)),
            (b"\x89HDF\r\n", Some(FileKind::Hdf5)),
            (b"\x93NUMPY\x01", Some(FileKind::Numpy)),
            (b"Entry not found", Some(FileKind::Text("Entry not found".to_owned()))),
            ("Zugang gesperrt für".as_bytes(), Some(FileKind::Text("Zugang gesperrt für".to_owned()))),
            (&[8, 0, 0, 0, 0, 0, 0, 0, b'{', b'}'], None),
            (&[0xFF, 0x12, 0x99], None),
        ];
        for (bytes, kind) in cases {
            assert_eq!(FileKind::of(bytes), kind, "{:?}", String::from_utf8_lossy(bytes));
        }
        // A character that the limit cuts is left out.
        let cut = ["a".repeat(START - 1).as_bytes(), &[0xC3]].concat();
        assert_eq!(FileKind::of(&cut), Some(FileKind::Text("a".repeat(60))));
    }
}
