//! `farflung net`: measures the links between the processes of a job.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use farflung::base::{Bandwidth, Bytes, Link, Nanos, PeerId, Rank};
use farflung::comm::{Algorithm, CommError, Communicator, Located, ReduceOp, tcp};
use farflung::parallel::{Between, Cluster, Machine, Speed, TensorEfficiency};
use farflung::{AccessArgs, Error, PeerCounters, Result};
use serde::{Deserialize, Serialize};

use super::relay::RelayArgs;

/// Measure the network between the processes of a job, or simulate a bad link in it. Run bench and probe under
/// `farflung launch` or another launcher, or with a list of peers; run relay without a launcher.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung launch -n 4 -- net bench
  farflung launch -n 4 -- net bench --op all_gather --algorithm ring --json
  RANK=1 WORLD_SIZE=3 MASTER_ADDR=10.0.0.1 farflung net probe --secret-file ~/job-secret
  farflung launch -n 3 -- net probe --out links.toml
  farflung net bench --peers peers.toml --rank 0 --secret-file ~/job-secret
  farflung net relay --listen 127.0.0.1:9001 --to 127.0.0.1:29500 --rate 100mbit --delay 20ms")]
pub(crate) struct NetCommand {
    #[command(subcommand)]
    command: Net,
}

/// How a process of `bench` or `probe` finds the others.
#[derive(Debug, clap::Args)]
struct JobArgs {
    /// TOML file with the address of each rank, instead of a launcher:
    /// `peers = ["10.0.0.1:4000", "10.0.0.2:4000"]`.
    #[arg(long, value_name = "FILE", requires = "rank")]
    peers: Option<PathBuf>,
    /// This process's rank among the peers.
    #[arg(long, value_name = "N", requires = "peers")]
    rank: Option<u32>,
    #[command(flatten)]
    access: AccessArgs,
}

#[derive(Debug, clap::Subcommand)]
enum Net {
    Bench(BenchArgs),
    Probe(ProbeArgs),
    Relay(RelayArgs),
}

/// Time a collective at growing sizes, with the columns of nccl-tests. busbw is the rate on each process's
/// link; slowest is the rank that took longest in the reported run.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: farflung launch -n 4 -- net bench --max 4194304")]
struct BenchArgs {
    /// The collective to time.
    #[arg(long, value_enum, default_value_t = Op::AllReduce)]
    op: Op,
    /// All-reduce algorithm: ring, double-tree and others; auto takes the cheapest on the links of --topology,
    /// or on a LAN.
    #[arg(long, value_name = "NAME", default_value_t = Algorithm::Ring)]
    algorithm: Algorithm,
    /// TOML file with the links, as written by probe.
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// Size of the smallest buffer, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(4..))]
    min: u64,
    /// Size of the largest buffer, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(4..=4 << 30))]
    max: u64,
    /// Number of runs per size; the median is reported.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
    /// Limit on what each process sends to all others together, such as 20mbit.
    #[arg(long, value_name = "BANDWIDTH", default_value = "unlimited")]
    up: Bandwidth,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// Measure latency and bandwidth of every pair of processes, one after the other, and print a topology file.
/// Comments at its end contain the counters of the system's TCP for each pair: retransmitted packets,
/// round-trip times under load and at rest, and queueing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: farflung launch -n 3 -- net probe --out links.toml")]
struct ProbeArgs {
    /// Bytes of the transfers that measure bandwidth.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u64).range(1024..=1 << 30))]
    bytes: u64,
    /// Speed of each device in the file, in floating-point operations per second; it is not measured.
    #[arg(long, value_name = "N", default_value_t = 50_000_000_000)]
    flops: u64,
    /// File that rank 0 writes. Default: standard output.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    job: JobArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Op {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    Scan,
    ExclusiveScan,
    AllToAll,
}

impl Op {
    /// Runs the collective once over `x`.
    fn run(self, comm: &Communicator, x: &mut [f32]) -> Result<(), CommError> {
        match self {
            Self::AllReduce => comm.all_reduce(x, ReduceOp::Sum),
            Self::ReduceScatter => comm.reduce_scatter(x, ReduceOp::Sum).map(|_| ()),
            Self::AllGather => comm.all_gather(x),
            Self::Broadcast => comm.broadcast(x, Rank(0)),
            Self::Reduce => comm.reduce(x, ReduceOp::Sum, Rank(0)),
            Self::Scan => comm.scan(x, ReduceOp::Sum),
            Self::ExclusiveScan => comm.exclusive_scan(x, ReduceOp::Sum),
            Self::AllToAll => comm.all_to_all(x).map(|_| ()),
        }
    }

