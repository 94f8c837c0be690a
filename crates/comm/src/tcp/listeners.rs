//! The sockets at which a process listens: all addresses of a name that are this machine's, or all addresses of
//! this machine. It does not depend on who connects.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, ToSocketAddrs};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::CommError;
use crate::secure::Security;

/// Number of connections that the system holds until they are accepted, per socket.
const BACKLOG: i32 = 128;

/// Kind of error for an address without a port.
const NO_PORT: ErrorKind = ErrorKind::InvalidInput;

/// Listening sockets with the same port, which do not block.
#[derive(Debug)]
pub(super) struct Listeners {
    sockets: Vec<TcpListener>,
}

/// What an address to listen at was given for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AddressUse {
    /// Others look for this process at this address.
    Meet,
    /// This process is to listen there, and others get another address.
    Listen,
}

/// Returns whether a name stands for the loopback on every machine.
fn is_localhost(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.to_ascii_lowercase().starts_with("localhost.")
}

/// Returns the host of `host:port`, without the brackets of IPv6.
pub(super) fn host_of(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']'])
}

/// Returns the IP address that the host of `host:port` is, unless it is a name.
pub(super) fn literal_ip(address: &str) -> Option<IpAddr> {
    host_of(address).parse().ok()
}

impl Listeners {
    /// Listens at all addresses of `address` (`host:port`) that are this machine's.
    ///
    /// A name may be the loopback on its own machine. Then it listens at all addresses of this machine, if
    /// connections are encrypted or the network is trusted; else at the loopback. An IP address is taken as it
    /// is, and so is `localhost` as [`AddressUse::Listen`]. With [`AddressUse::Meet`], it also listens at all
    /// addresses if the name is not known here, or if its addresses are those of a router. With port 0 the
    /// system chooses one.
    ///
    /// # Errors
    /// [`CommError::Io`] if `address` is no `host:port`, the port is in use, or no address can be used.
    pub(super) fn of_name(
        what: &'static str,
        address: &str,
        used: AddressUse,
        security: &Security,
    ) -> Result<Self, CommError> {
        let failed = |e: &io::Error| CommError::io("listen at", &address, e);
        let host = host_of(address);
        let literal = literal_ip(address);
        let may_be_everywhere = security.allows_all_addresses();
        let may_be_elsewhere = may_be_everywhere && used == AddressUse::Meet;
        let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        let port = port.ok_or_else(|| CommError::io(what, &address, &NO_PORT.into()))?;
        let everywhere = |reason: Option<String>| {
            let listeners = Self::everywhere(port).map_err(|e| failed(&e))?;
            if let Some(reason) = reason {
                tracing::warn!(
                    "listening at {listeners}, because {reason}; other machines need a name or address at which \
                     they reach this one"
                );
            }
            Ok(listeners)
        };
        if may_be_everywhere && literal.is_some_and(|ip| ip.is_unspecified()) {
            return everywhere(None);
        }
        let resolved = match address.to_socket_addrs() {
            Ok(resolved) => resolved,
            Err(e) if may_be_elsewhere => {
                return everywhere(Some(format!("`{host}` is not known here: {e}")));
            }
            Err(e) => return Err(CommError::io(what, &address, &e)),
        };
        let (mut sockets, mut wrong) = (Vec::new(), None);
        for mut at in resolved {
            // With port 0, all sockets get the port of the first.
            let own = sockets.first().and_then(|socket: &TcpListener| socket.local_addr().ok());
            at.set_port(own.map_or(at.port(), |own| own.port()));
            match bound(at) {
                Ok(socket) => sockets.push(socket),
                // A name may have an address twice.
                Err(e) if e.kind() == ErrorKind::AddrInUse && is_among(at, &sockets) => {}
                Err(e) if e.kind() == ErrorKind::AddrInUse => return Err(failed(&e)),
                Err(e) => wrong = Some(e),
            }
        }
        if let (true, Some(wrong)) = (sockets.is_empty(), wrong) {
            if may_be_elsewhere && wrong.kind() == ErrorKind::AddrNotAvailable {
                return everywhere(Some(format!("`{host}` is no address of this machine")));
            }
            return Err(failed(&wrong));
        }
        let listeners = Self { sockets };
        let means_loopback = literal.is_some() || used == AddressUse::Listen && is_localhost(host);
        if listeners.is_loopback() && may_be_everywhere && !means_loopback {
            // The port must be free again.
            drop(listeners);
            return everywhere(Some(format!("`{host}` is the loopback here")));
        }
        Ok(listeners)
    }

    /// Listens at all addresses of this machine.
    pub(super) fn everywhere(port: u16) -> io::Result<Self> {
        let first = bound((Ipv4Addr::UNSPECIFIED, port).into());
        let port = match &first {
            Ok(socket) => socket.local_addr()?.port(),
            Err(_) => port,
        };
        // A machine may have only one of the two kinds of addresses.
        match (first, bound_to_v6(port)) {
            (Err(e), _) | (Ok(_), Err(e)) if e.kind() == ErrorKind::AddrInUse => Err(e),
            (Err(e), Err(_)) => Err(e),
            (first, second) => Ok(Self { sockets: [first, second].into_iter().flatten().collect() }),
        }
    }

