//! The header of frames on sockets. Every byte on a socket belongs to a frame; the WIRE section of the README
//! is the specification.

use crate::WireError;
use crate::control::Control;
use crate::sizes::{FRAME_BYTES, HEADER_BYTES};
use crate::transport::{Channel, Tag};

/// Version of the protocol; sent in every frame.
pub const VERSION: u8 = 6;

pub(crate) const MAGIC: [u8; 4] = *b"FFLC";

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A payload for a tag.
    Data = 1,
    /// Flow control: the receiver took `check` frames of the tag, so the sender may send as many more.
    Credit = 2,
    /// The last frame: the sender leaves.
    Bye = 3,
    /// A [`Control`] message, for instance of the rendezvous.
    Control = 4,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Data, Self::Credit, Self::Bye, Self::Control];
}

/// Decoded header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) tag: Tag,
    pub(crate) check: u32,
    pub(crate) length: usize,
    pub(crate) crc: u32,
}

/// The tag in the headers of frames without a tag.
pub(crate) const NO_TAG: Tag = Tag { context: 0, channel: Channel::User, number: 0 };

/// Encodes the header of a frame with this payload, including its checksum.
pub(crate) fn encode(kind: Kind, tag: Tag, check: u32, payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut h = plain(kind, tag, check, payload.len());
    let crc = checksum(&h, payload);
    h[28..].copy_from_slice(&crc.to_le_bytes());
    h
}

/// Encodes the header of a frame without a checksum, for shared memory and TLS sessions.
pub(crate) fn plain(kind: Kind, tag: Tag, check: u32, length: usize) -> [u8; HEADER_BYTES] {
    let mut h = [0; HEADER_BYTES];
    h[..4].copy_from_slice(&MAGIC);
    h[4] = VERSION;
    h[5] = kind as u8;
    h[6] = tag.channel as u8;
    h[8..16].copy_from_slice(&tag.context.to_le_bytes());
    h[16..20].copy_from_slice(&tag.number.to_le_bytes());
    h[20..24].copy_from_slice(&check.to_le_bytes());
    h[24..28].copy_from_slice(&(length as u32).to_le_bytes());
    h
}

/// Computes the CRC-32 (IEEE) of the header's first 28 bytes followed by the payload.
pub(crate) fn checksum(header: &[u8; HEADER_BYTES], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[..28]);
    hasher.update(payload);
    hasher.finalize()
}

/// Decodes a header from untrusted bytes. The caller must compare the checksum once it has the payload; under
/// TLS there is none.
pub(crate) fn decode(h: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
    let word = |at: usize| u32::from_le_bytes([h[at], h[at + 1], h[at + 2], h[at + 3]]);
    if h[..4] != MAGIC {
        return Err(WireError::Magic);
    }
    if h[4] != VERSION {
        return Err(WireError::Version { want: VERSION, got: h[4] });
    }
    let kind = Kind::ALL.into_iter().find(|k| *k as u8 == h[5]).ok_or(WireError::Kind(h[5]))?;
    let channels = [Channel::User, Channel::Collective, Channel::Abort, Channel::Suspect];
    let channel = channels.into_iter().find(|c| *c as u8 == h[6]).ok_or(WireError::Channel(h[6]))?;
    // Byte 7 is reserved for the last eight bits of the membership's epoch, and must be 0.
    if h[7] != 0 {
        return Err(WireError::Epoch { want: 0, got: h[7] });
    }
    let length = word(24) as usize;
    if length > FRAME_BYTES {
        return Err(WireError::Length { max: FRAME_BYTES, got: length });
    }
    let context = u64::from(word(8)) | u64::from(word(12)) << 32;
    let tag = Tag { context, channel, number: word(16) };
    Ok(Header { kind, tag, check: word(20), length, crc: word(28) })
}

/// A complete frame, decoded from untrusted bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message<'a> {
    /// A payload for a tag.
    Data {
        /// The conversation to which the payload belongs.
        tag: Tag,
        /// Word that both ends of a collective compute in the same way.
        check: u32,
        /// Payload.
        payload: &'a [u8],
    },
    /// Flow control: the receiver took this number of frames of the tag.
    Credit {
        /// The conversation.
        tag: Tag,
        /// Number of frames.
        frames: u32,
    },
    /// The last frame: the sender leaves.
    Bye,
    /// A control message, for instance of the rendezvous or to a store.
    Control(Control<'a>),
}

/// Result of parsing the first bytes of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// The beginning of a frame. At least this number of bytes, counted from the start of the stream, is needed
    /// to continue.
    Part(usize),
    /// A frame, and its length in bytes.
    Whole(Message<'a>, usize),
}

