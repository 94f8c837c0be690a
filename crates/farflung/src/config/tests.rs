//! Tests of the settings: defaults, files, flags, and errors.

use std::path::Path;

use super::choice::TransportName;
use super::*;
use crate::Error;
use crate::transports::{MEMORY, SIMULATED, TCP};

fn toml(text: &str) -> Result<TrainArgs> {
    TrainArgs::from_toml(text, Path::new("run.toml"))
}

#[test]
fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
    let file = toml("steps = 7\nlr = 1\nlink = \"lan\"\nerror-feedback = false\n").unwrap();
    let given = TrainArgs { steps: Some(9), ..TrainArgs::default() };
    let config = TrainConfig::fill(given.or(file));
    assert_eq!((config.steps, config.lr, config.batch), (9, 1.0, TrainConfig::default().batch));
    assert_eq!(config.link, "lan".parse().unwrap());
    assert!(!config.error_feedback);
}

#[test]
fn what_is_printed_reads_back_the_same() {
    let odd = TrainConfig {
        layers: Some(3),
        data: Some("a \"b\"/c".into()),
        prompt: "line\nbreak \u{1f980}".to_owned(),
        lr: 1.234_567_890_123e-5,
        link: Link { bandwidth: Bandwidth(123_456_789), latency: Nanos(1_234_567) },
        deadline: Nanos(1),
        up: Bandwidth(20_000_001),
        codec: "topk:0.01/int4:64+ef:0.95".parse().unwrap(),
        resume: Resume::Path("runs/x/step-3".into()),
        clip: 0.0,
        stages: 4,
        schedule: Method::ZbV,
        microbatches: Some(12),
        recompute: Recompute::Layers(2),
        offload: 3,
        version_sync: VersionSync::Newest,
        ..TrainConfig::default()
    };
    let full = TrainConfig { recompute: Recompute::Full, ..TrainConfig::default() };
    for config in [TrainConfig::default(), odd, full] {
        let text = config.to_toml();
        let read = TrainConfig::fill(toml(&text).unwrap());
        assert_eq!(TrainConfig { given: config.given.clone(), ..read }, config, "{text}");
    }
    assert!(TrainConfig::default().to_toml().contains("\neval-every = "));
}

#[test]
fn every_flag_is_a_key_and_every_default_is_valid() {
    TrainConfig::default().validate().unwrap();
    let command = <TrainArgs as clap::Args>::augment_args(clap::Command::new("train"));
    let flags: Vec<_> = command.get_arguments().filter_map(|a| a.get_long()).map(str::to_owned).collect();
    assert_eq!(flags, TrainArgs::KEYS.iter().map(|k| dashed(k)).collect::<Vec<_>>());
}

#[test]
fn an_unknown_key_is_refused_with_its_line_and_the_nearest() {
    let message = |text| toml(text).unwrap_err().to_string();
    assert_eq!(
        message("# hi\nbatch = 3\nstpes = 4"),
        "run.toml:3: unknown key `stpes`, did you mean `steps`?"
    );
    assert_eq!(message("sync_every = 3"), "run.toml:1: unknown key `sync_every`, did you mean `sync-every`?");
    assert_eq!(message("zzzzzzzzzz = 3"), "run.toml:1: unknown key `zzzzzzzzzz`");
    assert_eq!(toml("x = 1").unwrap_err().exit_code(), 2);
}

#[test]
fn a_wrong_value_names_the_key_and_what_was_expected() {
    for (text, expected) in [
        ("steps = -1", "a whole number"),
        ("steps = 1.5", "a whole number"),
        ("steps = \"5\"", "a whole number"),
        ("lr = \"fast\"", "a number"),
        ("lr = nan", "a number"),
        ("overlap = 1", "true or false"),
        ("model = 3", "a text"),
        ("link = \"100mbit\"", "BANDWIDTH,LATENCY"),
        ("codec = \"int88\"", "int8[:BLOCK]"),
        ("codec = \"topk:0/f16\"", "\"topk:0\" selects no elements"),
        ("optimizer = \"adm\"", "one of adamw sgd adam"),
        ("group = \"*.bias\"", "group `*.bias`: expected PATTERN:lr=FACTOR,decay=X"),
        ("steps = [1]", "a whole number"),
        ("deadline = 30", "a time"),
        ("schedule = \"gpip\"", "one of gpipe 1f1b"),
        ("recompute = 0", "none, full, each-layer, a number of layers, or an amount of memory"),
    ] {
        let key = text.split(' ').next().unwrap();
        let message = toml(&format!("\n{text}")).unwrap_err().to_string();
        assert!(message.starts_with("run.toml:2:"), "{message}");
        assert!(message.contains(&format!("`{key}`")) && message.contains(expected), "{message}");
    }
    assert!(matches!(toml("steps = "), Err(Error::ConfigSyntax { .. })));
    assert!(matches!(toml("steps = 1\nsteps = 2"), Err(Error::ConfigSyntax { .. })));
}

