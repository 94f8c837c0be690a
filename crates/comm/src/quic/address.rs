//! Addresses of peers: sockets and relays in one string, and conversion between public keys of iroh and of this
//! crate.

use std::collections::BTreeSet;
use std::net::{SocketAddr, ToSocketAddrs};

use ::iroh::{EndpointAddr, RelayConfig, RelayMap, RelayUrl, TransportAddr};
use iroh_relay::RelayQuicConfig;

use crate::CommError;
use crate::secure::PublicKey;

/// Greatest length of the addresses in a greeting, in bytes.
const TEXT: usize = 600;
/// Prefix of an address that is reached over QUIC alone, in a network that uses sockets as well.
const QUIC: &str = "quic:";

/// The addresses and relays in a string such as `10.0.0.1:29500,http://relay.example:3340`.
#[derive(Debug, Clone, Default)]
pub(super) struct PeerAddresses {
    pub(super) sockets: Vec<SocketAddr>,
    pub(super) relays: Vec<RelayUrl>,
}

impl PeerAddresses {
    /// Parses a user's string, and resolves host names.
    pub(super) fn resolve(text: &str) -> Result<Self, CommError> {
        let mut places = Self::default();
        let mut wrong = None;
        for one in text.split(',').filter(|one| !one.is_empty()) {
            if is_relay(one) {
                places.relays.push(relay(one)?);
                continue;
            }
            match one.to_socket_addrs() {
                Ok(addresses) => places.sockets.extend(addresses),
                Err(e) => wrong = Some(CommError::io("address", &one, &e)),
            }
        }
        match wrong {
            Some(wrong) if places.is_empty() => Err(wrong),
            _ => Ok(places),
        }
    }

    /// Formats the relays, then the addresses, as many as fit into a greeting.
    pub(super) fn text(&self) -> String {
        let relays = self.relays.iter().map(|url| url.to_string().trim_end_matches('/').to_owned());
        let mut text = String::new();
        for one in relays.chain(self.sockets.iter().map(SocketAddr::to_string)) {
            if text.len() + one.len() < TEXT {
                text = if text.is_empty() { one } else { text + "," + &one };
            }
        }
        text
    }

    /// Parses the parts of a member's address that belong to QUIC; those of sockets and the key are skipped.
    /// Host names are resolved.
    pub(super) fn of_member(text: &str) -> Result<Self, CommError> {
        let part = |one: &str| match one.strip_prefix(QUIC) {
            Some(address) => Some(address.to_owned()),
            None => is_relay(one).then(|| one.to_owned()),
        };
        let parts: Vec<String> = text.split(',').filter_map(part).collect();
        Self::resolve(&parts.join(","))
    }

    /// Formats them as parts of a member's address. Relays have their ports, which tickets require.
    pub(super) fn for_member(&self) -> String {
        let with_port = |url: &str| match url.parse::<RelayUrl>().map(|url| url.port_or_known_default()) {
            Ok(Some(port)) if !url.ends_with(&format!(":{port}")) => format!("{url}:{port}"),
            _ => url.to_owned(),
        };
        let part = |one: &str| if is_relay(one) { with_port(one) } else { format!("{QUIC}{one}") };
        self.text().split(',').filter(|one| !one.is_empty()).map(part).collect::<Vec<_>>().join(",")
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.sockets.is_empty() && self.relays.is_empty()
    }

    /// Returns iroh's address of the peer with this key at these places; without `direct`, at the relays only.
    ///
    /// # Errors
    /// [`CommError::NoEncryptedConnection`] if the bytes are not a public key.
    pub(super) fn of(&self, key: PublicKey, direct: bool) -> Result<EndpointAddr, CommError> {
        let id =
            ::iroh::PublicKey::from_bytes(key.bytes()).map_err(|_| CommError::NoEncryptedConnection {
                peer: key.to_string(),
                reason: "its key is not a valid ed25519 public key".to_owned(),
            })?;
        let sockets = self.sockets.iter().filter(|_| direct).copied().map(TransportAddr::Ip);
        let relays = self.relays.iter().cloned().map(TransportAddr::Relay);
        Ok(EndpointAddr { id, addrs: sockets.chain(relays).collect::<BTreeSet<_>>() })
    }
}

