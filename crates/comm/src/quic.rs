//! QUIC between processes, by the crate `iroh`, also from behind address translation: with hole punching,
//! relays that the user names, and addresses that may change during a run. A peer is identified by its ed25519
//! key, that of its [`Identity`](crate::secure::Identity).
//!
//! QUIC is the second network of an endpoint over sockets: a [`Socket`] opens it, and
//! [`GateConfig::over_quic`](crate::tcp::GateConfig::over_quic) gives it to the ranks of
//! [`mixed::join`](crate::mixed::join) or the members of a
//! [`GrowingNetwork`](crate::tcp::GrowingNetwork), which use it beside TCP, or alone.
//!
//! Each (peer, tag) has a stream of its own, so a lost packet delays only one tag's frames. No public service
//! is used: the relays are those of [`SocketConfig::relays`], and members tell each other their addresses.
//!
//! A tokio runtime with one thread moves the bytes; no public type mentions tokio. Backpressure is QUIC's flow
//! control of each stream: a stream is not read while [`WINDOW`](crate::WINDOW) of its frames have not been
//! taken.

mod address;
mod acceptor;
mod greet;
mod growing;
mod handshake_stream;
mod network;
mod pacer;
mod peer;
mod relay;
mod relay_probe;
mod socket;

use std::time::Duration;

pub use growing::SocketConfig;
pub use relay::{Relay, RelayConfig};
pub use socket::Socket;

/// Default time after which a silent peer counts as lost. A killed process that is reached directly is noticed
/// sooner, if its machine answers that its port is closed. Else QUIC cannot distinguish it from an unreachable
/// one, so this is a compromise. A relay that is away for 4 s interrupts for 8 s, since attempts to
/// reconnect to it are made at growing intervals.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
