//! Detects a path on which small packets arrive and large ones vanish: a tunnel or router with a smaller packet
//! size whose message about it ("fragmentation needed") is dropped by a firewall. Connections are made and
//! greetings pass, but the first large message never arrives.

use std::io::ErrorKind;
use std::net::TcpStream;
use std::time::Duration;

use super::is_within_one_machine;
use super::kernel::{self, Connection};

/// Number of times in succession that the same data must have been sent again: after about 1.4 s if packets
/// usually arrive within milliseconds.
const TIMEOUTS: u8 = 3;
/// Payload in bytes of the packets that every path of IPv4 carries. If packets are not larger, their size is
/// not the cause.
const CARRIED_BY_ALL: u64 = 536;
/// Time in which the peer's machine must answer a small packet.
const ANSWER: Duration = Duration::from_millis(500);

/// What a user can do about lost packets.
pub(super) const ADVICE: &str = "probably a tunnel or router on the way drops large packets: try a smaller packet size (MTU) on this \
     machine's network interface, such as `ip link set dev NAME mtu 1280`";

/// Returns whether data that was sent over a connection is not confirmed. Takes no time, unlike [`lost`].
pub(super) fn is_unconfirmed(socket: &TcpStream) -> bool {
    kernel::ask(socket).is_some_and(|sent| is_stuck(&sent))
}

/// Returns the likely cause if data that was sent over a connection is not confirmed, although the peer's
/// machine answers small packets. Takes up to [`ANSWER`] if data is not confirmed.
pub(super) fn lost(socket: &TcpStream) -> Option<String> {
    if is_within_one_machine(socket) { None } else { diagnose(socket) }
}

fn diagnose(socket: &TcpStream) -> Option<String> {
    let at = socket.peer_addr().ok()?;
    let sent = kernel::ask(socket).filter(is_stuck)?;
    // A refusal is an answer, too.
    let answers = match TcpStream::connect_timeout(&at, ANSWER) {
        Ok(_) => true,
        Err(e) => e.kind() == ErrorKind::ConnectionRefused,
    };
    answers.then(|| {
        let Connection { packet_bytes, timeouts, .. } = sent;
        format!(
            "the machine of {at} answers small packets, but does not confirm those with {packet_bytes} bytes of \
             data, which were sent {timeouts} times more"
        )
    })
}

fn is_stuck(sent: &Connection) -> bool {
    sent.unconfirmed > 0 && sent.timeouts >= TIMEOUTS && sent.packet_bytes > CARRIED_BY_ALL
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_large_packets_that_are_sent_again_and_again_are_a_sign() {
        let stuck = Connection { unconfirmed: 2, timeouts: 3, packet_bytes: 1448, ..Connection::default() };
        assert!(is_stuck(&stuck));
        for other in [
            Connection { unconfirmed: 0, ..stuck },
            Connection { timeouts: 2, ..stuck },
            Connection { packet_bytes: 536, ..stuck },
        ] {
            assert!(!is_stuck(&other), "{other:?}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_peer_that_gets_no_packet_but_whose_machine_answers_is_a_sign() {
        use std::io::Write as _;

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        assert_eq!(diagnose(&sender), None);
        kernel::drop_packets(&receiver, true);
        sender.write_all(&[0; 2000]).unwrap();
        let cause = loop {
            match diagnose(&sender) {
                Some(cause) => break cause,
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let at = listener.local_addr().unwrap();
        assert!(cause.starts_with(&format!("the machine of {at} answers small packets")), "{cause}");
        assert_eq!(lost(&sender), None, "within one machine there is no tunnel");
        kernel::drop_packets(&receiver, false);
    }
}
