//! A small internet of network namespaces: two homes, each behind a router that translates addresses, and an
//! open network between the routers. It ends with the process that made it.

use std::process::Command;

use anyhow::Result;

use crate::namespaces::Namespaces;

/// The address of the machine in the open network, on which the relay listens.
pub(super) const OPEN: &str = "203.0.113.9";

/// How the routers choose the outer port of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Translation {
    /// The port of the machine behind the router: a direct path can be found.
    Kept,
    /// A random port for each destination: no direct path can be found.
    Random,
}

/// A script that makes the networks; `$1` are the flags of address translation.
const MAKE: &str = r#"
ip link add open type bridge
ip addr add 203.0.113.9/24 dev open
ip link set open up
for n in 1 2; do
  ip netns add router$n
  ip netns add home$n
  ip link add wan$n type veth peer name wan netns router$n
  ip link set wan$n master open up
  ip -n router$n link add lan type veth peer name lan netns home$n
  ip -n router$n link set lo up
  ip -n router$n addr add 203.0.113.$n/24 dev wan
  ip -n router$n addr add 192.168.$n.1/24 dev lan
  ip -n router$n link set wan up
  ip -n router$n link set lan up
  ip -n home$n link set lo up
  ip -n home$n addr add 192.168.$n.2/24 dev lan
  ip -n home$n link set lan up
  ip -n home$n route add default via 192.168.$n.1
  nsenter --net=/run/netns/router$n sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
  nsenter --net=/run/netns/router$n nft -f - <<END
table ip nat {
  chain leave { type nat hook postrouting priority 100; oifname "wan" masquerade $1; }
}
table ip wall {
  chain pass { type filter hook forward priority 0; policy accept; iifname "wan" ct state new drop; }
  chain own { type filter hook input priority 0; policy accept; iifname "wan" ct state new drop; }
}
END
done
"#;

/// The networks. Dropping this removes them.
#[derive(Debug)]
pub(super) struct World(Namespaces);

impl World {
    /// Makes the networks.
    ///
    /// Errors: a tool is missing, or this user may not make namespaces.
    pub(super) fn make(translation: Translation) -> Result<Self> {
        let random = if translation == Translation::Random { "fully-random" } else { "" };
        let setup = "`cargo xtask setup nat` installs it (packages nftables, iproute2 and util-linux)";
        Namespaces::make(MAKE, random, &["nft"], setup).map(Self)
    }

    /// Returns the command that runs in the open network.
    pub(super) fn in_the_open(&self, command: &Command) -> Command {
        self.0.within(None, command)
    }

    /// Returns the command that runs in home 1 or 2.
    pub(super) fn at_home(&self, home: u32, command: &Command) -> Command {
        self.0.within(Some(&format!("home{home}")), command)
    }
}
