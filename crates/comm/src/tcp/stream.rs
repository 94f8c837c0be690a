//! A socket with or without a TLS session over it, as plain bytes: without blocking for links, with a deadline
//! for whoever meets. It knows no frame beyond those in which both sides prove who they are.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::control::Control;
use crate::error::Refusal;
use crate::secure::{PublicKey, Role, Security, Session, SessionError};
use crate::wire::{self, Message, Parsed};
use crate::{CommError, WireError};

use crate::until::Until;

/// A connection.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) socket: TcpStream,
    sealed: Option<Sealed>,
}

#[derive(Debug)]
struct Sealed {
    session: Mutex<Session>,
    security: Security,
    /// The key that the other side has to have, where it is known.
    expected: Option<PublicKey>,
    /// Sealed bytes wait for the socket.
    holds: AtomicBool,
    /// There are bytes to be read of which the socket knows nothing any more.
    has_more: AtomicBool,
}

/// The error of a session, where it is one.
pub(super) fn session_error(error: &io::Error) -> Option<&SessionError> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}

fn broken(error: SessionError) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

impl Sealed {
    fn lock(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what the poll loop has to know.
    fn note(&self, session: &Session) {
        self.holds.store(!session.to_send().is_empty(), Ordering::Release);
        self.has_more.store(session.has_more(), Ordering::Release);
    }
}

impl Stream {
    /// A connection that has just been made, as this side's `security` wants it; the other side has to have the
    /// key that is `expected`, where it is known.
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
        let sealed = security.session(role, names).map_err(broken)?.map(|session| Sealed {
            session: Mutex::new(session),
            security: security.clone(),
            expected,
            holds: AtomicBool::new(false),
            has_more: AtomicBool::new(false),
        });
        Ok(Self { socket, sealed })
    }

