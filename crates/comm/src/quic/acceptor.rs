//! New connections, until they have proven that they belong to the job. Independent of the job itself.
//!
//! A connection without proof costs at most: one handshake; one stream with a window of [`UNPROVEN`] bytes, of
//! which 1024 are read; a time of [`GREETING`]; and one of [`MOST`] places. It does not delay members.

use std::sync::Arc;
use std::time::Duration;

use ::iroh::endpoint::Incoming;
use tokio::sync::{Semaphore, mpsc};

use super::handshake_stream::{HandshakeStream, control};
use crate::control::{Control, HELLO};
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::secure::{Role, Security};
use crate::wire::VERSION;
use crate::{CommError, WireError};

/// Greatest number of waiting connections; more are refused before their handshake.
const MOST: usize = 256;
/// Time limit for the handshake and the greeting; a rank greets at once.
const GREETING: Duration = Duration::from_secs(10);
/// Greatest number of bytes that a peer may send before its proof.
pub(super) const UNPROVEN: u32 = 16 * 1024;

/// A connection that has proven that it belongs to the job, and its greeting.
#[derive(Debug)]
pub(super) struct AuthenticatedConnection {
    pub(super) line: HandshakeStream,
    /// Frame with the greeting.
    pub(super) greeting: Vec<u8>,
    /// End of its right to join, in seconds since 1970 (0: no end). This side's proof repeats it.
    pub(super) expiry: u64,
}

/// Accepts connections until it is dropped; later ones are not answered.
#[derive(Debug)]
pub(super) struct Acceptor {
    accepting: tokio::task::JoinHandle<()>,
    guests: mpsc::Receiver<AuthenticatedConnection>,
}

impl Acceptor {
    pub(super) fn open(endpoint: &::iroh::Endpoint, security: &Security) -> Self {
        let (coming, guests) = mpsc::channel(MOST);
        let (endpoint, security) = (endpoint.clone(), security.clone());
        let accepting = tokio::spawn(async move {
            let places = Arc::new(Semaphore::new(MOST));
            while let Some(incoming) = endpoint.accept().await {
                let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                    let limit = format_args!("at most {MOST} connections may wait");
                    security.refused().note(None, "too many", &limit);
                    incoming.refuse();
                    continue;
                };
                let (security, coming) = (security.clone(), coming.clone());
                tokio::spawn(async move {
                    if let Some(guest) = read_greeting(&security, incoming).await {
                        // Fails if the acceptor has been dropped.
                        let _ = coming.send(guest).await;
                    }
                    drop(place);
                });
            }
        });
        Self { accepting, guests }
    }

    /// Returns the next connection that has proven its right to join, with its greeting.
    pub(super) async fn next(&mut self) -> Option<AuthenticatedConnection> {
        self.guests.recv().await
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn read_greeting(security: &Security, incoming: Incoming) -> Option<AuthenticatedConnection> {
    let note = |kind, detail: &dyn std::fmt::Display| {
        security.refused().note(None, kind, detail);
        None
    };
    let until = Deadline::after(GREETING);
    let shaken = async { incoming.accept()?.await };
    let connection = match tokio::time::timeout(GREETING, shaken).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return note("gave up", &error),
        Err(_) => return note("silent", &format_args!("no handshake within {GREETING:?}")),
    };
    let Some(Ok(left)) = until.remaining().map(Ok::<_, ()>) else {
        return note("silent", &format_args!("no greeting within {GREETING:?}"));
    };
    let mut line = match tokio::time::timeout(left, HandshakeStream::accept(connection)).await {
        Ok(Ok(line)) => line,
        Ok(Err(error)) => return note("gave up", &error),
        Err(_) => return note("silent", &format_args!("no greeting within {GREETING:?}")),
    };
    let name = line.key().to_string();
    let proof = match line.receive(HELLO, until).await {
        Ok(proof) => proof,
        Err(CommError::Handshake { source: WireError::Version { got, .. }, .. }) => {
            let reason = Refusal::Version { want: VERSION, got };
            let _: Option<AuthenticatedConnection> = note(reason.kind(), &reason);
            line.refuse(reason).await;
            return None;
        }
        Err(error) => return note("garbage", &error),
    };
    let verified = match control(&proof, &name) {
        Ok(proof) => line.verify(security, Role::Server, None, &proof),
        Err(error) => return note("garbage", &error),
    };
    let expiry = match verified {
        Ok(expiry) => expiry,
        Err(reason) => {
            let _: Option<AuthenticatedConnection> = note(reason.kind(), &reason);
            line.refuse(reason).await;
            return None;
        }
    };
    match line.receive(HELLO, until).await {
        Ok(greeting) if matches!(control(&greeting, &name), Ok(Control::Hello { .. } | Control::Ask(_))) => {
            Some(AuthenticatedConnection { line, greeting, expiry })
        }
        Ok(_) => note("no greeting", &"another message arrived before the greeting"),
        Err(error) => note("garbage", &error),
    }
}

impl AuthenticatedConnection {
    /// Refuses the connection with the reason.
    pub(super) fn refuse(mut self, security: &Security, reason: Refusal) {
        security.refused().note(None, reason.kind(), &reason);
        tokio::spawn(async move { self.line.refuse(reason).await });
    }
}
