//! How byte-level vocabularies write bytes: each byte is a printable character.

/// Number of bytes.
pub(super) const BYTES: usize = 256;

/// Returns the character of each byte: printable bytes are themselves, and the others are numbered from U+0100
/// on.
///
/// Source: `bytes_to_unicode` of the code published with GPT-2.
pub(super) fn byte_chars() -> [char; BYTES] {
    let mut others = (0x100_u32..).filter_map(char::from_u32);
    let char = |byte| match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        _ => others.next().expect("there are more characters than bytes"),
    };
    let mut chars = ['\0'; BYTES];
    chars.iter_mut().zip((0..=255).map(char)).for_each(|(to, char)| *to = char);
    chars
}
