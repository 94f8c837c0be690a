//! Two machines, in network namespaces with a router between them, whose files of host names differ as those of
//! real machines do. In the last case, the router drops large packets without a word.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::namespaces::Namespaces;

pub(crate) const BENCH: Bench = Bench {
    name: "machine-names",
    claim: "ranks on two machines meet by a name that is the loopback or another kind of address on rank 0's own \
            machine, and members join a host without a default route; where large packets are lost, the message \
            says so",
    source: "network namespaces; the cases are from issues of torch, gloo and Kubeflow",
    seed: 0,
    run,
};

/// Machines `a` and `b`, and a router between them.
const MAKE: &str = r#"
ip netns add router
ip -n router link set lo up
for x in "a 1" "b 2"; do
  set -- $x
  ip netns add $1
  ip link add wire$2 netns $1 type veth peer name to$1 netns router
  ip -n $1 link set lo up
  # Segments that the network card would cut are never dropped for their size.
  ip -n $1 link set wire$2 up gso_max_segs 1
  ip -n $1 addr add 10.77.$2.1/24 dev wire$2
  ip -n $1 addr add fd77:$2::1/64 dev wire$2 nodad
  ip -n router link set to$1 up
  ip -n router addr add 10.77.$2.254/24 dev to$1
  ip -n router addr add fd77:$2::fe/64 dev to$1 nodad
done
for x in "a 1 2" "b 2 1"; do
  set -- $x
  ip -n $1 route add 10.77.$3.0/24 via 10.77.$2.254 advmss 1448
  ip -n $1 route add fd77:$3::/64 via fd77:$2::fe
done
nsenter --net=/run/netns/router sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
nsenter --net=/run/netns/router sh -c 'echo 1 > /proc/sys/net/ipv6/conf/all/forwarding'
"#;