fn is_relay(text: &str) -> bool {
    text.starts_with("http://") || text.starts_with("https://")
}

/// Parses the URL of a relay, `http://host:port` or `https://host:port`.
///
/// # Errors
/// [`CommError::Io`] if the text is not such a URL.
pub(super) fn relay(text: &str) -> Result<RelayUrl, CommError> {
    let wrong = |e: String| CommError::io("relay", &text, &std::io::Error::other(e));
    if !is_relay(text) {
        return Err(wrong("expected `http://host:port` or `https://host:port`".to_owned()));
    }
    text.parse().map_err(|e| wrong(format!("{e}")))
}

/// Returns the relays that a process may use, in iroh's type.
pub(super) fn relay_map(relays: &[RelayUrl]) -> RelayMap {
    relays.iter().map(|url| RelayConfig::new(url.clone(), Some(discovery(url)))).collect()
}

/// Returns the port at which a relay tells processes their public address, over UDP: the port of its HTTP, or
/// with TLS the default port of `iroh-relay`.
fn discovery(url: &RelayUrl) -> RelayQuicConfig {
    match (url.scheme(), url.port_or_known_default()) {
        ("http", Some(port)) => RelayQuicConfig::new(port),
        _ => RelayQuicConfig::default(),
    }
}

/// Returns the public key that iroh identifies a peer by.
pub(super) fn key_of(id: ::iroh::EndpointId) -> PublicKey {
    PublicKey::new(*id.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_text_and_come_back() {
        let text = "http://10.0.0.9:3340,10.0.0.1:29500,[::1]:9";
        let places = PeerAddresses::resolve(text).unwrap();
        assert_eq!((places.relays.len(), places.sockets.len(), places.text()), (1, 2, text.to_owned()));
        for wrong in ["http://", "10.0.0.1", "ftp://a:1"] {
            assert!(PeerAddresses::resolve(wrong).is_err(), "{wrong}");
        }
        assert!(PeerAddresses::resolve(",").unwrap().is_empty());
        assert_eq!(places.for_member(), "http://10.0.0.9:3340,quic:10.0.0.1:29500,quic:[::1]:9");
        let member = PeerAddresses::of_member(&format!("10.0.0.2:7,key:ab,{}", places.for_member())).unwrap();
        assert_eq!((member.relays, member.sockets), (places.relays.clone(), places.sockets.clone()));
        assert!(PeerAddresses::of_member("10.0.0.2:7").unwrap().is_empty());
        let usual = PeerAddresses::resolve("https://relay.example").unwrap();
        assert_eq!(usual.for_member(), "https://relay.example:443");
        assert_eq!(PeerAddresses::of_member(&usual.for_member()).unwrap().relays, usual.relays);
        let many = PeerAddresses { sockets: vec!["[2001:db8::1]:29500".parse().unwrap(); 200], ..places };
        assert!(many.text().len() <= TEXT && many.text().starts_with("http://10.0.0.9:3340,"));
        assert_eq!(PeerAddresses::resolve("localhost:7,nowhere.invalid:1").unwrap().sockets[0].port(), 7);
        assert!(PeerAddresses::resolve("nowhere.invalid:1").is_err());
    }

    #[test]
    fn a_relay_tells_addresses_at_its_own_port() {
        let port = |text: &str| discovery(&relay(text).unwrap()).port;
        assert_eq!((port("http://a:3340"), port("https://a:3340")), (3340, 7842));
        assert!(relay("a:3340").unwrap_err().to_string().contains("http://host:port"));
    }
}
