//! One TLS 1.3 session as a state machine: bytes of a socket in and out, plain bytes in and out. It knows no
//! socket, so that the loop that polls sockets drives it. What a peer may send before it has proven itself is
//! bounded here.

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use rustls::CertificateError;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use zeroize::Zeroizing;

use super::exporter::ExporterSecret;
use super::identity::PublicKey;
use super::records::{self, HEAD, Keys, OVERHEAD, Opened, RECORD, Records, STEP};
use super::room::Room;
use super::tls;

/// What is sealed beside a record at times, a new key, and what stays free in front.
const BESIDE: usize = 4 * STEP;
/// Bytes that are sealed before the socket takes them.
const OUTGOING: usize = 8 * RECORD + BESIDE;
/// Bytes that are read of a socket at once: what waits in full records, and the beginning of another.
const INCOMING: usize = 9 * (RECORD + OVERHEAD);
/// Bytes that a peer may send in all before it has proven itself: twice what our own greeting takes.
pub(crate) const STRANGER: usize = 4096;
/// The same of a peer that shows a chain of certificates.
const CHAIN: usize = 16 * 1024;

const LABEL: &str = "EXPORTER-farflung-join";

/// Why a session ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum SessionError {
    /// The other side speaks our protocol without encryption.
    #[error("the other side is not encrypted: give it the ticket or the secret too, or --insecure to both")]
    Clear,
    /// The other side speaks something else.
    #[error("the other side does not speak TLS")]
    NotTls,
    /// The other side offers nothing that is as good as what is asked for.
    #[error("the other side offers no TLS 1.3 with raw ed25519 keys")]
    Downgrade,
    /// What came does not belong to this session.
    #[error("a record does not belong to this session: replayed or changed on its way")]
    Foreign,
    /// The other side ended the session.
    #[error("the other side ended the session: {0}")]
    Alert(String),
    /// Its certificate is not one that is taken here.
    #[error("{kind}: {detail}")]
    Certificate {
        /// One word or two.
        kind: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// More than a peer may send before it has proven itself.
    #[error("more than {0} bytes before any proof")]
    TooMuch(usize),
    /// Anything else that is wrong with it.
    #[error("malformed handshake: {0}")]
    Malformed(String),
}

impl SessionError {
    /// One word or two, by which refusals are counted.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Clear => "not encrypted",
            Self::NotTls => "no TLS",
            Self::Downgrade => "downgrade",
            Self::Foreign => "replayed or changed",
            Self::Alert(_) => "gave up",
            Self::Certificate { kind, .. } => kind,
            Self::TooMuch(_) => "too many bytes",
            Self::Malformed(_) => "malformed handshake",
        }
    }
}

impl From<rustls::Error> for SessionError {
    fn from(error: rustls::Error) -> Self {
        use rustls::Error as E;
        if let E::InvalidCertificate(fault) = &error
            && let Some(kind) = certificate_fault(fault)
        {
            return Self::Certificate { kind, detail: fault.to_string() };
        }
        match error {
            E::DecryptError | E::InvalidCertificate(CertificateError::BadSignature) => Self::Foreign,
            E::PeerIncompatible(_) | E::NoCertificatesPresented => Self::Downgrade,
            E::AlertReceived(alert) => Self::Alert(format!("{alert:?}")),
            other => Self::Malformed(other.to_string()),
        }
    }
}

/// What is wrong with a certificate, where it is one.
const fn certificate_fault(fault: &CertificateError) -> Option<&'static str> {
    use CertificateError as E;
    match fault {
        E::UnknownIssuer => Some("certificate of another authority"),
        E::Expired | E::ExpiredContext { .. } => Some("expired certificate"),
        E::NotValidYet | E::NotValidYetContext { .. } => Some("certificate of the future"),
        E::NotValidForName | E::NotValidForNameContext { .. } => Some("certificate of another name"),
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => Some("certificate for another purpose"),
        _ => None,
    }
}

/// The bytes that a peer may send before its proof.
const fn limit(tls: &tls::Tls) -> usize {
    if tls.is_by_certificates() { CHAIN } else { STRANGER }
}

enum Side {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
    /// The handshake is done.
    Established(Box<Records>),
    /// It could not be established.
    Failed,
}

/// Sealed bytes for the socket.
#[derive(Default)]
struct Outgoing {
    bytes: Room,
    sent: usize,
    filled: usize,
    /// All that the socket has taken.
    said: usize,
}

/// What a turn of the handshake led to.
#[derive(PartialEq, Eq)]
enum Turn {
    /// Something; there may be more.
    Moved,
    /// It needs bytes.
    Waits,
    /// Both may send.
    Established,
    /// The other side has ended it.
    Ended,
}

