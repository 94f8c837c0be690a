//! Reads the streams of a peer: one stream per tag, whose frames are put into the inbox.

use std::sync::Arc;

use ::iroh::endpoint::{ReadExactError, RecvStream, SendStream};

use super::Peer;
use crate::sizes::HEADER_BYTES;
use crate::wire::{self, Kind};
use crate::{Pool, WireError};

/// Reads a stream to its end, then finishes the other half of it, which tells the peer that everything was
/// received.
///
/// # Errors
/// If a frame is invalid. The end of the connection is not an error here; `Peer::listen` reports it.
pub(super) async fn read(
    peer: &Peer,
    mut send: SendStream,
    mut recv: RecvStream,
    pool: &Arc<Pool>,
) -> Result<(), WireError> {
    let mut tag = None;
    loop {
        let mut bytes = [0; HEADER_BYTES];
        match recv.read_exact(&mut bytes).await {
            Ok(()) => {}
            Err(ReadExactError::FinishedEarly(0)) => {
                // An error is ignored: the stream may be closed already.
                let _ = send.finish();
                return Ok(());
            }
            Err(ReadExactError::FinishedEarly(_)) => {
                return Err(WireError::Malformed("header: the stream ended within it"));
            }
            Err(ReadExactError::ReadError(_)) => return Ok(()),
        }
        let header = wire::decode(&bytes)?;
        if header.kind != Kind::Data {
            return Err(WireError::Kind(header.kind as u8));
        }
        if *tag.get_or_insert(header.tag) != header.tag {
            return Err(WireError::Malformed("tag: the stream carries frames of another tag"));
        }
        let mut frame = pool.lease(header.length);
        match recv.read_exact(frame.bytes_mut()).await {
            Ok(()) => {}
            Err(ReadExactError::FinishedEarly(_)) => {
                return Err(WireError::Malformed("payload: the stream ended within it"));
            }
            Err(ReadExactError::ReadError(_)) => return Ok(()),
        }
        if wire::checksum(&bytes, frame.bytes()) != header.crc {
            return Err(WireError::Checksum);
        }
        frame.check = header.check;
        peer.deliver(header.tag, frame).await;
    }
}
