//! Jobs whose workers a bench drives step by step, over any transport, with the trainer's own code.
//!
//! It does not depend on what is measured.

use std::net::TcpListener;

use anyhow::{Context, Result, anyhow};
use farflung::base::{Link, Rank};
use farflung::compress::AverageSpec;
use farflung::config::choice::{LrScheduleKind, OptimizerKind, SyncKind, TransportKind};
use farflung::optim::local::SGD;
use farflung::optim::sync::DDP;
use farflung::train::{Job, Trainer, WorkerConnection, connections};
use farflung::transports::{MEMORY, SIMULATED, TCP};
use farflung::{LaunchEnv, Stop, TrainConfig};

/// Transport of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobTransport {
    /// Channels within this process.
    Memory,
    /// Virtual time over equal links.
    Simulated(Link),
    /// Sockets of the loopback interface.
    Tcp,
}

/// Returns settings for a small GPT on the default text: 2 layers of width 64, a context of 32 tokens, 4
/// sequences per worker and step, ddp, and a constant learning rate. With `nano`, the model has the shape of
/// the preset `nano` and a context of 64 tokens instead.
pub(crate) fn config(seed: u64, nano: bool) -> TrainConfig {
    let small = |n| (!nano).then_some(n);
    TrainConfig {
        layers: small(2),
        heads: small(2),
        dim: small(64),
        context: Some(if nano { 64 } else { 32 }),
        batch: 4,
        seed,
        sync: SyncKind::of(&DDP),
        codec: AverageSpec::default(),
        lr_schedule: LrScheduleKind::Constant,
        min_lr: 0.0,
        warmup: 0,
        threads: 1,
        ..TrainConfig::default()
    }
}

/// Returns the settings with plain SGD: no momentum, no decay, no clipping, and the learning rate `lr`.
pub(crate) fn plain_sgd(config: TrainConfig, lr: f64) -> TrainConfig {
    TrainConfig {
        optimizer: OptimizerKind::of(&SGD),
        momentum: 0.0,
        weight_decay: 0.0,
        clip: 0.0,
        lr,
        ..config
    }
}

/// Makes a job over a transport. Use [`again`] for further jobs on the same data, which does not read it again.
pub(crate) fn job(config: TrainConfig, over: JobTransport) -> Result<Job> {
    let config = with_transport(config, over);
    let world = config.workers;
    Ok(Job::new(config, world, Stop::manual())?)
}

/// Returns the job with other settings of the same model and data.
///
/// # Panics
/// If the settings cannot be combined.
pub(crate) fn again(job: &Job, config: TrainConfig, over: JobTransport) -> Job {
    let config = with_transport(config, over);
    let world = config.workers;
    job.with_config(config, world).expect("the settings of a bench can be combined")
}

pub(crate) fn with_transport(mut config: TrainConfig, over: JobTransport) -> TrainConfig {
    (config.transport, config.link) = (over.kind(), over.link_or(config.link));
    config
}

/// Moves a job whose plan is made to another transport.
pub(crate) fn set_transport(job: &mut Job, over: JobTransport) {
    (job.config.transport, job.config.link) = (over.kind(), over.link_or(job.config.link));
}

impl JobTransport {
    fn kind(self) -> TransportKind {
        TransportKind::of(match self {
            Self::Memory => &MEMORY,
            Self::Simulated(_) => &SIMULATED,
            Self::Tcp => &TCP,
        })
    }

    const fn link_or(self, link: Link) -> Link {
        match self {
            Self::Simulated(link) => link,
            Self::Memory | Self::Tcp => link,
        }
    }
}

/// Runs `work` for each worker of the job, on separate threads. Returns the results in order of rank.
pub(crate) fn on_all<T: Send>(job: &Job, work: impl Fn(&mut Trainer) -> Result<T> + Sync) -> Result<Vec<T>> {
    on_connections(job, |connection| work(&mut Trainer::new(job, connection.comm, job.config.threads)?))
}

/// Runs `work` for each worker on a separate thread, with its [`WorkerConnection`] (its connection to the job).
/// No trainer is made.
pub(crate) fn on_connections<T: Send>(
    job: &Job,
    work: impl Fn(WorkerConnection) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let work = &work;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        if matches!(job.config.transport, TransportKind::Named(row) if row.joins_processes()) {
            let port = free_port()?;
            for rank in 0..job.world {
                threads.push(scope.spawn(move || work(join(job, rank, port)?)));
            }
        } else {
            for connection in connections(job, None)? {
                threads.push(scope.spawn(move || work(connection)));
            }
        }
        threads.into_iter().map(|t| t.join().map_err(|_| anyhow!("a worker panicked"))?).collect()
    })
}

/// Returns a port of the loopback interface that is free now.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("failed to find a free port")?;
    Ok(listener.local_addr().context("failed to read a socket's address")?.port())
}

/// Connects one rank of a TCP job, as a process that a launcher has started does.
fn join(job: &Job, rank: usize, port: u16) -> Result<WorkerConnection> {
    let env = LaunchEnv {
        rank: Rank(rank as u32),
        world_size: job.world,
        local_rank: rank,
        local_world_size: Some(job.world),
        master_addr: "127.0.0.1".to_owned(),
        master_port: port,
        source: "the bench",
        more_addresses: Vec::new(),
        security: farflung::comm::secure::Security::unencrypted(),
    };
    connections(job, Some(farflung::train::join(&job.config, &env)?))?
        .pop()
        .context("the process has no seat")
}

/// Returns `|a - b| / |b|` over whole buffers, in f64.
pub(crate) fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let off: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let size: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
    (off / size).sqrt()
}

/// Returns the largest absolute difference between elements of two lists of the same length.
pub(crate) fn farthest(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}
