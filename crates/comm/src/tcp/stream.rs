//! A byte stream over a socket, with or without TLS: non-blocking for links, with a deadline while ranks meet.
//! The only frames that it handles itself are those in which both sides prove that they belong to the job.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::large_packets;
use crate::control::Control;
use crate::error::Refusal;
use crate::secure::{PublicKey, Role, Security, Session, SessionError};
use crate::wire::{self, Message, Parsed};
use crate::{CommError, WireError};

use crate::deadline::Deadline;

/// A connection, encrypted or not.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) socket: TcpStream,
    encrypted: Option<EncryptedSession>,
}

#[derive(Debug)]
struct EncryptedSession {
    session: Mutex<Session>,
    security: Security,
    /// The key that the peer must have, if it is known in advance.
    expected: Option<PublicKey>,
    /// Set if encrypted bytes wait for the socket.
    holds: AtomicBool,
    /// Set if the session holds bytes to be read, for which the socket does not become readable.
    has_more: AtomicBool,
}

/// Returns the session's error that an I/O error wraps, if there is one.
pub(super) fn session_error(error: &io::Error) -> Option<&SessionError> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}

fn broken(error: SessionError) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

impl EncryptedSession {
    fn lock(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates the flags that the poll loop reads.
    fn note(&self, session: &Session) {
        self.holds.store(!session.to_send().is_empty(), Ordering::Release);
        self.has_more.store(session.has_more(), Ordering::Release);
    }
}

impl Stream {
    /// Wraps a new connection, as `security` requires. If `expected` is set, the peer must have that key.
    pub(super) fn new(
        socket: TcpStream,
        security: &Security,
        role: Role,
        expected: Option<PublicKey>,
    ) -> io::Result<Self> {
        let names = match (role, expected) {
            (Role::Client, None) => security.names_at(socket.peer_addr()?),
            _ => Vec::new(),
        };
        let sealed = security.session(role, names).map_err(broken)?.map(|session| EncryptedSession {
            session: Mutex::new(session),
            security: security.clone(),
            expected,
            holds: AtomicBool::new(false),
            has_more: AtomicBool::new(false),
        });
        Ok(Self { socket, encrypted: sealed })
    }

