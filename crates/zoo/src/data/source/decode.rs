//! From bytes to text in UTF-8: byte-order marks, UTF-16, and the encoding that the user names.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use farflung_base::text_encoding::{UTF8_MARK, Utf16, utf16};

use super::SourceError;

/// An encoding of text, by one of its names in the web's Encoding Standard, such as `windows-1252`,
/// `shift_jis` or `utf-16le`. `latin1` is a name of windows-1252 there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextEncoding(Encoding);

#[cfg(feature = "encodings")]
type Encoding = &'static encoding_rs::Encoding;
#[cfg(not(feature = "encodings"))]
type Encoding = std::convert::Infallible;

/// Error: no encoding has this name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected the name of an encoding, such as utf-8, windows-1252, shift_jis or utf-16le")]
pub struct NoEncoding;

impl FromStr for TextEncoding {
    type Err = NoEncoding;

    #[cfg(feature = "encodings")]
    fn from_str(name: &str) -> Result<Self, NoEncoding> {
        encoding_rs::Encoding::for_label_no_replacement(name.as_bytes()).map(Self).ok_or(NoEncoding)
    }

    #[cfg(not(feature = "encodings"))]
    fn from_str(_: &str) -> Result<Self, NoEncoding> {
        Err(NoEncoding)
    }
}

impl fmt::Display for TextEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name().to_ascii_lowercase())
    }
}

#[cfg(feature = "encodings")]
impl TextEncoding {
    fn name(self) -> &'static str {
        self.0.name()
    }

    /// Decodes bytes without a byte-order mark.
    fn decode(self, path: &Path, bytes: &[u8]) -> Result<Vec<u8>, SourceError> {
        use encoding_rs::DecoderResult;

        let mut decoder = self.0.new_decoder_without_bom_handling();
        let mut text = Vec::with_capacity(bytes.len());
        let mut read = 0;
        loop {
            text.reserve((bytes.len() - read).clamp(64, 1 << 20));
            let filled = text.len();
            text.resize(text.capacity(), 0);
            let (result, taken, written) =
                decoder.decode_to_utf8_without_replacement(&bytes[read..], &mut text[filled..], true);
            text.truncate(filled + written);
            read += taken;
            match result {
                DecoderResult::InputEmpty => return Ok(text),
                DecoderResult::OutputFull => {}
                DecoderResult::Malformed(wrong, after) => {
                    let offset = read.saturating_sub(usize::from(wrong) + usize::from(after));
                    return Err(wrong_at(path, self.name(), offset, bytes.get(offset).copied(), true));
                }
            }
        }
    }
}

#[cfg(not(feature = "encodings"))]
impl TextEncoding {
    const fn name(self) -> &'static str {
        match self.0 {}
    }

    const fn decode(self, _: &Path, _: &[u8]) -> Result<Vec<u8>, SourceError> {
        match self.0 {}
    }
}

/// A text as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::data) struct Decoded {
    /// The text in UTF-8, or any bytes if no encoding was given.
    pub(in crate::data) text: Vec<u8>,
    /// The encoding, unless the bytes were taken as they are.
    pub(in crate::data) from: Option<&'static str>,
    /// Length of the byte-order mark before them.
    pub(in crate::data) mark: usize,
}

/// Returns an error about a byte that does not belong to an encoding.
pub(in crate::data) fn wrong_at(
    path: &Path,
    encoding: &'static str,
    offset: usize,
    byte: Option<u8>,
    any: bool,
) -> SourceError {
    SourceError::Encoding { path: path.to_owned(), encoding, offset, byte, any }
}

/// Returns whether bytes begin with the byte-order mark of UTF-16.
pub(super) fn has_utf16_mark(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff")
}

/// Returns the text of a file. A byte-order mark tells the encoding and is left out; else the encoding is
/// `given`; without one, the bytes are taken as they are.
///
/// Errors: [`SourceError::Encoding`] with the first wrong byte; [`SourceError::NotText`] for UTF-32.
pub(in crate::data) fn text_of(
    path: &Path,
    bytes: Vec<u8>,
    given: Option<TextEncoding>,
) -> Result<Decoded, SourceError> {
    if bytes.starts_with(b"\xff\xfe\0\0") || bytes.starts_with(b"\0\0\xfe\xff") {
        let advice = "convert it, as with `iconv -f utf-32 -t utf-8`";
        return Err(SourceError::NotText {
            path: path.to_owned(),
            what: "text in UTF-32".to_owned(),
            advice,
        });
    }
    if let Some(Utf16 { name, text, wrong }) = utf16(&bytes) {
        return match wrong {
            Some(offset) => Err(wrong_at(path, name, offset, bytes.get(offset).copied(), true)),
            None => Ok(Decoded { text: text.into_bytes(), from: Some(name), mark: 0 }),
        };
    }
    let marked = bytes.starts_with(UTF8_MARK);
    let mut text = bytes;
    if marked {
        text.drain(..UTF8_MARK.len());
    }
    match given {
        Some(encoding) if !marked => {
            Ok(Decoded { text: encoding.decode(path, &text)?, from: Some(encoding.name()), mark: 0 })
        }
        _ => Ok(Decoded { text, from: None, mark: if marked { UTF8_MARK.len() } else { 0 } }),
    }
}

