//! Runs plans of `farflung plan auto` for uneven machines on the virtual clock, and compares times.

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::Link;
use farflung::parallel::{Cluster, Plan};
use farflung::train::auto::{Candidate, Wanted, auto};
use farflung::train::{Job, PipelineSizes, Trainer};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, config, job, on_all, set_transport};

pub(crate) const BENCH: Bench = Bench {
    name: "plan-run",
    claim: "the plan that is chosen for unequal machines takes the predicted time, and no plan with equal \
            shares in the file's order, with data parallelism alone or with a pipeline alone is faster",
    source: "ours",
    seed: 1337,
    run,
};

const MICROBATCHES: usize = 12;

/// A network and the text of its topology file.
struct Network {
    name: &'static str,
    file: &'static str,
}

const NETWORKS: [Network; 10] = [
    Network {
        name: "4:2:1:1 on a fast net",
        file: "default = '10gbit,10us'\n[[device]]\nname = 'a'\nflops = '400 MFLOPS'\n[[device]]\nname = \
            'b'\nflops = \
               '200 MFLOPS'\n[[device]]\nname = 'c'\ncount = 2\nflops = '100 MFLOPS'",
    },
    Network {
        name: "4:2:1:1 on 10 Mbit/s",
        file: "default = '10mbit,1ms'\n[[device]]\nname = 'a'\nflops = '400 MFLOPS'\n[[device]]\nname = \
            'b'\nflops = \
               '200 MFLOPS'\n[[device]]\nname = 'c'\ncount = 2\nflops = '100 MFLOPS'",
    },
    Network {
        name: "equal machines, slow uplinks",
        file: "default = '100mbit,5ms'\n[[device]]\nname = 'd'\ncount = 4\nflops = '200 MFLOPS'\nup = \
            '8mbit'\ndown = '50mbit'",
    },
    Network {
        name: "two offices of two",
        file: "[[region]]\nname = 'x'\ninside = '1gbit,100us'\n[[region]]\nname = 'y'\ninside = \
            '1gbit,100us'\n[[device]]\nname = \
               'p'\ncount = 2\nflops = '300 MFLOPS'\nregion = 'x'\n[[device]]\nname = 'q'\ncount = 2\nflops = \
               '300 \
               MFLOPS'\nregion = 'y'\n[[link]]\nbetween = ['x', 'y']\nlink = '5mbit,20ms'",
    },
    Network {
        name: "two offices, interleaved in the file",
        file: "[[region]]\nname = 'x'\ninside = '1gbit,100us'\n[[region]]\nname = 'y'\ninside = \
            '1gbit,100us'\n[[device]]\nname = \
               'p0'\nflops = '300 MFLOPS'\nregion = 'x'\n[[device]]\nname = 'q0'\nflops = '300 \
               MFLOPS'\nregion = \
               'y'\n[[device]]\nname = 'p1'\nflops = '300 MFLOPS'\nregion = 'x'\n[[device]]\nname = \
               'q1'\nflops = '300 \
               MFLOPS'\nregion = 'y'\n[[link]]\nbetween = ['x', 'y']\nlink = '5mbit,20ms'",
    },
    Network {
        name: "one fast machine, three slow and far",
        file: "default = '4mbit,40ms'\n[[device]]\nname = 'big'\nflops = '900 MFLOPS'\n[[device]]\nname = \
            'far'\ncount = \
               3\nflops = '50 MFLOPS'",
    },
    Network {
        name: "little memory",
        file: "default = '50mbit,2ms'\n[[device]]\nname = 'm'\ncount = 3\nflops = '200 MFLOPS'\nmemory = \
            '5MB'\n[[device]]\nname = \
               'n'\nflops = '400 MFLOPS'\nmemory = '4MB'",
    },
    Network {
        name: "six machines, 3:1",
        file: "default = '20mbit,3ms'\n[[device]]\nname = 'f'\ncount = 3\nflops = '300 \
            MFLOPS'\n[[device]]\nname = 's'\ncount = \
               3\nflops = '100 MFLOPS'",
    },
    Network {
        name: "two machines, 5:1, high latency",
        file: "default = '100mbit,80ms'\n[[device]]\nname = 'u'\nflops = '500 MFLOPS'\n[[device]]\nname = \
            'v'\nflops = '100 MFLOPS'",
    },
    Network {
        name: "asymmetric homes",
        file: "default = '100mbit,10ms'\n[[device]]\nname = 'h0'\nflops = '100 MFLOPS'\nup = '2mbit'\ndown = \
               '50mbit'\n[[device]]\nname = 'h1'\nflops = '200 MFLOPS'\nup = '5mbit'\ndown = \
               '50mbit'\n[[device]]\nname = \
               'h2'\nflops = '300 MFLOPS'\nup = '10mbit'\ndown = '100mbit'\n[[device]]\nname = 'h3'\nflops = \
               '250 \
               MFLOPS'\nup = '20mbit'\ndown = '100mbit'",
    },
];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let base = TrainConfig {
        batch: 1,
        workers: 1,
        layers: Some(6),
        accumulate: MICROBATCHES,
        ..config(report.seed(), false)
    };
    let whole = job(base.clone(), JobTransport::Memory)?;
    let sizes = PipelineSizes { batch: 1, microbatches: MICROBATCHES as u32 };
    for (at, network) in NETWORKS.iter().enumerate().take(if options.quick { 2 } else { NETWORKS.len() }) {
        let cluster: Cluster = network.file.parse()?;
        let file = folder.path().join(format!("{at}.toml"));
        std::fs::write(&file, network.file).context("failed to write the topology")?;
        let machines = cluster.size() as usize;
        let config = TrainConfig {
            topology: Some(file),
            workers: machines,
            accumulate: MICROBATCHES.div_ceil(machines),
            ..base.clone()
        };
        let there = whole.with_config(config, machines)?;
        let wanted = Wanted { only: None, keep: 1, each_kind: true };
        let candidates = auto("small", &whole.model, &cluster, sizes, wanted)?.candidates;
        let chosen = candidates.first().context("no plan was found")?;
        let took = timed(&there, &chosen.plan)?;
        let row = |what: &str| format!("{}: {what}", network.name);
        report.row(&row(&chosen.what), took, "s", Threshold::None)?;
        let off = (chosen.step.as_secs_f64() / took - 1.0).abs();
        report.row(
            &row("relative difference of the prediction from the measured time"),
            off,
            "",
            Threshold::AtMost(0.03),
        )?;
        let mut fastest = f64::INFINITY;
        for other in alternatives(&candidates) {
            fastest = fastest.min(timed(&there, &other.plan)?);
        }
        if fastest.is_finite() {
            report.row(
                &row("best alternative, time relative to the chosen plan"),
                fastest / took,
                "x",
                Threshold::AtLeast(0.9999),
            )?;
        }
    }
    Ok(())
}

/// Returns what the chosen plan, which is the first candidate, is compared with: of the others, the best
/// baseline and the best other plan of each kind.
fn alternatives(candidates: &[Candidate]) -> Vec<&Candidate> {
    let mut kinds = Vec::new();
    let mut others: Vec<&Candidate> = Vec::new();
    for candidate in &candidates[1..] {
        let kind = (candidate.kind, candidate.is_baseline);
        if !kinds.contains(&kind) {
            kinds.push(kind);
            others.push(candidate);
        }
    }
    others
}

/// Returns the virtual time of a step.
fn timed(there: &Job, plan: &Plan) -> Result<f64> {
    let mut job = there.with_plan(plan.clone())?;
    set_transport(&mut job, JobTransport::Simulated(Link::FREE));
    let steps = 2;
    let ranks = on_all(&job, |rank: &mut Trainer| {
        let begun = rank.comm().now();
        for _ in 0..steps {
            rank.step(false)?;
        }
        Ok(rank.comm().now().saturating_sub(begun).as_secs_f64() / f64::from(steps))
    })?;
    Ok(ranks.into_iter().fold(0.0, f64::max))
}
