//! Connecting to another process: resolves its address, tries the addresses in turn, and records the outcome of
//! the last attempt at each.

use std::collections::BTreeMap;
use std::io::{Error as IoError, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::stream::Stream;
use crate::CommError;
use crate::deadline::Deadline;
use crate::secure::{PublicKey, Role, Security};

/// Time limit of one attempt to connect, so that a host that drops packets does not use up the time of the
/// others.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Time after which names are resolved again, since a name may become known only after a machine has started.
const RESOLVED_FOR: Duration = Duration::from_secs(1);
/// Time between two attempts to connect.
pub(super) const RETRY: Duration = Duration::from_millis(10);
/// Greatest number of addresses in [`Target::outcome`].
const SHOWN: usize = 4;

/// An address at which another process is looked for.
#[derive(Debug)]
pub(super) struct Target {
    what: &'static str,
    /// `host:port`, or several separated by commas.
    given: String,
    addresses: Vec<SocketAddr>,
    /// The names that could not be resolved, with the resolver's errors.
    unresolved: Vec<String>,
    resolved_until: Deadline,
    outcomes: BTreeMap<SocketAddr, String>,
    last: Option<SocketAddr>,
}

/// Resolves a `host:port`, or several separated by commas. Fails only if none of them can be resolved.
pub(super) fn resolve(what: &'static str, address: &str) -> Result<Vec<SocketAddr>, CommError> {
    let mut target = Target::new(what, address)?;
    match target.unresolved.pop().filter(|_| target.addresses.is_empty()) {
        Some(message) => {
            let (address, kind) = (address.to_owned(), ErrorKind::NotFound);
            Err(CommError::Io { what, address, kind, message })
        }
        None => Ok(target.addresses),
    }
}

impl Target {
    /// Resolves `given`: `host:port`, or several separated by commas. A name that is not known yet is resolved
    /// again at later attempts.
    ///
    /// # Errors
    /// [`CommError::Io`] if none of them has the form `host:port`.
    pub(super) fn new(what: &'static str, given: &str) -> Result<Self, CommError> {
        let mut target = Self {
            what,
            given: given.to_owned(),
            addresses: Vec::new(),
            unresolved: Vec::new(),
            resolved_until: Deadline::after(RESOLVED_FOR),
            outcomes: BTreeMap::new(),
            last: None,
        };
        target.resolve().map(|()| target)
    }

    /// Makes the target of one address.
    pub(super) fn at(address: SocketAddr) -> Self {
        Self {
            what: "address of a rank",
            given: address.to_string(),
            addresses: vec![address],
            unresolved: Vec::new(),
            resolved_until: Deadline::never(),
            outcomes: BTreeMap::new(),
            last: None,
        }
    }

    fn resolve(&mut self) -> Result<(), CommError> {
        let (mut addresses, mut malformed) = (Vec::new(), None);
        self.unresolved.clear();
        for one in self.given.split(',') {
            match one.to_socket_addrs() {
                Ok(found) => addresses.extend(found),
                Err(e) if e.kind() == ErrorKind::InvalidInput => {
                    malformed = Some(CommError::io(self.what, &one, &e));
                    self.unresolved.push(format!("{one}: {e}"));
                }
                Err(e) => self.unresolved.push(format!("{one}: {e}")),
            }
        }
        if let Some(error) = malformed.filter(|_| addresses.is_empty() && self.unresolved.len() == 1) {
            return Err(error);
        }
        // A resolver that fails for a moment does not make known addresses unknown.
        if !addresses.is_empty() {
            addresses.dedup();
            self.outcomes.retain(|address, _| addresses.contains(address));
            self.addresses = addresses;
        }
        self.resolved_until = Deadline::after(RESOLVED_FOR);
        Ok(())
    }

    /// Tries the addresses in turn, each once, until one can be connected to. If connections are encrypted,
    /// also does the handshake and sends this side's proof. Returns `None` if no address can be connected to.
    ///
    /// If nothing listens yet on a local port in the range of automatically chosen ports, the system may give
    /// the socket that same port and connect it to itself. Such a connection is closed and does not count,
    /// because it would occupy the port.
    pub(super) fn attempt(
        &mut self,
        security: &Security,
        expected: Option<PublicKey>,
        until: Deadline,
    ) -> Result<Option<Stream>, CommError> {
        if self.resolved_until.remaining().is_none() {
            self.resolve()?;
        }
        for address in self.addresses.clone() {
            let Some(left) = until.remaining() else { break };
            let socket = match TcpStream::connect_timeout(&address, left.min(ATTEMPT)) {
                Ok(socket) => socket,
                Err(e) => {
                    self.outcomes.insert(address, said(&e));
                    continue;
                }
            };
            let ends = socket.local_addr().and_then(|own| Ok((own, socket.peer_addr()?)));
            match ends {
                Ok((own, peer)) if own != peer => {}
                Ok(_) => {
                    self.outcomes.insert(address, said(&ErrorKind::ConnectionRefused.into()));
                    continue;
                }
                Err(e) => {
                    self.outcomes.insert(address, said(&e));
                    continue;
                }
            }
            self.last = Some(address);
            self.outcomes.insert(address, "connected".to_owned());
            let made = Stream::new(socket, security, Role::Client, expected);
            let stream = made.map_err(|e| CommError::io("session with", &address, &e))?;
            stream.greet(until).inspect_err(|error| self.note(error))?;
            return Ok(Some(stream));
        }
        Ok(None)
    }

    /// Tries to connect until the deadline. Returns `None` if no address has answered by then.
    pub(super) fn connect(
        &mut self,
        security: &Security,
        expected: Option<PublicKey>,
        until: Deadline,
    ) -> Result<Option<Stream>, CommError> {
        loop {
            match self.attempt(security, expected, until) {
                Ok(None) => {}
                Err(e) if hung_up(&e) => {}
                other => return other,
            }
            let Some(left) = until.remaining() else { return Ok(None) };
            std::thread::sleep(left.min(RETRY));
        }
    }

    /// Records that the connection that was made last has failed.
    pub(super) fn note(&mut self, error: &CommError) {
        let Some(last) = self.last else { return };
        let outcome = if hung_up(error) {
            "connected, and the other side closed the connection".to_owned()
        } else {
            format!("connected, then: {error}")
        };
        self.outcomes.insert(last, outcome);
    }

    /// Describes what the address resolves to, and the outcome of the last attempt at each.
    pub(super) fn outcome(&self) -> String {
        let mut parts: Vec<String> = Vec::new();
        for address in self.addresses.iter().take(SHOWN) {
            let outcome = self.outcomes.get(address).map_or("not tried", String::as_str);
            parts.push(format!("{address} ({outcome})"));
        }
        match self.addresses.len().saturating_sub(SHOWN) {
            0 => {}
            more => parts.push(format!("{more} more")),
        }
        let mut said = Vec::new();
        if !parts.is_empty() {
            said.push(format!("tried {}", parts.join(", ")));
        }
        if let Some(unresolved) = self.unresolved.first() {
            said.push(format!("could not resolve {unresolved}"));
        }
        said.join("; ")
    }
}

/// Returns the words for a failed attempt to connect.
fn said(error: &IoError) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused => "connection refused: nothing listens there".to_owned(),
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            "no answer: no such machine, or a firewall drops the packets".to_owned()
        }
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => "no route".to_owned(),
        _ => error.to_string(),
    }
}

