//! Recognises a file by its first bytes: to read it, or to say what lies in place of a file that was expected.

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
    /// A compressed file.
    Compressed(Compression),
    /// A GGUF file, as llama.cpp reads it.
    Gguf,
    /// An HDF5 file, as Keras writes it.
    Hdf5,
    /// An array of NumPy.
    Numpy,
    /// A file of another known kind, which holds no plain text.
    Other(&'static str),
    /// Another text, with its first line.
    Text(String),
}

/// Formats of compressed files that hold one stream of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// gzip, RFC 1952.
    Gzip,
    /// zstd, RFC 8878.
    Zstd,
    /// xz.
    Xz,
    /// bzip2.
    Bzip2,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Bzip2 => "bzip2",
        })
    }
}

/// First bytes of files, and their kinds.
const SIGNATURES: [(&[u8], FileKind); 36] = [
    (b"PK\x03\x04", FileKind::Zip),
    (b"PK\x05\x06", FileKind::Zip),
    (b"GGUF", FileKind::Gguf),
    (b"\x89HDF", FileKind::Hdf5),
    (b"\x93NUMPY", FileKind::Numpy),
    (b"\x1F\x8B\x08", FileKind::Compressed(Compression::Gzip)),
    (b"\x28\xB5\x2F\xFD", FileKind::Compressed(Compression::Zstd)),
    (b"\xFD7zXZ\0", FileKind::Compressed(Compression::Xz)),
    (b"version https://git-lfs.github.com/spec/", FileKind::LfsPointer(None)),
    (b"version https://hawser.github.com/spec/", FileKind::LfsPointer(None)),
    (b"/annex/objects/", FileKind::AnnexPointer),
    (b"PAR1", FileKind::Other("a Parquet file")),
    (b"ARROW1", FileKind::Other("an Arrow file")),
    (b"Obj\x01", FileKind::Other("an Avro file")),
    (b"SQLite format 3\0", FileKind::Other("an SQLite database")),
    (b"MMIDIDX\0\0", FileKind::Other("an index of Megatron-LM, whose tokens are in the .bin file beside it")),
    (b"%PDF-", FileKind::Other("a PDF document")),
    (b"\xD0\xCF\x11\xE0\xA1\xB1\x1A\xE1", FileKind::Other("an old Office document")),
    (b"{\\rtf", FileKind::Other("an RTF document")),
    (b"%!PS", FileKind::Other("a PostScript document")),
    (b"\x89PNG\r\n\x1A\n", FileKind::Other("a PNG picture")),
    (b"\xFF\xD8\xFF", FileKind::Other("a JPEG picture")),
    (b"GIF87a", FileKind::Other("a GIF picture")),
    (b"GIF89a", FileKind::Other("a GIF picture")),
    (b"7z\xBC\xAF\x27\x1C", FileKind::Other("a 7z archive")),
    (b"Rar!\x1A\x07", FileKind::Other("a RAR archive")),
    (b"]\0\0", FileKind::Other("a file compressed with lzma")),
    (b"\x1F\x9D", FileKind::Other("a file compressed with compress")),
    (b"\x1F\xA0", FileKind::Other("a file compressed with compress")),
    (b"\x04\x22\x4D\x18", FileKind::Other("a file compressed with lz4")),
    (b"LZIP\x01", FileKind::Other("a file compressed with lzip")),
    (b"\x89LZO\0\r\n\x1A\n", FileKind::Other("a file compressed with lzop")),
    (b"\x7FELF", FileKind::Other("a program")),
    (b"ID3\x03", FileKind::Other("an MP3 recording")),
    (b"ID3\x04", FileKind::Other("an MP3 recording")),
    (b"OggS", FileKind::Other("an Ogg recording")),
];

/// First bytes of a block of bzip2, after four bytes: the digits of pi, or of its square root for an empty
/// file. Text may begin with the three letters before them.
const BZIP2_BLOCKS: [&[u8]; 2] = [b"1AY&SY", b"\x17rE8P\x90"];

/// Where the magic word of a tar archive stands.
const TAR: (usize, &[u8]) = (257, b"ustar");

