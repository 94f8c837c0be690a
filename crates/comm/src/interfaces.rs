//! The addresses of this machine at which others may reach it. It sends nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

/// Greatest number of addresses of one kind that are returned.
const MOST: usize = 4;

/// Returns the addresses at which other machines may reach this one, those of IPv4 first. Of each kind it is
/// the address from which the system sends to the internet; without a route to there, those of all interfaces.
/// Empty if there is only the loopback.
#[must_use]
pub fn reachable_addresses() -> Vec<IpAddr> {
    // Addresses for documentation, which no machine has.
    let outer_v4 = outer(Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into());
    let outer_v6 = outer(Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into());
    let all = of_interfaces();
    let of_kind = |outer: Option<IpAddr>, is_kind: fn(&IpAddr) -> bool| match outer {
        Some(ip) => vec![ip],
        None => all.iter().copied().filter(is_kind).take(MOST).collect(),
    };
    let v4 = of_kind(outer_v4, IpAddr::is_ipv4);
    v4.into_iter().chain(of_kind(outer_v6, IpAddr::is_ipv6)).collect()
}

/// Returns the address from which the system would send to `other`.
fn outer(any: IpAddr, other: IpAddr) -> Option<IpAddr> {
    let socket = UdpSocket::bind((any, 0)).ok()?;
    // Connecting a UDP socket sends nothing; the system only chooses the local address.
    socket.connect((other, 9)).ok()?;
    socket.local_addr().ok().map(|own| own.ip()).filter(is_reachable)
}

/// Returns whether an address names this machine for others, without the name of an interface.
fn is_reachable(ip: &IpAddr) -> bool {
    let is_link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast() && !is_link_local
}

/// Returns the reachable addresses of all interfaces that are up; none if the system does not tell.
fn of_interfaces() -> Vec<IpAddr> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    #[expect(unsafe_code, reason = "rustix has no call for the addresses of interfaces")]
    // SAFETY: the call writes a list, or nothing if it fails, and `first` is a valid place for its pointer.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = first;
    #[expect(unsafe_code, reason = "the system's list consists of pointers")]
    // SAFETY: each entry and each address is valid until `freeaddrs` below. An address of family `AF_INET` is a
    // `sockaddr_in`, and one of `AF_INET6` a `sockaddr_in6`.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as libc::c_uint == 0 || entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: as above; the address is not null.
        let ip = unsafe {
            match i32::from((*entry.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    IpAddr::from(address.sin_addr.s_addr.to_ne_bytes())
                }
                libc::AF_INET6 => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    IpAddr::from(address.sin6_addr.s6_addr)
                }
                _ => continue,
            }
        };
        if is_reachable(&ip) && !found.contains(&ip) {
            found.push(ip);
        }
    }
    #[expect(unsafe_code, reason = "the system's list must be given back")]
    // SAFETY: the list is that of the call above, and no pointer into it is left.
    unsafe {
        libc::freeifaddrs(first);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_name_no_machine_or_need_an_interface_are_left_out() {
        for (ip, named) in [
            ("10.0.0.1", true),
            ("203.0.113.5", true),
            ("fd77::1", true),
            ("127.0.1.1", false),
            ("0.0.0.0", false),
            ("169.254.1.1", false),
            ("::1", false),
            ("::", false),
            ("fe80::1", false),
            ("ff02::1", false),
        ] {
            assert_eq!(is_reachable(&ip.parse().unwrap()), named, "{ip}");
        }
    }

    #[test]
    fn own_addresses_are_those_that_this_machine_can_listen_at() {
        for ip in of_interfaces().into_iter().chain(reachable_addresses()) {
            assert!(is_reachable(&ip), "{ip}");
            assert!(std::net::TcpListener::bind((ip, 0)).is_ok(), "{ip}");
        }
    }
}
