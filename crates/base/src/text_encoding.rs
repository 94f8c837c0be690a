//! Text files as editors and shells write them: in UTF-8 with or without a byte-order mark, or in UTF-16 with
//! one.

use std::borrow::Cow;

/// Returns the UTF-8 bytes of a text without its byte-order mark. UTF-16 is recognised by its mark; a character
/// that is not valid in it becomes U+FFFD. Bytes without a mark are returned as they are.
///
/// ```
/// use farflung_base::text_encoding::utf8;
///
/// assert_eq!(&*utf8(b"\xEF\xBB\xBFa"), b"a");
/// assert_eq!(&*utf8(b"\xFF\xFEa\0"), b"a");
/// assert_eq!(&*utf8(b"a"), b"a");
/// ```
#[must_use]
pub fn utf8(bytes: &[u8]) -> Cow<'_, [u8]> {
    match utf16(bytes) {
        Some(decoded) => Cow::Owned(decoded.text.into_bytes()),
        None => Cow::Borrowed(bytes.strip_prefix(UTF8_MARK).unwrap_or(bytes)),
    }
}

/// The byte-order mark of UTF-8.
pub const UTF8_MARK: &[u8] = b"\xEF\xBB\xBF";

/// A text that was in UTF-16.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Utf16 {
    /// `UTF-16LE` or `UTF-16BE`.
    pub name: &'static str,
    /// The text, with U+FFFD for what is not valid.
    pub text: String,
    /// Offset of the first byte that is not valid: of half a pair, or a byte too many at the end.
    pub wrong: Option<usize>,
}

/// Decodes a text that begins with the byte-order mark of UTF-16; `None` for other bytes.
#[must_use]
pub fn utf16(bytes: &[u8]) -> Option<Utf16> {
    type ToUnit = fn([u8; 2]) -> u16;
    let (rest, name, unit): (_, _, ToUnit) = match bytes {
        [0xFF, 0xFE, rest @ ..] => (rest, "UTF-16LE", u16::from_le_bytes),
        [0xFE, 0xFF, rest @ ..] => (rest, "UTF-16BE", u16::from_be_bytes),
        _ => return None,
    };
    let (pairs, half) = rest.as_chunks();
    let (mut text, mut wrong, mut at) = (String::with_capacity(bytes.len()), None, bytes.len() - rest.len());
    for decoded in char::decode_utf16(pairs.iter().map(|&pair| unit(pair))) {
        if decoded.is_err() {
            wrong = wrong.or(Some(at));
        }
        at += decoded.as_ref().map_or(2, |c| 2 * c.len_utf16());
        text.push(decoded.unwrap_or(char::REPLACEMENT_CHARACTER));
    }
    if !half.is_empty() {
        wrong = wrong.or(Some(at));
    }
    Some(Utf16 { name, text, wrong })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_left_out_and_utf16_is_converted() {
        let text = "é 𝄞\r\n";
        let marked: String = ['\u{FEFF}'].into_iter().chain(text.chars()).collect();
        let utf16 =
            |to_bytes: fn(u16) -> [u8; 2]| -> Vec<u8> { marked.encode_utf16().flat_map(to_bytes).collect() };
        for bytes in [text.as_bytes(), marked.as_bytes(), &utf16(u16::to_le_bytes), &utf16(u16::to_be_bytes)]
        {
            assert_eq!(&*utf8(bytes), text.as_bytes());
        }
        assert_eq!(super::utf16(b"\xFF\xFEa\0\x34\xD8").unwrap().wrong, Some(4));
        assert_eq!(super::utf16(b"\xFE\xFF\0ab").unwrap().wrong, Some(4));
        // Half of a pair, and a byte too many.
        assert_eq!(&*utf8(b"\xFF\xFE\x34\xD8a"), "\u{FFFD}".as_bytes());
        assert_eq!(&*utf8(b""), b"");
    }
}
