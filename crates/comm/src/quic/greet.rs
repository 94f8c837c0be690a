//! Connects to a peer by its key: greets it, and checks its proof.

use std::time::Duration;

use ::iroh::{Endpoint, EndpointAddr};

use super::handshake_stream::{HandshakeStream, control};
use super::socket::PROTOCOL;
use crate::CommError;
use crate::control::Control;
use crate::deadline::Deadline;
use crate::secure::{PublicKey, Role, Security, refused};

/// Time limit of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(10);

/// Connects to a peer by its key, sends the greeting (an encoded frame), and checks the peer's proof.
///
/// # Errors
/// [`CommError::Io`] if the peer is not reached; other errors if it is another peer, or refuses this one.
pub(super) async fn greet(
    security: &Security,
    endpoint: &Endpoint,
    to: (EndpointAddr, PublicKey),
    greeting: &[u8],
    until: Deadline,
) -> Result<HandshakeStream, CommError> {
    let (address, key) = to;
    let io = |e: &dyn std::fmt::Display| {
        let error = std::io::Error::new(std::io::ErrorKind::ConnectionAborted, e.to_string());
        CommError::io("connection to", &key.to_string(), &error)
    };
    let attempt = until.remaining().unwrap_or_default().min(ATTEMPT);
    let connected = tokio::time::timeout(attempt, endpoint.connect(address, PROTOCOL)).await;
    let connection = connected.map_err(|_| io(&"no answer"))?.map_err(|e| io(&e))?;
    let mut line = HandshakeStream::open(connection).await?;
    // If these fail, the peer's answer says why.
    let _ = line.prove(security, Role::Client, None).await;
    let _ = line.send_frame(greeting).await;
    let bytes = line.receive(HandshakeStream::LONGEST, until).await?;
    let name = key.to_string();
    match control(&bytes, &name)? {
        Control::Refuse(reason) => Err(refused(&name, reason)),
        proof => match line.verify(security, Role::Client, Some(key), &proof) {
            Ok(_) => Ok(line),
            Err(reason) => Err(CommError::Unproven { peer: name, reason }),
        },
    }
}