/// The bytes of a text that are no text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::data) struct NoText {
    /// Number of bytes in sequences that are not UTF-8, and of control characters other than white space and
    /// escape.
    pub(in crate::data) bytes: u64,
    /// Offset of the first of them.
    pub(in crate::data) first: Option<usize>,
}

/// Counts the bytes that are no text.
pub(in crate::data) fn no_text(bytes: &[u8]) -> NoText {
    let control = |byte: &u8| matches!(byte, 0..=8 | 14..=26 | 28..=31 | 127);
    let mut found = NoText::default();
    let mut at = 0;
    for chunk in bytes.utf8_chunks() {
        let valid = chunk.valid().as_bytes();
        let controls = valid.iter().copied().filter(control).count();
        if found.first.is_none() {
            let first = valid.iter().position(control);
            found.first = first.or((!chunk.invalid().is_empty()).then_some(valid.len())).map(|i| at + i);
        }
        found.bytes += (controls + chunk.invalid().len()) as u64;
        at += valid.len() + chunk.invalid().len();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], given: Option<&str>) -> Result<Decoded, SourceError> {
        text_of(Path::new("a.txt"), bytes.to_vec(), given.map(|name| name.parse().unwrap()))
    }

    #[test]
    fn byte_order_marks_tell_the_encoding_and_are_left_out() {
        assert_eq!(read(b"\xef\xbb\xbfabc", None).unwrap().text, b"abc");
        assert_eq!(read(b"\xff\xfea\0\x3d\xd8\0\xde", None).unwrap().text, "a😀".as_bytes());
        let big = read(b"\xfe\xff\0a\0\xe9", None).unwrap();
        assert_eq!((big.text, big.from), ("aé".as_bytes().to_vec(), Some("UTF-16BE")));
        // A lone surrogate, and half a unit at the end.
        for (bytes, offset) in [(&b"\xff\xfea\0\x3d\xd8"[..], 4), (b"\xff\xfea\0b", 4)] {
            let error = read(bytes, None).unwrap_err();
            assert!(matches!(error, SourceError::Encoding { offset: at, .. } if at == offset), "{error}");
        }
        let error = read(b"\xff\xfe\0\0a\0\0\0", None).unwrap_err().to_string();
        assert!(error.contains("UTF-32"), "{error}");
    }

    #[cfg(feature = "encodings")]
    #[test]
    fn an_encoding_that_is_given_applies_to_all_without_a_mark() {
        assert_eq!(read(b"caf\xe9", Some("latin1")).unwrap().text, "café".as_bytes());
        assert_eq!(read(b"\x83\x6e", Some("shift_jis")).unwrap().text, "ハ".as_bytes());
        assert_eq!(read("é".as_bytes(), Some("utf-8")).unwrap().text, "é".as_bytes());
        assert_eq!(read(b"a\0b\0", Some("utf-16le")).unwrap().text, b"ab");
        assert_eq!(read(b"\xef\xbb\xbf\xc3\xa9", Some("latin1")).unwrap().text, "é".as_bytes());
        let long = "ä".repeat(100_000).into_bytes();
        assert_eq!(read(&vec![0xe4; 100_000], Some("latin1")).unwrap().text, long);
        let error = read(b"ab\xff", Some("utf-8")).unwrap_err().to_string();
        assert!(error.contains("byte 2") && error.contains("0xff"), "{error}");
        assert_eq!("nope".parse::<TextEncoding>(), Err(NoEncoding));
        assert_eq!("LATIN1".parse::<TextEncoding>().unwrap().to_string(), "windows-1252");
    }

    #[test]
    fn what_is_no_text_is_counted() {
        assert_eq!(no_text("é\t\r\n\x1b[0m".as_bytes()), NoText::default());
        assert_eq!(no_text(b"ab\xe9cd\0\x01"), NoText { bytes: 3, first: Some(2) });
        assert_eq!(no_text(b"a\0\xe9"), NoText { bytes: 2, first: Some(1) });
    }
}
