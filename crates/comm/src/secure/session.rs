//! A TLS 1.3 session as a state machine: encrypted bytes and plain bytes go in and out. It does not use
//! sockets; the loop that polls sockets calls it. It limits the bytes that a peer may send before it has proven
//! the join secret.

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use zeroize::Zeroizing;

use super::aligned_buffer::AlignedBuffer;
use super::exporter::ExporterSecret;
use super::identity::PublicKey;
use super::records::{self, HEAD, Keys, OVERHEAD, RECORD, RECORD_ALIGNMENT, RecordContent, Records};
use super::session_error::SessionError;
use super::tls;

/// Space in bytes for a key update, which may precede a record, and for unused bytes at the front of the
/// buffer.
const KEY_UPDATE_SPACE: usize = 4 * RECORD_ALIGNMENT;
/// Size in bytes of the buffer of encrypted data that the socket has not taken.
const OUTGOING: usize = 8 * RECORD + KEY_UPDATE_SPACE;
/// Size in bytes of the buffer of received data: several full records, and the beginning of another.
const INCOMING: usize = 9 * (RECORD + OVERHEAD);
/// Maximum number of bytes that a peer with a raw key may send before it has proven the join secret. This
/// program's own handshake is several times shorter. The bytes of the latest read do not count.
pub(crate) const MAX_UNPROVEN_BYTES: usize = 4096;
/// The same maximum for a peer that shows a chain of certificates.
const MAX_UNPROVEN_CHAIN_BYTES: usize = 16 * 1024;

const LABEL: &str = "EXPORTER-farflung-join";

/// Returns the maximum number of bytes that a peer may send before it has proven the join secret.
const fn limit(tls: &tls::Tls) -> usize {
    if tls.is_by_certificates() { MAX_UNPROVEN_CHAIN_BYTES } else { MAX_UNPROVEN_BYTES }
}

enum Side {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
    /// The handshake is done; records are encrypted and decrypted here and not in rustls.
    Established(Box<Records>),
    /// The last part of the handshake failed.
    Failed,
}

/// Buffer of encrypted bytes for the socket.
#[derive(Default)]
struct Outgoing {
    bytes: AlignedBuffer,
    sent: usize,
    filled: usize,
    /// Number of bytes that the socket has taken in total.
    total_sent: usize,
}

/// Result of one step of the handshake.
#[derive(PartialEq, Eq)]
enum HandshakeStatus {
    /// Progress was made; there may be more to do.
    Moved,
    /// The handshake needs more bytes from the other side.
    Waits,
    /// The handshake is done: data can be sent.
    Established,
    /// The other side has ended the session.
    Ended,
}

/// A TLS session. The caller reads and writes the socket.
pub(crate) struct Session {
    side: Side,
    secret: Arc<ExporterSecret>,
    exporter: Option<Zeroizing<[u8; 32]>>,
    peer: Option<PublicKey>,
    /// Received encrypted bytes. Those before `from` are processed; the space from `to` on is free.
    incoming: AlignedBuffer,
    from: usize,
    to: usize,
    /// Range in `incoming` of decrypted bytes that the caller has not taken.
    opened: Range<usize>,
    outgoing: Outgoing,
    /// Decrypted bytes that arrived with the end of the handshake and that the caller has not taken.
    plain: Vec<u8>,
    /// Number of bytes received in total.
    total_received: usize,
    /// Maximum number of bytes that may be received before the other side has proven the join secret.
    limit: usize,
    ended: bool,
    /// Error of a record that ended the session after the handshake. Later calls of [`Session::open`] return
    /// it.
    broken: Option<SessionError>,
    /// Whether the other side has proven that it may connect.
    is_proven: bool,
    /// Whether the first bytes of the connection are still to be checked.
    first: bool,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session(heard: {}, proven: {})", self.total_received, self.is_proven)
    }
}

