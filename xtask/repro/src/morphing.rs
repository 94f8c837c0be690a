//! Compares policies for lost machines under seeded preemptions, and checks how often to save.

use anyhow::Result;
use farflung::base::Nanos;
use farflung::parallel::churn::{
    CheckpointedJob, POLICIES, Recovery, Replay, StepTimes, Trace, alive, daly, mixes, replay, survivors,
    young,
};
use farflung::parallel::churn::{Position, Shape, reroute};
use farflung::parallel::pipeline::{Boundary, Method, PipelineCost, Settings, StageCost, simulate};
use farflung::parallel::shipped;
use farflung::train::{PipelineSizes, fleet};
use farflung::zoo::ModelSpec;

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "morphing",
    claim: "under the same trace of preemptions, Varuna's morphing, Oobleck's templates, ReCycle's \
            re-routing and Parcae's liveput each get more work done than restarting from checkpoints at \
            Daly's interval",
    source: "Athlur et al. 2022; Jang et al. 2023; Gandhi et al. 2024; Duan et al. 2024; Young 1974; Daly 2006",
    seed: 21,
    run,
};

const HOUR: u64 = 3_600_000_000_000;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    intervals(report, options)?;
    templates(report)?;
    rerouted(report)?;
    liveput(report)?;
    let (traces, hours) = if options.quick { (1, 12) } else { (5, 48) };
    // All machines of `spot` count as slow as the slowest. Each is lost after four hours on average, and comes
    // back after 20 minutes on average.
    let cluster = shipped::cluster("spot")?;
    let model = ModelSpec::preset("gpt2-xl")?;
    let fleet = fleet(&model, &cluster, PipelineSizes { batch: 1, microbatches: 128 })?;
    let mut prices = StepTimes::new(&fleet)?;
    let second = 1_000_000_000;
    let recovery = Recovery {
        save: Nanos(10 * second),
        restart: Nanos(60 * second),
        regroup: Nanos(10 * second),
        lifetime: Nanos(4 * HOUR),
    };
    let mut shares = [0.0; POLICIES.len()];
    let mut least = [f64::INFINITY; POLICIES.len()];
    let mut losses = 0;
    for seed in 0..traces {
        let machines = cluster.size() as u32;
        let trace = Trace::drawn(machines, 4.0 * 3600.0, 1200.0, Nanos(hours * HOUR), report.seed() + seed);
        losses += trace.losses();
        let mut seen: Vec<Replay> = Vec::new();
        for row in &POLICIES {
            seen.push(replay(row, &trace, &recovery, &mut prices)?);
        }
        for (at, done) in seen.iter().enumerate() {
            shares[at] += done.share / traces as f64;
            least[at] = least[at].min(done.steps as f64 / seen[0].steps as f64);
        }
    }
    report.row("traces", traces as f64, "", Threshold::None)?;
    report.row("losses of a machine", losses as f64, "", Threshold::None)?;
    for (at, row) in POLICIES.iter().enumerate() {
        let name = format!("{}: work done, relative to changes that take no time", row.name);
        report.row(&name, shares[at], "", Threshold::AtMost(1.0))?;
        if at > 0 {
            let name = format!("{}: work done, relative to restarting, lowest of all traces", row.name);
            report.row(&name, least[at], "x", Threshold::AtLeast(1.0))?;
        }
    }
    Ok(())
}

/// Compares closed forms with simulated failures.
fn intervals(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let segments = if options.quick { 200_000 } else { 2_000_000 };
    for (save, between) in [(5.0, 86_400.0), (30.0, 7200.0), (120.0, 3600.0)] {
        let job = CheckpointedJob { every: daly(save, between), save, restart: 60.0, mtbf: between };
        let (expected, seen) = (job.expected(), job.simulated(segments, report.seed()));
        let name = format!("{save} s to save, a failure every {between} s");
        report.row(&format!("{name}: Daly's interval"), job.every, "s", Threshold::None)?;
        report.row(&format!("{name}: goodput"), expected.work, "", Threshold::None)?;
        let off = (expected.work / seen.work - 1.0).abs() * 100.0;
        report.row(
            &format!("{name}: difference of the closed form from the simulation"),
            off,
            "%",
            Threshold::AtMost(0.2),
        )?;
        let best = job.best().expected().work;
        let of = |every: f64| CheckpointedJob { every, ..job }.expected().work / best;
        report.row(
            &format!("{name}: goodput at Daly's interval, relative to the best interval"),
            of(job.every),
            "x",
            Threshold::AtLeast(0.999),
        )?;
        report.row(
            &format!("{name}: goodput at Young's interval, relative to the best interval"),
            of(young(save, between)),
            "x",
            Threshold::AtLeast(0.99),
        )?;
    }
    // Two copies of 8 stages. A machine is lost after two hours on average, and replaced after ten minutes.
    report.row(
        "2 copies of 8 stages: probability that each stage has a copy",
        alive(8, 2, 7200.0, 600.0),
        "",
        Threshold::None,
    )
}

