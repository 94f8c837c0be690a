//! Members and their ids.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Id of a member. In `farflung`: the first 28 bytes of its public key and the number of its endpoint, or that
/// number alone if connections are not encrypted. In simulations: a number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemberId(pub [u8; 32]);

impl MemberId {
    /// Returns the id that contains only a number: big endian, in the last four bytes, so that ids sort as
    /// numbers do.
    #[must_use]
    pub const fn number(number: u32) -> Self {
        let mut bytes = [0; 32];
        let [a, b, c, d] = number.to_be_bytes();
        (bytes[28], bytes[29], bytes[30], bytes[31]) = (a, b, c, d);
        Self(bytes)
    }
}

impl fmt::Display for MemberId {
    /// Writes the first 8 bytes in hexadecimal; for an id that contains only a number, `#` and that number.
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

/// A member of a run, or a newcomer that asks to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Member {
    /// Id of the member.
    pub id: MemberId,
    /// Number of the member's endpoint in the transport. A run uses each number only once: a machine that
    /// leaves and joins again gets another slot, even if it keeps its id.
    pub slot: u32,
    /// Epoch of the first view that contains the member. Set by [`View::first`](super::View::first) and
    /// [`View::with`](super::View::with).
    pub joined: u64,
}

impl Member {
    /// Creates a member that is not in a view yet.
    #[must_use]
    pub const fn new(id: MemberId, slot: u32) -> Self {
        Self { id, slot, joined: 0 }
    }
}
