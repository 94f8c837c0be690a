//! Notices that the process of a silent peer has ended: then the peer's machine answers a datagram to its port
//! with "port unreachable" (ICMP). A slow link, a relay or a firewall that drops packets gives no such answer,
//! so a process behind them is never taken for one that has ended.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ::iroh::TransportAddr;
use ::iroh::endpoint::{Connection, Path};
use tokio::net::UdpSocket;

use crate::memory::real_start;
use crate::second_network::unspecified;

/// Time between two checks whether the peer is silent.
const INTERVAL: Duration = Duration::from_millis(500);
/// Silence after which its port is probed. A peer whose address has just changed sends from the new one sooner.
const SILENT: Duration = Duration::from_secs(2);
/// Time limit for the answer to a probe.
const ANSWER: Duration = Duration::from_millis(300);
/// Number of answers in a row, saying that the port is closed, after which the process counts as ended.
const ANSWERS: u32 = 3;

/// Waits until the peer has been silent and its port has been found closed.
pub(super) async fn wait(connection: &Connection) {
    let mut last: (u64, Instant) = (0, real_start());
    let mut closed = 0;
    loop {
        tokio::time::sleep(INTERVAL).await;
        let received = connection.stats().udp_rx.datagrams;
        if received != last.0 {
            (last, closed) = ((received, real_start()), 0);
        } else if last.1.elapsed() >= SILENT {
            let is_closed = match direct(connection) {
                Some(address) => is_closed(address).await,
                None => false,
            };
            closed = if is_closed { closed + 1 } else { 0 };
            if closed >= ANSWERS {
                return;
            }
        }
    }
}

/// Returns the address of the peer; `None` if a relay is used.
fn direct(connection: &Connection) -> Option<SocketAddr> {
    let paths = connection.paths();
    match paths.iter().find(Path::is_selected)?.remote_addr() {
        TransportAddr::Ip(address) => Some(*address),
        _ => None,
    }
}

/// Returns whether the machine at this address answers that nothing listens at the port. The datagram is too
/// short for QUIC, which ignores it.
async fn is_closed(address: SocketAddr) -> bool {
    let own = SocketAddr::new(unspecified(address.ip()), 0);
    let answered = async {
        let socket = UdpSocket::bind(own).await?;
        socket.connect(address).await?;
        socket.send(&[0]).await?;
        socket.recv(&mut [0; 1]).await
    };
    let answered = tokio::time::timeout(ANSWER, answered).await;
    matches!(answered, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused)
}