    /// Does the handshake as a client, and sends this side's proof. The server's first message is its own
    /// proof, or a refusal; [`Stream::read_message`] checks the proof.
    pub(super) fn greet(&self, until: Deadline) -> Result<(), CommError> {
        let Some(sealed) = &self.encrypted else { return Ok(()) };
        let io = |e: io::Error| connection_error(&self.name(), &e);
        let mut session = sealed.lock();
        loop {
            session.seal(&[]).map_err(|e| io(broken(e)))?;
            self.flush(&mut session).map_err(io)?;
            if session.is_established() {
                break;
            }
            let left = until.remaining().ok_or_else(|| self.late(&self.name(), until))?;
            self.socket.set_read_timeout(Some(left)).map_err(io)?;
            match self.receive(&mut session) {
                Ok(0) => return Err(io(ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(io(e)),
            }
        }
        let key = session.peer().ok_or_else(|| self.unproven(Refusal::Key))?;
        sealed.security.check_key(key, sealed.expected).map_err(|reason| self.unproven(reason))?;
        let proof = sealed.security.prove(Role::Client, &session, None);
        drop(session);
        let proof = proof.ok_or_else(|| self.unproven(Refusal::Secret))?;
        self.write_all(&wire::framed_bytes(&proof)).map_err(io)
    }

    /// Checks the proof of a client, and sends this side's.
    pub(super) fn admit(&self, proof: &Control<'_>) -> Result<(), Refusal> {
        let Some(sealed) = &self.encrypted else { return Err(Refusal::EncryptionMismatch) };
        let mut session = sealed.lock();
        let expiry = sealed.security.verify(Role::Server, &session, sealed.expected, proof)?;
        session.trust();
        let own = sealed.security.prove(Role::Server, &session, Some(expiry)).ok_or(Refusal::Secret)?;
        drop(session);
        // If the client has gone, the next read finds out.
        let _ = self.write_all(&wire::framed_bytes(&own));
        Ok(())
    }

    /// Returns whether the peer has proven that it belongs here; always true without encryption.
    pub(super) fn is_proven(&self) -> bool {
        self.encrypted.as_ref().is_none_or(|sealed| sealed.lock().is_proven())
    }

    /// Returns the key that the peer has proven to hold.
    pub(super) fn peer_key(&self) -> Option<PublicKey> {
        self.encrypted.as_ref().and_then(|sealed| sealed.lock().peer())
    }

    /// Returns whether the connection is encrypted.
    pub(super) const fn is_encrypted(&self) -> bool {
        self.encrypted.is_some()
    }

    /// Returns whether encrypted bytes wait for the socket.
    pub(super) fn holds(&self) -> bool {
        self.encrypted.as_ref().is_some_and(|sealed| sealed.holds.load(Ordering::Acquire))
    }

    /// Returns the number of encrypted bytes that wait for the socket.
    pub(super) fn held(&self) -> usize {
        self.encrypted.as_ref().map_or(0, |sealed| sealed.lock().to_send().len())
    }

    /// Returns whether the session holds bytes to be read, for which the socket does not become readable.
    pub(super) fn has_more(&self) -> bool {
        self.encrypted.as_ref().is_some_and(|sealed| sealed.has_more.load(Ordering::Acquire))
    }

    /// Returns the address of the peer, for logs and errors.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.socket.peer_addr().ok()
    }

    fn name(&self) -> String {
        self.address().map_or_else(|| "a peer".to_owned(), |address| address.to_string())
    }

    /// Writes as many bytes of `slices` as can be written without blocking, and returns their number. With
    /// encryption, bytes count as written once they are encrypted, also if they still wait for the socket.
    pub(super) fn write_now(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(sealed) = &self.encrypted else { return write_once(&self.socket, slices) };
        let mut session = sealed.lock();
        let mut taken = 0;
        if self.flush(&mut session)? {
            taken = session.seal(slices).map_err(broken)?;
            self.flush(&mut session)?;
        }
        sealed.note(&session);
        Ok(taken)
    }

    /// Writes encrypted bytes that wait for the socket.
    pub(super) fn flush_now(&self) -> io::Result<()> {
        self.write_now(&[]).map(|_| ())
    }

    /// Reads bytes that are there now into `first`, then `second`, as many as fit. The socket must be
    /// non-blocking.
    pub(super) fn read_now(&self, first: &mut [u8], second: &mut [u8]) -> io::Result<usize> {
        match &self.encrypted {
            None => (&self.socket).read_vectored(&mut [IoSliceMut::new(first), IoSliceMut::new(second)]),
            Some(sealed) => self.read_encrypted(sealed, first, second, true),
        }
    }

    fn read_encrypted(
        &self,
        sealed: &EncryptedSession,
        first: &mut [u8],
        second: &mut [u8],
        all: bool,
    ) -> io::Result<usize> {
        let mut session = sealed.lock();
        let wanted = first.len() + second.len();
        let mut taken = 0;
        let read = loop {
            let at = taken.min(first.len());
            let places = &mut [IoSliceMut::new(&mut first[at..]), IoSliceMut::new(&mut second[taken - at..])];
            let opened = session.open(places);
            // The session's own bytes are sent even after an error: an alert tells the peer the reason.
            let flushed = self.flush(&mut session);
            match opened {
                Ok(count) => taken += count,
                Err(error) => break Err(broken(error)),
            }
            if taken == wanted || taken > 0 && !all || session.has_ended() {
                break flushed.map(|_| taken);
            }
            match self.receive(&mut session) {
                Ok(0) => break Ok(taken),
                Ok(_) => {}
                // Returns the bytes decrypted so far; the next call reads from the socket again.
                Err(_) if taken > 0 => break Ok(taken),
                Err(e) => break Err(e),
            }
        };
        sealed.note(&session);
        read
    }

    /// Reads encrypted bytes from the socket.
    fn receive(&self, session: &mut Session) -> io::Result<usize> {
        // The record is longer than this peer may send: before its proof the limit is low.
        if session.receive_buffer().is_empty() {
            return Err(broken(SessionError::TooMuch(session.limit())));
        }
        loop {
            match (&self.socket).read(session.receive_buffer()) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Ok(count) => return session.received(count).map(|()| count).map_err(broken),
                other => return other,
            }
        }
    }

    /// Writes encrypted bytes; returns whether none are left.
    fn flush(&self, session: &mut Session) -> io::Result<bool> {
        while !session.to_send().is_empty() {
            match write_once(&self.socket, &[IoSlice::new(session.to_send())])? {
                0 => return Ok(false),
                count => session.sent(count),
            }
        }
        Ok(true)
    }

