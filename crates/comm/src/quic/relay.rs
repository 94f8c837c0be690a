//! A relay run by the user: it forwards packets between peers that cannot reach each other directly, and tells
//! each peer its public address. The peers encrypt the packets end to end.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use iroh_relay::server::{Access, AccessControl, ClientRequest, QuicConfig, Server, ServerConfig};
use tokio::runtime::{Builder, Runtime};

use super::address::key_of;
use crate::CommError;
use crate::secure::{PublicKey, self_signed};

/// Where a relay listens, and which keys may use it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RelayConfig {
    /// Address to listen at: TCP for packets to forward, UDP at the same port to tell addresses; port 0 picks a
    /// free one.
    pub listen: SocketAddr,
    /// Keys that may use the relay; `None` allows all.
    pub allow: Option<BTreeSet<PublicKey>>,
}

impl RelayConfig {
    /// Creates a configuration that allows all keys.
    #[must_use]
    pub const fn new(listen: SocketAddr) -> Self {
        Self { listen, allow: None }
    }
}

/// A running relay, with a thread of its own. Dropping it stops it.
#[derive(Debug)]
pub struct Relay {
    server: Mutex<Option<Server>>,
    runtime: Mutex<Option<Runtime>>,
    address: SocketAddr,
}

/// Allows the keys of a list; without a list, all keys.
#[derive(Debug)]
struct Allowed(Option<BTreeSet<PublicKey>>);

impl AccessControl for Allowed {
    async fn on_connect(&self, request: &ClientRequest) -> Access {
        let key = key_of(request.endpoint_id());
        match &self.0 {
            Some(keys) if !keys.contains(&key) => {
                tracing::warn!(%key, "the relay refused a key that is not in its allow list");
                Access::Deny { reason: Some("this key is not in the relay's allow list".to_owned()) }
            }
            _ => Access::Allow,
        }
    }
}

impl Relay {
    /// Starts the relay.
    ///
    /// # Errors
    /// [`CommError::Io`] if the port is not free for TCP and UDP.
    pub fn start(config: &RelayConfig) -> Result<Self, CommError> {
        let mut address = config.listen;
        let io = |e: &std::io::Error| CommError::io("listen at", &config.listen, e);
        if address.port() == 0 {
            // Both protocols use the same port, so it is chosen before either listens.
            address = TcpListener::bind(address).and_then(|free| free.local_addr()).map_err(|e| io(&e))?;
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("farflung-relay")
            .enable_all()
            .build()
            .map_err(|e| io(&e))?;
        let mut relay = iroh_relay::server::RelayConfig::new(address);
        relay.access = std::sync::Arc::new(Allowed(config.allow.clone()));
        let mut quic = QuicConfig::new(address);
        quic.server_config = Some(self_signed()?);
        let mut settings = ServerConfig::default();
        (settings.relay, settings.quic) = (Some(relay), Some(quic));
        let server = runtime
            .block_on(Server::spawn(settings))
            .map_err(|e| io(&std::io::Error::other(format!("{e:#}"))))?;
        Ok(Self { server: Mutex::new(Some(server)), runtime: Mutex::new(Some(runtime)), address })
    }

    /// Returns the address that it listens at.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns its URL, for processes that can reach it at the address that it listens at.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the number of bytes of packets that it has forwarded.
    #[must_use]
    pub fn carried(&self) -> u64 {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        server.as_ref().map_or(0, |server| server.metrics().server.bytes_sent.get())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let server = self.server.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(runtime) = self.runtime.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            let stopped = async {
                if let Some(server) = server {
                    let _ = tokio::time::timeout(Duration::from_secs(2), server.shutdown()).await;
                }
            };
            runtime.block_on(stopped);
            runtime.shutdown_timeout(Duration::from_millis(200));
        }
    }
}
