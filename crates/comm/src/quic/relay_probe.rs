//! A short check whether a relay answers, so that a process which starts does not wait long for one that is not
//! there, or for another program at its address.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::thread;
use std::time::Duration;

use ::iroh::RelayUrl;

use crate::deadline::Deadline;

/// Time limit for a connection to one address, of which a few are tried.
const CONNECTING: Duration = Duration::from_secs(1);
const MOST_TRIED: usize = 2;
/// Time limit for the answer: a relay answers without doing anything else first.
const ANSWERING: Duration = Duration::from_secs(2);
/// The path at which a relay answers everybody.
const PATH: &str = "/ping";
/// Length of the beginning of an answer over HTTP up to its status, such as `HTTP/1.1 200`.
const HEAD: usize = 12;

/// Returns whether one of these relays answers; they are asked at the same time.
pub(super) fn answers_any(relays: &[RelayUrl]) -> bool {
    thread::scope(|scope| {
        let asking: Vec<_> = relays.iter().map(|relay| scope.spawn(|| answers(relay))).collect();
        // All are joined: a thread that panicked has no answer.
        asking.into_iter().filter_map(|thread| thread.join().ok()).fold(false, |any, one| any | one)
    })
}

/// Returns whether a relay answers. One with `https` is not spoken to in TLS: it counts if it answers anything,
/// or closes the connection.
fn answers(relay: &RelayUrl) -> bool {
    let host = relay.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let Some(port) = relay.port_or_known_default() else { return false };
    let addresses = (host, port).to_socket_addrs().into_iter().flatten();
    let is_tls = relay.scheme() == "https";
    let named = relay.authority().rsplit_once('@').map_or(relay.authority(), |(_, named)| named);
    let answers = |at: SocketAddr| match head(&at, named) {
        Ok(head) => is_tls || head.starts_with(b"HTTP/1.") && head.ends_with(b" 200"),
        // What was a request in clear may be answered by a reset.
        Err(error) if is_tls && is_closed(error.kind()) => true,
        Err(error) => {
            tracing::debug!(%relay, %at, %error, "the relay does not answer, and is not waited for");
            false
        }
    };
    addresses.take(MOST_TRIED).any(answers)
}

/// Returns whether the other side has closed a connection that it had accepted.
const fn is_closed(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe)
}

/// Sends a request over HTTP, and returns the first bytes of the answer, up to its status. They are fewer if
/// the connection is closed before.
///
/// Errors: those of the connection; [`ErrorKind::WouldBlock`] or `TimedOut` if no answer comes in time.
fn head(at: &SocketAddr, host: &str) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(at, CONNECTING)?;
    let until = Deadline::after(ANSWERING);
    stream.set_write_timeout(Some(ANSWERING))?;
    write!(stream, "GET {PATH} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
    let mut head = [0; HEAD];
    let mut filled = 0;
    while filled < HEAD {
        let Some(left) = until.remaining() else { return Err(ErrorKind::TimedOut.into()) };
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut head[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(head[..filled].to_vec())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::relay::{Relay, RelayConfig};
    use super::*;

    fn at(listener: &TcpListener) -> RelayUrl {
        format!("http://{}", listener.local_addr().unwrap()).parse().unwrap()
    }

    #[test]
    fn a_relay_that_is_not_there_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = at(&listener);
        drop(listener);
        assert!(!answers(&url));
        assert!(!answers(&"http://no-such-host.invalid:1".parse().unwrap()));
    }

    #[test]
    fn a_relay_answers_and_a_program_that_accepts_and_is_silent_does_not() {
        let relay = Relay::start(&RelayConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
        let url: RelayUrl = relay.url().parse().unwrap();
        assert!(answers(&url));
        // The system accepts connections that the program never takes.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let limit = head(&silent.local_addr().unwrap(), "localhost").unwrap_err();
        assert!(matches!(limit.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{limit}");
        assert!(!answers_any(&[at(&silent)]));
        assert!(answers_any(&[at(&silent), url]));
    }

    #[test]
    fn another_program_that_speaks_http_is_no_relay() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = at(&listener);
        let serving = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"HTTP/1.1 404 Not Found\r\n\r\n").unwrap();
            // Until the other side has closed it: closing first would drop what it has not read yet.
            let _ = stream.read_to_end(&mut Vec::new());
        });
        assert!(!answers(&url));
        serving.join().unwrap();
    }
}