    /// Writes all bytes. The socket must block, or have room for them.
    pub(super) fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        if self.encrypted.is_none() {
            return (&self.socket).write_all(bytes);
        }
        let mut rest = bytes;
        while !rest.is_empty() || self.holds() {
            let count = self.write_now(&[IoSlice::new(rest)])?;
            rest = &rest[count..];
            if count == 0 && self.holds() {
                return Err(ErrorKind::WouldBlock.into());
            }
        }
        Ok(())
    }

    /// Sends one message.
    pub(super) fn send_message(&self, message: &Control<'_>) -> io::Result<()> {
        let frame = wire::framed(message).map_err(|e| io::Error::new(ErrorKind::InvalidInput, e))?;
        self.write_all(&frame)
    }

    /// Sends one message unencrypted, to a peer that does not use encryption.
    pub(super) fn send_unencrypted(&self, message: &Control<'_>) {
        if let Ok(frame) = wire::framed(message) {
            // The peer may have gone already.
            let _ = (&self.socket).write_all(&frame);
        }
    }

    /// Reads one whole message, and checks the peer's proof if that comes first. Memory grows with the bytes
    /// that arrive, not with the length that the peer claims.
    pub(super) fn read_message(&self, from: &str, until: Deadline) -> Result<Vec<u8>, CommError> {
        loop {
            let bytes = self.read_frame(from, until)?;
            let Some(sealed) = self.encrypted.as_ref().filter(|_| !self.is_proven()) else {
                return Ok(bytes);
            };
            let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
            match wire::parse(&bytes).map_err(wrong)? {
                // A peer that refuses sends no proof.
                Parsed::Whole(Message::Control(Control::Refuse(_)), _) => return Ok(bytes),
                Parsed::Whole(Message::Control(proof), _) => {
                    let mut session = sealed.lock();
                    let verified = sealed.security.verify(Role::Client, &session, sealed.expected, &proof);
                    verified.map_err(|reason| self.unproven(reason))?;
                    session.trust();
                }
                _ => return Err(wrong(WireError::Malformed("control message"))),
            }
        }
    }

    fn read_frame(&self, from: &str, until: Deadline) -> Result<Vec<u8>, CommError> {
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
            let want = match wire::parse(&bytes).map_err(wrong)? {
                Parsed::Part(want) => want,
                Parsed::Whole(..) => return Ok(bytes),
            };
            let io = |e: &io::Error| connection_error(from, e);
            let left = until.remaining().ok_or_else(|| self.late(from, until))?;
            self.socket.set_read_timeout(Some(left)).map_err(|e| io(&e))?;
            let place = &mut buffer[..(want - bytes.len()).min(4096)];
            let read = match &self.encrypted {
                None => (&self.socket).read(place),
                Some(sealed) => self.read_encrypted(sealed, place, &mut [], false),
            };
            match read {
                Ok(0) => return Err(io(&ErrorKind::UnexpectedEof.into())),
                Ok(n) => bytes.extend_from_slice(&buffer[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(e) => return Err(io(&e)),
            }
        }
    }

    /// Returns the error of a peer that has not answered by the deadline.
    fn late(&self, from: &str, until: Deadline) -> CommError {
        let cause =
            large_packets::lost(&self.socket).map(|cause| format!(": {cause}: {}", large_packets::ADVICE));
        CommError::Io {
            what: NO_ANSWER,
            address: from.to_owned(),
            kind: ErrorKind::TimedOut,
            message: format!("waited for {:?}{}", until.limit(), cause.unwrap_or_default()),
        }
    }

    fn unproven(&self, reason: Refusal) -> CommError {
        CommError::Unproven { peer: self.name(), reason }
    }
}

/// What failed if a peer has not answered by the deadline.
const NO_ANSWER: &str = "no answer in time from";

/// Returns whether an error is that of a peer that was connected and did not answer in time.
pub(super) fn is_late(error: &CommError) -> bool {
    matches!(error, CommError::Io { what: NO_ANSWER, .. })
}

/// Converts an error of the connection to one of the rendezvous.
fn connection_error(from: &str, error: &io::Error) -> CommError {
    match session_error(error) {
        Some(reason) => {
            CommError::NoEncryptedConnection { peer: from.to_owned(), reason: reason.to_string() }
        }
        None => CommError::io("answer from", &from, error),
    }
}

/// Writes once, and returns the number of bytes that the socket took; 0 if it would block.
fn write_once(mut socket: &TcpStream, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    loop {
        match socket.write_vectored(slices) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(0),
            result => return result,
        }
    }
}
