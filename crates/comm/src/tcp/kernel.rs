//! Statistics of a connection from the system's TCP: `TCP_INFO` on Linux. On other systems there are none.

use std::net::TcpStream;

use farflung_base::Nanos;

/// Statistics of one connection since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Connection {
    pub(super) round_trip: Option<Nanos>,
    pub(super) least_round_trip: Option<Nanos>,
    /// Bytes per second of the data that was confirmed last.
    pub(super) rate: Option<u64>,
    /// Whether there was too little to send to fill the path.
    pub(super) rate_is_least: bool,
    pub(super) packets: u64,
    pub(super) retransmissions: u64,
    /// Bytes in the socket that have not been sent yet.
    pub(super) unsent: u64,
    /// Packets that were sent and not confirmed.
    pub(super) unconfirmed: u64,
    /// Number of times in succession that the same data was sent again without being confirmed.
    pub(super) timeouts: u8,
    /// Payload of the largest packets that it sends, in bytes.
    pub(super) packet_bytes: u64,
}

/// Returns the system's statistics of a connection; `None` if the system has none.
#[cfg(target_os = "linux")]
pub(super) fn ask(socket: &TcpStream) -> Option<Connection> {
    use std::os::fd::AsRawFd as _;

    // No kernel so far writes more than this.
    let mut info = [0_u8; 512];
    let mut len = info.len() as libc::socklen_t;
    #[expect(unsafe_code, reason = "rustix has no call for this option")]
    // SAFETY: the descriptor is open while `socket` is borrowed; the system writes at most `len` bytes to
    // `info`, any of which are valid, and their number to `len`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    (result == 0).then(|| read(&info[..info.len().min(len as usize)]))
}

#[cfg(not(target_os = "linux"))]
pub(super) fn ask(_: &TcpStream) -> Option<Connection> {
    None
}

/// The first of several fields of a byte that are a bit wide.
const FIRST_BIT: u8 = if cfg!(target_endian = "big") { 0x80 } else { 1 };

/// Reads `struct tcp_info` of `linux/tcp.h`. Its fields never move; newer kernels append fields. A field that
/// an older kernel does not have is `None` or 0.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "the layout is that of Linux"))]
fn read(info: &[u8]) -> Connection {
    let field = |at: usize| {
        let bytes = info.get(at..at + 4)?;
        Some(u64::from(u32::from_ne_bytes(bytes.try_into().ok()?)))
    };
    let long = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    let micros = |at| field(at).filter(|&us| us > 0 && us < u64::from(u32::MAX)).map(Nanos::from_micros);
    Connection {
        timeouts: info.get(2).copied().unwrap_or(0),
        packet_bytes: field(16).unwrap_or(0),
        unconfirmed: field(24).unwrap_or(0),
        round_trip: micros(68),
        retransmissions: field(100).unwrap_or(0),
        unsent: field(144).unwrap_or(0),
        least_round_trip: micros(148),
        packets: field(156).unwrap_or(0),
        rate: long(160).filter(|&rate| rate > 0),
        // The first of the bits of byte 7, from the end at which the system's compiler begins.
        rate_is_least: info.get(7).is_some_and(|bits| bits & FIRST_BIT != 0),
    }
}

/// Drops what arrives at a socket, until the filter is removed again.
#[cfg(all(test, target_os = "linux"))]
pub(super) fn drop_packets(socket: &TcpStream, drops: bool) {
    use std::os::fd::AsRawFd as _;

    // `return 0`: keeps no byte of a packet.
    let mut code = [libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 }];
    let program = libc::sock_fprog { len: 1, filter: code.as_mut_ptr() };
    let option = if drops { libc::SO_ATTACH_FILTER } else { libc::SO_DETACH_FILTER };
    #[expect(unsafe_code, reason = "rustix has no call for filters")]
    // SAFETY: the program and its only instruction live until the call returns, which copies them.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_kernel_tells_less() {
        let mut info = [0; 240];
        for (at, value) in [(16, 1448_u32), (24, 9), (68, 1500), (100, 3), (144, 77), (148, 900), (156, 1000)]
        {
            info[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        info[2] = 4;
        info[160..168].copy_from_slice(&12_500_000_u64.to_ne_bytes());
        let all = Connection {
            round_trip: Some(Nanos::from_micros(1500)),
            least_round_trip: Some(Nanos::from_micros(900)),
            rate: Some(12_500_000),
            rate_is_least: false,
            packets: 1000,
            retransmissions: 3,
            unsent: 77,
            unconfirmed: 9,
            timeouts: 4,
            packet_bytes: 1448,
        };
        assert_eq!(read(&info), all);
        info[7] = FIRST_BIT;
        assert_eq!(read(&info), Connection { rate_is_least: true, ..all });
        info[7] = !FIRST_BIT;
        assert_eq!(read(&info), all);
        // The struct of Linux 3.0 ends after the retransmissions.
        let oldest = Connection { least_round_trip: None, rate: None, packets: 0, unsent: 0, ..all };
        assert_eq!(read(&info[..104]), oldest);
        assert_eq!(read(&[]), Connection::default());
        assert_eq!(read(&info[..160]), Connection { rate: None, ..all });
        // A round trip of 0 or `u32::MAX` means that none was measured yet.
        info[68..72].fill(0);
        info[148..152].fill(0xFF);
        assert_eq!(read(&info), Connection { round_trip: None, least_round_trip: None, ..all });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn packets_that_are_lost_are_counted_when_they_are_sent_again() {
        use std::io::{Read as _, Write as _};
        use std::time::Duration;

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        let mut got = [0; 5];
        sender.write_all(b"clean").unwrap();
        receiver.read_exact(&mut got).unwrap();
        receiver.write_all(b"reply").unwrap();
        sender.read_exact(&mut got).unwrap();
        let clean = ask(&sender).unwrap();
        assert_eq!((clean.retransmissions, clean.packets, clean.unsent), (0, 1, 0), "{clean:?}");
        let (last, least) = (clean.round_trip.unwrap(), clean.least_round_trip.unwrap());
        assert!(Nanos(0) < least && least <= last && last < Nanos::from_millis(1_000), "{clean:?}");

        drop_packets(&receiver, true);
        sender.write_all(b"again").unwrap();
        std::thread::sleep(Duration::from_millis(700));
        drop_packets(&receiver, false);
        receiver.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"again");
        let lossy = ask(&sender).unwrap();
        assert!(lossy.retransmissions > 0 && lossy.packets > 1 + lossy.retransmissions, "{lossy:?}");
    }
}