/// Checks Oobleck's mixes of templates of 2 to 5 machines.
fn templates(report: &mut Report<'_>) -> Result<()> {
    let published = [(13, 10), (12, 10), (11, 7), (10, 7), (9, 5), (8, 5), (7, 3), (6, 3), (5, 2), (4, 2)];
    let off = published.iter().filter(|&&(machines, count)| mixes(&[2, 3, 4, 5], machines).len() != count);
    report.row(
        "mixes of templates 2 to 5 for 4 to 13 machines that differ from the list",
        off.count() as f64,
        "",
        Threshold::AtMost(0.0),
    )
}

/// Loses one machine of 8 pipelines of 4 stages, at each stage in turn.
fn rerouted(report: &mut Report<'_>) -> Result<()> {
    let (stages, pipelines, microbatches) = (4, 8, 16);
    let base = Method::OneFOneB.order(&Settings::new(stages, microbatches))?;
    let cost = PipelineCost::uniform(&base, StageCost::UNIT, Boundary::latency(Nanos::ZERO));
    let whole = simulate(&base, &cost)?.makespan().as_secs_f64();
    let (mut worst, mut wrong) = (0.0_f64, 0);
    for stage in 0..stages {
        let found = reroute(&base, pipelines, &[Position { pipeline: 3, stage }], &cost)?;
        worst = worst.max(simulate(&found.order, &cost)?.makespan().as_secs_f64());
        let misplaced = found.order.actions().filter(|(rank, action)| {
            found.order.placement().part(action.stage) != found.positions[rank.index()].stage
        });
        wrong += misplaced.count();
    }
    let fewer =
        Method::OneFOneB.order(&Settings::new(stages, (microbatches * pipelines).div_ceil(pipelines - 1)))?;
    let dropped = simulate(&fewer, &cost)?.makespan().as_secs_f64();
    report.row(
        "ReCycle, 1 of 8 x 4 machines lost: work on a machine of another stage",
        wrong as f64,
        "",
        Threshold::AtMost(0.0),
    )?;
    report.row(
        "ReCycle, 1 of 8 x 4 machines lost: time of a pass, relative to 1F1B without losses",
        worst / whole,
        "x",
        Threshold::None,
    )?;
    report.row(
        "dropping the pipeline: time of a pass, relative to 1F1B without losses",
        dropped / whole,
        "x",
        Threshold::None,
    )?;
    report.row(
        "ReCycle: speed relative to dropping the pipeline",
        dropped / worst,
        "x",
        Threshold::AtLeast(1.0),
    )
}

/// Compares the probabilities of remaining pipelines with a count over all sets of lost machines.
fn liveput(report: &mut Report<'_>) -> Result<()> {
    let (shape, machines) = (Shape { stages: 3, pipelines: 4 }, 14_u32);
    let mut most = 0.0_f64;
    for lost in 1..=5 {
        let (mut counts, mut all) = ([0.0; 5], 0.0);
        for set in (0_u32..1 << machines).filter(|set| set.count_ones() == lost) {
            let alive = |stage: u32| (0..4).filter(|row| set & (1 << (row * 3 + stage)) == 0).count();
            counts[(0..3).map(alive).min().unwrap_or(0)] += 1.0;
            all += 1.0;
        }
        for (found, count) in survivors(shape, machines, lost).iter().zip(counts) {
            most = most.max((found - count / all).abs());
        }
    }
    report.row(
        "Parcae: probabilities of remaining pipelines, difference from counting all losses",
        most,
        "",
        Threshold::AtMost(1e-9),
    )
}
