//! Decides which requests the page's server answers. A pure function, which the server calls first for each
//! request.

use std::net::IpAddr;

use axum::http::uri::Authority;

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The method is not GET; the page is read only.
    Method,
    /// The request has no valid `Host`.
    NoHost,
    /// The `Host` is another name, perhaps of a site that makes its name resolve to this machine.
    OtherHost,
}

/// Checks whether a request is answered, by its method and its `Host`. `named` is the host of `--listen`.
///
/// A site can make its own name resolve to this machine after a browser has loaded its page (DNS rebinding),
/// and its scripts could then read what is served here. But their requests carry the site's name, so only
/// addresses, `localhost` and the host of `--listen` are accepted.
pub(super) fn check(method: &str, host: Option<&[u8]>, named: &str) -> Result<(), Refusal> {
    if method != "GET" {
        return Err(Refusal::Method);
    }
    let host = Authority::try_from(host.ok_or(Refusal::NoHost)?).map_err(|_| Refusal::NoHost)?;
    let host = host.host().trim_matches(['[', ']']);
    let is_here = host.eq_ignore_ascii_case("localhost") || host.eq_ignore_ascii_case(named);
    if is_here || host.parse::<IpAddr>().is_ok() { Ok(()) } else { Err(Refusal::OtherHost) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_get_to_this_machine_by_address_or_its_own_names_is_answered() {
        let host = |host: &str| check("GET", Some(host.as_bytes()), "gpu-box");
        for fine in ["localhost", "LOCALHOST:8642", "127.0.0.1:9000", "[::1]:8642", "10.0.0.7", "gpu-box:1"] {
            assert_eq!(host(fine), Ok(()), "{fine}");
        }
        for other in ["evil.example", "evil.example:8642", "localhost.evil.example", "127.0.0.1.nip.example"]
        {
            assert_eq!(host(other), Err(Refusal::OtherHost), "{other}");
        }
        for bad in ["", "a b", "http://localhost", "\u{e4}", ":"] {
            assert!(host(bad).is_err(), "{bad}");
        }
        assert_eq!(check("GET", None, ""), Err(Refusal::NoHost));
        for method in ["POST", "HEAD", "PUT", "OPTIONS", "get"] {
            assert_eq!(check(method, Some(b"localhost"), ""), Err(Refusal::Method), "{method}");
        }
    }
}
