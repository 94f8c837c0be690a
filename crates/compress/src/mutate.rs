//! Corrupts payloads as an adversary would, for tests of decoders on the host and on devices.

use crc32fast::Hasher;
use farflung_base::Philox;

use crate::wire::HEADER;

/// Corrupts a frame: it changes a bit, a byte or a word, shortens or extends the frame, or overwrites
/// everything from some place on. Three of four frames then get a valid checksum, and half of these a valid
/// length, as a forger would write them. The result is a pure function of the bytes, `rng` and `case`.
///
/// ```
/// use farflung_base::Philox;
/// use farflung_compress::{PayloadRef, mutate, parse};
///
/// let (mut codec, mut payload) = (parse("int4:8")?, farflung_compress::Payload::new());
/// codec.compress(&[1.0; 20], Default::default(), &mut payload)?;
/// let mut refused = 0;
/// for case in 0..100 {
///     let mut bytes = payload.as_bytes().to_vec();
///     mutate(&mut bytes, &Philox::new(1, 2), case);
///     let decoded = PayloadRef::parse(&bytes).and_then(|p| codec.decompress(p, &mut [0.0; 20]));
///     refused += u32::from(decoded.is_err());
/// }
/// assert!(refused > 50);
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
pub fn mutate(bytes: &mut Vec<u8>, rng: &Philox, case: u64) {
    let [kind, at, with, seals] = rng.block(case);
    let at = at as usize % bytes.len().max(1);
    match kind % 6 {
        _ if bytes.is_empty() => bytes.push(with as u8),
        0 => bytes[at] ^= 1 << (with % 8),
        1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][with as usize % 5],
        2 => bytes.truncate(at),
        3 => bytes.extend_from_slice(&with.to_le_bytes()[..=at % 4]),
        // Overwrites a whole field: a word of the header, or a scale.
        4 => bytes[at & !3..].iter_mut().zip(with.to_le_bytes()).for_each(|(b, w)| *b = w),
        _ => bytes[at..].fill(with as u8),
    }
    if seals % 4 != 0 {
        if seals % 8 > 3 && bytes.len() >= HEADER {
            let body = (bytes.len() - HEADER) as u64;
            bytes[16..24].copy_from_slice(&body.to_le_bytes());
        }
        reseal(bytes);
    }
}

/// Writes the checksum that fits the frame's bytes. Does nothing if there are fewer bytes than a header.
pub fn reseal(bytes: &mut [u8]) {
    if let Some((header, body)) = bytes.split_first_chunk_mut::<HEADER>() {
        let (hashed, sum) = header.split_at_mut(HEADER - 4);
        let mut crc = Hasher::new();
        crc.update(hashed);
        crc.update(body);
        sum.copy_from_slice(&crc.finalize().to_le_bytes());
    }
}