    /// Listens at the first of these addresses that can be used.
    pub(super) fn first_of(addresses: &[SocketAddr]) -> io::Result<Self> {
        let socket = TcpListener::bind(addresses)?;
        socket.set_nonblocking(true)?;
        Ok(Self { sockets: vec![socket] })
    }

    /// Accepts a connection, if one has arrived.
    pub(super) fn accept(&self) -> Option<(TcpStream, SocketAddr)> {
        self.sockets.iter().find_map(|socket| socket.accept().ok())
    }

    /// Returns what to poll for new connections.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN))
    }

    /// Returns the addresses of the sockets.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.sockets.iter().filter_map(|socket| socket.local_addr().ok()).collect()
    }

    /// Returns the address of the first socket.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.sockets.first().ok_or(ErrorKind::AddrNotAvailable)?.local_addr()
    }

    /// Returns whether other machines cannot reach it.
    pub(super) fn is_loopback(&self) -> bool {
        self.addresses().iter().all(|at| at.ip().is_loopback())
    }
}

impl fmt::Display for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self.addresses();
        match own.first() {
            Some(first) if first.ip().is_unspecified() => {
                write!(f, "port {} of all addresses of this machine", first.port())
            }
            _ => f.write_str(&own.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}

fn is_among(at: SocketAddr, sockets: &[TcpListener]) -> bool {
    sockets.iter().any(|socket| socket.local_addr().is_ok_and(|own| own == at))
}

fn bound(at: SocketAddr) -> io::Result<TcpListener> {
    let socket = TcpListener::bind(at)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Listens at all IPv6 addresses, and not at those of IPv4, for which there is another socket.
fn bound_to_v6(port: u16) -> io::Result<TcpListener> {
    let socket = rustix::net::socket(AddressFamily::INET6, SocketType::STREAM, None)?;
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_ipv6_v6only(&socket, true)?;
    rustix::net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0))?;
    rustix::net::listen(&socket, BACKLOG)?;
    let socket = TcpListener::from(socket);
    socket.set_nonblocking(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(address: &str, used: AddressUse, security: &Security) -> Result<Listeners, CommError> {
        Listeners::of_name("own address", address, used, security)
    }

    fn is_everywhere(listeners: &Listeners) -> bool {
        listeners.addresses().iter().all(|at| at.ip().is_unspecified())
    }

    #[test]
    fn a_name_that_is_the_loopback_is_served_at_all_addresses_where_that_is_allowed() {
        let trusted = Security::unencrypted().trusting_network();
        let open = listen("localhost:0", AddressUse::Meet, &trusted).unwrap();
        let port = open.address().unwrap().port();
        assert!(is_everywhere(&open), "{open}");
        assert_eq!(open.to_string(), format!("port {port} of all addresses of this machine"));
        for (address, used, security) in [
            ("localhost:0", AddressUse::Meet, &Security::unencrypted()),
            // `--listen localhost:0` asks for the loopback.
            ("localhost:0", AddressUse::Listen, &trusted),
            // An address, unlike a name, is meant as it is.
            ("127.0.0.1:0", AddressUse::Meet, &trusted),
        ] {
            let closed = listen(address, used, security).unwrap();
            assert!(closed.is_loopback(), "{address} {used:?}: {closed}");
        }
    }

    #[test]
    fn what_is_not_this_machine_is_served_at_all_addresses_where_that_is_allowed() {
        let trusted = Security::unencrypted().trusting_network();
        for address in ["192.0.2.7:0", "no-such-host.invalid:0"] {
            assert!(is_everywhere(&listen(address, AddressUse::Meet, &trusted).unwrap()));
            for (used, security) in
                [(AddressUse::Meet, &Security::unencrypted()), (AddressUse::Listen, &trusted)]
            {
                let error = listen(address, used, security).unwrap_err().to_string();
                assert!(error.contains(address), "{error}");
            }
        }
    }

    #[test]
    fn a_port_in_use_and_an_address_without_a_port_are_errors() {
        let trusted = Security::unencrypted().trusting_network();
        let taken = listen("0.0.0.0:0", AddressUse::Listen, &trusted).unwrap();
        let port = taken.address().unwrap().port();
        for host in ["127.0.0.1", "localhost", "0.0.0.0"] {
            let error = listen(&format!("{host}:{port}"), AddressUse::Meet, &trusted).unwrap_err();
            assert!(matches!(error, CommError::Io { kind: ErrorKind::AddrInUse, .. }), "{host}: {error}");
        }
        let error = listen("nonsense", AddressUse::Meet, &trusted).unwrap_err();
        assert!(matches!(error, CommError::Io { what: "own address", .. }), "{error}");
    }

    #[test]
    fn one_port_is_heard_over_both_kinds_of_addresses() {
        let open = Listeners::everywhere(0).unwrap();
        for at in open.addresses() {
            let ip: IpAddr = if at.is_ipv4() { [127, 0, 0, 1].into() } else { Ipv6Addr::LOCALHOST.into() };
            let _client = TcpStream::connect((ip, at.port())).unwrap();
            while open.accept().is_none() {
                std::thread::yield_now();
            }
        }
    }
}
