//! The address of rank 0 as people write it in `MASTER_ADDR`: a host, `host:port`, `tcp://host:port` as in
//! `init_method` of `PyTorch`, an IPv6 address with or without brackets, and the line of a file with its end.

use crate::{Error, Result};

/// Returns the port of `MASTER_PORT`; `None` if it is not set.
pub(super) fn port(env: &impl Fn(&str) -> Option<String>) -> Result<Option<u16>> {
    let Some(value) = env("MASTER_PORT").filter(|value| !value.trim().is_empty()) else { return Ok(None) };
    match value.trim().parse() {
        Ok(port) if port > 0 => Ok(Some(port)),
        _ => Err(Error::Variable { name: "MASTER_PORT", value, expected: "a port, 1 to 65535" }),
    }
}

/// Returns the host of `MASTER_ADDR`, without brackets, and the port if it has one. `None` if it is not set.
///
/// Errors: [`Error::Variable`] if it is no address, or has another port than `MASTER_PORT`.
pub(super) fn address(env: &impl Fn(&str) -> Option<String>) -> Result<Option<(String, Option<u16>)>> {
    let Some(value) = env("MASTER_ADDR").filter(|value| !value.trim().is_empty()) else { return Ok(None) };
    let wrong = |expected| Error::Variable { name: "MASTER_ADDR", value: value.trim().to_owned(), expected };
    let (host, own) = parse(value.trim()).ok_or_else(|| {
        wrong("one host name or IP address of rank 0's machine, such as node1, 10.0.0.1 or fd00::1")
    })?;
    match (own, port(env)?) {
        (Some(own), Some(other)) if own != other => Err(wrong(
            "a host without a port, or the port of MASTER_PORT, which is another: the same on all ranks",
        )),
        _ => Ok(Some((host, own))),
    }
}

/// Returns whether a host stands for all addresses of the machine that listens.
pub(super) fn is_unspecified(host: &str) -> bool {
    host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_unspecified())
}

/// Splits an address into its host and port. The URL of a relay keeps its scheme.
fn parse(text: &str) -> Option<(String, Option<u16>)> {
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme, rest)) => (scheme.to_ascii_lowercase(), rest),
        None => (String::new(), text),
    };
    let scheme = match scheme.as_str() {
        "" | "tcp" => String::new(),
        // Relays, which only QUIC uses.
        "http" | "https" => format!("{scheme}://"),
        _ => return None,
    };
    let rest = rest.trim_end_matches('/');
    let (host, port) = match rest.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
        }
        None if rest.parse::<std::net::Ipv6Addr>().is_ok() => (rest, None),
        None => rest.split_once(':').map_or((rest, None), |(host, port)| (host, Some(port))),
    };
    let is_name = |c: char| c.is_alphanumeric() || ['.', '-', '_', ':'].contains(&c);
    if host.is_empty() || !host.chars().all(is_name) {
        return None;
    }
    let port = match port.map(str::parse::<u16>) {
        None => None,
        Some(Ok(port)) if port > 0 => Some(port),
        Some(_) => return None,
    };
    Some((format!("{scheme}{host}"), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(address: &str, port: Option<&str>) -> Result<Option<(String, Option<u16>)>> {
        super::address(&|name: &str| match name {
            "MASTER_ADDR" => Some(address.to_owned()),
            _ => port.map(str::to_owned),
        })
    }

    #[test]
    fn addresses_are_read_as_people_write_them() {
        for (text, host, port) in [
            ("node1", "node1", None),
            ("10.0.0.1\n", "10.0.0.1", None),
            (" node1\r\n", "node1", None),
            ("tcp://10.0.0.1", "10.0.0.1", None),
            ("TCP://node1:9/", "node1", Some(9)),
            ("node_1.example:29500", "node_1.example", Some(29500)),
            ("[::1]", "::1", None),
            ("[fd00::1]:9", "fd00::1", Some(9)),
            ("tcp://[fd00::1]:9", "fd00::1", Some(9)),
            ("fd00::1", "fd00::1", None),
            ("http://198.51.100.7:3340", "http://198.51.100.7", Some(3340)),
        ] {
            assert_eq!(of(text, None).unwrap(), Some((host.to_owned(), port)), "{text:?}");
        }
        assert_eq!(of(" \n", None).unwrap(), None);
        assert_eq!(of("node1:9", Some("9\n")).unwrap(), Some(("node1".to_owned(), Some(9))));
    }

    #[test]
    fn what_is_no_address_is_an_error_that_names_the_variable() {
        for text in [
            "node1:0",
            "node1:port",
            "node1 node2",
            "node1,node2",
            "node1\nnode2",
            "file:///tmp/x",
            "[node1]",
            "[::1",
            "tcp://",
            "tcp://node1:9?rank=0",
            "user@node1",
            "1:2:3",
        ] {
            let error = of(text, None).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{text}");
            assert!(error.to_string().contains("MASTER_ADDR"), "{error}");
        }
        let error = of("node1:9", Some("10")).unwrap_err().to_string();
        assert!(error.contains("MASTER_ADDR is `node1:9`") && error.contains("MASTER_PORT"), "{error}");
    }
}
