//! The records of a TLS 1.3 session whose handshake is done (RFC 8446, section 5): plain bytes are copied once,
//! to where they are sealed and sent from, and records are opened where they came. rustls makes the keys, also
//! those that replace them; through its own record layer each byte would be copied twice each way. It knows no
//! socket.

use ring::aead::{AES_128_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{AlertDescription, ConnectionTrafficSecrets, ExtractedSecrets};

use super::session::SessionError;

/// Bytes of the header in front of a record.
pub(super) const HEAD: usize = 5;
/// A record's header, content type and tag.
pub(super) const OVERHEAD: usize = HEAD + 1 + TAG;
/// Bytes of a full record: whole pages, so that those behind it begin where a page does.
pub(super) const RECORD: usize = 16 * 1024;
/// The most plain bytes that are sealed to a record.
const PLAIN: usize = RECORD - OVERHEAD;
/// Lengths of records are multiples of it. What the system copies out of sockets then lies at multiples of it
/// from its source's place in a page; see `frame.rs` for what other places cost.
pub(super) const STEP: usize = 32;
/// The most plain bytes of a record of the other side, and what may surround them.
const MOST_PLAIN: usize = 16 * 1024;
const MOST_SEALED: usize = MOST_PLAIN + 256;
const TAG: usize = 16;
/// Records that are sealed with one key: half of what RFC 8446, section 5.5, gives AES-GCM.
const RECORDS: u64 = 1 << 23;
/// Bytes that are copied by one move. For longer ones the C library takes `rep movsb`, which is up to thirty
/// times slower where source and destination lie within 31 bytes of the same place of a page.
const MOVE: usize = 1024;

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;
const KEY_UPDATE: u8 = 24;
const NEW_TICKET: u8 = 4;

/// Copies between slices of one length.
pub(super) fn copy(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.chunks_mut(MOVE).zip(from.chunks(MOVE)) {
        to.copy_from_slice(from);
    }
}

/// Where the keys come from that replace others.
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

/// The key of one direction.
struct Half {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    /// The next record's number.
    next: u64,
}

impl Half {
    fn new((next, secrets): Secrets) -> Result<Self, SessionError> {
        let other = || SessionError::Malformed("another cipher".to_owned());
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(other()),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| other())?;
        let iv = iv.as_ref().try_into().map_err(|_| other())?;
        Ok(Self { key: LessSafeKey::new(key), iv, next })
    }

    /// The nonce of the next record, which is used once.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.next.to_be_bytes()) {
            *byte ^= number;
        }
        self.next += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// What a record was.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opened<'a> {
    /// Plain bytes.
    Data(&'a [u8]),
    /// Something about the session, which is done.
    Done,
    /// The other side sends nothing any more.
    Closed,
}

/// Both directions of a session.
pub(super) struct Records {
    keys: Keys,
    tx: Half,
    rx: Half,
    /// The other side wishes for a new key of this one.
    is_asked: bool,
    /// Records that are sealed with one key.
    limit: u64,
}

impl Records {
    pub(super) fn new(secrets: ExtractedSecrets, keys: Keys) -> Result<Self, SessionError> {
        let (tx, rx) = (Half::new(secrets.tx)?, Half::new(secrets.rx)?);
        Ok(Self { keys, tx, rx, is_asked: false, limit: RECORDS })
    }

