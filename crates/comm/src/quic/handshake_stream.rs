//! Control messages over a connection's first stream, on which two peers greet each other and prove that they
//! belong to the job.

use std::io::{self, ErrorKind};
use std::time::Duration;

use ::iroh::endpoint::{Connection, ReadError, RecvStream, SendStream};
use zeroize::Zeroizing;

use super::address::key_of;
use crate::control::Control;
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::secure::{PublicKey, Role, Security};
use crate::wire::{self, Parsed};
use crate::{CommError, FRAME_BYTES, HEADER_BYTES, Message, WireError};

/// Label of the TLS exporter whose value the proof of the secret covers.
const LABEL: &[u8] = b"EXPORTER-farflung-join";

/// Time that the peer has to receive the last message.
const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// The first stream of a connection.
#[derive(Debug)]
pub(super) struct HandshakeStream {
    pub(super) connection: Connection,
    send: SendStream,
    recv: RecvStream,
    exporter: Zeroizing<[u8; 32]>,
}

impl HandshakeStream {
    /// Opens the stream, on the side that connects.
    pub(super) async fn open(connection: Connection) -> Result<Self, CommError> {
        let opened = connection.open_bi().await;
        Self::new(connection, opened)
    }

    /// Accepts the stream, on the side that is connected to.
    pub(super) async fn accept(connection: Connection) -> Result<Self, CommError> {
        let opened = connection.accept_bi().await;
        Self::new(connection, opened)
    }

    fn new(
        connection: Connection,
        opened: Result<(SendStream, RecvStream), ::iroh::endpoint::ConnectionError>,
    ) -> Result<Self, CommError> {
        let name = || key_of(connection.remote_id()).to_string();
        let (send, recv) =
            opened.map_err(|e| CommError::io("open a stream to", &name(), &io::Error::from(e)))?;
        let mut exporter = Zeroizing::new([0; 32]);
        connection.export_keying_material(&mut *exporter, LABEL, &[]).map_err(|_| {
            CommError::NoEncryptedConnection {
                peer: name(),
                reason: "the session provides no key material for the proof".to_owned(),
            }
        })?;
        Ok(Self { connection, send, recv, exporter })
    }

    /// Returns the key that the peer has proven to hold.
    pub(super) fn key(&self) -> PublicKey {
        key_of(self.connection.remote_id())
    }

    /// Sends one message.
    pub(super) async fn send_message(&mut self, message: &Control<'_>) -> io::Result<()> {
        let frame = wire::framed(message).map_err(|e| io::Error::new(ErrorKind::InvalidInput, e))?;
        self.send_frame(&frame).await
    }

    /// Sends one message that is encoded already.
    pub(super) async fn send_frame(&mut self, frame: &[u8]) -> io::Result<()> {
        Ok(self.send.write_all(frame).await?)
    }

    /// Sends this side's proof.
    pub(super) async fn prove(
        &mut self,
        security: &Security,
        role: Role,
        expiry: Option<u64>,
    ) -> io::Result<()> {
        let proof = security.prove_by(role, &self.exporter, expiry);
        let proof =
            proof.ok_or_else(|| io::Error::other("this process has no valid join secret to prove"))?;
        self.send_frame(&wire::framed_bytes(&proof)).await
    }

    /// Checks the peer's proof; returns the end of its validity.
    pub(super) fn verify(
        &self,
        security: &Security,
        role: Role,
        expected: Option<PublicKey>,
        proof: &Control<'_>,
    ) -> Result<u64, Refusal> {
        security.verify_by(role, self.key(), &self.exporter, expected, proof)
    }

    /// Sends the reason of a refusal, waits briefly until the peer has received it, and closes the connection.
    pub(super) async fn refuse(&mut self, reason: Refusal) {
        self.send_last(&Control::Refuse(reason)).await;
        self.connection.close(1_u8.into(), b"refused");
    }

    /// Sends the last message, and waits briefly until the peer has received it. The peer may be gone already.
    pub(super) async fn send_last(&mut self, message: &Control<'_>) {
        if self.send_message(message).await.is_ok() {
            self.end().await;
        }
    }

    /// Waits briefly until the peer has received everything, after the last message.
    pub(super) async fn end(&mut self) {
        if self.send.finish().is_ok() {
            let _ = tokio::time::timeout(LAST_MESSAGE_TIMEOUT, self.send.stopped()).await;
        }
    }

    /// Receives one message of at most `most` bytes. Memory grows with the bytes that arrive, not with the
    /// length that the peer claims.
    pub(super) async fn receive(&mut self, most: usize, until: Deadline) -> Result<Vec<u8>, CommError> {
        let from = self.key().to_string();
        let wrong = |source| CommError::Handshake { peer: from.clone(), source };
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let want = match wire::parse(&bytes).map_err(wrong)? {
                Parsed::Whole(..) => return Ok(bytes),
                Parsed::Part(want) if want <= most => want,
                Parsed::Part(got) => return Err(wrong(WireError::Length { max: most, got })),
            };
            let late = || {
                let error = io::Error::new(ErrorKind::TimedOut, format!("waited for {:?}", until.limit()));
                CommError::io("no answer in time from", &from, &error)
            };
            let left = until.remaining().ok_or_else(late)?;
            let place = &mut buffer[..(want - bytes.len()).min(4096)];
            let read = tokio::time::timeout(left, self.recv.read(place)).await.map_err(|_| late())?;
            if let Some(count) =
                read.map_err(|e: ReadError| CommError::io("answer from", &from, &io::Error::from(e)))?
            {
                bytes.extend_from_slice(&buffer[..count]);
            } else {
                let end = io::Error::from(ErrorKind::UnexpectedEof);
                return Err(CommError::io("answer from", &from, &end));
            }
        }
    }

    /// Greatest length of a message in bytes.
    pub(super) const LONGEST: usize = HEADER_BYTES + FRAME_BYTES;
}

/// Parses the control message of a whole frame.
pub(super) fn control<'a>(bytes: &'a [u8], from: &str) -> Result<Control<'a>, CommError> {
    let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
    match wire::parse(bytes).map_err(wrong)? {
        Parsed::Whole(Message::Control(message), _) => Ok(message),
        _ => Err(wrong(WireError::Malformed("control message"))),
    }
}
