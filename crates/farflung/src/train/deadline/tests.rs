//! Tests that refused runs would indeed fail.

use std::fmt::Write as _;

use farflung_base::Algorithm;
use farflung_compress::AverageSpec;
use farflung_optim::sync::{DDP, DILOCO};

use super::*;
use crate::config::choice::{LrScheduleKind, SyncKind};
use crate::train::{Quiet, connections, run, run_job};
use crate::transports::{MEMORY, SIMULATED, TCP};
use crate::{Stop, TrainConfig};

/// Returns settings of a small model with few layers on a text of its own, on home links, for two steps.
fn config(folder: &tempfile::TempDir) -> TrainConfig {
    let data = folder.path().join("text.txt");
    std::fs::write(&data, "the quick brown fox ".repeat(300)).unwrap();
    TrainConfig {
        data: Some(data),
        layers: Some(2),
        heads: Some(2),
        dim: Some(8),
        context: Some(16),
        batch: 1,
        steps: 2,
        warmup: 0,
        lr_schedule: LrScheduleKind::Constant,
        eval_batches: 2,
        sample_tokens: 0,
        threads: 1,
        ..TrainConfig::default()
    }
}

fn job(config: &TrainConfig, deadline: Nanos) -> Job {
    let config = TrainConfig { deadline, ..config.clone() };
    let world = config.workers;
    Job::new(config, world, Stop::manual()).unwrap()
}

/// Runs with the longest deadline that is refused, without the check, and expects a failure.
fn does_not_work(config: &TrainConfig) {
    let at_once = job(config, Nanos(1));
    let time = slowest(&at_once, &at_once.topology().unwrap()).unwrap().unwrap().time;
    let job = job(config, time.saturating_sub(Nanos(1)));
    assert_eq!(check(&job, TransportName::of(&SIMULATED)).unwrap_err().exit_code(), 2);
    let result = run_job(&job, connections(&job, None).unwrap(), &mut Quiet);
    let lost = result.as_ref().is_err_and(|error| matches!(error, Error::PeerLost { .. }));
    let settings = config.to_toml();
    assert!(lost, "{time}: {:?} for\n{settings}", result.map(|report| report.map(|report| report.time_s)));
}

fn link(text: &str) -> Link {
    text.parse().unwrap()
}

#[test]
fn what_is_refused_would_not_have_worked_whatever_the_algorithm() {
    let folder = tempfile::tempdir().unwrap();
    for algorithm in Algorithm::ALL {
        for (workers, link) in
            [(2, link("1kbit,0ms")), (3, link("1mbit,10s")), (4, link("20kbit,1s")), (8, link("1gbit,200ms"))]
        {
            let codec = AverageSpec::default();
            does_not_work(&TrainConfig { workers, codec, link, algorithm, ..config(&folder) });
        }
    }
}

#[test]
fn what_is_refused_would_not_have_worked_whatever_the_codec() {
    let folder = tempfile::tempdir().unwrap();
    for codec in ["none", "int8", "int4:128", "sign", "f16", "topk:0.01/f16", "int8+zstd", "rolling:10"] {
        for (workers, sync) in [(2, SyncKind::of(&DDP)), (4, SyncKind::of(&DILOCO)), (5, SyncKind::of(&DDP))]
        {
            let (codec, sync_every) = (codec.parse().unwrap(), 2);
            let (link, bucket_mb) = (link("10kbit,50ms"), 0.003);
            let config = config(&folder);
            does_not_work(&TrainConfig { workers, sync, sync_every, codec, bucket_mb, link, ..config });
        }
    }
}

#[test]
fn what_is_refused_would_not_have_worked_over_unequal_links() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("links.toml");
    let device = |text: &mut String, rank: usize, up: &str, down: &str| {
        writeln!(
            text,
            "[[device]]\nname = \"d{rank}\"\nflops = \"1TFLOPS\"\nmemory = \"8GB\"\nup = \"{up}\"\ndown = \"{down}\""
        )
        .unwrap();
    };
    // Each rank in turn has the slow link, or a high latency.
    for slow in 0..3 {
        for (up, down, far) in
            [("10kbit", "1mbit", "1ms"), ("1mbit", "10kbit", "1ms"), ("50kbit", "50kbit", "5s")]
        {
            let mut text = "default = \"1gbit,1ms\"\n".to_owned();
            for rank in 0..3 {
                let (up, down) = if rank == slow { (up, down) } else { ("10mbit", "10mbit") };
                device(&mut text, rank, up, down);
            }
            for other in (0..3).filter(|&other| other != slow) {
                let between = format!("between = [\"d{slow}\", \"d{other}\"]");
                writeln!(text, "[[link]]\n{between}\nlink = \"1mbit,{far}\"").unwrap();
            }
            std::fs::write(&path, text).unwrap();
            for algorithm in Algorithm::ALL {
                let (codec, topology) = (AverageSpec::default(), Some(path.clone()));
                does_not_work(&TrainConfig { workers: 3, codec, topology, algorithm, ..config(&folder) });
            }
        }
    }
}

#[test]
fn what_is_refused_would_not_have_worked_in_a_pipeline() {
    let folder = tempfile::tempdir().unwrap();
    for (schedule, stages, workers) in [
        ("gpipe", 2, 2),
        ("1f1b", 4, 4),
        ("zb-h1", 2, 4),
        ("interleaved", 2, 2),
        ("zbv", 2, 2),
        ("chimera", 2, 2),
    ] {
        for link in [link("1kbit,0ms"), link("10kbit,50ms"), link("1kbit,2s")] {
            let schedule = schedule.parse().unwrap();
            let base = config(&folder);
            let layers = Some(8);
            does_not_work(&TrainConfig { layers, workers, link, stages, schedule, ..base });
        }
    }
}

#[test]
fn a_run_that_works_over_a_slow_link_is_not_refused() {
    let folder = tempfile::tempdir().unwrap();
    let base = config(&folder);
    // The average of a step takes seconds here.
    let slow = TrainConfig { link: link("20kbit,1s"), codec: "int8".parse().unwrap(), ..base };
    let job = job(&slow, slow.deadline);
    check(&job, TransportName::of(&SIMULATED)).unwrap();
    run_job(&job, connections(&job, None).unwrap(), &mut Quiet).unwrap().unwrap();
    // Other links than simulated ones are not checked.
    let never = TrainConfig { link: link("1kbit,10s"), ..slow };
    let job = self::job(&never, never.deadline);
    check(&job, TransportName::of(&TCP)).unwrap();
    check(&job, TransportName::of(&MEMORY)).unwrap();
    let never = TrainConfig { out: Some(folder.path().join("never")), ..never };
    let message = run(never, None, Stop::manual(), &mut Quiet).unwrap_err().to_string();
    assert!(
        message.starts_with("`link` is 1kbit,10s, expected a link that is fast enough for the"),
        "{message}"
    );
    assert!(
        message.contains("of 4 kB among 4 workers takes at least 69.15s")
            && message.ends_with("`deadline` is 60s"),
        "{message}"
    );
}
