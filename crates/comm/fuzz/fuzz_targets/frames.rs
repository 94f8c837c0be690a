//! Parses frames from arbitrary bytes, one after the other, until an incomplete or invalid one.

#![no_main]

use farflung_comm::{Parsed, parse};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Ok(Parsed::Whole(_, used)) = parse(rest) {
        rest = &rest[used..];
    }
});
