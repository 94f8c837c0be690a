//! Record layer of a TLS 1.3 session after the handshake (RFC 8446, section 5). Plain bytes are copied once,
//! into the buffer in which they are encrypted and from which they are sent. Received records are decrypted in
//! place. rustls makes the keys, including those of later key updates. Its own record layer would copy each
//! byte twice in each direction. Does not use sockets.

use ring::aead::{AES_128_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{AlertDescription, ConnectionTrafficSecrets, ExtractedSecrets};

use super::session_error::SessionError;

/// Length of a record's header in bytes.
pub(super) const HEAD: usize = 5;
/// Bytes that a record adds to the plain bytes: header, content type and tag.
pub(super) const OVERHEAD: usize = HEAD + 1 + TAG_BYTES;
/// Length of a full record in bytes: four pages of 4 KiB, so that the next record begins at the same offset in
/// its page.
pub(super) const RECORD: usize = 16 * 1024;
/// Maximum number of plain bytes that this side puts into one record.
const PLAIN: usize = RECORD - OVERHEAD;
/// Lengths of records are multiples of this. Data that the system copies out of a socket then goes to an offset
/// in a page that differs from the source's by a multiple of it. Other offsets make the copy slow: see
/// `frame.rs`.
pub(super) const RECORD_ALIGNMENT: usize = 32;
/// Maximum number of plain bytes in a record that the other side may send (RFC 8446, section 5.1).
const MOST_PLAIN: usize = 16 * 1024;
/// Maximum encrypted length of such a record, without its header (RFC 8446, section 5.2).
const MOST_SEALED: usize = MOST_PLAIN + 256;
const TAG_BYTES: usize = 16;
/// Number of records that are encrypted with one key: about a third of the limit of RFC 8446, section 5.5, for
/// AES-GCM (2^24.5).
const RECORDS_PER_KEY: u64 = 1 << 23;
/// Bytes per call of `copy_from_slice`. For longer copies the C library uses `rep movsb`, which is up to thirty
/// times slower if source and destination are at offsets in a page that differ by 1 to 31 bytes.
const BYTES_PER_COPY: usize = 1024;

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;
const KEY_UPDATE: u8 = 24;
const NEW_TICKET: u8 = 4;

/// Copies between slices of equal length.
pub(super) fn copy(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.chunks_mut(BYTES_PER_COPY).zip(from.chunks(BYTES_PER_COPY)) {
        to.copy_from_slice(from);
    }
}

/// Source of the keys that replace earlier ones.
pub(super) enum Keys {
    Client(Box<KernelConnection<ClientConnectionData>>),
    Server(Box<KernelConnection<ServerConnectionData>>),
}

type Secrets = (u64, ConnectionTrafficSecrets);

impl Keys {
    fn next_to_send(&mut self) -> Result<Secrets, SessionError> {
        Ok(match self {
            Self::Client(keys) => keys.update_tx_secret()?,
            Self::Server(keys) => keys.update_tx_secret()?,
        })
    }
    fn next_to_receive(&mut self) -> Result<Secrets, SessionError> {
        Ok(match self {
            Self::Client(keys) => keys.update_rx_secret()?,
            Self::Server(keys) => keys.update_rx_secret()?,
        })
    }
}

/// Key of one direction and the number of the next record.
struct DirectionKey {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    /// Sequence number of the next record.
    next: u64,
}

impl DirectionKey {
    fn new((next, secrets): Secrets) -> Result<Self, SessionError> {
        let other = || SessionError::Malformed("unexpected cipher suite".to_owned());
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(other()),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| other())?;
        let iv = iv.as_ref().try_into().map_err(|_| other())?;
        Ok(Self { key: LessSafeKey::new(key), iv, next })
    }

    /// Returns the nonce of the next record, and counts that record.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.next.to_be_bytes()) {
            *byte ^= number;
        }
        self.next += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Content of a decrypted record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RecordContent<'a> {
    /// Plain bytes.
    Data(&'a [u8]),
    /// A message about the session, which has been handled.
    Done,
    /// The other side sends no more data.
    Closed,
}

/// Both directions of a session.
pub(super) struct Records {
    keys: Keys,
    tx: DirectionKey,
    rx: DirectionKey,
    /// Whether the other side has requested that this side replaces its sending key.
    is_asked: bool,
    /// Number of records that are encrypted with one key.
    limit: u64,
}

impl Records {
    pub(super) fn new(secrets: ExtractedSecrets, keys: Keys) -> Result<Self, SessionError> {
        let (tx, rx) = (DirectionKey::new(secrets.tx)?, DirectionKey::new(secrets.rx)?);
        Ok(Self { keys, tx, rx, is_asked: false, limit: RECORDS_PER_KEY })
    }

