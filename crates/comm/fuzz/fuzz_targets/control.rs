//! A control message that is understood is understood alike when it is written again.

#![no_main]

use farflung_comm::Control;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = Control::decode(bytes) {
        assert_eq!(Control::decode(&message.encode()).as_ref(), Ok(&message));
    }
});