#[test]
fn ranges_are_checked_by_name() {
    type Spoil = fn(&mut TrainConfig);
    let broken: [(&str, Spoil); 13] = [
        ("workers", |c| c.workers = 0),
        ("batch", |c| c.batch = 0),
        ("beta2", |c| c.beta2 = 1.0),
        ("clip", |c| c.clip = -1.0),
        ("lr", |c| c.lr = f64::NAN),
        ("min-lr", |c| c.min_lr = 1.0),
        ("top-p", |c| c.top_p = 0.0),
        ("tune", |c| c.tune = 1_000_000_000_000),
        ("bucket-mb", |c| c.bucket_mb = 0.0),
        ("heads", |c| c.heads = Some(0)),
        ("deadline", |c| c.deadline = Nanos::ZERO),
        ("up", |c| c.up = Bandwidth(7_999)),
        ("up-each", |c| c.up_each = Bandwidth(0)),
    ];
    for (field, spoil) in broken {
        let mut config = TrainConfig::default();
        spoil(&mut config);
        let message = config.validate().unwrap_err().to_string();
        assert!(message.contains(&format!("`{field}`")), "{message}");
    }
}

#[test]
#[expect(clippy::float_cmp, reason = "the default run's bits depend on it")]
fn the_least_learning_rate_follows_the_highest() {
    assert_eq!(TrainConfig::default().min_lr, 1e-4);
    let least = |text| TrainConfig::merge(TrainArgs::default(), toml(text).unwrap()).unwrap().min_lr;
    assert_eq!((least("lr = 1e-3"), least("lr = 1e-5"), least("lr = 0.0")), (1e-4, 1e-5 / 10.0, 0.0));
    assert_eq!(least("lr = 0.5\nmin-lr = 0.25"), 0.25);
    let given = TrainArgs { lr: Some(3e-4), ..TrainArgs::default() };
    assert_eq!(TrainConfig::merge(given.clone(), toml("lr = 1.0").unwrap()).unwrap().min_lr, 3e-4 / 10.0);
    // In a run's own file, `min-lr` is derived from `lr`: it applies until another `lr` is given.
    let own = toml("lr = 1.0\nmin-lr = 0.5 # by default").unwrap();
    assert_eq!(TrainConfig::merge(given, own.clone()).unwrap().min_lr, 3e-4 / 10.0);
    assert_eq!(TrainConfig::merge(TrainArgs::default(), own).unwrap().min_lr, 0.5);
}

#[test]
fn the_transport_follows_the_number_of_processes() {
    let config = TrainConfig::default();
    assert_eq!(config.run_settings().transport_for(1, 4).unwrap(), TransportName::of(&SIMULATED));
    assert_eq!(config.run_settings().transport_for(4, 4).unwrap(), TransportName::of(&TCP));
    let memory = TrainConfig { transport: TransportKind::of(&MEMORY), ..config }.run_settings();
    assert_eq!(memory.transport_for(1, 4).unwrap(), TransportName::of(&MEMORY));
    assert!(memory.transport_for(2, 4).unwrap_err().to_string().contains("2 processes"));
}

#[test]
fn the_help_of_the_outer_rate_names_the_methods_that_use_it() {
    let command = <TrainArgs as clap::Args>::augment_args(clap::Command::new("train"));
    let flag = command.get_arguments().find(|flag| flag.get_long() == Some("outer-lr")).unwrap();
    let help = flag.get_help().unwrap().to_string();
    let words: Vec<_> = help.split([' ', ',', '.']).collect();
    for row in SyncKind::all() {
        assert_eq!(words.contains(&row.name), row.reads.contains(&"outer-lr"), "{}: {help}", row.name);
    }
}
