//! Further streams between ranks that are already connected. In each round every rank opens a new listener and
//! sends its address to the higher ranks over the existing streams. Each rank connects to the lower ones.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use farflung_base::Rank;

use super::super::stream::Stream;
use super::{Config, Streams, answer, hello, pairwise};
use crate::CommError;
use crate::control::Control;
use crate::deadline::Deadline;

/// Opens as many streams to each peer as the configuration requires. The existing stream comes first; there are
/// none to this rank itself.
pub(super) fn multiply(
    config: &Config,
    met: Streams,
    until: Deadline,
) -> Result<Vec<Vec<Stream>>, CommError> {
    let mut rounds = Vec::new();
    for _ in 1..config.streams {
        rounds.push(another(config, &met, until)?);
    }
    let mut all: Vec<Vec<Stream>> = met.into_iter().map(Vec::from_iter).collect();
    for round in rounds {
        for (streams, another) in all.iter_mut().zip(round) {
            streams.extend(another);
        }
    }
    Ok(all)
}

fn another(config: &Config, met: &Streams, until: Deadline) -> Result<Streams, CommError> {
    let at = config.listen.unwrap_or_else(|| common_address(met));
    let listening = |e: std::io::Error| CommError::io("listen at", &at, &e);
    let listener = TcpListener::bind((at, 0)).map_err(listening)?;
    let own = listener.local_addr().map_err(listening)?.to_string();
    let (lower, higher) = met.split_at(config.rank as usize);
    // The first entry of `higher` is this rank itself, to which there is no stream.
    for (rank, stream) in (config.rank + 1..).zip(higher.iter().flatten()) {
        hello(config, &own, |hello| stream.send_message(hello))
            .map_err(|e| CommError::io("send the greeting to", &Rank(rank), &e))?;
    }
    let mut addresses = Vec::new();
    for (rank, stream) in lower.iter().flatten().enumerate() {
        let peer =
            stream.socket.peer_addr().map_err(|e| CommError::io("socket of", &Rank(rank as u32), &e))?;
        let port = answer(config, &peer.to_string(), stream, until, |message| match message {
            Control::Hello { rank: by, listen, .. } if *by as usize == rank => {
                listen.parse::<SocketAddr>().ok().map(|address| address.port())
            }
            _ => None,
        })?;
        addresses.push((rank, vec![SocketAddr::new(peer.ip(), port)]));
    }
    pairwise(config, &listener, &own, &addresses, until)
}

/// Returns the address at which all peers reach this rank: the local address that all streams share, or the
/// unspecified one if they differ.
fn common_address(met: &Streams) -> IpAddr {
    let own: Vec<IpAddr> =
        met.iter().flatten().filter_map(|stream| Some(stream.socket.local_addr().ok()?.ip())).collect();
    match own.first() {
        Some(first) if own.iter().all(|ip| ip == first) => *first,
        _ if own.iter().any(IpAddr::is_ipv6) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    }
}
