//! Control messages: exchanged before links exist, with a store, and to set up shared memory. Encoded with
//! postcard, one message per frame. Independent of sockets.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::WireError;
use crate::error::Refusal;

/// Maximum length of a greeting in bytes. A connection that has not identified itself is not read further.
pub(crate) const HELLO: usize = 1024;

/// A control message. Strings and byte slices borrow from the bytes that they are decoded from.
///
/// The encoding numbers the variants in this order, so new ones are added at the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Control<'a> {
    /// Greeting of a rank that connects.
    Hello {
        /// The rank that connects.
        rank: u32,
        /// Number of ranks that the sender expects.
        world_size: u32,
        /// Name of the sender's job.
        job: &'a str,
        /// Address at which the sender listens for its peers.
        listen: &'a str,
        /// Epoch of the membership that the sender uses; 0 at present.
        epoch: u64,
        /// Public key of the sender, 32 bytes; empty if connections are not encrypted.
        key: &'a [u8],
        /// Digest of settings that must be the same on all ranks; empty at present.
        digest: &'a [u8],
    },
    /// Addresses, keys and secret of all ranks, in rank order.
    Table {
        /// Address of each rank.
        #[serde(borrow)]
        addresses: BoundedVec<&'a str>,
        /// Public keys, 32 bytes each; empty if connections are not encrypted.
        #[serde(borrow)]
        keys: BoundedVec<&'a [u8]>,
        /// Secret of connections among the ranks, 32 bytes; empty if they are not encrypted.
        secret: &'a [u8],
    },
    /// Accepts a greeting. The value is the rank that accepts it.
    Welcome(u32),
    /// Refuses a greeting, with the reason.
    Refuse(Refusal),
    /// The rendezvous failed: these ranks are missing.
    Missing(BoundedVec<u32>),
    /// To a store: first message of a client, with the name of its job.
    Open(&'a str),
    /// To a store: puts a value at a key. Answered by [`Control::Done`].
    Put {
        /// Key of the value.
        key: &'a str,
        /// Value to put.
        value: &'a [u8],
        /// If set, a value that the key already has is kept.
        only_new: bool,
    },
    /// To a store: requests the value of a key. Answered by [`Control::Value`].
    Get(&'a str),
    /// To a store: adds to the number at a key. Answered by [`Control::Sum`].
    Add {
        /// Key of the number.
        key: &'a str,
        /// Number to add.
        by: i64,
    },
    /// To a store: waits until all keys have values. Answered by [`Control::Values`], or by [`Control::Absent`]
    /// after the time limit.
    Wait {
        /// Keys to wait for.
        keys: BoundedVec<&'a str>,
        /// Time limit in milliseconds.
        patience: u64,
    },
    /// From a store: whether the request was carried out.
    Done(bool),
    /// From a store: the value, or `None` if there is none.
    Value(Option<&'a [u8]>),
    /// From a store: the sum.
    Sum(i64),
    /// From a store: the values, in the order of the keys.
    Values(BoundedVec<&'a [u8]>),
    /// From a store: indices of the keys without a value.
    Absent(BoundedVec<u32>),
    /// From a store: the request is denied, because the store is full or the value is not a number.
    Denied,
    /// First message of either side in an encrypted session; the side that connects sends first.
    Prove {
        /// Time until which the right to join is valid, in seconds since 1970; 0 for no limit.
        expiry: u64,
        /// Time of the sender's clock.
        clock: u64,
        /// HMAC-SHA256, keyed with the secret, of `farflung/join/1`, the role, the expiry and the session's
        /// exporter.
        mac: &'a [u8],
    },
    /// From a process that wants to join this job: requests the members.
    Ask(&'a str),
    /// Answer to [`Control::Ask`].
    Members {
        /// Number of each member's endpoint.
        slots: BoundedVec<u32>,
        /// Address at which each member listens.
        #[serde(borrow)]
        addresses: BoundedVec<&'a str>,
        /// Public keys, 32 bytes each; empty if connections are not encrypted.
        keys: BoundedVec<&'a [u8]>,
        /// Secret of connections among members, 32 bytes; empty if they are not encrypted.
        secret: &'a [u8],
        /// Further data for a process that joins.
        welcome: &'a [u8],
    },
    /// Step of the negotiation about shared memory, sent over the link to a process of the same machine.
    SharedMemory(SharedMemoryMessage),
}

/// Messages by which two processes of one machine agree to share memory. The peer with the greater number makes
/// the offer, or declines at once. If either side declines, both continue over the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SharedMemoryMessage {
    /// Offers a unix socket in the abstract namespace, at which the peer may hand over memory.
    Offer {
        /// Bytes of the socket's name, which is `farflung-` followed by these bytes in hexadecimal.
        name: [u8; 16],
        /// The peer must send this token with the memory, to prove that it has received the offer.
        token: [u8; 16],
    },
    /// The memory file and an eventfd that wakes the sender have been sent to that socket.
    Handed,
    /// From now on this side sends through shared memory. If this side made the offer, it has sent its own
    /// eventfd over the unix socket.
    Mapped,
    /// This side does not share memory.
    Declined,
}

impl<'a> Control<'a> {
    /// Returns the encoded message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("a message can always be serialized into memory")
    }

    /// Decodes a message from untrusted bytes, all of which it must use.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, WireError> {
        match postcard::take_from_bytes(bytes) {
            Ok((message, [])) => Ok(message),
            _ => Err(WireError::Malformed("control message")),
        }
    }
}

/// A list that is decoded without trusting the length in the message: memory is allocated only for the elements
/// that arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundedVec<T>(pub Vec<T>);

impl<T> Default for BoundedVec<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Serialize> Serialize for BoundedVec<T> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for BoundedVec<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Elements<T> {
            type Value = BoundedVec<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some(element) = elements.next_element()? {
                    all.push(element);
                }
                Ok(BoundedVec(all))
            }
        }
        deserializer.deserialize_seq(Elements(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns messages of each variant except `SharedMemory`, with their encodings in hexadecimal.
    fn all() -> Vec<(Control<'static>, &'static str)> {
        vec![
            (
                Control::Hello {
                    rank: 3,
                    world_size: 300,
                    job: "night",
                    listen: "[::1]:9",
                    epoch: 200,
                    key: &[1, 2],
                    digest: &[],
                },
                "00 03 ac02 05 6e69676874 07 5b3a3a315d3a39 c801 02 0102 00",
            ),
            (
                Control::Table {
                    addresses: BoundedVec(vec!["a:1", "b:2"]),
                    keys: BoundedVec(vec![&[3], &[4]]),
                    secret: &[5],
                },
                "01 02 03 613a31 03 623a32 02 01 03 01 04 01 05",
            ),
            (Control::Welcome(7), "02 07"),
            (Control::Refuse(Refusal::WorldSize { want: 2, got: 3 }), "03 00 02 03"),
            (Control::Refuse(Refusal::Job), "03 01"),
            (Control::Refuse(Refusal::Rank(9)), "03 02 09"),
            (Control::Refuse(Refusal::Taken(1)), "03 03 01"),
            (Control::Refuse(Refusal::Version { want: 3, got: 4 }), "03 04 03 04"),
            (Control::Refuse(Refusal::Key), "03 05"),
            (Control::Refuse(Refusal::Secret), "03 06"),
            (Control::Refuse(Refusal::Expired { expiry: 5, clock: 300 }), "03 07 05 ac02"),
            (Control::Refuse(Refusal::EncryptionMismatch), "03 08"),
            (Control::Refuse(Refusal::SimultaneousConnect), "03 09"),
            (Control::Refuse(Refusal::SameKey), "03 0a"),
            (Control::Refuse(Refusal::ListTooLong { members: 200, bytes: 300_000 }), "03 0b c801 e0a712"),
            (Control::Missing(BoundedVec(vec![1, 130])), "04 02 01 8201"),
            (Control::Open("night"), "05 05 6e69676874"),
            (Control::Put { key: "k", value: &[1, 2], only_new: true }, "06 01 6b 02 0102 01"),
            (Control::Get("k"), "07 01 6b"),
            (Control::Add { key: "k", by: -1 }, "08 01 6b 01"),
            (Control::Wait { keys: BoundedVec(vec!["k", "l"]), patience: 1000 }, "09 02 01 6b 01 6c e807"),
            (Control::Done(true), "0a 01"),
            (Control::Value(None), "0b 00"),
            (Control::Value(Some(&[5])), "0b 01 01 05"),
            (Control::Sum(2), "0c 04"),
            (Control::Values(BoundedVec(vec![&[5], &[]])), "0d 02 01 05 00"),
            (Control::Absent(BoundedVec(vec![0])), "0e 01 00"),
            (Control::Denied, "0f"),
            (Control::Prove { expiry: 5, clock: 300, mac: &[7, 8] }, "10 05 ac02 02 0708"),
            (Control::Ask("night"), "11 05 6e69676874"),
            (
                Control::Members {
                    slots: BoundedVec(vec![0, 200]),
                    addresses: BoundedVec(vec!["a:1", "b:2"]),
                    keys: BoundedVec(vec![&[3], &[4]]),
                    secret: &[5],
                    welcome: &[6, 7],
                },
                "12 02 00 c801 02 03 613a31 03 623a32 02 01 03 01 04 01 05 02 06 07",
            ),
        ]
    }

    #[test]
    fn every_message_is_pinned_and_comes_back() {
        for (message, want) in all() {
            let bytes = message.encode();
            let hex = bytes.iter().fold(String::new(), |text, b| text + &format!("{b:02x}"));
            assert_eq!(hex, want.replace(' ', ""), "{message:?}");
            assert_eq!(Control::decode(&bytes), Ok(message));
            for end in 0..bytes.len() {
                assert!(Control::decode(&bytes[..end]).is_err());
            }
            assert!(Control::decode(&[&bytes[..], &[0]].concat()).is_err());
        }
        assert!(Control::decode(&[19]).is_err());
        // Claims a list of four thousand million ranks in seven bytes.
        assert!(Control::decode(&[4, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F, 1]).is_err());
    }
}
