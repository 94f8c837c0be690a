//! Tests the choice of `auto` on declared links, the algorithms that are rejected, and that each algorithm
//! trains.

use farflung_parallel::Level;
use farflung_parallel::plan::NO_CODEC;

use farflung_zoo::Stage;

use super::*;
use crate::config::choice::LrScheduleKind;
use crate::train::{Job, Quiet, connections, run_job};
use crate::{Stop, TrainConfig};

/// Two regions of two machines, with a line of 20 Mbit/s and 20 ms between them.
const REGIONS: &str = r#"
default = "1gbit,20ms"
[[region]]
name = "east"
inside = "1gbit,1ms"
up = "20mbit"
down = "20mbit"
[[region]]
name = "west"
inside = "1gbit,1ms"
up = "20mbit"
down = "20mbit"
[[device]]
name = "e"
count = 2
flops = "1 TFLOPS"
region = "east"
[[device]]
name = "w"
count = 2
flops = "1 TFLOPS"
region = "west"
"#;

fn config(folder: &tempfile::TempDir, codec: &str, algorithm: Algorithm) -> TrainConfig {
    let (data, topology) = (folder.path().join("text.txt"), folder.path().join("regions.toml"));
    std::fs::write(&data, "the quick brown fox ".repeat(300)).unwrap();
    std::fs::write(&topology, REGIONS).unwrap();
    TrainConfig {
        data: Some(data),
        topology: Some(topology),
        codec: codec.parse().unwrap(),
        algorithm,
        layers: Some(2),
        heads: Some(2),
        dim: Some(16),
        context: Some(16),
        batch: 1,
        steps: 3,
        warmup: 0,
        lr_schedule: LrScheduleKind::Constant,
        eval_batches: 2,
        sample_tokens: 0,
        threads: 1,
        workers: 4,
        ..TrainConfig::default()
    }
}

fn job(config: TrainConfig) -> Result<Job> {
    let world = config.workers;
    Job::new(config, world, Stop::manual())
}

fn loss(job: &Job) -> f64 {
    let report = run_job(job, connections(job, None).unwrap(), &mut Quiet).unwrap().unwrap();
    report.train_loss.unwrap()
}

#[test]
fn auto_takes_the_cheapest_form_and_the_plan_says_which() {
    let folder = tempfile::tempdir().unwrap();
    let big =
        |algorithm| TrainConfig { dim: Some(128), bucket_mb: 1.0, ..config(&folder, "int8", algorithm) };
    let auto = job(big(Algorithm::Auto)).unwrap();
    assert_eq!(auto.plan.outermost().algorithm, Algorithm::Hierarchical);
    // The choice is in the plan's text, and a job with that text is the same.
    let text = auto.plan.to_string();
    assert!(text.contains("algorithm = \"hierarchical\""), "{text}");
    assert_eq!(auto.with_plan(text.parse().unwrap()).unwrap().plan.digest(), auto.plan.digest());
    let price = |form| {
        let job = job(big(form)).unwrap();
        let topology = job.topology().unwrap();
        coded_price(job.plan.outermost(), regions(&job.plan).as_deref(), 100_000, &topology).unwrap()
    };
    let least = price(Algorithm::Hierarchical);
    assert!(least < price(Algorithm::Direct) && least < price(Algorithm::Butterfly));
    // Without a codec, `auto` is resolved for each size.
    let plain = job(config(&folder, "none", Algorithm::Auto)).unwrap();
    assert_eq!(plain.plan.outermost().algorithm, Algorithm::Auto);
    // With a codec, the default is `direct`, with equal shards.
    let told = job(config(&folder, "int8", Algorithm::Ring)).unwrap();
    assert_eq!(told.plan.outermost().algorithm, Algorithm::Direct);
}

#[test]
fn an_algorithm_that_sums_no_packed_values_is_refused_by_its_field() {
    let folder = tempfile::tempdir().unwrap();
    let refused = job(config(&folder, "int8", Algorithm::Moshpit)).unwrap_err();
    assert!(matches!(&refused, Error::Setting { field: "algorithm", .. }), "{refused}");
    assert!(refused.to_string().contains("moshpit") && refused.to_string().contains("hierarchical"));
    let good = job(config(&folder, "int8", Algorithm::Direct)).unwrap();
    let mut plan = Plan::from(&good.plan);
    plan.levels[0].algorithm = Algorithm::DoubleTree;
    let refused = good.with_plan(plan).unwrap_err().to_string();
    assert!(refused.contains("`level[0].algorithm` is double-tree"), "{refused}");
}

