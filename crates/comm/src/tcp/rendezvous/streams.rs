//! Further streams between ranks that have met: each round listens afresh and says where on the streams that
//! are there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use farflung_base::Rank;

use super::super::stream::Stream;
use super::{Config, Streams, answer, hello, pairwise};
use crate::CommError;
use crate::control::Control;
use crate::until::Until;

/// As many streams to each peer as the config asks for, the one that is there first; none to oneself.
pub(super) fn multiply(config: &Config, met: Streams, until: Until) -> Result<Vec<Vec<Stream>>, CommError> {
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

fn another(config: &Config, met: &Streams, until: Until) -> Result<Streams, CommError> {
    let at = config.listen.unwrap_or_else(|| common_address(met));
    let listening = |e: std::io::Error| CommError::io("listen at", &at, &e);
    let listener = TcpListener::bind((at, 0)).map_err(listening)?;
    let own = listener.local_addr().map_err(listening)?.to_string();
    let (lower, higher) = met.split_at(config.rank as usize);
    // The first of the higher ones is this rank itself, to which there is no stream.
    for (rank, stream) in (config.rank + 1..).zip(higher.iter().flatten()) {
        hello(config, &own, |hello| stream.say(hello))
            .map_err(|e| CommError::io("hello to", &Rank(rank), &e))?;
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

/// Where all peers reach this rank: at the address that all streams have here, or at any.
fn common_address(met: &Streams) -> IpAddr {
    let own: Vec<IpAddr> =
        met.iter().flatten().filter_map(|stream| Some(stream.socket.local_addr().ok()?.ip())).collect();
    match own.first() {
        Some(first) if own.iter().all(|ip| ip == first) => *first,
        _ if own.iter().any(IpAddr::is_ipv6) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    }
}
