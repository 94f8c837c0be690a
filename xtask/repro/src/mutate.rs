//! Damages bytes as an attacker or a bad link does, from a seed. It does not depend on a format.

use farflung::base::Philox;

/// Damages `bytes` in one of six ways, and returns a random word for the caller.
pub(crate) fn mutate(bytes: &mut Vec<u8>, rng: &Philox, case: u64) -> u32 {
    let [kind, at, with, chance] = rng.block(case);
    let at = at as usize % bytes.len().max(1);
    match kind % 6 {
        0 => bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << (with % 8)),
        1 => bytes.iter_mut().skip(at).take(1).for_each(|b| *b = [0, 1, 0x7f, 0x80, 0xff][with as usize % 5]),
        2 => bytes.truncate(at),
        3 => bytes.extend_from_slice(&with.to_le_bytes()[..=at % 4]),
        // Overwrites a whole field.
        4 => bytes.iter_mut().skip(at & !3).zip(with.to_le_bytes()).for_each(|(b, w)| *b = w),
        _ => bytes[at..].fill(with as u8),
    }
    chance
}