impl FileKind {
    /// Returns the kind of a file that begins with these bytes; `None` for bytes of no known kind. `start` has
    /// the first [`START`] bytes, or all bytes of a shorter file.
    #[must_use]
    pub fn of(start: &[u8]) -> Option<Self> {
        if start.is_empty() {
            return Some(Self::Empty);
        }
        if let Some((_, kind)) = SIGNATURES.iter().find(|(bytes, _)| start.starts_with(bytes)) {
            return Some(kind.clone().with_size(start));
        }
        let has_at = |at: usize, word: &[u8]| start.get(at..).is_some_and(|rest| rest.starts_with(word));
        if start.starts_with(b"BZh") && BZIP2_BLOCKS.iter().any(|block| has_at(4, block)) {
            return Some(Self::Compressed(Compression::Bzip2));
        }
        // A frame that a decoder skips, as pzstd writes it first.
        if let [0x50..=0x5F, 0x2A, 0x4D, 0x18, ..] = start {
            return Some(Self::Compressed(Compression::Zstd));
        }
        if has_at(TAR.0, TAR.1) {
            return Some(Self::Other("a tar archive"));
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
        // To open a named pipe would wait for its other end.
        path.metadata().ok().filter(std::fs::Metadata::is_file)?;
        let mut start = Vec::new();
        File::open(path).ok()?.take(START as u64).read_to_end(&mut start).ok()?;
        Self::of(&start)
    }

    /// Adds the size of the file for which a pointer stands.
    fn with_size(self, start: &[u8]) -> Self {
        let Self::LfsPointer(_) = self else { return self };
        let text = String::from_utf8_lossy(start);
        Self::LfsPointer(text.lines().find_map(|line| line.strip_prefix("size ")?.trim().parse().ok()))
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
        let begins = |tag: &str| text.get(..tag.len()).is_some_and(|head| head.eq_ignore_ascii_case(tag));
        if ["<!doctype html", "<html"].iter().any(|tag| begins(tag)) {
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
                "PyTorch's torch.save writes such files; convert it with the library that wrote it, for transformers \
                 `python -c \"from transformers \
                 import AutoModelForCausalLM as M; M.from_pretrained('FOLDER').save_pretrained('NEW')\"`"
            }
            Self::Gguf => {
                "give the path of the file, if it is of LLaMA, Mistral or Qwen; else convert it to safetensors with Hugging Face's names"
            }
            Self::Hdf5 | Self::Numpy | Self::Other(_) => {
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
            Self::Zip => f.write_str("a zip archive"),
            Self::Pickle => f.write_str("a pickle of Python's"),
            Self::Compressed(format) => write!(f, "compressed with {format}"),
            Self::Gguf => f.write_str("a GGUF file of weights"),
            Self::Hdf5 => f.write_str("an HDF5 file"),
            Self::Numpy => f.write_str("a NumPy array"),
            Self::Other(what) => f.write_str(what),
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
        let cases: [(&[u8], Option<FileKind>); 19] = [
            (b"", Some(FileKind::Empty)),
            (&[0; 400], Some(FileKind::Zeros)),
            (pointer.as_bytes(), Some(FileKind::LfsPointer(Some(548_105_171)))),
            (b"version https://git-lfs.github.com/spec/v1\r\n", Some(FileKind::LfsPointer(None))),
            (b"/annex/objects/SHA256E-s5--ab.bin\n", Some(FileKind::AnnexPointer)),
            (b"\xEF\xBB\xBF\n <!DOCTYPE HTML><html>", Some(FileKind::Html)),
            (b"<?xml version=\"1.0\"?><Error>AccessDenied</Error>", Some(FileKind::Xml)),
            (b"PK\x03\x04\0\0", Some(FileKind::Zip)),
            (b"\x80\x02\x8a\x0a", Some(FileKind::Pickle)),
            (b"\x1F\x8B\x08", Some(FileKind::Compressed(Compression::Gzip))),
            (b"BZh91AY&SY", Some(FileKind::Compressed(Compression::Bzip2))),
            (b"BZh is how it begins", Some(FileKind::Text("BZh is how it begins".to_owned()))),
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