impl Session {
    /// Makes the session of the side that connects.
    ///
    /// If the server shows a certificate, it must be valid for one of `names`. If `names` is empty, names are
    /// not checked, and the caller must check the key.
    pub(super) fn client(tls: &tls::Tls, names: Vec<ServerName<'static>>) -> Result<Self, SessionError> {
        let secret = Arc::new(ExporterSecret::default());
        let mut config = tls.client_of(names);
        config.enable_secret_extraction = true;
        config.key_log = Arc::clone(&secret) as Arc<dyn rustls::KeyLog>;
        let side = UnbufferedClientConnection::new(Arc::new(config), tls::nobody())?;
        Ok(Self::new(Side::Client(side), secret, limit(tls)))
    }

    /// Makes the session of the side that accepts the connection.
    pub(super) fn server(tls: &tls::Tls) -> Result<Self, SessionError> {
        let secret = Arc::new(ExporterSecret::default());
        let mut config = tls.server.clone();
        config.enable_secret_extraction = true;
        config.key_log = Arc::clone(&secret) as Arc<dyn rustls::KeyLog>;
        let side = UnbufferedServerConnection::new(Arc::new(config))?;
        Ok(Self::new(Side::Server(side), secret, limit(tls)))
    }

    fn new(side: Side, secret: Arc<ExporterSecret>, limit: usize) -> Self {
        Self {
            limit,
            side,
            secret,
            exporter: None,
            peer: None,
            incoming: AlignedBuffer::default(),
            from: 0,
            to: 0,
            opened: 0..0,
            outgoing: Outgoing::default(),
            plain: Vec::new(),
            total_received: 0,
            ended: false,
            broken: None,
            is_proven: false,
            first: true,
        }
    }

    /// Returns whether the handshake is done, so that the exporter value and the other side's key are known.
    pub(crate) const fn is_established(&self) -> bool {
        self.exporter.is_some()
    }

    /// Returns the session's exporter value (RFC 8446, section 7.5) once the handshake is done. Proofs of the
    /// join secret are computed over it.
    pub(crate) fn exporter(&self) -> Option<&[u8; 32]> {
        self.exporter.as_deref()
    }

    /// Returns the key that the other side has proven to hold, once the handshake is done.
    pub(crate) const fn peer(&self) -> Option<PublicKey> {
        self.peer
    }

    /// Marks the other side as proven: the limit on the bytes that it may send is lifted.
    pub(crate) const fn trust(&mut self) {
        self.is_proven = true;
    }

    /// Returns the maximum number of bytes that the other side may send before it has proven the join secret.
    pub(crate) const fn limit(&self) -> usize {
        self.limit
    }

    pub(crate) const fn is_proven(&self) -> bool {
        self.is_proven
    }

    /// Returns whether the other side has ended the session.
    pub(crate) const fn has_ended(&self) -> bool {
        self.ended
    }

    /// Returns whether [`Session::open`] can make progress without more bytes from the socket.
    pub(crate) fn has_more(&self) -> bool {
        let held = &self.incoming[self.from..self.to];
        let whole =
            |head: &[u8; HEAD]| held.len() >= HEAD + usize::from(u16::from_be_bytes([head[3], head[4]]));
        !self.plain.is_empty() || !self.opened.is_empty() || held.first_chunk().is_some_and(whole)
    }

    /// Returns the buffer for the next bytes from the socket. [`Session::received`] must then be called with
    /// their number.
    pub(crate) fn receive_buffer(&mut self) -> &mut [u8] {
        let kept = if self.opened.is_empty() { self.from } else { self.opened.start };
        // The offset of a byte in the buffer equals its position in the stream, modulo `RECORD_ALIGNMENT`: see
        // the comment on `RECORD_ALIGNMENT`.
        let place = (self.total_received - (self.to - kept)) % RECORD_ALIGNMENT;
        self.incoming.grow(place + if self.is_proven { INCOMING } else { self.limit });
        if kept > place {
            self.incoming.copy_within(kept..self.to, place);
            let moved = kept - place;
            self.opened = self.opened.start.saturating_sub(moved)..self.opened.end.saturating_sub(moved);
            self.from -= moved;
            self.to -= moved;
        } else if self.from == self.to && self.opened.is_empty() {
            (self.from, self.to) = (place, place);
        }
        &mut self.incoming[self.to..]
    }

