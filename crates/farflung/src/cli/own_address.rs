//! Checks the addresses that a member tells others (`--address`), before anything is done with them.

use std::io::{Error as IoError, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs as _};

use farflung::transports::is_second_network_address;
use farflung::{Error, Result, launch_env};

/// What a resolver says about an address that it cannot resolve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unresolved {
    /// It is no `HOST:PORT`.
    Malformed,
    /// There is no such name.
    Missing,
    /// The resolver does not answer now; the name may exist.
    NotNow,
}

impl Unresolved {
    /// The standard library has no kind for these errors: the text is the system's.
    fn of(error: &IoError) -> Self {
        let text = error.to_string().to_lowercase();
        match error.kind() {
            ErrorKind::InvalidInput => Self::Malformed,
            // The texts of glibc and of musl.
            _ if text.contains("temporary failure") || text.contains("try again") => Self::NotNow,
            _ => Self::Missing,
        }
    }
}

/// Checks that the addresses have no scheme, such as `tcp://`, unless they are URLs of relays.
///
/// Errors: [`Error::Setting`] with the first other address.
pub(super) fn check_schemes(field: &'static str, addresses: &[String]) -> Result<()> {
    let is_wrong = |one: &&str| one.split_once("://").is_some_and(|(scheme, _)| !scheme.starts_with("http"));
    match addresses.iter().flat_map(|address| address.split(',')).find(is_wrong) {
        None => Ok(()),
        Some(wrong) => Err(Error::Setting {
            field,
            value: wrong.to_owned(),
            expected: "HOST:PORT, without a scheme; only a relay is given by its URL, http://HOST:PORT"
                .to_owned(),
        }),
    }
}

/// Checks that the resolver of this machine does not rule out the name at which ranks of this machine meet.
///
/// Errors: [`Error::Setting`] if there is no such name.
pub(super) fn check_master((host, port): &(String, u16)) -> Result<()> {
    match (host.as_str(), *port).to_socket_addrs() {
        Err(error) if Unresolved::of(&error) == Unresolved::Missing => Err(Error::Setting {
            field: "master",
            value: format!("{host}:{port}"),
            expected: format!("a name or an address of this machine: there is no host `{host}` ({error})"),
        }),
        _ => Ok(()),
    }
}

/// Checks that an address to listen at is `HOST:PORT`.
///
/// Errors: [`Error::Setting`].
pub(super) fn check_listen(address: &str) -> Result<()> {
    let has_port = |one: &str| {
        one.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
    };
    if address.split(',').all(has_port) {
        return Ok(());
    }
    let expected = "HOST:PORT, such as 0.0.0.0:29500 for all addresses of this machine".to_owned();
    Err(Error::Setting { field: "listen", value: address.to_owned(), expected })
}

/// Returns whether all of these addresses are those of the loopback, which no other machine reaches. One of
/// another network may be reached.
pub(super) fn are_loopback(addresses: &[String]) -> bool {
    let host = |address: &str| {
        address.rsplit_once(':').map_or("", |(host, _)| host).trim_matches(['[', ']']).to_owned()
    };
    addresses.iter().all(|one| !is_second_network_address(one) && launch_env::is_loopback(&host(one)))
}

/// Checks that the addresses are `HOST:PORT`, with names that the resolver knows. If it does not answer now,
/// returns a warning for the user instead.
///
/// Errors: [`Error::Setting`] with the first other address.
pub(super) fn check<'a>(addresses: impl IntoIterator<Item = &'a String>) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    let parts = addresses.into_iter().flat_map(|address| address.split(','));
    for address in parts.filter(|one| !is_second_network_address(one)) {
        let is_everywhere = |at: SocketAddr| at.ip().is_unspecified();
        let error = match address.to_socket_addrs().map(|mut found| found.any(is_everywhere)) {
            Ok(true) => {
                return Err(Error::Setting {
                    field: "address",
                    value: address.to_owned(),
                    expected: "an address at which others reach this machine: this one only means that it listens at \
                               all of its addresses"
                        .to_owned(),
                });
            }
            Ok(false) => continue,
            Err(error) => error,
        };
        let expected = match Unresolved::of(&error) {
            Unresolved::NotNow => {
                warnings.push(format!("warning: `--address {address}` cannot be checked now: {error}"));
                continue;
            }
            Unresolved::Malformed => "HOST:PORT, with a port below 65536".to_owned(),
            Unresolved::Missing => {
                let name = address.rsplit_once(':').map_or(address, |(name, _)| name);
                format!("an address that others can resolve: there is no host `{name}` ({error})")
            }
        };
        return Err(Error::Setting { field: "address", value: address.to_owned(), expected });
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Vec<String>> {
        check([&text.to_owned()])
    }

    #[test]
    fn what_the_system_says_decides() {
        let says = |text: &'static str| Unresolved::of(&IoError::other(text));
        let prefix = "failed to lookup address information: ";
        assert_eq!(
            says("failed to lookup address information: Name or service not known"),
            Unresolved::Missing
        );
        for text in ["Temporary failure in name resolution", "Try again"] {
            assert_eq!(Unresolved::of(&IoError::other(format!("{prefix}{text}"))), Unresolved::NotNow);
        }
    }

    #[test]
    fn only_relays_have_a_scheme() {
        let check = |text: &str| check_schemes("address", &[text.to_owned()]);
        for good in ["node1:5", "quic:198.51.100.7:3340", "http://a:1,https://b:2", "[::1]:5"] {
            check(good).unwrap();
        }
        let error = check("node1:5,tcp://node2:6").unwrap_err().to_string();
        assert!(error.contains("tcp://node2:6") && error.contains("without a scheme"), "{error}");
    }

    #[test]
    fn addresses_to_listen_at_have_a_port_and_those_of_all_addresses_are_not_told_to_others() {
        for good in ["0.0.0.0:29500", "127.0.0.1:0", "[::]:5", "node1:5", "0.0.0.0:1,[::]:1"] {
            check_listen(good).unwrap();
        }
        for bad in ["29500", ":29500", "node1", "node1:", "node1:port", "0.0.0.0:99999", ""] {
            let error = check_listen(bad).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains("listen"), "{error}");
        }
        for everywhere in ["0.0.0.0:29500", "[::]:29500"] {
            let error = of(everywhere).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains(everywhere), "{error}");
        }
        let loopback =
            |all: &[&str]| are_loopback(&all.iter().map(|&one| one.to_owned()).collect::<Vec<_>>());
        assert!(loopback(&["127.0.0.1:5", "[::1]:5", "localhost:5"]));
        assert!(!loopback(&["127.0.0.1:5", "10.0.0.1:5"]) && !loopback(&["http://127.0.0.1:3340"]));
    }

    #[test]
    fn an_address_without_a_port_is_an_error_and_one_of_another_network_is_not_looked_up() {
        for good in ["127.0.0.1:0", "[::1]:5", "quic:198.51.100.7:3340", "http://198.51.100.7:3340"] {
            assert_eq!(of(good).unwrap(), Vec::<String>::new(), "{good}");
        }
        for (bad, word) in [("here", "HOST:PORT"), ("here:99999", "HOST:PORT"), ("a b:1", "a b")] {
            let error = of(bad).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
