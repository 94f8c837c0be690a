//! One TLS 1.3 session as a state machine: bytes of a socket in and out, plain bytes in and out. It knows no
//! socket, so that the loop that polls sockets drives it. What a peer may send before it has proven itself is
//! bounded here.

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use rustls::CertificateError;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use zeroize::Zeroizing;

use super::exporter::ExporterSecret;
use super::identity::PublicKey;
use super::tls;

/// The most plain bytes of a record.
const RECORD: usize = 16 * 1024;
/// A record's header, content type and tag.
const OVERHEAD: usize = 5 + 1 + 16;
/// Bytes that are sealed before the socket takes them.
const OUTGOING: usize = 8 * (RECORD + OVERHEAD);
/// Bytes that are read of a socket at once.
const INCOMING: usize = 8 * (RECORD + OVERHEAD);
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
}

/// Sealed bytes for the socket.
#[derive(Default)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    filled: usize,
}

/// What a turn of the state machine is for.
enum Work<'a, 'b, 'c> {
    /// Plain bytes are wanted here.
    Open(&'a mut Target<'b, 'c>),
    /// These are to be sealed.
    Seal(&'a mut Source<'b, 'c>),
}

/// What a turn led to.
#[derive(PartialEq, Eq)]
enum Turn {
    /// Something; there may be more.
    Moved,
    /// The handshake needs bytes.
    Handshake,
    /// It is established, and there is no whole record any more.
    Idle,
    /// The other side has ended it.
    Ended,
}

/// A TLS session over a socket that others read and write.
pub(crate) struct Session {
    side: Side,
    secret: Arc<ExporterSecret>,
    exporter: Option<Zeroizing<[u8; 32]>>,
    /// Sealed bytes that came; those before `from` are used, those from `to` on are room.
    incoming: Vec<u8>,
    from: usize,
    to: usize,
    outgoing: Outgoing,
    /// Opened bytes for which there was no place, from `read` on.
    plain: Vec<u8>,
    read: usize,
    /// All that came.
    heard: usize,
    /// The most of it before a proof.
    limit: usize,
    ended: bool,
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
        config.key_log = Arc::clone(&secret) as Arc<dyn rustls::KeyLog>;
        let side = UnbufferedClientConnection::new(Arc::new(config), tls::nobody())?;
        Ok(Self::new(Side::Client(side), secret, limit(tls)))
    }

    /// The side that is connected to.
    pub(super) fn server(tls: &tls::Tls) -> Result<Self, SessionError> {
        let secret = Arc::new(ExporterSecret::default());
        let mut config = tls.server.clone();
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
            incoming: Vec::new(),
            from: 0,
            to: 0,
            outgoing: Outgoing::default(),
            plain: Vec::new(),
            read: 0,
            heard: 0,
            ended: false,
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
    pub(crate) fn peer(&self) -> Option<PublicKey> {
        match &self.side {
            _ if !self.is_established() => None,
            Side::Client(conn) => tls::key_of(conn.peer_certificates()),
            Side::Server(conn) => tls::key_of(conn.peer_certificates()),
        }
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
        let whole = |head: &[u8; 5]| held.len() >= 5 + usize::from(u16::from_be_bytes([head[3], head[4]]));
        self.read < self.plain.len() || held.first_chunk().is_some_and(whole)
    }

    /// Where bytes of the socket go next; [`Session::received`] is told how many came.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let wanted = if self.is_proven { INCOMING } else { self.limit };
        if self.from > 0 {
            self.incoming.copy_within(self.from..self.to, 0);
            self.to -= self.from;
            self.from = 0;
        }
        if self.incoming.len() < wanted {
            self.incoming.resize(wanted, 0);
        }
        &mut self.incoming[self.to..]
    }

    /// So many bytes came.
    pub(crate) fn received(&mut self, count: usize) -> Result<(), SessionError> {
        self.to += count;
        self.heard += count;
        if self.first && self.to >= 4 {
            self.first = false;
            if self.incoming[..4] == crate::wire::MAGIC {
                return Err(SessionError::Clear);
            }
            // A handshake record, or the alert by which the other side says that it will not have any.
            if !matches!(self.incoming[0], 0x15 | 0x16) || self.incoming[1] != 3 {
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
        if self.outgoing.sent == self.outgoing.filled {
            self.outgoing.sent = 0;
            self.outgoing.filled = 0;
        }
    }

    /// Opens what came into `slices`, as far as it goes; returns how much that was. The handshake goes on here
    /// too.
    pub(crate) fn open(&mut self, slices: &mut [IoSliceMut<'_>]) -> Result<usize, SessionError> {
        let mut target = Target { slices, slice: 0, at: 0, taken: 0 };
        self.read += target.put(&self.plain[self.read..]);
        if self.read == self.plain.len() {
            self.plain.clear();
            self.read = 0;
        }
        while !target.is_full() && self.turn(&mut Work::Open(&mut target))? == Turn::Moved {}
        Ok(target.taken)
    }

    /// Seals `slices`, as far as there is room; returns how much that was. 0 while the socket has not taken all
    /// that was sealed before, and before the handshake is done.
    pub(crate) fn seal(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, SessionError> {
        if self.outgoing.filled > 0 {
            return Ok(0);
        }
        if self.outgoing.bytes.len() < OUTGOING {
            self.outgoing.bytes.resize(OUTGOING, 0);
        }
        let mut source = Source { slices, slice: 0, at: 0, taken: 0, staging: Vec::new() };
        while self.turn(&mut Work::Seal(&mut source))? == Turn::Moved {}
        Ok(source.taken)
    }

    fn turn(&mut self, work: &mut Work<'_, '_, '_>) -> Result<Turn, SessionError> {
        let Self { side, incoming, from, to, outgoing, plain, .. } = self;
        let held = &mut incoming[*from..*to];
        let (used, turn) = match side {
            Side::Client(conn) => act(conn.process_tls_records(held), outgoing, plain, work),
            Side::Server(conn) => act(conn.process_tls_records(held), outgoing, plain, work),
        };
        *from += used;
        let turn = turn?;
        let is_done = match side {
            Side::Client(conn) => !conn.is_handshaking(),
            Side::Server(conn) => !conn.is_handshaking(),
        };
        if is_done && self.exporter.is_none() {
            let own = || SessionError::Malformed("no exporter".to_owned());
            self.exporter = Some(self.secret.export(LABEL, &[]).ok_or_else(own)?);
        }
        self.ended |= turn == Turn::Ended;
        Ok(turn)
    }
}

impl Outgoing {
    /// Adds what `write` writes; it says how much room it needs where it has too little.
    fn add(&mut self, mut write: impl FnMut(&mut [u8]) -> Result<usize, usize>) -> bool {
        loop {
            match write(&mut self.bytes[self.filled..]) {
                Ok(count) => {
                    self.filled += count;
                    return true;
                }
                Err(0) => return false,
                Err(needed) => self.bytes.resize(self.filled + needed, 0),
            }
        }
    }
}

/// Does what the state machine asks for. Returns bytes of the input that are used, and what it led to.
fn act<D>(
    status: UnbufferedStatus<'_, '_, D>,
    outgoing: &mut Outgoing,
    plain: &mut Vec<u8>,
    work: &mut Work<'_, '_, '_>,
) -> (usize, Result<Turn, SessionError>) {
    let turn = match status.state {
        Err(error) => Err(error.into()),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => {
            let mut turn = Ok(Turn::Moved);
            while let Some(record) = traffic.next_record() {
                match record {
                    Ok(record) => {
                        let placed = match work {
                            Work::Open(target) if plain.is_empty() => target.put(record.payload),
                            _ => 0,
                        };
                        plain.extend_from_slice(&record.payload[placed..]);
                    }
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
        Ok(ConnectionState::WriteTraffic(mut traffic)) => {
            if let Work::Seal(source) = work {
                while outgoing.bytes.len() - outgoing.filled >= RECORD + OVERHEAD {
                    let piece = source.piece();
                    if piece.is_empty() {
                        break;
                    }
                    let whole = outgoing.add(|room| {
                        traffic.encrypt(piece, room).map_err(|error| match error {
                            EncryptError::InsufficientSize(size) => size.required_size,
                            EncryptError::EncryptExhausted => 0,
                        })
                    });
                    if !whole {
                        let spent = SessionError::Malformed("its keys are used up".to_owned());
                        return (status.discard, Err(spent));
                    }
                    source.advance();
                }
            }
            Ok(Turn::Idle)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Turn::Handshake),
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
            slice[self.at..self.at + count].copy_from_slice(&bytes[..count]);
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

/// Plain bytes, taken in order by the record.
struct Source<'a, 'b> {
    slices: &'a [IoSlice<'b>],
    slice: usize,
    at: usize,
    taken: usize,
    /// A record's worth from several slices.
    staging: Vec<u8>,
}

impl Source<'_, '_> {
    /// The next record's bytes; none at the end. It stays the next until [`Source::advance`].
    fn piece(&mut self) -> &[u8] {
        while self.slices.get(self.slice).is_some_and(|slice| self.at == slice.len()) {
            self.slice += 1;
            self.at = 0;
        }
        let Some(rest) = self.slices.get(self.slice).map(|slice| &slice[self.at..]) else { return &[] };
        self.staging.clear();
        if rest.len() >= RECORD || self.slice + 1 == self.slices.len() {
            return &rest[..rest.len().min(RECORD)];
        }
        self.staging.extend_from_slice(rest);
        for slice in &self.slices[self.slice + 1..] {
            let room = RECORD - self.staging.len();
            self.staging.extend_from_slice(&slice[..slice.len().min(room)]);
        }
        &self.staging
    }

    /// The piece was sealed.
    fn advance(&mut self) {
        let rest = self.slices[self.slice].len() - self.at;
        let mut count = if self.staging.is_empty() { rest.min(RECORD) } else { self.staging.len() };
        self.taken += count;
        while count > 0 {
            let rest = self.slices[self.slice].len() - self.at;
            let step = count.min(rest);
            self.at += step;
            count -= step;
            if self.at == self.slices[self.slice].len() && self.slice + 1 < self.slices.len() {
                self.slice += 1;
                self.at = 0;
            } else if step == 0 {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests;
