//! Access of a process to QUIC: its UDP socket, its connections to relays, and the tokio runtime that drives
//! both. It outlives the endpoints that use it.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use ::iroh::endpoint::{BindOpts, IdleTimeout, QuicTransportConfig, RelayMode, VarInt, presets};
use ::iroh::{Endpoint, RelayUrl, SecretKey};
use iroh_relay::tls::CaTlsConfig;
use tokio::runtime::{Builder, Handle, Runtime};

use super::acceptor::UNPROVEN;
use super::address::{PeerAddresses, relay_map};
use super::peer::{STREAM_WINDOW, WINDOW_OF_ALL};
use super::relay_probe;
use crate::CommError;
use crate::secure::{AnyCertificate, Identity};

/// Name of the protocol in the handshake (ALPN).
pub(super) const PROTOCOL: &[u8] = b"farflung/1";
/// Time to wait for the connection to a relay before this process announces its addresses.
const RELAY: Duration = Duration::from_secs(10);
/// Time limit for closing sockets and connections to relays.
const CLOSING: Duration = Duration::from_secs(2);

/// How a process is reached over QUIC.
#[derive(Debug, Clone)]
pub(super) struct SocketOptions {
    /// Key of this process.
    pub(super) identity: Identity,
    pub(super) relays: Vec<RelayUrl>,
    /// UDP address to listen at; `None` for any port on all addresses.
    pub(super) listen: Option<SocketAddr>,
    /// Addresses at which others reach this process, besides those that it finds itself.
    pub(super) advertise: Vec<SocketAddr>,
    /// Whether peers may be reached directly; if not, only over relays.
    pub(super) direct: bool,
    pub(super) patience: Duration,
}

/// A process's UDP socket and its connections to relays. Dropping it closes them.
pub struct Socket {
    endpoint: Endpoint,
    relays: Vec<RelayUrl>,
    direct: bool,
    advertise: Vec<SocketAddr>,
    handle: Handle,
    runtime: Mutex<Option<Runtime>>,
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Socket({:?})", self.endpoint.bound_sockets())
    }
}

impl Socket {
    /// Opens the socket.
    ///
    /// # Errors
    /// If the port is in use, or the system starts no thread.
    pub(super) fn new(opening: &SocketOptions) -> Result<Self, CommError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("farflung-quic")
            .enable_all()
            .build()
            .map_err(|e| CommError::io("threads of", &"the QUIC transport", &e))?;
        match runtime.block_on(bind(opening)) {
            Ok(endpoint) => Ok(Self {
                endpoint,
                relays: opening.relays.clone(),
                direct: opening.direct,
                advertise: opening.advertise.clone(),
                handle: runtime.handle().clone(),
                runtime: Mutex::new(Some(runtime)),
            }),
            Err(error) => {
                runtime.shutdown_timeout(CLOSING);
                Err(error)
            }
        }
    }

    pub(super) const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(super) const fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(super) const fn is_direct(&self) -> bool {
        self.direct
    }

    /// Runs a future to its end on the runtime, and returns its result. `None` if the runtime has ended.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (told, done) = mpsc::channel();
        self.handle.spawn(async move {
            // Does not fail: the calling thread waits for the result.
            let _ = told.send(future.await);
        });
        done.recv().ok()
    }

    /// Returns the addresses and relays at which peers can reach this process.
    pub(super) fn peer_addresses(&self) -> PeerAddresses {
        let own = self.endpoint.addr();
        let mut places = PeerAddresses {
            sockets: own.ip_addrs().copied().collect(),
            relays: own.relay_urls().cloned().collect(),
        };
        for bound in self.endpoint.bound_sockets() {
            if !bound.ip().is_unspecified() && !places.sockets.contains(&bound) {
                places.sockets.push(bound);
            }
        }
        for &address in &self.advertise {
            places.sockets.retain(|own| *own != address);
            places.sockets.insert(0, address);
        }
        if places.relays.is_empty() {
            places.relays.clone_from(&self.relays);
        }
        places
    }

    /// Ends without notifying the peers, like a killed process.
    pub fn vanish(&self) {
        let runtime = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(runtime) = runtime {
            runtime.shutdown_background();
        }
    }

    /// Closes the socket and the connections to relays.
    pub(super) fn close(&self) {
        let Some(runtime) = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        let (told, closed) = mpsc::channel();
        let endpoint = self.endpoint.clone();
        runtime.spawn(async move {
            let _ = tokio::time::timeout(CLOSING, endpoint.close()).await;
            let _ = told.send(());
        });
        let _ = closed.recv_timeout(CLOSING + Duration::from_secs(1));
        runtime.shutdown_timeout(Duration::from_millis(100));
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // A task of the runtime that was the last owner cannot wait for the runtime's end.
        if Handle::try_current().is_ok() {
            self.vanish();
        }
        self.close();
    }
}

async fn bind(opening: &SocketOptions) -> Result<Endpoint, CommError> {
    let io = |what, address: &dyn fmt::Display, e: &dyn fmt::Display| {
        CommError::io(what, &address.to_string(), &std::io::Error::other(e.to_string()))
    };
    let relays = match &opening.relays[..] {
        [] => RelayMode::Disabled,
        relays => RelayMode::Custom(relay_map(relays)),
    };
    let mut builder = Endpoint::builder(presets::Minimal)
        .secret_key(SecretKey::from_bytes(opening.identity.seed()))
        .alpns(vec![PROTOCOL.to_vec()])
        .relay_mode(relays)
        .transport_config(transport(opening.patience)?);
    if opening.relays.iter().all(|url| url.scheme() == "http") {
        let any = |provider| Ok(Arc::new(AnyCertificate::new(provider)) as _);
        builder = builder.ca_tls_config(CaTlsConfig::custom_server_cert_verifier(Arc::new(any)));
    }
    if !opening.direct {
        builder = builder.clear_ip_transports();
    } else if let Some(at) = opening.listen {
        let wrong = |e| io("listen at", &at, &e);
        let required = BindOpts::default().set_is_required(true);
        builder = builder.clear_ip_transports().bind_addr_with_opts(at, required).map_err(wrong)?;
    }
    let endpoint = builder.bind().await.map_err(|e| {
        let at = opening.listen.map_or_else(|| "any address".to_owned(), |at| at.to_string());
        io("listen over UDP at", &at, &format_args!("{e:#}"))
    })?;
    let relays = opening.relays.clone();
    let answers = tokio::task::spawn_blocking(move || relay_probe::answers_any(&relays));
    if answers.await.unwrap_or(false) {
        // It may fail: the relay may become reachable later, or peers may be reached without it.
        let _ = tokio::time::timeout(RELAY, endpoint.online()).await;
    }
    Ok(endpoint)
}

fn transport(patience: Duration) -> Result<QuicTransportConfig, CommError> {
    let limit = IdleTimeout::try_from(patience)
        .map_err(|e| CommError::io("idle timeout of", &"QUIC", &std::io::Error::other(e)))?;
    Ok(QuicTransportConfig::builder()
        // One stream, and a small window for the whole connection, until the peer has proven that it belongs to
        // the job. Then `Network::connect` raises both.
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .receive_window(VarInt::from_u32(UNPROVEN))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .send_window(u64::from(WINDOW_OF_ALL))
        .datagram_receive_buffer_size(None)
        .max_idle_timeout(Some(limit))
        .keep_alive_interval(patience / 6)
        .default_path_keep_alive_interval(patience / 6)
        .build())
}
