//! A tokenizer whose tokens are bytes. It needs no vocabulary, and any file is valid data.

use super::Tokenizer;
use crate::ZooError;

/// The byte tokenizer, with 256 tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Byte;

impl Tokenizer for Byte {
    fn name(&self) -> &'static str {
        "byte"
    }

    fn vocab_size(&self) -> usize {
        256
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, ZooError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn encode_bytes(&self, bytes: &[u8]) -> Option<Vec<u32>> {
        Some(bytes.iter().copied().map(u32::from).collect())
    }

    fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>, ZooError> {
        let byte = |(position, &token): (usize, &u32)| {
            u8::try_from(token).map_err(|_| ZooError::TokenOutOfRange {
                path: None,
                position,
                token,
                vocab: 256,
            })
        };
        tokens.iter().enumerate().map(byte).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_come_back_and_other_ids_are_errors() {
        let all: Vec<u8> = (0..=255).collect();
        let tokens = Byte.encode_bytes(&all).unwrap();
        assert_eq!(tokens[200], 200);
        assert_eq!(Byte.decode(&tokens).unwrap(), all);
        assert_eq!(Byte.encode("é").unwrap(), [0xC3, 0xA9]);
        let message = Byte.decode(&[1, 256]).unwrap_err().to_string();
        assert!(message.contains("256 at position 1"), "{message}");
    }
}
