//! What is said before there are links, and to a store: postcard, one message in one frame. It knows no socket.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::WireError;
use crate::error::Refusal;

/// The longest greeting: whoever is not known yet is not listened to for longer.
pub(crate) const HELLO: usize = 1024;

/// A control message. Texts and values are borrowed from the bytes that they are read from.
///
/// On the wire variants are numbers in this order, so new ones come last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Control<'a> {
    /// Who connects.
    Hello {
        /// The rank that connects.
        rank: u32,
        /// How many ranks it expects.
        world_size: u32,
        /// Its job.
        job: &'a str,
        /// Where it listens for its peers.
        listen: &'a str,
        /// The epoch of the membership that it knows; 0 today.
        epoch: u64,
        /// Its public key, 32 bytes; empty where connections are not encrypted.
        key: &'a [u8],
        /// What all ranks compare before they exchange anything; empty today.
        digest: &'a [u8],
    },
    /// Where all ranks listen, in their order, and how they know each other.
    Table {
        /// Addresses.
        #[serde(borrow)]
        addresses: Listed<&'a str>,
        /// Public keys, 32 bytes each; none where connections are not encrypted.
        #[serde(borrow)]
        keys: Listed<&'a [u8]>,
        /// The secret of connections among the ranks, 32 bytes; empty where they are not encrypted.
        secret: &'a [u8],
    },
    /// Come in; the rank that says so.
    Welcome(u32),
    /// Stay out.
    Refuse(Refusal),
    /// The rendezvous failed: these ranks did not come.
    Missing(Listed<u32>),
    /// To a store: greets it with the job.
    Open(&'a str),
    /// To a store: puts a value at a key, where there is none if so wanted. Answered by [`Control::Done`].
    Put {
        /// Where.
        key: &'a str,
        /// What.
        value: &'a [u8],
        /// Leaves a value that is there already.
        only_new: bool,
    },
    /// To a store: asks for the value of a key. Answered by [`Control::Value`].
    Get(&'a str),
    /// To a store: adds to the number at a key. Answered by [`Control::Sum`].
    Add {
        /// Where.
        key: &'a str,
        /// How much.
        by: i64,
    },
    /// To a store: asks for the values of keys when all are there. Answered by [`Control::Values`], or by
    /// [`Control::Absent`] when the time is over.
    Wait {
        /// Which.
        keys: Listed<&'a str>,
        /// For how long, in milliseconds.
        patience: u64,
    },
    /// From a store: whether it was done.
    Done(bool),
    /// From a store: the value, where there is one.
    Value(Option<&'a [u8]>),
    /// From a store: the number.
    Sum(i64),
    /// From a store: the values, in the order of the keys.
    Values(Listed<&'a [u8]>),
    /// From a store: numbers of the keys without a value.
    Absent(Listed<u32>),
    /// From a store: it has no room for more, or the value is no number.
    Denied,
    /// The first thing that either side says in an encrypted session, the one that connects first.
    Prove {
        /// Until when the right to join holds, in seconds since 1970; 0 is always.
        expiry: u64,
        /// The time here.
        clock: u64,
        /// HMAC-SHA256 by the secret over `farflung/join/1`, the role, the expiry and the session's exporter.
        mac: &'a [u8],
    },
    /// From a process that would become a member of this job: asks where the members are.
    Ask(&'a str),
    /// To one that asked.
    Members {
        /// The number of each endpoint.
        slots: Listed<u32>,
        /// Where each listens.
        #[serde(borrow)]
        addresses: Listed<&'a str>,
        /// Public keys, 32 bytes each; none where connections are not encrypted.
        keys: Listed<&'a [u8]>,
        /// The secret of connections among members, 32 bytes; empty where they are not encrypted.
        secret: &'a [u8],
        /// Whatever else a member has to know before it connects.
        welcome: &'a [u8],
    },
    /// Over a link, to a process of the same machine: how both come to share memory.
    Near(Near),
}

/// What two processes of one machine say to each other until they share memory. The one with the greater number
/// offers; whoever declines goes on as before, and so does the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Near {
    /// There is a unix socket with this abstract name, for whoever knows the token.
    Offer {
        /// In hexadecimal digits behind `farflung-`.
        name: [u8; 16],
        /// What comes with the memory.
        token: [u8; 16],
    },
    /// A memory file and a doorbell lie at that socket.
    Handed,
    /// What this side says from now on, it says in the shared memory; of the side that offered, a doorbell lies
    /// at the socket.
    Mapped,
    /// It does not come to that.
    Declined,
}

impl<'a> Control<'a> {
    /// The message as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("messages are plain data, and memory takes all of it")
    }

    /// Reads a message of untrusted bytes, all of them.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, WireError> {
        match postcard::take_from_bytes(bytes) {
            Ok((message, [])) => Ok(message),
            _ => Err(WireError::Malformed("control message")),
        }
    }
}

/// A list that makes room for what is there, not for what it claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T>(pub Vec<T>);

impl<T> Default for Listed<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Serialize> Serialize for Listed<T> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Listed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Elements<T> {
            type Value = Listed<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some(element) = elements.next_element()? {
                    all.push(element);
                }
                Ok(Listed(all))
            }
        }
        deserializer.deserialize_seq(Elements(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One of each, with its bytes.
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
                    addresses: Listed(vec!["a:1", "b:2"]),
                    keys: Listed(vec![&[3], &[4]]),
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
            (Control::Refuse(Refusal::Clear), "03 08"),
            (Control::Refuse(Refusal::Crossed), "03 09"),
            (Control::Refuse(Refusal::SameKey), "03 0a"),
            (Control::Missing(Listed(vec![1, 130])), "04 02 01 8201"),
            (Control::Open("night"), "05 05 6e69676874"),
            (Control::Put { key: "k", value: &[1, 2], only_new: true }, "06 01 6b 02 0102 01"),
            (Control::Get("k"), "07 01 6b"),
            (Control::Add { key: "k", by: -1 }, "08 01 6b 01"),
            (Control::Wait { keys: Listed(vec!["k", "l"]), patience: 1000 }, "09 02 01 6b 01 6c e807"),
            (Control::Done(true), "0a 01"),
            (Control::Value(None), "0b 00"),
            (Control::Value(Some(&[5])), "0b 01 01 05"),
            (Control::Sum(2), "0c 04"),
            (Control::Values(Listed(vec![&[5], &[]])), "0d 02 01 05 00"),
            (Control::Absent(Listed(vec![0])), "0e 01 00"),
            (Control::Denied, "0f"),
            (Control::Prove { expiry: 5, clock: 300, mac: &[7, 8] }, "10 05 ac02 02 0708"),
            (Control::Ask("night"), "11 05 6e69676874"),
            (
                Control::Members {
                    slots: Listed(vec![0, 200]),
                    addresses: Listed(vec!["a:1", "b:2"]),
                    keys: Listed(vec![&[3], &[4]]),
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
        // A list of four thousand million ranks in seven bytes.
        assert!(Control::decode(&[4, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F, 1]).is_err());
    }
}