    /// Records that `count` bytes were read into [`Session::receive_buffer`].
    ///
    /// Errors: those of a peer that does not use TLS, and [`SessionError::TooMuch`].
    pub(crate) fn received(&mut self, count: usize) -> Result<(), SessionError> {
        self.to += count;
        self.total_received += count;
        let held = &self.incoming[self.from..self.to];
        if self.first && held.len() >= 4 {
            self.first = false;
            if held[..4] == crate::wire::MAGIC {
                return Err(SessionError::NotEncrypted);
            }
            // A TLS connection begins with a handshake record, or with an alert if the other side rejects it.
            if !matches!(held[0], 0x15 | 0x16) || held[1] != 3 {
                return Err(SessionError::NotTls);
            }
        }
        // The bytes just received may contain the proof of the join secret with data after it, so only earlier
        // bytes count towards the limit.
        if !self.is_proven && self.total_received - count >= self.limit {
            return Err(SessionError::TooMuch(self.limit));
        }
        Ok(())
    }

    /// Returns the encrypted bytes that the socket has not taken.
    pub(crate) fn to_send(&self) -> &[u8] {
        &self.outgoing.bytes[self.outgoing.sent..self.outgoing.filled]
    }

    /// Records that the socket has taken `count` bytes of [`Session::to_send`].
    pub(crate) const fn sent(&mut self, count: usize) {
        self.outgoing.sent += count;
        self.outgoing.total_sent += count;
        if self.outgoing.sent == self.outgoing.filled {
            self.outgoing.sent = 0;
            self.outgoing.filled = 0;
        }
    }