    /// Returns the name on the command line.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Returns the factor of nccl-tests: bytes on each link divided by bytes of the buffer. nccl-tests has no
    /// scans; their factor is that of a scan along a chain, in which each rank but the last sends one buffer.
    fn factor(self, n: f64) -> f64 {
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::Broadcast | Self::Reduce | Self::Scan | Self::ExclusiveScan => 1.0,
            Self::ReduceScatter | Self::AllGather | Self::AllToAll => (n - 1.0) / n,
        }
    }
}

impl NetCommand {
    pub(crate) fn run(self) -> Result<()> {
        match self.command {
            Net::Bench(args) => {
                let comm = args.job.join(args.up)?;
                args.run(&comm)
            }
            Net::Probe(args) => {
                let comm = args.job.join(Bandwidth::UNLIMITED)?;
                args.run(&comm)
            }
            Net::Relay(args) => args.run(),
        }
    }
}

impl JobArgs {
    /// Connects to the other processes. `up` limits what this process sends to all others together.
    fn join(&self, up: Bandwidth) -> Result<Communicator> {
        let mut config = self.place()?;
        config.pace.all = up;
        Ok(Communicator::new(tcp::join(&config)?))
    }

    /// Returns this process's place in its job: from a list of peers, or from a launcher's variables.
    fn place(&self) -> Result<tcp::Config> {
        let variable = |name: &str| std::env::var(name).ok();
        if let (Some(path), Some(rank)) = (&self.peers, self.rank) {
            let peers = farflung::peers::read(path)?;
            let security = self.access.among_peers(&peers, variable)?;
            let mut config = tcp::Config::with_peers(rank, peers);
            config.security = security;
            return Ok(config);
        }
        let Some(env) = self.access.detect(variable)? else {
            let expected =
                "a launcher that starts it, such as `farflung launch -n 2 -- net bench`, or --peers"
                    .to_owned();
            return Err(Error::Setting { field: "net", value: "alone".to_owned(), expected });
        };
        let mut config = tcp::Config::new(env.rank.0, env.world_size as u32, env.meeting_place());
        config.security = env.security;
        Ok(config)
    }
}

#[expect(clippy::disallowed_methods, reason = "it measures real time")]
fn now() -> Instant {
    Instant::now()
}

/// Seconds that the slowest rank took, and which rank that was.
type Slowest = Located<f64, u64>;

fn median<T: Copy>(mut times: Vec<T>, seconds: impl Fn(&T) -> f64) -> T {
    times.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
    times[times.len() / 2]
}

impl BenchArgs {
    fn run(self, comm: &Communicator) -> Result<()> {
        let mut comm = comm.clone().with_algorithm(self.algorithm);
        if let Some(path) = &self.topology {
            let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
                action: "read",
                path: path.clone(),
                source,
            })?;
            comm = comm.with_topology(text.parse::<Cluster>()?.topology()?)?;
        }
        let first = comm.rank().0 == 0;
        let n = comm.size() as f64;
        if first && !self.json {
            super::print(&format!(
                "{:>12} {:>12} {:>12} {:>12} {:>8}\n",
                "bytes", "time us", "algbw GB/s", "busbw GB/s", "slowest"
            ))?;
        }
        let mut bytes = self.min;
        while bytes <= self.max {
            let per_rank = (bytes as usize / 4).div_ceil(comm.size());
            let mut x = vec![1.0_f32; per_rank * comm.size()];
            let mut times = Vec::new();
            for iteration in 0..=self.iterations {
                x.fill(1.0);
                comm.barrier()?;
                let start = now();
                self.op.run(&comm, &mut x)?;
                if iteration > 0 {
                    let (value, place) = (start.elapsed().as_secs_f64(), u64::from(comm.rank().0));
                    times.push(Slowest { value, place });
                }
            }
            // The time of the slowest rank counts.
            comm.all_reduce(&mut times, ReduceOp::Max)?;
            let Slowest { value: time, place: slowest } = median(times, |time| time.value);
            let size = size_of_val(&x[..]);
            let algbw = size as f64 / time / 1e9;
            let busbw = algbw * self.op.factor(n);
            if first && self.json {
                let row = serde_json::json!({
                    "op": self.op.name(), "ranks": comm.size(), "bytes": size,
                    "time_us": time * 1e6, "algbw_gbs": algbw, "busbw_gbs": busbw,
                    "slowest_rank": slowest,
                });
                super::print(&format!("{row}\n"))?;
            } else if first {
                let row =
                    format!("{size:>12} {:>12.1} {algbw:>12.3} {busbw:>12.3} {slowest:>8}\n", time * 1e6);
                super::print(&row)?;
            }
            bytes *= 4;
        }
        Ok(comm.barrier()?)
    }
}

