//! Compares the tuner with a measurement of every bucket size and algorithm, on a link on which latency
//! dominates and on one on which bandwidth does.

use anyhow::{Context, Result, ensure};
use farflung::TrainConfig;
use farflung::base::Nanos;
use farflung::train::Job;
use farflung::train::tune::{Candidate, measure, tune};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all, on_connections};

pub(crate) const BENCH: Bench = Bench {
    name: "tune",
    claim: "--tune finds a bucket size and an algorithm whose step is within 5 % of the best of all, where \
            latency limits a step and where bandwidth does, and a run with the plan that it writes has the \
            same bits",
    source: "Gan et al. 2021, BAGUA's autotune service",
    seed: 1337,
    run,
};

/// Name of what limits the step; then the link and the codec.
const CASES: [(&str, &str, &str); 4] = [
    ("latency", "10gbit,5ms", "none"),
    ("bandwidth", "20mbit,1us", "none"),
    ("latency", "10gbit,5ms", "int8"),
    ("bandwidth", "20mbit,1us", "int8"),
];
/// Steps measured for each candidate.
const STEPS: u64 = 1;
/// Number of ranks: a power of two, which all algorithms support.
const RANKS: usize = 4;

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    let base = TrainConfig { workers: RANKS, tune: STEPS, ..config(report.seed(), false) };
    let first = job(base.clone(), JobTransport::Memory)?;
    for (bound, link, codec) in CASES {
        let config = TrainConfig { codec: codec.parse()?, ..base.clone() };
        let job = again(&first, config, JobTransport::Simulated(link.parse()?));
        let name = format!("{bound} ({link}), {codec}");
        let tuned = on_connections(&job, |connection| {
            let tuned = tune(&job, &connection.comm, 1)?.context("there is nothing to tune")?;
            Ok((tuned.chosen(), tuned.tried.len(), tuned.job))
        })?;
        ensure!(tuned.iter().all(|(chosen, ..)| *chosen == tuned[0].0), "ranks chose different candidates");
        let (chosen, tried, chosen_job) = &tuned[0];
        let (mut best, mut worst) = ((Nanos::MAX, *chosen), Nanos::ZERO);
        let grid = job.grid();
        for &candidate in &grid {
            if let Some(time) = time(&job, candidate)? {
                if time < best.0 {
                    best = (time, candidate);
                }
                worst = worst.max(time);
            }
        }
        let took = time(&job, *chosen)?.context("the chosen candidate is not possible")?;
        let ratio = |a: Nanos, b: Nanos| a.as_secs_f64() / b.as_secs_f64();
        report.row(
            &format!("{name}: a step with {chosen}"),
            took.as_secs_f64() * 1e3,
            "ms",
            Threshold::None,
        )?;
        let metric = format!("{name}: chosen step time relative to the best of {}, {}", grid.len(), best.1);
        report.row(&metric, ratio(took, best.0), "x", Threshold::AtMost(1.05))?;
        report.row(
            &format!("{name}: worst step time relative to the best"),
            ratio(worst, best.0),
            "x",
            Threshold::None,
        )?;
        report.row(&format!("{name}: candidates tried"), *tried as f64, "", Threshold::None)?;
        let bits = |job: &Job| {
            let ends = on_all(job, |rank| {
                for _ in 0..3 {
                    rank.step(false)?;
                }
                let bits: Vec<u32> = rank.params().to_vec::<f32>()?.into_iter().map(f32::to_bits).collect();
                rank.comm().barrier()?;
                Ok(bits)
            })?;
            Ok::<_, anyhow::Error>(ends.into_iter().next().unwrap_or_default())
        };
        let repeated = job.with_plan(chosen_job.plan.to_string().parse()?)?;
        let (ours, theirs) = (bits(chosen_job)?, bits(&repeated)?);
        let differ = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
        ensure!(!ours.is_empty() && ours.len() == theirs.len(), "no parameters");
        let metric = format!("{name}: parameters whose bits differ in a run with the plan");
        report.row(&metric, differ as f64, "", Threshold::AtMost(0.0))?;
    }
    Ok(())
}

/// Returns the time of a step on the slowest rank, or `None` if the candidate is not possible. Each call uses
/// new ranks.
fn time(job: &Job, candidate: Candidate) -> Result<Option<Nanos>> {
    let all = on_connections(job, |connection| Ok(measure(job, &connection.comm, candidate, (STEPS, 1))?))?;
    Ok(all.into_iter().next().flatten().map(|tried| tried.step))
}