/// Parses the frame at the start of a stream of untrusted bytes. Allocates only the lists of control messages,
/// and never more than the bytes present need.
///
/// # Errors
/// If the frame is malformed. The rest of the stream cannot be parsed then.
pub fn parse(bytes: &[u8]) -> Result<Parsed<'_>, WireError> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        // Another program may send less than a header, and then wait.
        let is_foreign = bytes.first_chunk::<4>().is_some_and(|first| *first != MAGIC);
        return if is_foreign { Err(WireError::Magic) } else { Ok(Parsed::Part(HEADER_BYTES)) };
    };
    let header = decode(head)?;
    let whole = HEADER_BYTES + header.length;
    let Some(payload) = rest.get(..header.length) else { return Ok(Parsed::Part(whole)) };
    if checksum(head, payload) != header.crc {
        return Err(WireError::Checksum);
    }
    let Header { tag, check, .. } = header;
    let message = match header.kind {
        Kind::Data => Message::Data { tag, check, payload },
        Kind::Credit => Message::Credit { tag, frames: check },
        Kind::Bye => Message::Bye,
        Kind::Control => Message::Control(Control::decode(payload)?),
    };
    Ok(Parsed::Whole(message, whole))
}

/// Encodes a control message as a frame.
///
/// # Errors
/// [`WireError::Length`] if it does not fit into one.
pub(crate) fn framed(message: &Control<'_>) -> Result<Vec<u8>, WireError> {
    let payload = message.encode();
    if payload.len() > FRAME_BYTES {
        return Err(WireError::Length { max: FRAME_BYTES, got: payload.len() });
    }
    Ok(framed_bytes(&payload))
}

/// Puts an encoded control message, which must not exceed [`FRAME_BYTES`], into a frame.
pub(crate) fn framed_bytes(payload: &[u8]) -> Vec<u8> {
    let mut frame = encode(Kind::Control, NO_TAG, 0, payload).to_vec();
    frame.extend(payload);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().fold(String::new(), |text, b| text + &format!("{b:02x}"))
    }

    #[test]
    fn the_header_is_pinned() {
        let tag = Tag { context: 0x0807_0605_0403_0201, channel: Channel::Collective, number: 9 };
        let header = encode(Kind::Data, tag, 0xAABB_CCDD, b"farflung");
        let fields = "46464c43 06 01 01 00 0102030405060708 09000000 ddccbbaa 08000000";
        assert_eq!(hex(&header[..28]), fields.replace(' ', ""));
        // CRC-32/ISO-HDLC, the same checksum as that of zlib.
        let whole = [&header[..28], b"farflung"].concat();
        assert_eq!(header[28..], bitwise_crc(&whole).to_le_bytes());
        let decoded = decode(&header).unwrap();
        let crc = checksum(&header, b"farflung");
        assert_eq!(decoded, Header { kind: Kind::Data, tag, check: 0xAABB_CCDD, length: 8, crc });
    }

    fn bitwise_crc(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0_u32, |crc, &b| {
            (0..8).fold(crc ^ u32::from(b), |c, _| if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 })
        })
    }

    #[test]
    fn every_wrong_field_is_an_error_and_no_byte_panics() {
        let good = encode(Kind::Credit, NO_TAG, 8, &[]);
        let with = |at: usize, value: u8| {
            let mut h = good;
            h[at] = value;
            decode(&h)
        };
        assert_eq!(with(0, b'X'), Err(WireError::Magic));
        assert_eq!(with(4, 1), Err(WireError::Version { want: VERSION, got: 1 }));
        assert_eq!(with(5, 0), Err(WireError::Kind(0)));
        assert_eq!(with(6, 4), Err(WireError::Channel(4)));
        assert_eq!(with(7, 1), Err(WireError::Epoch { want: 0, got: 1 }));
        assert!(matches!(with(27, 0xFF), Err(WireError::Length { .. })));
        let rng = farflung_base::Philox::new(1, 2);
        for i in 0..200_000 {
            let mut h = good;
            for j in 0..4 {
                let w = rng.word(8 * i + j);
                h[(w % 32) as usize] = (w >> 8) as u8;
            }
            if let Ok(header) = decode(&h) {
                assert!(header.length <= FRAME_BYTES);
            }
        }
    }

    #[test]
    fn a_stream_is_read_frame_by_frame() {
        let tag = Tag { context: 1, channel: Channel::User, number: 2 };
        let mut stream = encode(Kind::Data, tag, 5, b"abc").to_vec();
        stream.extend(b"abc");
        let data = stream.len();
        stream.extend(framed(&Control::Welcome(9)).unwrap());
        assert_eq!(parse(&stream[..31]), Ok(Parsed::Part(32)));
        assert_eq!(parse(&stream[..34]), Ok(Parsed::Part(35)));
        assert_eq!(parse(&stream), Ok(Parsed::Whole(Message::Data { tag, check: 5, payload: b"abc" }, 35)));
        let welcome = Message::Control(Control::Welcome(9));
        assert_eq!(parse(&stream[data..]), Ok(Parsed::Whole(welcome, 34)));
        stream[33] ^= 1;
        assert_eq!(parse(&stream), Err(WireError::Checksum));
        let long = "x".repeat(FRAME_BYTES);
        assert!(matches!(framed(&Control::Get(&long)), Err(WireError::Length { .. })));
    }
}
