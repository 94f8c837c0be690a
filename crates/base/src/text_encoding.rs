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
    match bytes {
        [0xEF, 0xBB, 0xBF, rest @ ..] => Cow::Borrowed(rest),
        [0xFF, 0xFE, rest @ ..] => Cow::Owned(from_utf16(rest, u16::from_le_bytes)),
        [0xFE, 0xFF, rest @ ..] => Cow::Owned(from_utf16(rest, u16::from_be_bytes)),
        _ => Cow::Borrowed(bytes),
    }
}

fn from_utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Vec<u8> {
    let units = bytes.as_chunks().0.iter().map(|&pair| unit(pair));
    let text: String = char::decode_utf16(units).map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER)).collect();
    text.into_bytes()
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
        // Half of a pair, and a byte too many.
        assert_eq!(&*utf8(b"\xFF\xFE\x34\xD8a"), "\u{FFFD}".as_bytes());
        assert_eq!(&*utf8(b""), b"");
    }
}