    /// Decrypts received bytes into `slices` until the bytes or the space are used up. Returns the number of
    /// plain bytes written. Also continues the handshake.
    pub(crate) fn open(&mut self, slices: &mut [IoSliceMut<'_>]) -> Result<usize, SessionError> {
        let mut target = Target { slices, slice: 0, at: 0, taken: 0 };
        loop {
            let early = target.put(&self.plain);
            self.plain.drain(..early);
            self.opened.start += target.put(&self.incoming[self.opened.clone()]);
            if target.is_full() || !self.open_next()? {
                return Ok(target.taken);
            }
        }
    }

    /// Decrypts the next record, or continues the handshake. Returns whether there was progress.
    fn open_next(&mut self) -> Result<bool, SessionError> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        if self.ended {
            return Ok(false);
        }
        let Side::Established(records) = &mut self.side else {
            return Ok(self.turn()? == HandshakeStatus::Moved);
        };
        let held = &mut self.incoming[self.from..self.to];
        let opened = match Records::whole(held) {
            Ok(None) => return Ok(false),
            Ok(Some(whole)) => records.open(&mut held[..whole]).map(|opened| (whole, opened)),
            Err(error) => Err(error),
        };
        match opened {
            Ok((whole, opened)) => {
                if let RecordContent::Data(plain) = opened {
                    let start = self.from + HEAD;
                    self.opened = start..start + plain.len();
                } else {
                    self.ended = opened == RecordContent::Closed;
                }
                self.from += whole;
                Ok(true)
            }
            Err(error) => {
                // An alert is not answered with an alert.
                if !matches!(error, SessionError::Alert(_)) {
                    let end = self.outgoing.filled;
                    self.outgoing.bytes.grow(end + 2 * RECORD_ALIGNMENT);
                    self.outgoing.filled += records.seal_alert(&mut self.outgoing.bytes[end..], &error)?;
                }
                self.broken = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Encrypts bytes of `slices` until the bytes or the space are used up. Returns the number of plain bytes
    /// taken: 0 if the socket has not taken all bytes encrypted before, or if the handshake is not done. Also
    /// continues the handshake.
    pub(crate) fn seal(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, SessionError> {
        while !self.ended
            && !matches!(self.side, Side::Established(_))
            && self.turn()? == HandshakeStatus::Moved
        {}
        let Side::Established(records) = &mut self.side else { return Ok(0) };
        let mut source = Source { slices, slice: 0, at: 0, taken: 0 };
        let Outgoing { bytes, sent, filled, total_sent: said } = &mut self.outgoing;
        if *filled > 0 || source.is_empty() {
            return Ok(0);
        }
        bytes.grow(if self.is_proven { OUTGOING } else { RECORD + KEY_UPDATE_SPACE });
        // The offset of a byte in the buffer equals its position in the stream, modulo `RECORD_ALIGNMENT`, as
        // in `Session::receive_buffer`.
        *sent = *said % RECORD_ALIGNMENT;
        *filled = *sent;
        while !source.is_empty() && bytes.len() - *filled >= RECORD + 2 * RECORD_ALIGNMENT {
            *filled += records.seal(&mut bytes[*filled..], |place| source.fill(place))?;
        }
        Ok(source.taken)
    }

    /// Does one step of the handshake.
    fn turn(&mut self) -> Result<HandshakeStatus, SessionError> {
        let held = &mut self.incoming[self.from..self.to];
        let (outgoing, plain) = (&mut self.outgoing, &mut self.plain);
        let (used, turn) = match &mut self.side {
            Side::Client(conn) => act(conn.process_tls_records(held), outgoing, plain),
            Side::Server(conn) => act(conn.process_tls_records(held), outgoing, plain),
            Side::Established(_) => return Ok(HandshakeStatus::Established),
            Side::Failed => {
                return Err(SessionError::Malformed("the session could not be established".to_owned()));
            }
        };
        self.from += used;
        let turn = turn?;
        self.ended |= turn == HandshakeStatus::Ended;
        let (is_done, certificates) = match &self.side {
            Side::Client(conn) => (!conn.is_handshaking(), conn.peer_certificates()),
            Side::Server(conn) => (!conn.is_handshaking(), conn.peer_certificates()),
            _ => (false, None),
        };
        if !is_done {
            return Ok(if turn == HandshakeStatus::Established { HandshakeStatus::Waits } else { turn });
        }
        // Bytes received right after the handshake may be the proof of the join secret. To check the proof, the
        // peer's key and the exporter are needed, so both are set as early as possible.
        if self.exporter.is_none() {
            self.peer = tls::key_of(certificates);
            let none = || SessionError::Malformed("the session has no exporter secret".to_owned());
            self.exporter = Some(self.secret.export(LABEL, &[]).ok_or_else(none)?);
        }
        if turn != HandshakeStatus::Established {
            return Ok(turn);
        }
        let (secrets, keys) = match std::mem::replace(&mut self.side, Side::Failed) {
            Side::Client(conn) => {
                let (secrets, keys) = conn.dangerous_into_kernel_connection()?;
                (secrets, Keys::Client(Box::new(keys)))
            }
            Side::Server(conn) => {
                let (secrets, keys) = conn.dangerous_into_kernel_connection()?;
                (secrets, Keys::Server(Box::new(keys)))
            }
            other => {
                self.side = other;
                return Ok(turn);
            }
        };
        self.side = Side::Established(Box::new(Records::new(secrets, keys)?));
        Ok(HandshakeStatus::Moved)
    }
}

impl Outgoing {
    /// Appends bytes by calling `write` with the free space. `write` returns the number of bytes written, or as
    /// an error the space that it needs (0: nothing to write).
    fn add(&mut self, mut write: impl FnMut(&mut [u8]) -> Result<usize, usize>) {
        loop {
            match write(&mut self.bytes[self.filled..]) {
                Ok(count) => {
                    self.filled += count;
                    return;
                }
                Err(0) => return,
                Err(needed) => self.bytes.grow(self.filled + needed),
            }
        }
    }
}

/// Does the action that the state of the handshake requires. Returns the number of input bytes processed, and
/// the result.
fn act<D>(
    status: UnbufferedStatus<'_, '_, D>,
    outgoing: &mut Outgoing,
    plain: &mut Vec<u8>,
) -> (usize, Result<HandshakeStatus, SessionError>) {
    let turn = match status.state {
        Err(error) => Err(error.into()),
        // Takes data that arrived right after the handshake.
        Ok(ConnectionState::ReadTraffic(mut traffic)) => {
            let mut turn = Ok(HandshakeStatus::Moved);
            while let Some(record) = traffic.next_record() {
                match record {
                    Ok(record) => plain.extend_from_slice(record.payload),
                    Err(error) => turn = Err(error.into()),
                }
            }
            turn
        }
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            outgoing.add(|room| {
                data.encode(room).map_err(|error| match error {
                    EncodeError::InsufficientSize(size) => size.required_size,
                    EncodeError::AlreadyEncoded => 0,
                })
            });
            Ok(HandshakeStatus::Moved)
        }
        // The encoded bytes are in `outgoing` already and are sent from there.
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(HandshakeStatus::Moved)
        }
        Ok(ConnectionState::WriteTraffic(_)) => Ok(HandshakeStatus::Established),
        Ok(ConnectionState::BlockedHandshake) => Ok(HandshakeStatus::Waits),
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Ok(HandshakeStatus::Ended),
        Ok(_) => Err(SessionError::Malformed("unexpected early data".to_owned())),
    };
    (status.discard, turn)
}

/// Destination of plain bytes: slices, filled in order.
struct Target<'a, 'b> {
    slices: &'a mut [IoSliceMut<'b>],
    slice: usize,
    at: usize,
    taken: usize,
}

impl Target<'_, '_> {
    fn is_full(&self) -> bool {
        self.slices[self.slice..].iter().all(|slice| slice.is_empty())
    }

