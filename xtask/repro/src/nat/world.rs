//! A small internet of network namespaces: two homes, each behind a router that translates addresses, and an
//! open network between the routers. It ends with the process that made it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

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

/// A script that makes the networks, prints `ready`, and keeps them until its standard input ends.
const MAKE: &str = r#"
set -e
PATH=$PATH:/usr/sbin:/sbin
mount -t tmpfs tmpfs /run
mkdir /run/netns
ip link set lo up
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
echo ready
exec cat
"#;

/// The networks. Dropping this removes them.
#[derive(Debug)]
pub(super) struct World(Child);

impl World {
    /// Makes the networks, in a user namespace of their own, which needs no privileges and touches no other
    /// network.
    ///
    /// Errors: a tool is missing, or this user may not make namespaces.
    pub(super) fn make(translation: Translation) -> Result<Self> {
        for tool in ["nft", "ip", "unshare", "nsenter"] {
            let look = format!("PATH=$PATH:/usr/sbin:/sbin command -v {tool}");
            let found = Command::new("sh").args(["-c", &look]).stdout(Stdio::null()).status();
            ensure!(
                found.is_ok_and(|status| status.success()),
                "`{tool}` is missing: `cargo xtask setup nat` installs it (packages nftables, iproute2 and \
                 util-linux)"
            );
        }
        let random = if translation == Translation::Random { "fully-random" } else { "" };
        let unshare = ["--user", "--map-root-user", "--net", "--mount", "--propagation", "private"];
        let mut made = Command::new("unshare")
            .args(unshare)
            .args(["sh", "-c", MAKE, "world", random])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("failed to start unshare")?;
        let mut line = String::new();
        let said = made.stdout.take().context("stdout is not piped")?;
        let read = BufReader::new(said).read_line(&mut line);
        let world = Self(made);
        if read.is_ok() && line.trim() == "ready" {
            return Ok(world);
        }
        let said = world.end()?;
        anyhow::bail!("failed to make namespaces with address translation: {said}")
    }

    /// Returns the errors that the script printed.
    fn end(mut self) -> Result<String> {
        drop(self.0.stdin.take());
        let mut said = String::new();
        if let Some(mut errors) = self.0.stderr.take() {
            std::io::Read::read_to_string(&mut errors, &mut said)?;
        }
        Ok(said)
    }

    /// Returns the command that runs in the open network.
    pub(super) fn in_the_open(&self, command: &Command) -> Command {
        self.inside(command, &["--net"])
    }

    /// Returns the command that runs in home 1 or 2.
    pub(super) fn at_home(&self, home: u32, command: &Command) -> Command {
        let mut outer = self.inside(&Command::new("nsenter"), &[]);
        outer.arg(format!("--net=/run/netns/home{home}")).arg(command.get_program());
        outer.args(command.get_args());
        outer
    }

    fn inside(&self, command: &Command, more: &[&str]) -> Command {
        let mut entered = Command::new("nsenter");
        entered.args(["--target", &self.0.id().to_string(), "--user", "--mount", "--preserve-credentials"]);
        entered.args(more).arg(command.get_program()).args(command.get_args());
        entered
    }
}

impl Drop for World {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // The script ends when its input is closed.
        let _ = self.0.wait();
    }
}
