//! `.bin` token files of nanoGPT (only little-endian `u16` tokens) and of llm.c (a header of 256 `i32`, then
//! the tokens).
//!
//! If the first word of a file is one of llm.c's magic numbers, the file is in llm.c's format, otherwise in
//! nanoGPT's. There is no ambiguity: read as tokens, the magic numbers are not ids of GPT-2.

use std::path::Path;

use crate::ZooError;

/// llm.c for GPT-2: version 1, `u16` tokens.
const MAGIC_U16: u32 = 20_240_520;
/// llm.c for Llama 3: version 7, `u32` tokens.
const MAGIC_U32: u32 = 20_240_801;
const HEADER_BYTES: usize = 1024;

/// Returns the `index`-th little-endian word of a header.
fn word(bytes: &[u8], index: usize) -> Option<u32> {
    let four = bytes.get(4 * index..4 * index + 4)?;
    Some(u32::from_le_bytes(four.try_into().expect("the slice has four bytes")))
}

fn expect(path: &Path, field: &'static str, found: u64, expected: u64) -> Result<(), ZooError> {
    if found == expected {
        return Ok(());
    }
    Err(ZooError::TokenFile { path: path.to_owned(), field, found, expected })
}

/// Returns the ids in a token file. `path` is used only in error messages.
///
/// Errors: [`ZooError::TokenFile`] if the version or the length is wrong.
pub(super) fn read<'a>(path: &Path, bytes: &'a [u8]) -> Result<Box<dyn Iterator<Item = u32> + 'a>, ZooError> {
    let (width, body) = match word(bytes, 0) {
        Some(magic @ (MAGIC_U16 | MAGIC_U32)) => {
            let (version, width) = if magic == MAGIC_U16 { (1, 2) } else { (7, 4) };
            if bytes.len() < HEADER_BYTES {
                expect(path, "length in bytes", bytes.len() as u64, HEADER_BYTES as u64)?;
            }
            expect(path, "version", u64::from(word(bytes, 1).unwrap_or(0)), version)?;
            let claimed = HEADER_BYTES as u64 + u64::from(word(bytes, 2).unwrap_or(0)) * width;
            expect(path, "length in bytes", bytes.len() as u64, claimed)?;
            (width, &bytes[HEADER_BYTES..])
        }
        _ => (2, bytes),
    };
    if width == 4 {
        return Ok(Box::new(body.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four))));
    }
    expect(path, "remainder of the length in bytes divided by 2", body.len() as u64 % 2, 0)?;
    Ok(Box::new(body.as_chunks().0.iter().map(|&two| u32::from(u16::from_le_bytes(two)))))
}
