//! What a socket gives begins with frames and ends with a part of one, or is refused.

#![no_main]

use farflung_comm::{Parsed, parse};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Ok(Parsed::Whole(_, used)) = parse(rest) {
        rest = &rest[used..];
    }
});