/// A case: the lines of `/etc/hosts` on both machines, and what the ranks are given as `MASTER_ADDR`.
struct Case {
    name: &'static str,
    hosts: [&'static str; 2],
    masters: [&'static str; 3],
}

/// The cases. Ranks 0 and 1 are on machine `a`, rank 2 is on `b`.
const CASES: [Case; 6] = [
    Case { name: "a plain name", hosts: ["10.77.1.1 alpha", "10.77.1.1 alpha"], masters: ["alpha"; 3] },
    Case {
        name: "a name that is 127.0.1.1 on its own machine",
        hosts: ["127.0.1.1 alpha", "10.77.1.1 alpha"],
        masters: ["alpha"; 3],
    },
    Case {
        name: "localhost on rank 0's machine",
        hosts: ["", "10.77.1.1 alpha"],
        masters: ["localhost", "localhost", "alpha"],
    },
    Case {
        name: "IPv6 first on rank 0's machine, only IPv4 on the other",
        hosts: ["fd77:1::1 alpha\n10.77.1.1 alpha", "10.77.1.1 alpha"],
        masters: ["alpha"; 3],
    },
    Case { name: "IPv6 alone", hosts: ["fd77:1::1 alpha", "fd77:1::1 alpha"], masters: ["alpha"; 3] },
    Case {
        name: "a name not known to rank 0",
        hosts: ["", "10.77.1.1 alpha"],
        masters: ["alpha", "10.77.1.1", "alpha"],
    },
];

/// Machines of the ranks.
const MACHINES: [&str; 3] = ["a", "a", "b"];
/// A secret, as users give it.
const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Flags of a small model. Its gradients take many packets.
const MODEL: [&str; 15] = [
    "--layers",
    "2",
    "--dim",
    "64",
    "--heads",
    "2",
    "--context",
    "32",
    "--batch",
    "2",
    "--threads",
    "1",
    "--sample-tokens",
    "0",
    "--quiet",
];

/// Writes the text on which the model is trained, and returns its path.
fn text(folder: &Path) -> Result<String> {
    let path = folder.join("text.txt");
    fs::write(&path, "the quick brown fox jumps over the lazy dog ".repeat(1000))?;
    Ok(path.display().to_string())
}

/// Returns a command on a machine with this file of host names.
fn on(net: &Namespaces, machine: &str, hosts: &Path, args: &[&str]) -> Result<Command> {
    let command = farflung(args)?;
    let mut named = Command::new("unshare");
    named.args(["--mount", "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""]).arg(hosts);
    named.arg(command.get_program()).args(command.get_args());
    let mut within = net.within(Some(machine), &named);
    within.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(within)
}

/// Runs the ranks of a job, each on its machine. Returns whether all succeeded, and their messages.
fn job(
    net: &Namespaces,
    folder: &Path,
    hosts: [&str; 2],
    masters: &[&str],
    deadline: &str,
) -> Result<(bool, Vec<String>)> {
    let machines = if masters.len() == 2 { ["a", "b"].to_vec() } else { MACHINES.to_vec() };
    let data = text(folder)?;
    let mut ranks: Vec<Child> = Vec::new();
    for (rank, (master, machine)) in masters.iter().zip(machines).enumerate() {
        let lines = hosts[usize::from(machine == "b")];
        let file = folder.join(format!("hosts-{machine}"));
        fs::write(&file, format!("127.0.0.1 localhost\n{lines}\n"))?;
        let out = folder.join("out").display().to_string();
        let args = ["train", "--steps", "2", "--sync", "ddp", "--deadline", deadline, "--out", &out];
        let mut command = on(net, machine, &file, &[&args[..], &["--data", &data], &MODEL].concat())?;
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", masters.len().to_string());
        command.env("MASTER_ADDR", master).env("FARFLUNG_SECRET", SECRET);
        command.env("FARFLUNG_HOME", folder.join("home"));
        ranks.push(command.spawn().context("failed to start nsenter")?);
    }
    let ended: Vec<_> = ranks.into_iter().map(Child::wait_with_output).collect::<std::io::Result<_>>()?;
    let said = ended.iter().map(|output| String::from_utf8_lossy(&output.stderr).into_owned()).collect();
    Ok((ended.iter().all(|output| output.status.success()), said))
}

/// Hosts a run on `a`, and joins it from `b`. Returns the messages of the newcomer if it did not join.
fn hosted(net: &Namespaces, folder: &Path) -> Result<Option<String>> {
    let file = folder.join("hosts");
    fs::write(&file, "127.0.0.1 localhost\n")?;
    let home = folder.join("home");
    let (out, ticket) = (folder.join("host").display().to_string(), folder.join("run.ticket"));
    let ticket_out = ticket.display().to_string();
    let data = text(folder)?;
    let host = ["host", "--steps", "1000000", "--out", &out, "--ticket-out", &ticket_out, "--data", &data];
    let mut host = on(net, "a", &file, &[&host[..], &MODEL].concat())?.env("FARFLUNG_HOME", &home).spawn()?;
    while !ticket.exists() {
        ensure!(host.try_wait()?.is_none(), "the host ended before it wrote its ticket");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let member = folder.join("member");
    let own = member.display().to_string();
    let args = ["join", "--ticket-file", &ticket_out, "--out", &own, "--data", &data, "--quiet"];
    let mut joined = on(net, "b", &file, &args)?.env("FARFLUNG_HOME", &home).spawn()?;
    // A member that has the state writes rows, and one that cannot join ends.
    let outcome = loop {
        if fs::metadata(member.join("metrics.jsonl")).is_ok_and(|file| file.len() > 0) {
            break None;
        }
        if joined.try_wait()?.is_some() {
            let output = joined.wait_with_output()?;
            host.kill()?;
            host.wait()?;
            return Ok(Some(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    for child in [&mut joined, &mut host] {
        child.kill()?;
        child.wait()?;
    }
    Ok(outcome)
}

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    let setup = "`cargo xtask setup nat` installs it (packages iproute2 and util-linux)";
    let net = Namespaces::make(MAKE, "", &[], setup)?;
    let mut row = |name: &str, failed: Option<String>| {
        let failures = f64::from(u8::from(failed.is_some()));
        report.row(&format!("{name}: failures"), failures, "1", Threshold::AtMost(0.0))?;
        failed.map_or(Ok(()), |said| Err(anyhow::anyhow!("{name}: the processes printed:\n{said}")))
    };
    for case in CASES {
        let folder = tempfile::tempdir()?;
        let (met, said) = job(&net, folder.path(), case.hosts, &case.masters, "20s")?;
        row(case.name, (!met).then(|| said.concat()))?;
    }
    let folder = tempfile::tempdir()?;
    row("a member joins a host without a default route", hosted(&net, folder.path())?)?;
    // Now the interface of `b` drops longer packets, and the router sends no message about it.
    let mut small = Command::new("ip");
    small.args(["link", "set", "dev", "wire2", "mtu", "700"]);
    ensure!(net.within(Some("b"), &small).status()?.success(), "failed to set the size of packets");
    let folder = tempfile::tempdir()?;
    let (met, said) = job(&net, folder.path(), ["", ""], &["10.77.1.1", "10.77.1.1"], "15s")?;
    let is_named = said.iter().any(|said| said.contains("drops large packets"));
    row("large packets are lost, and no rank says so", (met || !is_named).then(|| said.concat()))
}
