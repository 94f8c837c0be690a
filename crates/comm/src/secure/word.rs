//! Encoding of bytes as one printable word: base32 in lower case without padding (RFC 4648, section 6).

const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// Encodes bytes as a word.
pub(super) fn encode(bytes: &[u8]) -> String {
    let mut word = String::with_capacity(bytes.len() * 8 / 5 + 1);
    let (mut bits, mut held) = (0_u32, 0);
    for &byte in bytes {
        bits = bits << 8 | u32::from(byte);
        held += 8;
        while held >= 5 {
            held -= 5;
            word.push(char::from(ALPHABET[(bits >> held & 31) as usize]));
        }
        bits &= (1 << held) - 1;
    }
    if held > 0 {
        word.push(char::from(ALPHABET[(bits << (5 - held) & 31) as usize]));
    }
    word
}

/// Decodes a word in upper or lower case. Returns `None` if a character is not in the alphabet, or if the bits
/// after the last whole byte are five or more, or are not all zero.
pub(super) fn decode(word: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(word.len() * 5 / 8);
    let (mut bits, mut held) = (0_u32, 0);
    for c in word.bytes() {
        let value = ALPHABET.iter().position(|a| *a == c.to_ascii_lowercase())?;
        bits = bits << 5 | value as u32;
        held += 5;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    (held < 5 && bits == 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_rfc_4648() {
        let vectors = ["", "my", "mzxq", "mzxw6", "mzxw6yq", "mzxw6ytb", "mzxw6ytboi"];
        for (length, word) in vectors.iter().enumerate() {
            assert_eq!(encode(&b"foobar"[..length]), *word);
            assert_eq!(decode(word).unwrap(), &b"foobar"[..length]);
            assert_eq!(decode(&word.to_uppercase()).unwrap(), &b"foobar"[..length]);
        }
    }

    #[test]
    fn what_is_no_word_is_refused() {
        for wrong in ["m", "mz1q", "mzx", "mzxq=", "mzxr", "mzxw6yr", "é", "my "] {
            assert_eq!(decode(wrong), None, "{wrong}");
        }
    }
}
