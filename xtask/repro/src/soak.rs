//! Runs random collectives under random faults in virtual time. Every seed must end, and must give the same
//! result each time.

use anyhow::Result;
use farflung::base::{AccessLink, Bandwidth, Link, Nanos, PeerId, Philox, Rank, Topology};
use farflung::comm::simulated::{Faults, LinkNoise, cluster_with};
use farflung::comm::{Algorithm, AllReduce as _, CommError, Communicator, ReduceOp, Transport};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::ranks::{Cluster, on_ranks};

pub(crate) const BENCH: Bench = Bench {
    name: "soak",
    claim: "200 random collectives of 8 ranks on random links under random faults end for every seed, with \
            the same times, errors and bits in each run and on every machine",
    source: "deterministic simulation as in FoundationDB and turmoil",
    seed: 0,
    run,
};

const N: usize = 8;
const COLLECTIVES: u64 = 200;

/// Digests of the first 50 seeds, and of the first 1000.
const PINNED: [u64; 2] = [0xc59b_282c_4aba_c1f8, 0xf1d5_2006_6dc8_5b37];

/// A running digest.
#[derive(Debug, Clone, Copy, Default)]
struct Digest(u64);

impl Digest {
    fn add(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(7) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn text(&mut self, text: &str) {
        for b in text.bytes() {
            self.add(b.into());
        }
    }
}

fn links(rng: Philox) -> Topology {
    let mut topology = Topology::uniform(N, Link::FREE);
    let ranks = || (0..N as u32).map(Rank);
    for a in ranks() {
        let rate = |i| Bandwidth(10_000_000 << rng.below(10 * u64::from(a.0) + i, 7));
        topology.set_access_link(a, AccessLink { up: rate(0), down: rate(1) });
        for b in ranks() {
            let i = 1000 + 10 * (u64::from(a.0) * N as u64 + u64::from(b.0));
            let latency = Nanos::from_micros(100 << rng.below(i, 9));
            topology.set_link(a, b, Link { bandwidth: Bandwidth(1_000_000_000), latency });
        }
    }
    topology
}

/// Returns up to three faults within the time of a run, and jitter and loss for every second seed.
fn faults(rng: Philox, seed: u64) -> Faults {
    let mut faults = Faults::new();
    if seed % 2 == 1 {
        let (jitter, retransmit) = (Nanos::from_millis(5), Nanos::from_millis(200));
        faults = faults.weather(LinkNoise { seed, jitter, loss: 2_000, retransmit });
    }
    for i in 0..rng.below(0, 4) {
        let word = |j| rng.below(10 * (i + 1) + j, 1 << 30);
        let at = faults.at(Nanos::from_millis(word(0) % 20_000));
        let peer = |j| PeerId((word(j) % N as u64) as u32);
        let later = Nanos::from_millis(word(0) % 20_000 + word(4) % 4_000);
        faults = match word(1) % 5 {
            0 => at.crash(peer(2)),
            1 => at.freeze(peer(2), later),
            2 => at.cut_until(peer(2), peer(3), later),
            3 => at.corrupt(peer(2), peer(3)),
            _ => at.partition(&[peer(2), peer(3)], N, later),
        };
    }
    faults
}

/// Runs one random collective. All ranks draw the same one.
fn collective(comm: &Communicator, draw: impl Fn(u64) -> u64) -> Result<u64, CommError> {
    let n = comm.size();
    let len = (draw(1) % 3_000) as usize;
    let root = Rank((draw(2) % n as u64) as u32);
    let algorithm = Algorithm::ALL[(draw(3) % Algorithm::ALL.len() as u64) as usize];
    let mut x: Vec<f32> = (0..len).map(|i| (i % 97) as f32 + comm.rank().0 as f32 * 0.1).collect();
    match draw(0) % 10 {
        0..4 => comm.all_reduce_by(algorithm.program(comm.rank(), n), &mut x, ReduceOp::Sum)?,
        4 => {
            let own = comm.reduce_scatter(&mut x, ReduceOp::Max)?;
            x = x[own].to_vec();
        }
        5 => comm.all_gather(&mut x)?,
        6 => comm.broadcast(&mut x, root)?,
        7 => {
            comm.reduce(&mut x, ReduceOp::Mean, root)?;
            x.truncate(if comm.rank() == root { len } else { 0 });
        }
        8 => x = comm.all_to_all(&x[..len / n * n])?,
        _ => comm.barrier()?,
    }
    let mut digest = Digest::default();
    for v in &x {
        digest.add(v.to_bits().into());
    }
    Ok(digest.0)
}

fn rank(mut comm: Communicator, rng: Philox) -> u64 {
    let mut digest = Digest::default();
    let mut next = 0;
    while next < COLLECTIVES {
        let result = collective(&comm, |i| rng.below(100_000 + 10 * next + i, 1 << 40));
        next += 1;
        digest.add(comm.now().0);
        match result {
            Ok(bits) => digest.add(bits),
            Err(error) => {
                digest.text(&error.to_string());
                // The survivors continue with the highest number of collectives that any of them has done.
                let again = comm.shrink().and_then(|left| {
                    let mut at = [next];
                    left.all_reduce(&mut at, ReduceOp::Max)?;
                    Ok((left, at[0]))
                });
                match again {
                    Ok((left, at)) => (comm, next) = (left, at),
                    Err(error @ CommError::Ended { .. }) => {
                        digest.text(&error.to_string());
                        break;
                    }
                    Err(error) => digest.text(&error.to_string()),
                }
            }
        }
    }
    digest.add(comm.size() as u64);
    digest.0
}

/// Returns the digest of one seed.
fn soak(seed: u64) -> Result<u64> {
    let topology = links(Philox::new(seed, 1));
    let endpoints = cluster_with(&topology, &faults(Philox::new(seed, 2), seed));
    let cluster: Cluster = endpoints.into_iter().map(|t| t as std::sync::Arc<dyn Transport>).collect();
    let ends = on_ranks(cluster, |comm| {
        Ok(rank(comm.with_deadline(Nanos::from_millis(2_000)), Philox::new(seed, 3)))
    })?;
    let mut digest = Digest::default();
    for end in ends {
        digest.add(end);
    }
    Ok(digest.0)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let (seeds, pinned) = if options.quick { (50, PINNED[0]) } else { (1000, PINNED[1]) };
    // Two seeds run at a time, since the ranks of one seed mostly wait for each other.
    let halves: Vec<Result<Vec<u64>>> = std::thread::scope(|scope| {
        let half = |first: u64| scope.spawn(move || (first..seeds).step_by(2).map(soak).collect());
        [half(0), half(1)].into_iter().map(|h| h.join().expect("no seed panics")).collect()
    });
    let halves = halves.into_iter().collect::<Result<Vec<_>>>()?;
    let mut digest = Digest::default();
    for seed in 0..seeds as usize {
        digest.add(halves[seed % 2][seed / 2]);
    }
    // Runs a few seeds again.
    let mut other = 0;
    for seed in (0..seeds).step_by(seeds as usize / 5) {
        other += u32::from(soak(seed)? != halves[seed as usize % 2][seed as usize / 2]);
    }
    report.row("seeds that ended", seeds as f64, "1", Threshold::None)?;
    report.row("seeds with another result in a second run", f64::from(other), "1", Threshold::AtMost(0.0))?;
    report.row(
        "the digest of all seeds is the expected one",
        f64::from(u8::from(digest.0 == pinned)),
        "1",
        Threshold::AtLeast(1.0),
    )?;
    anyhow::ensure!(digest.0 == pinned, "the digest of {seeds} seeds is {:#018x}", digest.0);
    Ok(())
}
