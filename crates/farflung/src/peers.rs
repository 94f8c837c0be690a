//! The static peer file: the address of each rank of a job, for jobs without a master.
//!
//! This module parses text and does not depend on sockets.

use std::path::Path;

use serde::Deserialize;

use crate::{Error, Result};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    peers: Vec<String>,
}

/// Returns the addresses in a peer file, in the order of ranks. The file is TOML:
/// `peers = ["10.0.0.1:4000", "10.0.0.2:4000"]`.
///
/// Errors: [`Error::Io`], [`Error::ConfigSyntax`]; [`Error::Setting`] if the list is empty or an address lacks
/// a port.
pub fn read(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    parse(&text, path)
}

fn parse(text: &str, path: &Path) -> Result<Vec<String>> {
    let file: File = toml::from_str(text)
        .map_err(|source| Error::ConfigSyntax { path: path.to_owned(), source: Box::new(source) })?;
    let has_port = |peer: &&String| {
        peer.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|p| p > 0))
    };
    let wrong = match file.peers.iter().find(|peer| !has_port(peer)) {
        Some(peer) => peer.clone(),
        None if file.peers.is_empty() => "empty".to_owned(),
        None => return Ok(file.peers),
    };
    Err(Error::Setting { field: "peers", value: wrong, expected: "a `host:port` for each rank".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_in_the_order_of_ranks() {
        let read = |text| parse(text, "peers.toml".as_ref());
        let peers = read("# ours\npeers = [\"a:1\", \"[::1]:65535\"]\n").unwrap();
        assert_eq!(peers, ["a:1", "[::1]:65535"]);
        for bad in ["peers = []", "peers = [\"a\"]", "peers = [\"a:0\"]", "peers = [\"a:65536\"]"] {
            assert!(matches!(read(bad), Err(Error::Setting { field: "peers", .. })), "{bad}");
        }
        for bad in ["peer = [\"a:1\"]", "", "peers = 3"] {
            assert!(matches!(read(bad), Err(Error::ConfigSyntax { .. })), "{bad}");
        }
    }
}