/// A TLS session over a socket that others read and write.
pub(crate) struct Session {
    side: Side,
    secret: Arc<ExporterSecret>,
    exporter: Option<Zeroizing<[u8; 32]>>,
    peer: Option<PublicKey>,
    /// Sealed bytes that came; those before `from` are used, those from `to` on are room.
    incoming: Room,
    from: usize,
    to: usize,
    /// Of those that are used, the plain bytes for which there was no place.
    opened: Range<usize>,
    outgoing: Outgoing,
    /// The same of those that came along with the handshake.
    plain: Vec<u8>,
    /// All that came.
    heard: usize,
    /// The most of it before a proof.
    limit: usize,
    ended: bool,
    broken: Option<SessionError>,
    is_proven: bool,
    first: bool,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session(heard: {}, proven: {})", self.heard, self.is_proven)
    }
}

impl Session {
    /// The side that connects.
    ///
    /// Of certificates one has to have any of these `names`; without any, that is left to whoever knows the
    /// key.
    pub(super) fn client(tls: &tls::Tls, names: Vec<ServerName<'static>>) -> Result<Self, SessionError> {
        let secret = Arc::new(ExporterSecret::default());
        let mut config = tls.client_of(names);
        config.enable_secret_extraction = true;
        config.key_log = Arc::clone(&secret) as Arc<dyn rustls::KeyLog>;
        let side = UnbufferedClientConnection::new(Arc::new(config), tls::nobody())?;
        Ok(Self::new(Side::Client(side), secret, limit(tls)))
    }