    /// Greets the other side as a client: the handshake, and this side's proof. Its own proof comes before
    /// whatever else it says, and is checked by [`Stream::read_message`].
    pub(super) fn greet(&self, until: Until) -> Result<(), CommError> {
        let Some(sealed) = &self.sealed else { return Ok(()) };
        let io = |e: io::Error| connection_error(&self.name(), &e);
        let mut session = sealed.lock();
        loop {
            session.seal(&[]).map_err(|e| io(broken(e)))?;
            self.flush(&mut session).map_err(io)?;
            if session.is_established() {
                break;
            }
            let left = until.left().ok_or_else(|| io(ErrorKind::TimedOut.into()))?;
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

    /// Takes the proof that a client has sent, and answers it.
    pub(super) fn admit(&self, proof: &Control<'_>) -> Result<(), Refusal> {
        let Some(sealed) = &self.sealed else { return Err(Refusal::Clear) };
        let mut session = sealed.lock();
        let expiry = sealed.security.verify(Role::Server, &session, sealed.expected, proof)?;
        session.trust();
        let own = sealed.security.prove(Role::Server, &session, Some(expiry)).ok_or(Refusal::Secret)?;
        drop(session);
        // If the client is gone already, reading finds it.
        let _ = self.write_all(&wire::framed_bytes(&own));
        Ok(())
    }

    /// Whether the other side has proven that it belongs here, or need not.
    pub(super) fn is_proven(&self) -> bool {
        self.sealed.as_ref().is_none_or(|sealed| sealed.lock().is_proven())
    }

    /// The key that the other side has proven to hold.
    pub(super) fn peer_key(&self) -> Option<PublicKey> {
        self.sealed.as_ref().and_then(|sealed| sealed.lock().peer())
    }

    /// Whether it is encrypted.
    pub(super) const fn is_sealed(&self) -> bool {
        self.sealed.is_some()
    }

    /// Whether sealed bytes wait for the socket.
    pub(super) fn holds(&self) -> bool {
        self.sealed.as_ref().is_some_and(|sealed| sealed.holds.load(Ordering::Acquire))
    }

    /// Sealed bytes that wait for the socket.
    pub(super) fn held(&self) -> usize {
        self.sealed.as_ref().map_or(0, |sealed| sealed.lock().to_send().len())
    }

    /// Whether there are bytes to be read of which the socket knows nothing any more.
    pub(super) fn has_more(&self) -> bool {
        self.sealed.as_ref().is_some_and(|sealed| sealed.has_more.load(Ordering::Acquire))
    }

    /// The address of the other side, for logs and errors.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.socket.peer_addr().ok()
    }

    fn name(&self) -> String {
        self.address().map_or_else(|| "a peer".to_owned(), |address| address.to_string())
    }

    /// How much of `slices` the socket takes now, or this side until it does.
    pub(super) fn write_now(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(sealed) = &self.sealed else { return write_once(&self.socket, slices) };
        let mut session = sealed.lock();
        let mut taken = 0;
        if self.flush(&mut session)? {
            taken = session.seal(slices).map_err(broken)?;
            self.flush(&mut session)?;
        }
        sealed.note(&session);
        Ok(taken)
    }

    /// Writes what waits for the socket.
    pub(super) fn flush_now(&self) -> io::Result<()> {
        self.write_now(&[]).map(|_| ())
    }

    /// Reads into `first`, then `second`, what is there now, all of it. The socket must not block.
    pub(super) fn read_now(&self, first: &mut [u8], second: &mut [u8]) -> io::Result<usize> {
        match &self.sealed {
            None => (&self.socket).read_vectored(&mut [IoSliceMut::new(first), IoSliceMut::new(second)]),
            Some(sealed) => self.read_sealed(sealed, first, second, true),
        }
    }

    fn read_sealed(
        &self,
        sealed: &Sealed,
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
            // What the session asks to be sent goes out also where it came to an end: an alert says why.
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
                // What was opened before counts; the next call finds the end again.
                Err(_) if taken > 0 => break Ok(taken),
                Err(e) => break Err(e),
            }
        };
        sealed.note(&session);
        read
    }

    /// Reads sealed bytes from the socket.
    fn receive(&self, session: &mut Session) -> io::Result<usize> {
        // A record that does not fit, of somebody who may not send that much.
        if session.room().is_empty() {
            return Err(broken(SessionError::TooMuch(session.limit())));
        }
        loop {
            match (&self.socket).read(session.room()) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Ok(count) => return session.received(count).map(|()| count).map_err(broken),
                other => return other,
            }
        }
    }

    /// Writes what is sealed; returns whether nothing is left.
    fn flush(&self, session: &mut Session) -> io::Result<bool> {
        while !session.to_send().is_empty() {
            match write_once(&self.socket, &[IoSlice::new(session.to_send())])? {
                0 => return Ok(false),
                count => session.sent(count),
            }
        }
        Ok(true)
    }

    /// Writes all of it, where the socket blocks or has room for it.
    fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        if self.sealed.is_none() {
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

    /// Says one message.
    pub(super) fn say(&self, message: &Control<'_>) -> io::Result<()> {
        let frame = wire::framed(message).map_err(|e| io::Error::new(ErrorKind::InvalidInput, e))?;
        self.write_all(&frame)
    }

    /// Says one message without encryption, to another side that knows none.
    pub(super) fn say_clear(&self, message: &Control<'_>) {
        if let Ok(frame) = wire::framed(message) {
            // It may be gone already.
            let _ = (&self.socket).write_all(&frame);
        }
    }

    /// The bytes of one whole message, as many as come: nothing is allocated by a length that is only claimed.
    /// The other side's proof is checked on the way.
    pub(super) fn read_message(&self, from: &str, until: Until) -> Result<Vec<u8>, CommError> {
        loop {
            let bytes = self.read_frame(from, until)?;
            let Some(sealed) = self.sealed.as_ref().filter(|_| !self.is_proven()) else { return Ok(bytes) };
            let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
            match wire::parse(&bytes).map_err(wrong)? {
                // A refusal comes instead of the proof.
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

    fn read_frame(&self, from: &str, until: Until) -> Result<Vec<u8>, CommError> {
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
            let want = match wire::parse(&bytes).map_err(wrong)? {
                Parsed::Part(want) => want,
                Parsed::Whole(..) => return Ok(bytes),
            };
            let io = |e: &io::Error| connection_error(from, e);
            let late = || CommError::Io {
                what: "no answer in time of",
                address: from.to_owned(),
                kind: ErrorKind::TimedOut,
                message: format!("waited for {:?}", until.limit()),
            };
            self.socket.set_read_timeout(Some(until.left().ok_or_else(late)?)).map_err(|e| io(&e))?;
            let place = &mut buffer[..(want - bytes.len()).min(4096)];
            let read = match &self.sealed {
                None => (&self.socket).read(place),
                Some(sealed) => self.read_sealed(sealed, place, &mut [], false),
            };
            match read {
                Ok(0) => return Err(io(&ErrorKind::UnexpectedEof.into())),
                Ok(n) => bytes.extend_from_slice(&buffer[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(e) => return Err(io(&e)),
            }
        }
    }

    fn unproven(&self, reason: Refusal) -> CommError {
        CommError::Unproven { peer: self.name(), reason }
    }
}

/// What an error of the connection means to whoever meets.
fn connection_error(from: &str, error: &io::Error) -> CommError {
    match session_error(error) {
        Some(reason) => CommError::Unsealed { peer: from.to_owned(), reason: reason.to_string() },
        None => CommError::io("answer of", &from, error),
    }
}

/// How much of it the socket takes now; 0 where it would block.
fn write_once(mut socket: &TcpStream, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    loop {
        match socket.write_vectored(slices) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(0),
            result => return result,
        }
    }
}