    /// The same with another limit of records for each key.
    #[cfg(test)]
    pub(super) const fn limited(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Seals the next record's worth of what `fill` gives: it fills what it is handed as far as it goes, and
    /// returns how much that was. Returns the bytes that are used of `room`, which has place for two records.
    ///
    /// Errors: of keys, which do not occur.
    pub(super) fn seal(
        &mut self,
        room: &mut [u8],
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, SessionError> {
        let mut used = 0;
        if self.is_asked || self.tx.next >= self.limit {
            self.is_asked = false;
            used = self.seal_message(room, HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 0])?;
            self.tx = Half::new(self.keys.next_to_send()?)?;
        }
        let plain = fill(&mut room[used + HEAD..used + HEAD + PLAIN]);
        Ok(used + self.finish(&mut room[used..], DATA, plain)?)
    }

    /// Says why the session ends.
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

    /// Seals the `plain` bytes that lie behind the place of the header.
    fn finish(&mut self, room: &mut [u8], kind: u8, plain: usize) -> Result<usize, SessionError> {
        let whole = (plain + OVERHEAD).next_multiple_of(STEP);
        let sealed = (whole - HEAD) as u16;
        let (head, rest) = room[..whole].split_at_mut(HEAD);
        head.copy_from_slice(&[DATA, 3, 3, (sealed >> 8) as u8, sealed as u8]);
        let (inner, tag) = rest.split_at_mut(usize::from(sealed) - TAG);
        inner[plain] = kind;
        inner[plain + 1..].fill(0);
        let nonce = self.tx.nonce();
        let made = self.tx.key.seal_in_place_separate_tag(nonce, Aad::from(&*head), inner);
        tag.copy_from_slice(
            made.map_err(|_| SessionError::Malformed("a record is too long".to_owned()))?.as_ref(),
        );
        Ok(whole)
    }

    /// The length of the record that `held` begins with, if it is there whole.
    ///
    /// Errors: what is no record that may come now.
    pub(super) fn whole(held: &[u8]) -> Result<Option<usize>, SessionError> {
        let Some(&[kind, _, _, high, low]) = held.first_chunk() else { return Ok(None) };
        if kind != DATA {
            return Err(SessionError::Malformed(format!("a record of kind {kind} after the handshake")));
        }
        let sealed = usize::from(u16::from_be_bytes([high, low]));
        if sealed > MOST_SEALED {
            return Err(SessionError::Malformed(format!("a record of {sealed} bytes")));
        }
        Ok((held.len() >= HEAD + sealed).then_some(HEAD + sealed))
    }

    /// Opens a record in its place.
    ///
    /// Errors: [`SessionError::Foreign`] if it is not the next of this session; what may not come in one.
    pub(super) fn open<'a>(&mut self, record: &'a mut [u8]) -> Result<Opened<'a>, SessionError> {
        let foreign = SessionError::Foreign;
        let (head, rest) = record.split_first_chunk_mut::<HEAD>().ok_or_else(|| foreign.clone())?;
        let (sealed, tag) = rest.split_last_chunk_mut::<TAG>().ok_or_else(|| foreign.clone())?;
        let (nonce, tag) = (self.rx.nonce(), Tag::from(*tag));
        let opened = self.rx.key.open_in_place_separate_tag(nonce, Aad::from(*head), tag, sealed, 0..);
        let inner = opened.map_err(|_| foreign)?;
        let plain = inner.iter().rposition(|&byte| byte != 0);
        let plain = plain.ok_or_else(|| SessionError::Malformed("a record without a kind".to_owned()))?;
        if plain > MOST_PLAIN {
            return Err(SessionError::Malformed(format!("a record of {plain} plain bytes")));
        }
        let (kind, plain) = (inner[plain], &inner[..plain]);
        match (kind, plain) {
            (DATA, plain) => return Ok(Opened::Data(plain)),
            (HANDSHAKE, [KEY_UPDATE, 0, 0, 1, asks @ (0 | 1)]) => {
                self.is_asked |= *asks == 1;
                self.rx = Half::new(self.keys.next_to_receive()?)?;
            }
            // A server's, for sessions that go on later, of which there are none.
            (HANDSHAKE, [NEW_TICKET, ..]) if matches!(self.keys, Keys::Client(_)) => {}
            (ALERT, [_, reason]) => match AlertDescription::from(*reason) {
                AlertDescription::CloseNotify => return Ok(Opened::Closed),
                AlertDescription::UserCanceled => {}
                other => return Err(SessionError::Alert(format!("{other:?}"))),
            },
            (kind, plain) => {
                let what = format!("a message of kind {kind} and {} bytes after the handshake", plain.len());
                return Err(SessionError::Malformed(what));
            }
        }
        Ok(Opened::Done)
    }
}

#[cfg(test)]
mod tests;
