//! Tests every pair of choices: valid pairs train, and the others are refused with the reason in the table.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::net::TcpListener;

use farflung::base::Rank;
use farflung::config::choice::TransportKind;
use farflung::train::combination::{AXES, covering};
use farflung::train::{Job, Trainer, WorkerConnection, connections};
use farflung::{Error, LaunchEnv, Stop, TrainConfig};

const STEPS: u64 = 3;

/// Returns settings of a tiny model with two replicas, with two stages each if the schedule has stages.
fn base() -> (tempfile::TempDir, TrainConfig) {
    let (folder, config) = crate::small::config(STEPS);
    let config = TrainConfig {
        heads: Some(2),
        dim: Some(8),
        context: Some(8),
        batch: 1,
        sync_every: 2,
        first_moment_every: Some(2),
        second_moment_every: Some(2),
        outer_lr: 0.7,
        route_tokens: 4,
        // Some optimizers make large updates here.
        theta: 10.0,
        ..config
    };
    (folder, config)
}

fn with(config: &TrainConfig, values: &[(&str, &str)]) -> TrainConfig {
    let mut config = config.clone();
    for (name, value) in values {
        let axis = AXES.iter().find(|axis| axis.name == *name).unwrap();
        (axis.set)(&mut config, value);
    }
    config.workers = 2 * config.stages * config.tensor;
    config.microbatches = (config.stages > 1).then_some(4);
    config
}

/// Returns the jobs of one process whose data and models the others take: of a GPT, of a mixture whose router
/// takes each token by itself, as slices of sequences need it, and of a model with a head of its own.
fn wholes(base: &TrainConfig) -> [Job; 2] {
    let gpt = TrainConfig { workers: 1, ..base.clone() };
    let mixture = TrainConfig {
        model: "mixtral-nano".to_owned(),
        heads: Some(4),
        balance_loss: Some(0.0),
        ..gpt.clone()
    };
    [gpt, mixture].map(|config| Job::new(config, 1, Stop::manual()).unwrap())
}

/// Returns the job of a run: of the mixture if its experts are divided.
fn job_of(wholes: &[Job; 2], config: &TrainConfig) -> Result<Job, Error> {
    wholes[usize::from(config.expert > 1)].with_config(config.clone(), config.workers)
}

/// Returns one function per rank that opens its connection; ranks are threads of this process over any
/// transport.
fn seats_of(job: &Job) -> Vec<Box<dyn FnOnce() -> WorkerConnection + Send + '_>> {
    let joins = matches!(job.config.transport, TransportKind::Named(row) if row.joins_processes());
    if !joins {
        let connections = connections(job, None).unwrap().into_iter();
        return connections
            .map(|connection| Box::new(move || connection) as Box<dyn FnOnce() -> WorkerConnection + Send>)
            .collect();
    }
    let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let join = move |rank: usize| {
        let env = LaunchEnv {
            rank: Rank(rank as u32),
            world_size: job.world,
            local_rank: rank,
            local_world_size: Some(job.world),
            master_addr: "127.0.0.1".to_owned(),
            master_port: port,
            source: "the test",
            more_addresses: Vec::new(),
            security: farflung::comm::secure::Security::unencrypted(),
        };
        let joined = farflung::train::join(&job.config, &env).unwrap();
        connections(job, Some(joined)).unwrap().pop().unwrap()
    };
    (0..job.world)
        .map(|rank| Box::new(move || join(rank)) as Box<dyn FnOnce() -> WorkerConnection + Send>)
        .collect()
}

/// Returns the losses of each rank's steps and the hash of its first part at the end.
fn train(job: &Job) -> Result<Vec<(Vec<f64>, blake3::Hash)>, Error> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = seats_of(job)
            .into_iter()
            .map(|connection| {
                scope.spawn(move || {
                    let mut trainer = Trainer::new(job, connection().comm, 1)?;
                    let folder = tempfile::tempdir().unwrap();
                    trainer.keep_state_in(job, folder.path())?;
                    let losses =
                        (0..STEPS).map(|_| Ok(trainer.step(false)?.loss)).collect::<Result<_, Error>>()?;
                    Ok((losses, trainer.hash()?))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn every_pair_of_choices_trains_or_is_refused() {
    let (_folder, base) = base();
    let wholes = wholes(&base);
    let found = covering();
    let mut failed = Vec::new();
    for run in &found.runs {
        let values: Vec<_> = AXES.iter().map(|axis| axis.name).zip(run.iter().map(String::as_str)).collect();
        let config = with(&base, &values);
        let name = run.join(" ");
        let job = match job_of(&wholes, &config) {
            Ok(job) => job,
            Err(error) => {
                failed.push(format!("{name}: refused: {error}"));
                continue;
            }
        };
        match train(&job) {
            Err(error) => failed.push(format!("{name}: {error}: {:?}", std::error::Error::source(&error))),
            Ok(ranks) => {
                let finite = ranks.iter().all(|(losses, _)| losses.iter().all(|loss| loss.is_finite()));
                let mut of_place = BTreeMap::new();
                let equal = (0..)
                    .map(Rank)
                    .zip(&ranks)
                    .all(|(rank, (_, hash))| *of_place.entry(job.plan.place(rank)).or_insert(hash) == hash);
                if !finite || !equal {
                    failed.push(format!("{name}: finite {finite}, replicas equal {equal}: {:?}", ranks[0].0));
                }
            }
        }
    }
    println!(
        "{} runs have {} pairs; {} pairs are refused",
        found.runs.len(),
        found.pairs,
        found.refused.len()
    );
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), found.runs.len(), failed.join("\n"));
    assert!(found.pairs > 4000, "{} pairs", found.pairs);
}

#[test]
fn what_is_refused_is_refused_with_that_reason() {
    let (_folder, base) = base();
    let wholes = wholes(&base);
    for pair in covering().refused {
        let values = [(pair.a.0.name, &*pair.a.1), (pair.b.0.name, &*pair.b.1)];
        let staged = values.iter().any(|(name, _)| *name == "schedule");
        let mut config = with(&base, &values);
        if !staged {
            config = with(&TrainConfig { stages: 2, ..config }, &[]);
        }
        let error = job_of(&wholes, &config).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{values:?}: {error}");
        // The default of another setting may also be incompatible with one of the two.
        let reason = pair.refusal.to_string();
        let same = error.to_string() == reason;
        let other =
            farflung::train::combination::refusal_of(&config).unwrap().to_string() == error.to_string();
        assert!(same || other, "{values:?}: {error}, not {reason}");
    }
}
