//! The simulator and the trainer agree: a step's predicted makespan against the virtual time that real stages take.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::Nanos;
use farflung::comm::Communicator;
use farflung::parallel::pipeline::{Method, VersionSync};
use farflung::train::{Pipelined, refusal, seats};

use crate::harness::{Bench, Mark, Options, Report};
use crate::workers::{Over, again, config, job, plain_sgd};

pub(crate) const BENCH: Bench = Bench {
    name: "predict-vs-run",
    claim: "the simulator's makespan is the executor's virtual time within 1%, for every schedule on uneven stages and links",
    source: "ours",
    seed: 1337,
    run,
};

const RANKS: usize = 4;

/// Four machines in a row, each link another.
fn topology() -> String {
    let mut text = "default = \"50mbit,3ms\"\n".to_owned();
    for rank in 0..RANKS {
        let _ = write!(text, "[[device]]\nname = \"m{rank}\"\nflops = \"50 GFLOPS\"\nmemory = \"8GB\"\n");
    }
    for (rank, link) in ["200mbit,500us", "80mbit,2ms", "1gbit,100us"].into_iter().enumerate() {
        let _ = write!(text, "[[link]]\nbetween = [\"m{rank}\", \"m{}\"]\nlink = \"{link}\"\n", rank + 1);
    }
    text
}

/// All ranks' clocks are the same after this.
fn align(comm: &Communicator) -> Result<()> {
    let all = comm.all_gather_bytes(comm.now().0.to_le_bytes().to_vec())?;
    let clock = |bytes: &Vec<u8>| Ok(u64::from_le_bytes(bytes.as_slice().try_into()?));
    let latest = all.iter().map(clock).collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or_default();
    let meet = Nanos(latest).saturating_add(Nanos::from_millis(1000));
    comm.advance(meet.saturating_sub(comm.now()));
    Ok(())
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let path = folder.path().join("row.toml");
    std::fs::write(&path, topology()).context("failed to write the topology")?;
    let base = TrainConfig {
        // Ten layers over four or eight parts, and a head: no two parts take the same.
        layers: Some(10),
        batch: 2,
        workers: RANKS,
        stages: RANKS,
        topology: Some(path),
        compute_rate: 2e9,
        ..plain_sgd(config(report.seed(), false), 0.1)
    };
    let link = base.link;
    let first = job(TrainConfig { workers: RANKS, ..base.clone() }, Over::Simulated(link))?;
    let microbatches: &[usize] = if options.quick { &[8] } else { &[8, 16] };
    for &m in microbatches {
        let all = Method::ALL.into_iter().filter(|m| refusal(*m).is_none());
        let all = all.map(|schedule| (schedule, VersionSync::Vertical));
        for (schedule, version_sync) in all.chain([(Method::PipeDream, VersionSync::Newest)]) {
            let config = TrainConfig { schedule, version_sync, microbatches: Some(m), ..base.clone() };
            let job = again(&first, config, Over::Simulated(link));
            let measured: Vec<Result<(Nanos, Nanos)>> = std::thread::scope(|scope| {
                let job = &job;
                let one = move |seat: farflung::train::Seat| {
                    let mut rank = Pipelined::new(job, seat.comm, 1)?;
                    let predicted = rank.plan().predicted()?.compute().makespan();
                    align(rank.comm())?;
                    rank.step(false)?;
                    let (begun, ended) = rank.last_pass();
                    Ok((predicted, ended.saturating_sub(begun)))
                };
                let threads: Vec<_> = seats(&job.config, None)?
                    .into_iter()
                    .map(|seat| scope.spawn(move || one(seat)))
                    .collect();
                anyhow::Ok(threads.into_iter().map(|t| t.join().expect("no rank panics")).collect())
            })?;
            let measured = measured.into_iter().collect::<Result<Vec<_>>>()?;
            let took = measured.iter().map(|m| m.1).max().unwrap_or_default();
            let predicted = measured[0].0;
            let off = (took.as_secs_f64() / predicted.as_secs_f64() - 1.0).abs() * 100.0;
            // With the newest weights, the table that the first and the last stage share has to be the newest as well:
            // one waits for the other, of which the schedule knows nothing.
            let (newest, mark) = match version_sync {
                VersionSync::Newest => (" with the newest weights", Mark::None),
                VersionSync::Vertical => ("", Mark::AtMost(1.0)),
            };
            let name = format!("{schedule}{newest}, {m} microbatches");
            report.row(&format!("{name}: predicted"), predicted.as_secs_f64() * 1e3, "ms", Mark::None)?;
            report.row(&format!("{name}: off"), off, "%", mark)?;
        }
    }
    Ok(())
}
