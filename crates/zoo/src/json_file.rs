//! Reads JSON files as people have them: with a byte-order mark, in UTF-16, or with the `NaN` and `Infinity`
//! that Python writes.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use farflung_base::text_encoding::utf8;
use serde::de::DeserializeOwned;

use crate::ZooError;
use crate::file_kind::FileKind;

/// Largest file that is read, in bytes. The largest tokenizers have about 40 MB.
const LONGEST: u64 = 1 << 28;

/// Reads a file. A number that JSON does not have (`NaN`, `Infinity`, `-Infinity`) counts as null.
///
/// Errors: [`ZooError::Io`]; [`ZooError::WrongFile`] if it is another kind of file; [`ZooError::Json`].
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, ZooError> {
    from_bytes(path, &bytes(path)?)
}

/// Reads the bytes of a file, up to those of the longest one that is read.
///
/// Errors: [`ZooError::Io`].
pub(crate) fn bytes(path: &Path) -> Result<Vec<u8>, ZooError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(ZooError::open(path))?;
    file.take(LONGEST).read_to_end(&mut bytes).map_err(ZooError::io("read", path))?;
    Ok(bytes)
}

/// Reads the bytes of a file. `path` is for messages.
///
/// Errors: as [`read`], without those of reading.
pub(crate) fn from_bytes<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, ZooError> {
    parse(bytes).map_err(|source| match FileKind::of(bytes) {
        None | Some(FileKind::Text(_)) => ZooError::Json { path: path.to_owned(), source },
        Some(kind) => ZooError::WrongFile { path: path.to_owned(), kind, expected: "a JSON file" },
    })
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, serde_json::Error> {
    let bytes = &*utf8(bytes);
    serde_json::from_slice(bytes).or_else(|error| {
        let replaced = with_null_for_python_floats(bytes);
        // The first error has the position in the file.
        if replaced == bytes { Err(error) } else { serde_json::from_slice(&replaced).map_err(|_| error) }
    })
}

/// Replaces `NaN`, `Infinity` and `-Infinity` outside of strings.
fn with_null_for_python_floats(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(&byte) = rest.first() {
        let word = [&b"NaN"[..], b"-Infinity", b"Infinity"].into_iter().find(|word| rest.starts_with(word));
        let (copied, taken): (&[u8], usize) = match word {
            Some(word) if !in_string => (b"null", word.len()),
            _ if in_string && byte == b'\\' => (&rest[..rest.len().min(2)], rest.len().min(2)),
            _ => (&rest[..1], 1),
        };
        in_string ^= byte == b'"';
        out.extend(copied);
        rest = &rest[taken..];
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn marks_utf16_and_pythons_floats_are_read() {
        let text = "{\r\n  \"n\": 3,\r\n  \"é\": \"a \\\" NaN\"\r\n}\r\n";
        let expected = json!({"n": 3, "é": "a \" NaN"});
        let utf16 = |to_bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
            "\u{FEFF}".encode_utf16().chain(text.encode_utf16()).flat_map(to_bytes).collect()
        };
        let marked = [b"\xEF\xBB\xBF", text.as_bytes()].concat();
        for bytes in [text.as_bytes().to_vec(), marked, utf16(u16::to_le_bytes), utf16(u16::to_be_bytes)] {
            assert_eq!(parse::<Value>(&bytes).unwrap(), expected);
        }
        let floats = r#"{"a": NaN, "b": [-Infinity, Infinity], "c": "-Infinity \\", "d": 1}"#;
        let expected = json!({"a": null, "b": [null, null], "c": "-Infinity \\", "d": 1});
        assert_eq!(parse::<Value>(floats.as_bytes()).unwrap(), expected);
    }

    #[test]
    fn other_errors_have_their_place_in_the_file() {
        let message = parse::<Value>(b"{\n\"a\": NaN, oops}").unwrap_err().to_string();
        assert!(message.contains("line 2 column 6"), "{message}");
        assert!(parse::<Value>(b"\xFF\xFE{").is_err() && parse::<Value>(b"\"\\").is_err());
    }
}
