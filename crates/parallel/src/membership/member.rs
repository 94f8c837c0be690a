//! A member and its name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a member is known by: its public key, or in simulations a rank's number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemberId(pub [u8; 32]);

impl MemberId {
    /// The id of a simulated member: its number, big endian, in the last bytes, so that ids sort as numbers do.
    #[must_use]
    pub const fn number(number: u32) -> Self {
        let mut bytes = [0; 32];
        let [a, b, c, d] = number.to_be_bytes();
        (bytes[28], bytes[29], bytes[30], bytes[31]) = (a, b, c, d);
        Self(bytes)
    }
}

impl fmt::Display for MemberId {
    /// The first 8 bytes in hexadecimal; of a simulated member its number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (zeros, number) = self.0.split_at(28);
        if let &[a, b, c, d] = number
            && zeros.iter().all(|&byte| byte == 0)
        {
            return write!(f, "#{}", u32::from_be_bytes([a, b, c, d]));
        }
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemberId({self})")
    }
}

/// A member of a run, or a newcomer that asks to be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Member {
    /// Its name.
    pub id: MemberId,
    /// Its endpoint's number in the transport, never given twice in a run: a machine that leaves and joins
    /// again has the same id and another slot.
    pub slot: u32,
    /// The epoch of the first view that it is in; [`View::with`](super::View::with) sets it.
    pub joined: u64,
}

impl Member {
    /// A machine that is in no view yet.
    #[must_use]
    pub const fn new(id: MemberId, slot: u32) -> Self {
        Self { id, slot, joined: 0 }
    }
}