/// Tag of the probe's messages.
const PROBE: u32 = 7;

/// A measured link.
#[derive(Debug, Serialize, Deserialize)]
struct Pair {
    to: u32,
    link: Link,
    counters: PeerCounters,
}

impl ProbeArgs {
    /// Measures this rank's link to `to`, which answers each message, and returns it with the counters of that
    /// peer.
    fn measure(&self, comm: &Communicator, to: Rank) -> Result<Pair> {
        let mut turns = Vec::new();
        for _ in 0..20 {
            let start = now();
            comm.send(to, PROBE, &[0; 8])?;
            comm.recv(to, PROBE)?;
            turns.push(start.elapsed());
        }
        let turn = turns.into_iter().min().unwrap_or(Duration::ZERO);
        let data = vec![0; self.bytes as usize];
        let mut transfers = Vec::new();
        for _ in 0..3 {
            let start = now();
            comm.send(to, PROBE, &data)?;
            comm.recv(to, PROBE)?;
            transfers.push(start.elapsed().saturating_sub(turn).as_secs_f64());
        }
        // Read at once, while the smoothed round-trip time is still that of the transfers.
        let counters = PeerCounters::of(comm.transport().as_ref(), PeerId(to.0));
        let rate = self.bytes as f64 * 8.0 / median(transfers, |&seconds| seconds).max(1e-9);
        let link = Link { bandwidth: Bandwidth(rate as u64), latency: Nanos::from(turn / 2) };
        Ok(Pair { to: to.0, link, counters })
    }

    fn run(self, comm: &Communicator) -> Result<()> {
        let (n, me) = (comm.size() as u32, comm.rank());
        let mut own = Vec::new();
        for (a, b) in (0..n).flat_map(|a| (a + 1..n).map(move |b| (Rank(a), Rank(b)))) {
            if me == a {
                own.push(self.measure(comm, b)?);
            } else if me == b {
                for _ in 0..23 {
                    comm.recv(a, PROBE)?;
                    comm.send(a, PROBE, &[0; 8])?;
                }
            }
            comm.barrier()?;
        }
        let own = serde_json::to_vec(&own).expect("numbers are plain data");
        let all = comm.all_gather_bytes(own)?;
        if me.0 > 0 {
            return Ok(());
        }
        let name = |rank: usize| format!("rank-{rank}");
        let device = |rank| Machine {
            name: name(rank),
            count: 1,
            speed: Speed::Flops(self.flops),
            memory: None,
            price: None,
            power: None,
            region: None,
            up: None,
            down: None,
            tensor_efficiency: TensorEfficiency::default(),
        };
        let (mut links, mut comments) = (Vec::new(), String::new());
        for (from, bytes) in all.iter().enumerate() {
            let malformed = |_| Error::Message {
                message: format!("the list of links that rank {from} measured"),
                problem: "cannot be parsed",
            };
            let pairs: Vec<Pair> = serde_json::from_slice(bytes).map_err(malformed)?;
            for Pair { to, link, counters } in pairs {
                tracing::info!(from, to, %link, bytes = %Bytes(self.bytes), "measured");
                let PeerCounters { bytes_sent, bytes_received, path, .. } = counters;
                let (sent, received) = (Bytes(bytes_sent), Bytes(bytes_received));
                let path = path.map_or_else(String::new, |path| format!("; {path}"));
                let _ = writeln!(
                    comments,
                    "# {} to {}: sent {sent}, received {received}{path}",
                    name(from),
                    name(to as usize)
                );
                links.push(Between { ends: [name(from), name(to as usize)], link });
            }
        }
        let devices = (0..n as usize).map(device).collect();
        let cluster = Cluster { default: None, regions: Vec::new(), devices, links };
        let text = format!("{cluster}\n{comments}");
        match &self.out {
            None => super::print(&text),
            Some(path) => std::fs::write(path, text).map_err(|source| Error::Io {
                action: "write",
                path: path.clone(),
                source,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_those_of_nccl_tests_and_names_those_of_the_flags() {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(near(Op::AllReduce.factor(8.0), 1.75));
        assert!(near(Op::AllGather.factor(8.0), 0.875) && near(Op::Broadcast.factor(8.0), 1.0));
        assert_eq!(Op::ReduceScatter.name(), "reduce_scatter");
        assert_eq!(median(vec![3.0, 1.0, 2.0], |&seconds| seconds).to_string(), "2");
    }
}
