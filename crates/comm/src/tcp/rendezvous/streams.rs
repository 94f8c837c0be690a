//! Further streams between ranks that are already connected. In each round every rank opens a new listener and
//! sends its address to the higher ranks over the existing streams. Each rank connects to the lower ones.

use std::net::{IpAddr, SocketAddr};

use farflung_base::Rank;

use super::super::listeners::Listeners;
use super::super::stream::Stream;
use super::super::target::Target;
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
    let at = config.listen.or_else(|| common_address(met));
    let listeners = match at {
        Some(at) => Listeners::first_of(&[SocketAddr::new(at, 0)]),
        None => Listeners::everywhere(0),
    };
    let listening = |e: std::io::Error| {
        let place = at.map_or_else(|| "all addresses of this machine".to_owned(), |at| at.to_string());
        CommError::io("listen at", &place, &e)
    };
    let listeners = listeners.map_err(listening)?;
    let own = listeners.address().map_err(listening)?.to_string();
    let (lower, higher) = met.split_at(config.rank as usize);
    // The first entry of `higher` is this rank itself, to which there is no stream.
    for (rank, stream) in (config.rank + 1..).zip(higher.iter().flatten()) {
        hello(config, &own, |hello| stream.send_message(hello))
            .map_err(|e| CommError::io("send the greeting to", &Rank(rank), &e))?;
    }
    let mut lower_targets = Vec::new();
    for (rank, stream) in lower.iter().flatten().enumerate() {
        let peer =
            stream.socket.peer_addr().map_err(|e| CommError::io("socket of", &Rank(rank as u32), &e))?;
        let port = answer(config, &peer.to_string(), stream, until, |message| match message {
            Control::Hello { rank: by, listen, .. } if *by as usize == rank => {
                listen.parse::<SocketAddr>().ok().map(|address| address.port())
            }
            _ => None,
        })?;
        lower_targets.push((rank, Target::at(SocketAddr::new(peer.ip(), port))));
    }
    pairwise(config, &listeners, &own, lower_targets, until)
}

/// Returns the address at which all peers reach this rank: the local address that all streams share; `None` if
/// they differ.
fn common_address(met: &Streams) -> Option<IpAddr> {
    let own: Vec<IpAddr> =
        met.iter().flatten().filter_map(|stream| Some(stream.socket.local_addr().ok()?.ip())).collect();
    own.first().filter(|first| own.iter().all(|ip| ip == *first)).copied()
}