#[test]
fn every_form_and_a_plan_of_two_levels_train_as_one_process_does() {
    let folder = tempfile::tempdir().unwrap();
    let plain = loss(&job(config(&folder, "none", Algorithm::Ring)).unwrap());
    for form in [Algorithm::Direct, Algorithm::Butterfly, Algorithm::Hierarchical, Algorithm::Auto] {
        // Copies that differed would end the run.
        let coded = loss(&job(TrainConfig { resync_every: 1, ..config(&folder, "int8", form) }).unwrap());
        assert!((coded - plain).abs() < 0.02, "{form}: {coded} {plain}");
    }
    let job = job(config(&folder, "int8", Algorithm::Hierarchical)).unwrap();
    let outer = job.plan.levels[0].clone();
    let inner = Level {
        groups: vec![vec![0, 3], vec![1, 2]],
        codec: NO_CODEC.to_owned(),
        algorithm: Algorithm::Direct,
        ..outer.clone()
    };
    let mut plan = Plan::from(&job.plan);
    plan.levels = vec![inner, outer];
    let two = job.with_plan(plan).unwrap();
    assert!((loss(&two) - plain).abs() < 0.02);
    assert_eq!(regions(&two.plan).unwrap()[0], [Rank(0), Rank(3)]);
}

#[test]
fn momentum_corrected_selections_train_and_take_only_forms_without_sums_in_between() {
    let folder = tempfile::tempdir().unwrap();
    let auto = job(TrainConfig { dim: Some(128), ..config(&folder, "dgc:0.1", Algorithm::Auto) }).unwrap();
    assert!(auto.plan.outermost().forms().contains(&auto.plan.outermost().algorithm));
    let refused = job(config(&folder, "dgc:0.1", Algorithm::Hierarchical)).unwrap_err().to_string();
    assert!(
        refused.contains("direct, butterfly, all-gather or auto") && refused.contains("momentum"),
        "{refused}"
    );
    for codec in ["dgc:0.1", "topk:0.1/f16+dgc:0.5"] {
        let coded =
            loss(&job(TrainConfig { resync_every: 1, ..config(&folder, codec, Algorithm::Ring) }).unwrap());
        assert!(coded.is_finite() && coded < 6.0, "{codec}: {coded}");
    }
}

#[test]
fn a_protocol_trains_on_any_form_of_plain_sums_and_is_near_them_at_full_rank() {
    let folder = tempfile::tempdir().unwrap();
    let plain = loss(&job(config(&folder, "none", Algorithm::Ring)).unwrap());
    // At such a high rank most matrices are sent unencoded, and the rest is nearly exact.
    for form in [Algorithm::Ring, Algorithm::Direct, Algorithm::DoubleTree, Algorithm::Auto] {
        let run = job(TrainConfig { resync_every: 1, ..config(&folder, "powersgd:8", form) }).unwrap();
        let low_rank = loss(&run);
        assert!((low_rank - plain).abs() < 0.2, "{form}: {low_rank} {plain}");
    }
    let unless_told = Level { codec: "powersgd:2".to_owned(), ..Level::default() };
    assert_eq!(BoundLevel::of(0, &unless_told).unwrap().refusal(), None);
    // Only a protocol has exchanges. Those of PowerSGD are its factors, which have few values.
    let run = |codec| job(config(&folder, codec, Algorithm::Ring)).unwrap();
    let exchanges = |codec| {
        let job = run(codec);
        let stage = Stage::whole(&job.model, &Device::cpu(1).unwrap()).unwrap();
        job.average_config().exchanges(stage.layout())
    };
    assert_eq!(exchanges("int8"), None);
    let values: usize = exchanges("powersgd:2").unwrap().iter().flatten().sum();
    assert!(values * 3 < run("none").model.parameters() as usize, "{values}");
}
