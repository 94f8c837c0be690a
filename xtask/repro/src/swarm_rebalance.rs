//! Measures how much work SWARM gets done under preemptions by how often it rebalances, compares hystereses,
//! and checks the square-cube law.

mod hysteresis;

use anyhow::Result;
use farflung::base::Nanos;
use farflung::parallel::swarm::{Churn, SquareCube, SwarmRun, simulate_swarm};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "swarm-rebalance",
    claim: "under preemptions, a swarm that rebalances every minute gets more work done than one that \
            rebalances every five minutes, and that one more than one that never does; the hysteresis of \
            pools is within 5% of the best of those tried, where a move takes 30 s; wide layers hide their \
            communication",
    source: "Ryabinin et al. 2023, SWARM: 82.7%, 95.8%, 97.6% of the optimum",
    seed: 0,
    run,
};

const HOUR: u64 = 3600;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let (traces, hours) = if options.quick { (1, 4) } else { (10, 32) };
    let nanos = |seconds: u64| Nanos(seconds * 1_000_000_000);
    let arms = [("never", None), ("every 300 s", Some(nanos(300))), ("every 60 s", Some(nanos(60)))];
    let mut shares = [0.0; 3];
    // 400 peers on 32 stages, as in the paper, whose trace is not public. A peer lives half a day on average,
    // and is away for half an hour.
    let base = SwarmRun {
        stages: 32,
        peers: 400,
        churn: Churn { lifetime: 12.0 * HOUR as f64, absence: 0.5 * HOUR as f64 },
        time: nanos(hours * HOUR),
        every: None,
        download: nanos(30),
    };
    let (mut least_seldom, mut least_never) = (f64::INFINITY, f64::INFINITY);
    let mut last = [0.0; 3];
    for trace in 0..traces {
        let mut seen = [0.0; 3];
        for (arm, &(_, every)) in arms.iter().enumerate() {
            let goodput = simulate_swarm(&SwarmRun { every, ..base }, report.seed() + trace)?;
            seen[arm] = goodput.share_of_bound;
            shares[arm] += goodput.share_of_bound / traces as f64;
            last[arm] += goodput.last_hour / traces as f64;
        }
        least_never = least_never.min(seen[1] / seen[0]);
        least_seldom = least_seldom.min(seen[2] / seen[1]);
    }
    report.row("traces", traces as f64, "", Threshold::None)?;
    for (arm, &(name, _)) in arms.iter().enumerate() {
        report.row(
            &format!("{name}: work done, relative to a perfectly equal division"),
            shares[arm],
            "",
            Threshold::None,
        )?;
        report.row(
            &format!("{name}: work done in the last hour, relative to a perfectly equal division"),
            last[arm],
            "",
            Threshold::None,
        )?;
    }
    report.row(
        "every 300 s relative to never, lowest of all traces",
        least_never,
        "x",
        Threshold::AtLeast(1.0 + 1e-6),
    )?;
    report.row(
        "every 60 s relative to every 300 s, lowest of all traces",
        least_seldom,
        "x",
        Threshold::AtLeast(1.0),
    )?;
    hysteresis::run(report, options.quick)?;
    square_cube(report)
}

/// Checks the square-cube law for a device of 16.25 TFLOP/s on 500 Mbit/s, with sequences of 512 tokens in 8
/// bits.
fn square_cube(report: &mut Report<'_>) -> Result<()> {
    let models =
        [("768 wide, 1 layer", 768, 1), ("4096, 1", 4096, 1), ("4096, 3", 4096, 3), ("12288, 1", 12_288, 1)];
    let (mut before, mut falls) = (0.0, 0);
    for (name, hidden, layers) in models {
        let of = |milliseconds: f64| {
            let round_trip = milliseconds / 1e3;
            SquareCube { hidden, layers, tokens: 512, bits: 8, flops: 16.25e12, bandwidth: 500e6, round_trip }
                .utilisation()
                .share
        };
        let shares = [0.0, 10.0, 50.0, 100.0, 200.0].map(of);
        falls += u32::from(shares.windows(2).any(|pair| pair[1] > pair[0]));
        falls += u32::from(shares[3] < before);
        before = shares[3];
        for (rtt, share) in [0, 10, 50, 100, 200].into_iter().zip(shares) {
            report.row(&format!("utilisation: {name}, round trip {rtt} ms"), share, "", Threshold::None)?;
        }
    }
    report.row(
        "cases in which utilisation does not fall with distance or rise with width",
        f64::from(falls),
        "",
        Threshold::AtMost(0.0),
    )
}
