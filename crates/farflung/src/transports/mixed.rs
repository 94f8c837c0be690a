//! Several networks in one run: processes of a machine share memory, others connect over TCP where it reaches
//! and over QUIC elsewhere.

use farflung_comm::Communicator;

use super::JoinSettings;
use crate::{Error, Result};

/// Meets the other processes with transport `auto`, if there are relays: the settings' or the ticket's. `None`
/// without relays, and, if only the ticket has relays, in a build without QUIC: then processes meet over TCP.
///
/// Errors: relays of the settings in a build without the feature `iroh`; those of the networks.
pub fn meet_by_auto(meeting: &JoinSettings) -> Result<Option<Communicator>> {
    let is_wanted = !meeting.relays.is_empty();
    if cfg!(feature = "iroh") && (is_wanted || meeting.master.split(',').any(is_second_network_address)) {
        return meet(meeting, true).map(Some);
    }
    if is_wanted && meeting.world_size > 1 {
        return Err(missing("auto with --relay"));
    }
    Ok(None)
}

#[cfg(not(feature = "iroh"))]
pub(super) fn meet(_: &JoinSettings, _: bool) -> Result<Communicator> {
    Err(missing("iroh"))
}

/// Meets the other processes over QUIC, and over TCP as well if `sockets` is set.
#[cfg(feature = "iroh")]
pub(super) fn meet(meeting: &JoinSettings, sockets: bool) -> Result<Communicator> {
    use farflung_base::PeerId;
    use farflung_comm::mixed::{self, Config};
    use farflung_comm::quic::{Socket, SocketConfig};
    use farflung_comm::tcp::GateConfig;

    let JoinSettings { rank, world_size, master, security, job, deadline, .. } = meeting;
    if *world_size == 1 {
        return super::tcp::meet(meeting);
    }
    let is_host = *rank == 0;
    let (mut relays, addresses): (Vec<String>, Vec<String>) =
        master.split(',').map(str::to_owned).partition(|one| is_second_network_address(one));
    for relay in &meeting.relays {
        if !relays.contains(relay) {
            relays.push(relay.clone());
        }
    }
    let mut socket = SocketConfig::new(security.clone());
    socket.relays.clone_from(&relays);
    socket.listen = over_udp(addresses.first(), is_host);
    // Rank 0 listens at the first of its addresses; the others try all of them.
    let listen = addresses.first().map_or("0.0.0.0:0", |first| first).to_owned();
    let mut gate = GateConfig::new(if is_host { listen } else { String::new() }, job, security.clone());
    gate.deadline = (*deadline).into();
    gate.shared_memory = meeting.shared_memory;
    let gate = gate.over_quic(&Socket::open(&socket)?, sockets);
    let by_quic: Vec<String> = addresses.iter().map(|one| format!("quic:{one}")).chain(relays).collect();
    let host = [addresses.join(","), by_quic.join(",")].into_iter().filter(|one| !one.is_empty()).collect();
    let mut join = Config::new(*rank, *world_size, host, gate);
    join.pace = meeting.pace;
    let end = mixed::join(&join)?;
    for peer in (0..*world_size).map(PeerId).filter(|peer| peer.0 != *rank) {
        if end.is_over_second_network(peer) {
            let path = end.second_network_path(peer).unwrap_or_else(|| "path not known yet".to_owned());
            tracing::info!(peer = peer.0, path, "connected over QUIC");
        } else {
            tracing::info!(peer = peer.0, "connected over TCP");
        }
    }
    Ok(Communicator::new(end).with_deadline(*deadline))
}

/// Returns the UDP address at which a process listens. `first` is the address of rank 0. Rank 0 takes its port,
/// other ranks any port. The IP address is the loopback if rank 0 has that, else the unspecified one. `None` if
/// there is no address, or if it cannot be resolved.
#[cfg(feature = "iroh")]
fn over_udp(first: Option<&String>, is_host: bool) -> Option<String> {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};

    let first = first?.to_socket_addrs().ok()?.next()?;
    let ip = match first.ip() {
        ip if ip.is_loopback() => ip,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    Some(SocketAddr::new(ip, if is_host { first.port() } else { 0 }).to_string())
}

/// Returns the error of a setting that needs the feature `iroh`.
pub(super) fn missing(value: &str) -> Error {
    Error::Setting {
        field: "transport",
        value: value.to_owned(),
        expected: "a build with the feature `iroh`: cargo build --release --features iroh".to_owned(),
    }
}

/// Returns whether an address is that of a relay or of QUIC.
#[must_use]
pub fn is_second_network_address(address: &str) -> bool {
    address.contains("://") || address.starts_with("quic:")
}