    /// Copies as many of `bytes` as there is space for. Returns their number.
    fn put(&mut self, mut bytes: &[u8]) -> usize {
        let before = self.taken;
        while let Some(slice) = self.slices.get_mut(self.slice) {
            let count = bytes.len().min(slice.len() - self.at);
            records::copy(&mut slice[self.at..self.at + count], &bytes[..count]);
            bytes = &bytes[count..];
            self.at += count;
            self.taken += count;
            if self.at < slice.len() {
                break;
            }
            self.slice += 1;
            self.at = 0;
        }
        self.taken - before
    }
}

/// Source of plain bytes: slices, read in order.
struct Source<'a, 'b> {
    slices: &'a [IoSlice<'b>],
    slice: usize,
    at: usize,
    taken: usize,
}

impl Source<'_, '_> {
    fn is_empty(&self) -> bool {
        let Some((first, rest)) = self.slices[self.slice..].split_first() else { return true };
        self.at == first.len() && rest.iter().all(|slice| slice.is_empty())
    }

    /// Copies bytes into `place` until the bytes or the space are used up. Returns their number.
    fn fill(&mut self, place: &mut [u8]) -> usize {
        let mut filled = 0;
        while let Some(slice) = self.slices.get(self.slice) {
            let count = (slice.len() - self.at).min(place.len() - filled);
            records::copy(&mut place[filled..filled + count], &slice[self.at..self.at + count]);
            filled += count;
            self.at += count;
            if self.at < slice.len() {
                break;
            }
            self.slice += 1;
            self.at = 0;
        }
        self.taken += filled;
        filled
    }
}

#[cfg(test)]
impl Session {
    /// Takes the record layer out of an established session, which cannot be used afterwards.
    pub(super) fn take_records(&mut self) -> Records {
        match std::mem::replace(&mut self.side, Side::Failed) {
            Side::Established(records) => *records,
            _ => panic!("it is not established"),
        }
    }

    /// Sets the number of records after which the sending key is replaced.
    pub(super) const fn limit_records(&mut self, limit: u64) {
        if let Side::Established(records) = &mut self.side {
            records.limited(limit);
        }
    }
}

#[cfg(test)]
mod tests;
