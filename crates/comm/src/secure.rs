//! Who may join a job, and how its connections are protected: keys, tickets, join secrets, and TLS 1.3 between
//! peers that are identified by their keys or certificates. Opens neither sockets nor files; `security.rs`
//! resolves host names.

mod certificates;
mod clock;
mod exporter;
mod identity;
mod records;
mod refused;
#[cfg(feature = "iroh")]
mod relay;
mod aligned_buffer;
mod secret;
mod security;
mod session;
mod session_error;
mod ticket;
mod tls;
mod word;

pub use certificates::{CertificateFault, Certificates};
pub use identity::{Identity, PublicKey, random};
pub use refused::Refused;
pub(crate) use refused::refused;
#[cfg(feature = "iroh")]
pub(crate) use relay::{AnyCertificate, self_signed};
pub use secret::{JoinSecret, SECRET_BYTES};
pub use security::Security;
pub(crate) use security::{Admission, Role};
pub(crate) use session::Session;
pub(crate) use session_error::SessionError;
pub use ticket::{ADDRESSES, Ticket, TicketError};

pub use clock::unix_seconds;
