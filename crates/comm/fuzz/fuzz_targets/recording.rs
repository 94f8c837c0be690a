//! A recording that decodes must be the same after encoding and decoding it again.

#![no_main]

use farflung_comm::simulated::Recording;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(recording) = Recording::decode(bytes) {
        let again = Recording::decode(&recording.encode()).expect("an encoded recording can be decoded");
        recording.compare(&again).expect("the decoded recording is equal to the original");
    }
});
