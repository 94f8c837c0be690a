//! A control message that decodes must be the same after encoding and decoding it again.

#![no_main]

use farflung_comm::Control;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = Control::decode(bytes) {
        assert_eq!(Control::decode(&message.encode()).as_ref(), Ok(&message));
    }
});