    /// The side that is connected to.
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
            incoming: Room::default(),
            from: 0,
            to: 0,
            opened: 0..0,
            outgoing: Outgoing::default(),
            plain: Vec::new(),
            heard: 0,
            ended: false,
            broken: None,
            is_proven: false,
            first: true,
        }
    }

    /// Whether the handshake is done.
    pub(crate) const fn is_established(&self) -> bool {
        self.exporter.is_some()
    }

    /// The exporter, by which secrets are proven, once the handshake is done.
    pub(crate) fn exporter(&self) -> Option<&[u8; 32]> {
        self.exporter.as_deref()
    }

    /// The key that the other side holds, once the handshake is done.
    pub(crate) const fn peer(&self) -> Option<PublicKey> {
        self.peer
    }

    /// The other side belongs here: it may send as much as it likes.
    pub(crate) const fn trust(&mut self) {
        self.is_proven = true;
    }

    /// The bytes that the other side may send before its proof.
    pub(crate) const fn limit(&self) -> usize {
        self.limit
    }

    pub(crate) const fn is_proven(&self) -> bool {
        self.is_proven
    }

    /// Whether the other side has ended the session.
    pub(crate) const fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether [`Session::open`] has something to give without more bytes of the socket.
    pub(crate) fn has_more(&self) -> bool {
        let held = &self.incoming[self.from..self.to];
        let whole =
            |head: &[u8; HEAD]| held.len() >= HEAD + usize::from(u16::from_be_bytes([head[3], head[4]]));
        !self.plain.is_empty() || !self.opened.is_empty() || held.first_chunk().is_some_and(whole)
    }

    /// Where bytes of the socket go next; [`Session::received`] is told how many came.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let kept = if self.opened.is_empty() { self.from } else { self.opened.start };
        // Bytes lie where they do in the stream, by `STEP`: see there.
        let place = (self.heard - (self.to - kept)) % STEP;
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

    /// So many bytes came.
    pub(crate) fn received(&mut self, count: usize) -> Result<(), SessionError> {
        self.to += count;
        self.heard += count;
        let held = &self.incoming[self.from..self.to];
        if self.first && held.len() >= 4 {
            self.first = false;
            if held[..4] == crate::wire::MAGIC {
                return Err(SessionError::Clear);
            }
            // A handshake record, or the alert by which the other side says that it will not have any.
            if !matches!(held[0], 0x15 | 0x16) || held[1] != 3 {
                return Err(SessionError::NotTls);
            }
        }
        // The proof may be in what has just come, with more behind it.
        if !self.is_proven && self.heard - count >= self.limit {
            return Err(SessionError::TooMuch(self.limit));
        }
        Ok(())
    }

    /// Sealed bytes that the socket has not taken.
    pub(crate) fn to_send(&self) -> &[u8] {
        &self.outgoing.bytes[self.outgoing.sent..self.outgoing.filled]
    }

    /// The socket has taken so many.
    pub(crate) const fn sent(&mut self, count: usize) {
        self.outgoing.sent += count;
        self.outgoing.said += count;
        if self.outgoing.sent == self.outgoing.filled {
            self.outgoing.sent = 0;
            self.outgoing.filled = 0;
        }
    }

    /// Opens what came into `slices`, as far as it goes; returns how much that was. The handshake goes on here
    /// too.
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

    /// Opens the next record, or goes on with the handshake; returns whether there was any, or more to do.
    fn open_next(&mut self) -> Result<bool, SessionError> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        if self.ended {
            return Ok(false);
        }
        let Side::Established(records) = &mut self.side else { return Ok(self.turn()? == Turn::Moved) };
        let held = &mut self.incoming[self.from..self.to];
        let opened = match Records::whole(held) {
            Ok(None) => return Ok(false),
            Ok(Some(whole)) => records.open(&mut held[..whole]).map(|opened| (whole, opened)),
            Err(error) => Err(error),
        };
        match opened {
            Ok((whole, opened)) => {
                if let Opened::Data(plain) = opened {
                    let start = self.from + HEAD;
                    self.opened = start..start + plain.len();
                } else {
                    self.ended = opened == Opened::Closed;
                }
                self.from += whole;
                Ok(true)
            }
            Err(error) => {
                // An alert is not answered.
                if !matches!(error, SessionError::Alert(_)) {
                    let end = self.outgoing.filled;
                    self.outgoing.bytes.grow(end + 2 * STEP);
                    self.outgoing.filled += records.seal_alert(&mut self.outgoing.bytes[end..], &error)?;
                }
                self.broken = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Seals `slices`, as far as there is room; returns how much that was. 0 while the socket has not taken all
    /// that was sealed before, and before the handshake is done. The handshake goes on here too.
    pub(crate) fn seal(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, SessionError> {
        while !self.ended && !matches!(self.side, Side::Established(_)) && self.turn()? == Turn::Moved {}
        let Side::Established(records) = &mut self.side else { return Ok(0) };
        let mut source = Source { slices, slice: 0, at: 0, taken: 0 };
        let Outgoing { bytes, sent, filled, said } = &mut self.outgoing;
        if *filled > 0 || source.is_empty() {
            return Ok(0);
        }
        bytes.grow(if self.is_proven { OUTGOING } else { RECORD + BESIDE });
        // As in the room for what comes.
        *sent = *said % STEP;
        *filled = *sent;
        while !source.is_empty() && bytes.len() - *filled >= RECORD + 2 * STEP {
            *filled += records.seal(&mut bytes[*filled..], |place| source.fill(place))?;
        }
        Ok(source.taken)
    }

    /// A turn of the handshake.
    fn turn(&mut self) -> Result<Turn, SessionError> {
        let held = &mut self.incoming[self.from..self.to];
        let (outgoing, plain) = (&mut self.outgoing, &mut self.plain);
        let (used, turn) = match &mut self.side {
            Side::Client(conn) => act(conn.process_tls_records(held), outgoing, plain),
            Side::Server(conn) => act(conn.process_tls_records(held), outgoing, plain),
            Side::Established(_) => return Ok(Turn::Established),
            Side::Failed => return Err(SessionError::Malformed("it could not be established".to_owned())),
        };
        self.from += used;
        let turn = turn?;
        self.ended |= turn == Turn::Ended;
        let (is_done, certificates) = match &self.side {
            Side::Client(conn) => (!conn.is_handshaking(), conn.peer_certificates()),
            Side::Server(conn) => (!conn.is_handshaking(), conn.peer_certificates()),
            _ => (false, None),
        };
        if !is_done {
            return Ok(if turn == Turn::Established { Turn::Waits } else { turn });
        }
        // What has come right behind the handshake may be the proof, for which this is needed.
        if self.exporter.is_none() {
            self.peer = tls::key_of(certificates);
            let none = || SessionError::Malformed("no exporter".to_owned());
            self.exporter = Some(self.secret.export(LABEL, &[]).ok_or_else(none)?);
        }
        if turn != Turn::Established {
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
        Ok(Turn::Moved)
    }
}

impl Outgoing {
    /// Adds what `write` writes; it says how much room it needs where it has too little.
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

/// Does what the handshake asks for. Returns bytes of the input that are used, and what it led to.
fn act<D>(
    status: UnbufferedStatus<'_, '_, D>,
    outgoing: &mut Outgoing,
    plain: &mut Vec<u8>,
) -> (usize, Result<Turn, SessionError>) {
    let turn = match status.state {
        Err(error) => Err(error.into()),
        // What has come right behind the handshake.
        Ok(ConnectionState::ReadTraffic(mut traffic)) => {
            let mut turn = Ok(Turn::Moved);
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
            Ok(Turn::Moved)
        }
        // It stays in its place in what is to be sent.
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(Turn::Moved)
        }
        Ok(ConnectionState::WriteTraffic(_)) => Ok(Turn::Established),
        Ok(ConnectionState::BlockedHandshake) => Ok(Turn::Waits),
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Ok(Turn::Ended),
        Ok(_) => Err(SessionError::Malformed("early data".to_owned())),
    };
    (status.discard, turn)
}

/// Places for plain bytes, filled in order.
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

    /// Copies as much of `bytes` as there is place for.
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

/// Plain bytes, taken in order.
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

    /// Fills `place` as far as it goes; returns how much that was.
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
    /// The records alone, of a session that is no more.
    pub(super) fn take_records(&mut self) -> Records {
        match std::mem::replace(&mut self.side, Side::Failed) {
            Side::Established(records) => *records,
            _ => panic!("it is not established"),
        }
    }

    /// Keys are replaced after so many records.
    pub(super) const fn limit_records(&mut self, limit: u64) {
        if let Side::Established(records) = &mut self.side {
            records.limited(limit);
        }
    }
}

#[cfg(test)]
mod tests;
