//! Frames to and from one other process, as MPI messages.

use std::collections::VecDeque;
use std::sync::Arc;

use farflung_base::PeerId;

use super::messages::{Buffer, Lane, Transfer, World};
use crate::credit::Counts;
use crate::sizes::HEADER_BYTES;
use crate::wire::{self, Header};
use crate::{Frame, Pool, WireError};

/// Maximum size in bytes of a message with a header. Longer payloads are sent in a message of their own,
/// without a copy.
const SHORT: usize = 4096;

#[derive(Default)]
pub(super) struct Peer {
    /// Number of sent frames for which the peer has not sent a credit yet, by tag.
    pub(super) in_flight: Counts,
    /// Number of frames taken since the last credit was sent, by tag.
    pub(super) taken: Counts,
    /// Set once the peer has said goodbye: it sends nothing more.
    pub(super) said_goodbye: bool,
    /// Set once the peer has sent bytes that are not a valid frame.
    pub(super) is_broken: bool,
    /// Sends in progress, in the order in which they were started.
    sending: VecDeque<Transfer>,
    /// Posted receive of the next header.
    header: Option<Transfer>,
    /// Buffer for the next receive of a header, kept between two of them.
    spare: Vec<u8>,
    /// Header of the frame being received, and the receive of its long payload.
    payload: Option<(Header, Transfer)>,
}

impl Peer {
    /// Starts to send a frame.
    pub(super) fn send(
        &mut self,
        world: &World,
        to: PeerId,
        header: &[u8; HEADER_BYTES],
        frame: Option<Frame>,
    ) {
        let mut first = header.to_vec();
        let long = frame.filter(|frame| {
            let is_short = HEADER_BYTES + frame.len() <= SHORT;
            if is_short {
                first.extend_from_slice(frame.bytes());
            }
            !is_short
        });
        let long = long.map(|frame| (Lane::Payloads, Buffer::Long(frame)));
        for (lane, buffer) in [(Lane::Headers, Buffer::Short(first))].into_iter().chain(long) {
            self.sending.push_back(Transfer::send(world, to, lane, buffer));
        }
        self.forget_sent(world);
    }

    /// Returns whether any message to the peer is still in progress.
    pub(super) fn is_sending(&self) -> bool {
        !self.sending.is_empty()
    }

    /// Drops sends that are complete.
    pub(super) fn forget_sent(&mut self, world: &World) {
        while self.sending.front_mut().is_some_and(|first| first.poll(world).is_some()) {
            self.sending.pop_front();
        }
    }

    /// Returns the next frame once it has arrived completely. A new frame is begun only if `may_begin` is set.
    pub(super) fn receive(
        &mut self,
        world: &World,
        from: PeerId,
        pool: &Arc<Pool>,
        may_begin: bool,
    ) -> Result<Option<(Header, Frame)>, WireError> {
        if self.said_goodbye || self.is_broken {
            return Ok(None);
        }
        if self.payload.is_none() && may_begin {
            let header = self.header.take().unwrap_or_else(|| {
                let mut spare = std::mem::take(&mut self.spare);
                spare.resize(SHORT, 0);
                Transfer::receive(world, from, Lane::Headers, Buffer::Short(spare))
            });
            let header = self.header.insert(header);
            let Some((Buffer::Short(message), length)) = header.poll(world) else { return Ok(None) };
            self.header = None;
            let read = read(&message[..length], pool);
            self.spare = message;
            let (header, payload) = read?;
            if let Some(frame) = payload {
                return Ok(Some((header, frame)));
            }
            let into = Buffer::Long(pool.lease(header.length));
            self.payload = Some((header, Transfer::receive(world, from, Lane::Payloads, into)));
        }
        let Some((header, coming)) = &mut self.payload else { return Ok(None) };
        let Some((Buffer::Long(mut frame), length)) = coming.poll(world) else { return Ok(None) };
        let header = *header;
        self.payload = None;
        if length != header.length {
            return Err(OTHER_LENGTH);
        }
        frame.check = header.check;
        Ok(Some((header, frame)))
    }
}

/// Error of a payload whose length is not that in its header.
const OTHER_LENGTH: WireError =
    WireError::Malformed("MPI message: its payload has another length than its header says");

/// Parses a message: a header, and its payload if that is short.
fn read(message: &[u8], pool: &Arc<Pool>) -> Result<(Header, Option<Frame>), WireError> {
    let (head, payload) = message
        .split_first_chunk()
        .ok_or(WireError::Malformed("MPI message: it is shorter than a header"))?;
    let header = wire::decode(head)?;
    let is_short = HEADER_BYTES + header.length <= SHORT;
    let expected = if is_short { header.length } else { 0 };
    if payload.len() != expected {
        return Err(OTHER_LENGTH);
    }
    Ok((header, is_short.then(|| pool.copy_of(payload, header.check))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Tag;
    use crate::wire::Kind;

    #[test]
    fn a_message_is_a_header_and_what_it_says_or_is_refused() {
        let pool = Pool::new();
        let message = |claimed: usize, payload: &[u8]| {
            let header = wire::plain(Kind::Data, Tag::user(5, 6), 7, claimed);
            read(&[&header[..], payload].concat(), &pool).map(|(header, frame)| {
                (header.length, frame.map(|frame| (frame.bytes().to_vec(), frame.check)))
            })
        };
        let most = SHORT - HEADER_BYTES;
        assert_eq!(message(0, &[]), Ok((0, Some((vec![], 7)))));
        assert_eq!(message(most, &vec![3; most]), Ok((most, Some((vec![3; most], 7)))));
        assert_eq!(message(most + 1, &[]), Ok((most + 1, None)));
        assert_eq!(message(2, &[1]), Err(OTHER_LENGTH));
        assert_eq!(message(most + 1, &[1]), Err(OTHER_LENGTH));
        assert!(matches!(message(crate::FRAME_BYTES + 1, &[]), Err(WireError::Length { .. })));
        assert!(matches!(read(&[0; 5], &pool), Err(WireError::Malformed(_))));
        assert!(matches!(read(&[0; HEADER_BYTES], &pool), Err(WireError::Magic)));
    }
}