/// Returns whether the error says that the other side ended the connection. A relay, a tunnel or a forwarded
/// port does that while the peer behind it does not listen yet.
pub(super) const fn hung_up(error: &CommError) -> bool {
    matches!(
        error,
        CommError::Io {
            kind: ErrorKind::UnexpectedEof
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::BrokenPipe,
            ..
        }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_that_works_is_enough() {
        let all = resolve("master address", "no-such-host.invalid:1,127.0.0.1:2,[::1]:3").unwrap();
        assert_eq!(all, ["127.0.0.1:2".parse().unwrap(), "[::1]:3".parse().unwrap()]);
        assert!(resolve("master address", "no-such-host.invalid:1").is_err());
    }

    #[test]
    fn what_came_of_each_address_is_said() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        drop(taken);
        let mut target = Target::new("master address", &format!("no-such-host.invalid:1,{address}")).unwrap();
        let reached = target.attempt(&Security::unencrypted(), None, Deadline::after(Duration::from_secs(5)));
        assert!(reached.unwrap().is_none());
        let said = target.outcome();
        assert!(said.contains(&format!("tried {address} (connection refused")), "{said}");
        assert!(said.contains("could not resolve no-such-host.invalid:1: "), "{said}");
    }

    #[test]
    fn a_name_that_is_not_known_yet_is_no_error_but_nonsense_is() {
        let mut target = Target::new("master address", "no-such-host.invalid:1").unwrap();
        let until = Deadline::after(Duration::from_millis(30));
        assert!(target.connect(&Security::unencrypted(), None, until).unwrap().is_none());
        assert!(target.outcome().starts_with("could not resolve no-such-host.invalid:1"));
        assert!(matches!(
            Target::new("master address", "nonsense").unwrap_err(),
            CommError::Io { what: "master address", .. }
        ));
    }
}