    /// Sets another limit of records for each key.
    #[cfg(test)]
    pub(super) const fn limited(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Encrypts one record into `room`, which must have space for a full record and a key update. `fill` writes
    /// the plain bytes into the slice that it is given and returns their number. If the sending key is due for
    /// replacement, a key update is written before the record. Returns the number of bytes written to `room`.
    ///
    /// Errors: those of the keys, which do not occur in practice.
    pub(super) fn seal(
        &mut self,
        room: &mut [u8],
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, SessionError> {
        let mut used = 0;
        if self.is_asked || self.tx.next >= self.limit {
            self.is_asked = false;
            used = self.seal_message(room, HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 0])?;
            self.tx = DirectionKey::new(self.keys.next_to_send()?)?;
        }
        let plain = fill(&mut room[used + HEAD..used + HEAD + PLAIN]);
        Ok(used + self.finish(&mut room[used..], DATA, plain)?)
    }

    /// Encrypts an alert that tells the other side why the session ends. Returns the number of bytes written to
    /// `room`.
    pub(super) fn seal_alert(
        &mut self,
        room: &mut [u8],
        error: &SessionError,
    ) -> Result<usize, SessionError> {
        let reason = match error {
            SessionError::Foreign => AlertDescription::BadRecordMac,
            _ => AlertDescription::UnexpectedMessage,
        };
        self.seal_message(room, ALERT, &[2, reason.into()])
    }

    fn seal_message(&mut self, room: &mut [u8], kind: u8, message: &[u8]) -> Result<usize, SessionError> {
        room[HEAD..HEAD + message.len()].copy_from_slice(message);
        self.finish(room, kind, message.len())
    }

    /// Encrypts the `plain` bytes that follow the header's place in `room`. Returns the length of the record.
    fn finish(&mut self, room: &mut [u8], kind: u8, plain: usize) -> Result<usize, SessionError> {
        let whole = (plain + OVERHEAD).next_multiple_of(RECORD_ALIGNMENT);
        let sealed = (whole - HEAD) as u16;
        let (head, rest) = room[..whole].split_at_mut(HEAD);
        head.copy_from_slice(&[DATA, 3, 3, (sealed >> 8) as u8, sealed as u8]);
        let (inner, tag) = rest.split_at_mut(usize::from(sealed) - TAG_BYTES);
        inner[plain] = kind;
        inner[plain + 1..].fill(0);
        let nonce = self.tx.nonce();
        let made = self.tx.key.seal_in_place_separate_tag(nonce, Aad::from(&*head), inner);
        tag.copy_from_slice(
            made.map_err(|_| SessionError::Malformed("a record is too long".to_owned()))?.as_ref(),
        );
        Ok(whole)
    }

    /// Returns the length of the record at the beginning of `held`; `None` if it is not complete.
    ///
    /// Errors: [`SessionError::Malformed`] if the header is not one that may follow the handshake.
    pub(super) fn whole(held: &[u8]) -> Result<Option<usize>, SessionError> {
        let Some(&[kind, _, _, high, low]) = held.first_chunk() else { return Ok(None) };
        if kind != DATA {
            return Err(SessionError::Malformed(format!(
                "unexpected record of kind {kind} after the handshake"
            )));
        }
        let sealed = usize::from(u16::from_be_bytes([high, low]));
        if sealed > MOST_SEALED {
            return Err(SessionError::Malformed(format!("a record of {sealed} bytes is too long")));
        }
        Ok((held.len() >= HEAD + sealed).then_some(HEAD + sealed))
    }

    /// Decrypts a record in place, and handles messages about the session.
    ///
    /// Errors: [`SessionError::Foreign`] if it is not the next record of this session,
    /// [`SessionError::Malformed`] if its content is not allowed, [`SessionError::Alert`] if the other side
    /// reports an error.
    pub(super) fn open<'a>(&mut self, record: &'a mut [u8]) -> Result<RecordContent<'a>, SessionError> {
        let foreign = SessionError::Foreign;
        let (head, rest) = record.split_first_chunk_mut::<HEAD>().ok_or_else(|| foreign.clone())?;
        let (sealed, tag) = rest.split_last_chunk_mut::<TAG_BYTES>().ok_or_else(|| foreign.clone())?;
        let (nonce, tag) = (self.rx.nonce(), Tag::from(*tag));
        let opened = self.rx.key.open_in_place_separate_tag(nonce, Aad::from(*head), tag, sealed, 0..);
        let inner = opened.map_err(|_| foreign)?;
        let plain = inner.iter().rposition(|&byte| byte != 0);
        let plain =
            plain.ok_or_else(|| SessionError::Malformed("a record has no content type".to_owned()))?;
        if plain > MOST_PLAIN {
            return Err(SessionError::Malformed(format!(
                "a record of {plain} bytes after decryption is too long"
            )));
        }
        let (kind, plain) = (inner[plain], &inner[..plain]);
        match (kind, plain) {
            (DATA, plain) => return Ok(RecordContent::Data(plain)),
            (HANDSHAKE, [KEY_UPDATE, 0, 0, 1, asks @ (0 | 1)]) => {
                self.is_asked |= *asks == 1;
                self.rx = DirectionKey::new(self.keys.next_to_receive()?)?;
            }
            // A server's ticket for resuming the session. Sessions are never resumed, so it is ignored.
            (HANDSHAKE, [NEW_TICKET, ..]) if matches!(self.keys, Keys::Client(_)) => {}
            (ALERT, [_, reason]) => match AlertDescription::from(*reason) {
                AlertDescription::CloseNotify => return Ok(RecordContent::Closed),
                AlertDescription::UserCanceled => {}
                other => return Err(SessionError::Alert(format!("{other:?}"))),
            },
            (kind, plain) => {
                let what = format!(
                    "unexpected message of kind {kind} and {} bytes after the handshake",
                    plain.len()
                );
                return Err(SessionError::Malformed(what));
            }
        }
        Ok(RecordContent::Done)
    }
}

#[cfg(test)]
mod tests;
