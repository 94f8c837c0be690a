//! Data that are divided among replicas: by files, and by similarity.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use crate::small::{config, job, on_all};
use farflung::TrainConfig;
use farflung::base::Rank;
use farflung::parallel::Axis;
use farflung::train::{Job, Trainer};
use farflung::zoo::Sharding;

/// Makes a folder of four texts, each of a single letter; the held-out part is the end of the last one.
fn letters(folder: &Path) -> std::path::PathBuf {
    let data = folder.join("letters");
    std::fs::create_dir(&data).unwrap();
    for (letter, len) in [('a', 900), ('b', 800), ('c', 700), ('d', 1000)] {
        std::fs::write(data.join(format!("{letter}.txt")), letter.to_string().repeat(len)).unwrap();
    }
    data
}

/// Returns the letters that a replica sees in its first sequences.
fn seen(job: &Job, replica: usize) -> String {
    let sampler = job.sampler(replica).unwrap();
    let mut inputs = sampler.sequences(0, 64).unwrap().inputs;
    inputs.sort_unstable();
    inputs.dedup();
    inputs.into_iter().map(|token| token as u8 as char).collect()
}

#[test]
fn each_replica_has_files_of_its_own_with_stages_too() {
    let (folder, config) = config(2);
    let data = letters(folder.path());
    let base = TrainConfig { data: Some(data), shards: Sharding::Files, workers: 4, ..config };
    let flat = job(&base);
    // The longest file goes to the first replica, and so on. Of d, fewer than 700 characters remain, since its
    // end is held out.
    let all: Vec<_> = (0..4).map(|replica| seen(&flat, replica)).collect();
    assert_eq!(all, ["a", "b", "c", "d"]);
    let two = job(&TrainConfig { stages: 2, ..base.clone() });
    assert_eq!([seen(&two, 0), seen(&two, 1)], ["ad", "bc"]);
    let plain = job(&TrainConfig { shards: Sharding::Random, ..base });
    assert_eq!(seen(&plain, 0), "abcd");
}

#[test]
fn replicas_train_on_their_own_and_stay_the_same() {
    let (folder, config) = config(3);
    let data = letters(folder.path());
    for stages in [1, 2] {
        let base = TrainConfig { data: Some(data.clone()), workers: 4, stages, ..config.clone() };
        let losses = |shards: Sharding| {
            let job = job(&TrainConfig { shards, ..base.clone() });
            let ranks = on_all(&job, |connection| {
                let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
                let losses: Vec<f64> = (0..3).map(|_| rank.step(false).unwrap().loss).collect();
                (losses, rank.hash().unwrap())
            });
            // Rank 0 of each replica has the same parameters.
            let firsts = job.plan.group(Rank(0), Axis::Data);
            assert!(firsts.iter().all(|rank| ranks[rank.index()] == ranks[0]), "{shards}");
            ranks[0].0.clone()
        };
        let files = losses(Sharding::Files);
        assert_eq!(files, losses(Sharding::Files));
        assert_ne!(files, losses(Sharding::Random));
        assert_ne!(losses(Sharding::KMeans(4)), losses(Sharding::Random));
    }
}

#[test]
fn ranks_compare_it_and_a_run_records_it() {
    let (_folder, config) = config(1);
    let config = TrainConfig { shards: Sharding::KMeans(3), ..config };
    let shared = config.shared();
    let fact = shared.iter().find(|fact| fact.name == "shards").unwrap();
    assert_eq!(fact.value, "\"kmeans:3\"");
    assert!(config.is_training("shards"));
}

#[test]
fn what_does_not_go_together_is_refused_with_the_reason() {
    use farflung::Stop;
    use farflung::config::choice::SamplingKind;
    let (_folder, config) = config(1);
    let refused = |config: TrainConfig| Job::new(config, 4, Stop::manual()).unwrap_err().to_string();
    let base = TrainConfig { workers: 4, shards: Sharding::KMeans(8), ..config };
    let message = refused(TrainConfig { sampling: SamplingKind::Epochs, ..base.clone() });
    assert!(message.contains("shards") && message.contains("epochs"), "{message}");
    let message = refused(TrainConfig { own_data: true, ..base.clone() });
    assert!(message.contains("shards") && message.contains("own-data"), "{message}");
    // A text without end-of-text tokens is one document.
    let message = refused(TrainConfig { shards: Sharding::Files, ..base });
    assert!(message.contains("1 parts") && message.contains("4 replicas"), "{message}");
}
