//! Tests each note with settings that cause it, and that every setting is covered.

use super::super::{TrainArgs, dashed};
use super::*;
use std::path::Path;

/// Settings that always have an effect.
const ALWAYS: [&str; 60] = [
    "plan",
    "attention",
    "layers",
    "heads",
    "dim",
    "context",
    "vocab",
    "balance-loss",
    "balance-over",
    "z-loss",
    "capacity-factor",
    "expert",
    "expert-weights",
    "paths",
    "tokenizer",
    "init-from",
    "data",
    "tokens",
    "sampling",
    "document-mask",
    "objective",
    "out",
    "json",
    "quiet",
    "steps",
    "batch",
    "accumulate",
    "optimizer",
    "lr",
    "warmup",
    "weight-decay",
    "group",
    "lookahead",
    "clip",
    "seed",
    "sync",
    "topology",
    "transport",
    "stages",
    "tensor",
    "tensor-weights",
    "sequence-parallel",
    "context-parallel",
    "zero",
    "state",
    "mesh",
    "pools",
    "microbatches",
    "recompute",
    "device",
    "precision",
    "deterministic",
    "threads",
    "eval-every",
    "eval-batches",
    "keep-last",
    "save-end",
    "compress-checkpoints",
    "sample-tokens",
    "digest-every",
];

/// Settings as in a file, number of workers, whether links are simulated, and the expected note.
type Case = (&'static str, usize, bool, &'static str);

const CASES: &[Case] = &[
    (
        "ulysses = 2\ncontext-order = 'striped'",
        2,
        true,
        "`ulysses`, `context-order` change nothing: `context-parallel` is 1, and each replica has whole sequences",
    ),
    (
        "context-parallel = 2\nulysses = 2\ncontext-order = 'striped'",
        2,
        true,
        "`context-order` changes nothing: `ulysses` is as many as `context-parallel`",
    ),
    (
        "zero-weights = '2,1'",
        2,
        true,
        "`zero-weights` changes nothing: `zero` is 0, and each replica has all of the optimizer's state",
    ),
    (
        "zero = 2\nzero-codec = 'int8,int4'\nzero-within = '2'",
        4,
        true,
        "`zero-codec`, `zero-within` change nothing: `zero` is not 3, and each replica has all weights",
    ),
    (
        "algorithm = 'ring'\nzero = 1",
        2,
        true,
        "`algorithm` changes nothing: with `zero`, each gradient goes to the rank that updates it",
    ),
    (
        "algorithm = 'all-gather'\ncodec = 'none'",
        4,
        true,
        "`algorithm` changes nothing: all-gather is only for values that a codec packs",
    ),
    (
        "recipe = 'onebit-adam'\noptimizer = 'qadam'\ncodec = 'int8'",
        4,
        true,
        "`recipe` changes nothing: all settings that it consists of are overridden with other values",
    ),
    ("model = 'baby'\ninit-from = 'w'", 4, true, "`model` changes nothing: the weights of `init-from` have"),
    (
        "momentum = 0.9",
        4,
        true,
        "`momentum` changes nothing: `optimizer` is adamw, not sgd or rmsprop or muon or signum",
    ),
    (
        "local-steps = '1,1,1,1'",
        4,
        true,
        "`local-steps` changes nothing: `sync` ddp averages at each step, so all replicas take all steps",
    ),
    (
        "sync = 'diloco'\nlocal-steps = 'by-speed'",
        4,
        true,
        "`local-steps` changes nothing: without `topology` all machines have the same speed",
    ),
    (
        "servers = 'central'\nmeet-every = 50\nouter-buffer = 2\nstaleness = 3\nquorum = 2\ngrace = '1s'",
        4,
        true,
        "`servers` changes nothing: `sync` is ddp, not async or parameter-server",
    ),
    (
        "first-moment-every = 40\nsecond-moment-every = 120",
        4,
        true,
        "`first-moment-every`, `second-moment-every` change nothing: `sync` is ddp, not des-loc",
    ),
    (
        "data = 'book.txt'\nloss-on = 'all'\npacking = false",
        4,
        true,
        "`loss-on`, `packing` change nothing: the data is no file of examples (.jsonl)",
    ),
    ("balance = 'equal'", 4, false, "`balance` changes nothing: the run's members do not change"),
    ("min-members = 2", 4, false, "`min-members` changes nothing: the run's members do not change"),
    ("pooled = true\nstages = 2", 4, false, "`pooled` changes nothing: the run's members do not change"),
    ("name = 'home-3'", 4, false, "`name` changes nothing: the run's members do not change"),
    ("join-wait = '5s'", 4, false, "`join-wait` changes nothing: the run's members do not change"),
    ("copy-share = 0.5", 4, false, "`copy-share` changes nothing: the run's members do not change"),
    (
        "keep-work = false",
        4,
        false,
        "`keep-work` changes nothing: stages are not pools of members that come and leave",
    ),
    ("trigger = 0.1", 4, true, "`trigger` changes nothing: `sync` is ddp, not event"),
    (
        "sync-delay = 1",
        4,
        true,
        "`sync-delay` changes nothing: `sync` is ddp, not streaming or async or halos",
    ),
    (
        "average-interval = '1s'\nsync-warmup = 9",
        4,
        true,
        "`average-interval`, `sync-warmup` change nothing: `sync` is ddp, not async-average",
    ),
    (
        "meet-every = 50",
        4,
        true,
        "`meet-every` changes nothing: `sync` is ddp, not async or parameter-server",
    ),
    ("outer-buffer = 2", 4, true, "`outer-buffer` changes nothing: `sync` is ddp, not async or halos"),
    (
        "world-every = 2\nworld-lr = 0.5\nworld-momentum = 0.5\nworld-mixing = 0.5",
        4,
        true,
        "`world-every`, `world-lr`, `world-momentum`, `world-mixing` change nothing: `sync` is ddp, not halos",
    ),
    ("staleness = 2", 4, true, "`staleness` changes nothing: `sync` is ddp, not bounded-stale"),
    ("quorum = 2\ngrace = '1s'", 4, true, "`quorum`, `grace` change nothing: `sync` is ddp, not decoupled"),
    ("shards = 'files'", 1, true, "`shards` changes nothing: there is one replica, which has all data"),
    (
        "codec = 'sign'",
        4,
        true,
        "`codec` sign sends gradients in one bit, without their magnitudes, but `optimizer` adamw divides",
    ),
    (
        "beta1 = 0.9\nbeta2 = 0.95\noptimizer = 'sgd'",
        4,
        true,
        "`beta1`, `beta2` change nothing: `optimizer` is sgd, not adamw or adam or amsgrad",
    ),
    (
        "eps = 1e-5\noptimizer = 'lion'",
        4,
        true,
        "`eps` changes nothing: `optimizer` is lion, not adamw or adam",
    ),
    (
        "rho = 0.9\ncentered = true",
        4,
        true,
        "`rho`, `centered` change nothing: `optimizer` is adamw, not rmsprop",
    ),
    ("dampening = 0.1", 4, true, "`dampening` changes nothing: `optimizer` is adamw, not sgd"),
    ("nesterov = true", 4, true, "`nesterov` changes nothing: `optimizer` is adamw, not sgd or muon"),
    (
        "nesterov = true\noptimizer = 'sgd'\nmomentum = 0.0",
        4,
        true,
        "`nesterov` changes nothing: `momentum` is 0",
    ),
    ("lr-decay = 0.1", 4, true, "`lr-decay` changes nothing: `optimizer` is adamw, not adagrad"),
    (
        "final-lr = 0.1\ngamma = 0.1",
        4,
        true,
        "`final-lr`, `gamma` change nothing: `optimizer` is adamw, not adabound",
    ),
    (
        "density-warmup = 8",
        4,
        true,
        "`density-warmup` changes nothing: `codec` int8 does not select a fraction of the elements",
    ),
    ("tune = 2\nsync = 'diloco'", 4, true, "`tune` changes nothing: `sync` diloco takes local steps"),
    (
        "theta = 0.1\nmoniqua-bits = 4",
        4,
        true,
        "`theta`, `moniqua-bits` change nothing: `sync` is ddp, not moniqua",
    ),
    (
        "variance-doubling = 8\nlocal-doubling = 9",
        4,
        true,
        "`variance-doubling`, `local-doubling` change nothing: `optimizer` is adamw, not zero-one-adam",
    ),
    ("muon-scale = 'original'", 4, true, "`muon-scale` changes nothing: `optimizer` is adamw, not muon"),
    ("lookahead-alpha = 0.9", 4, true, "`lookahead-alpha` changes nothing: `lookahead` is 0"),
    ("decay-fraction = 0.5", 4, true, "`decay-fraction` changes nothing: `lr-schedule` is cosine, not wsd"),
    (
        "min-lr = 1e-4\nlr-schedule = 'constant'",
        4,
        true,
        "`min-lr` changes nothing: the learning rate of `lr-schedule` constant",
    ),
    (
        "min-lr = 1e-4\nlr-schedule = 'cosine'\nsteps = 50",
        4,
        true,
        "`min-lr`, `lr-schedule` change nothing: the run ends before",
    ),
    ("steps = 20", 4, true, "`warmup` is 50 and the run has 20 steps: the learning rate does not reach `lr`"),
    (
        "boundary = 'int8'\nboundary-backward = 'int8'",
        4,
        true,
        "`boundary`, `boundary-backward` change nothing: `stages` is 1, so there is no pipeline",
    ),
    ("state-dir = 'x'", 4, true, "`state-dir` changes nothing: `state` is device"),
    (
        "save-end = false",
        4,
        true,
        "`save-end` is false and `state` is device: the end of the run is not saved",
    ),
    (
        "boundary-store = 'file'\nboundary = 'int8'\nstages = 2",
        4,
        true,
        "`boundary-store` changes nothing: no boundary codec stores samples",
    ),
    (
        "expert-codec = 'int8'",
        4,
        true,
        "`expert-codec` changes nothing: `expert` is 1, so each replica has all experts",
    ),
    (
        "route-tokens = 16",
        4,
        true,
        "`route-tokens` changes nothing: there are no `paths`, so all replicas train one model",
    ),
    ("job = 'mine'", 4, true, "`job` changes nothing: the run is one process"),
    ("workers = 4", 8, false, "`workers` changes nothing: the launcher started 8 processes"),
    ("codec = 'int8'", 1, true, "`codec` changes nothing: the run has one worker"),
    (
        "bucket-mb = 4.0\noverlap = true\nlink = 'home'\ndeadline = '60s'\nresync-every = 50\nalgorithm = 'ring'\nerror-feedback = true",
        1,
        true,
        "`error-feedback`, `bucket-mb`, `overlap`, `algorithm`, `link`, `deadline`, `resync-every` change nothing: the run has one worker",
    ),
    (
        "codec = 'int8'\nstages = 4",
        4,
        true,
        "`codec` changes nothing: no two ranks hold the same part of the model",
    ),
    (
        "codec = 'int8'\ntensor = 2\nstages = 2",
        4,
        true,
        "`codec` changes nothing: no two ranks hold the same piece of the model",
    ),
    (
        "outer-lr = 0.7\nouter-momentum = 0.9",
        4,
        true,
        "`outer-lr`, `outer-momentum` change nothing: `sync` is ddp, not diloco",
    ),
    (
        "consensus-rate = 0.1\nsync = 'd-psgd'",
        4,
        true,
        "`consensus-rate` changes nothing: `sync` is d-psgd, not choco",
    ),
    (
        "fragments = 2\nsync-delay = 1\nmixing = 0.5\nsync = 'diloco'",
        4,
        true,
        "`fragments`, `mixing` change nothing: `sync` is diloco, not streaming",
    ),
    (
        "codec-warmup = 9\ncodec = 'none'",
        4,
        true,
        "`codec-warmup` changes nothing: all averages are sent uncompressed",
    ),
    (
        "sync-every = 20",
        4,
        true,
        "`sync-every` changes nothing: `sync` ddp averages at each step; only the comparison in the report \
         uses it",
    ),
    ("sync-every = 20", 4, false, "`sync-every` changes nothing: `sync` ddp averages at each step"),
    (
        "sync = 'diloco'\noverlap = false",
        4,
        true,
        "`overlap` changes nothing: `sync` diloco averages after a step",
    ),
    (
        "error-feedback = false\ncodec = 'int8+ef'",
        4,
        true,
        "`error-feedback` changes nothing: the codec's name sets",
    ),
    (
        "error-feedback = true\ncodec = 'none'",
        4,
        true,
        "`error-feedback` changes nothing: the codec is lossless",
    ),
    (
        "error-feedback = true\ncodec = 'unbiased:4'",
        4,
        true,
        "`error-feedback` changes nothing: the codec is unbiased",
    ),
    ("link = 'home'\ntopology = 't'", 4, true, "`link` changes nothing: `topology` sets the links"),
    ("link = 'home'\ntransport = 'memory'", 4, false, "`link` changes nothing: it is for simulated links"),
    (
        "up = '20mbit'",
        4,
        true,
        "`up` changes nothing: the run is one process, which sends nothing over sockets",
    ),
    (
        "up-each = '1mbit'\ntransport = 'memory'",
        4,
        false,
        "`up-each` changes nothing: the run is one process",
    ),
    (
        "relay = 'http://10.0.0.1:3340'\ntransport = 'tcp'",
        4,
        false,
        "`relay` changes nothing: only processes with `transport` auto or iroh use relays",
    ),
    ("relay = 'http://10.0.0.1:3340'", 4, true, "`relay` changes nothing: only processes with `transport`"),
    (
        "compute-rate = 1e9\ntransport = 'tcp'",
        4,
        false,
        "`compute-rate` changes nothing: it is for the clock of simulated links",
    ),
    ("schedule = '1f1b'", 4, true, "`schedule` changes nothing: `stages` is 1, so there is no pipeline"),
    (
        "schedule-file = 'f'\nchunks = 2\nmemory = 3\nslice-grain = 8\nversion-sync = 'newest'",
        4,
        true,
        "`schedule-file`, `chunks`, `memory`, `slice-grain`, `version-sync` change nothing: `stages` is 1",
    ),
    (
        "stages = 4\nschedule-file = 'f'\nschedule = 'gpipe'",
        4,
        true,
        "`schedule` changes nothing: `schedule-file` sets the order",
    ),
    (
        "stages = 4\nschedule = 'zb-h1'\nmemory = 4",
        4,
        true,
        "`memory` changes nothing: `schedule` zb-h1 has no limit on memory",
    ),
    ("stages = 4\nslice-grain = 4", 4, true, "`slice-grain` changes nothing: `schedule` 1f1b does not slice"),
    (
        "stages = 4\nversion-sync = 'vertical'",
        4,
        true,
        "`version-sync` changes nothing: `schedule` 1f1b does not keep several versions",
    ),
    ("pool-rates = '1,2'", 4, true, "`pool-rates` changes nothing: there are no `pools`"),
    ("recompute = 9", 4, true, "`recompute` is 9 and the model has 4 layers: all of them are recomputed"),
    ("recompute = 2\nstages = 4", 4, true, "`recompute` is 2 and a stage has at most 1 layers"),
    ("offload = 1", 4, true, "`offload` changes nothing: all devices are CPUs, whose memory is the host's"),
    (
        "offload = 1\ndevice = 'cuda'\nrecompute = 'full'",
        4,
        true,
        "`offload` changes nothing: all layers are recomputed",
    ),
    (
        "offload = 9\ndevice = 'cuda'\nrecompute = 1",
        4,
        true,
        "`offload` is 9 and 3 layers are not recomputed",
    ),
    (
        "topology = 'a.toml'\ncompute-rate = 1e9",
        4,
        true,
        "`compute-rate` changes nothing: `topology` sets the speeds",
    ),
    (
        "encoding = 'latin1'\ntoken-type = 'u32'",
        4,
        true,
        "`encoding`, `token-type` change nothing: without `data` there are no files",
    ),
    (
        "data = 'a'\nspecial-tokens = true",
        4,
        true,
        "`special-tokens` changes nothing: the tokenizer byte has no special tokens",
    ),
    ("own-data = true", 4, true, "`own-data` changes nothing: the run is one process"),
    ("loss-scale = 1024", 4, true, "`loss-scale` changes nothing: it is for `precision` f16 and bf16"),
    ("resync-every = 10", 4, true, "`resync-every` changes nothing: all devices are CPUs"),
    ("checkpoint-every = 500", 4, true, "`checkpoint-every` changes nothing: the run ends at step 500"),
    ("check-every = 500", 4, true, "`check-every` changes nothing: the run ends at step 500"),
    ("keep-last = 1", 4, true, "`keep-last` is 1, but two checkpoints are kept"),
    ("resume = 'auto'", 4, true, "`resume` changes nothing: without `out`"),
    (
        "sample-tokens = 0\nprompt = 'a'\ntemperature = 1.0\ntop-k = 0\ntop-p = 1.0",
        4,
        true,
        "`prompt`, `temperature`, `top-k`, `top-p` change nothing: `sample-tokens` is 0",
    ),
    (
        "temperature = 0.0\ntop-k = 4\ntop-p = 0.5",
        4,
        true,
        "`top-k`, `top-p` change nothing: `temperature` 0",
    ),
];

fn notes(text: &str, world: usize, simulated: bool) -> Vec<String> {
    let config = TrainConfig::fill(TrainArgs::from_toml(text, Path::new("run.toml")).unwrap());
    let model = ModelSpec::preset("nano").unwrap();
    config.notes(&NoteContext { model: &model, world, simulated, elastic: false })
}

#[test]
fn each_setting_that_changes_nothing_is_named_with_the_reason() {
    for &(text, world, simulated, expected) in CASES {
        let lines = notes(text, world, simulated);
        assert!(lines.iter().any(|line| line.starts_with(expected)), "{text}: {lines:#?}");
        // Each setting is noted once.
        let idle: Vec<_> = lines.iter().filter_map(|line| line.split_once(" change")).collect();
        let names: Vec<_> = idle.iter().flat_map(|(names, _)| names.split(", ")).collect();
        let once: BTreeSet<_> = names.iter().collect();
        assert_eq!(once.len(), names.len(), "{lines:#?}");
    }
}

#[test]
fn every_setting_changes_something_or_has_a_case() {
    for key in TrainArgs::KEYS.iter().map(|key| dashed(key)) {
        let quoted = format!("`{key}`");
        let idle = CASES
            .iter()
            .any(|(.., note)| note.split_once(" change").is_some_and(|(names, _)| names.contains(&quoted)));
        assert_ne!(idle, ALWAYS.contains(&&*key), "`{key}` is in one of the lists, by what it does");
    }
}

#[test]
fn what_was_not_given_has_no_note_and_what_matters_has_none() {
    for (world, simulated) in [(1, true), (4, true), (8, false)] {
        assert_eq!(notes("", world, simulated), [""; 0], "{world} {simulated}");
    }
    let model = ModelSpec::preset("nano").unwrap();
    let run = NoteContext { model: &model, world: 4, simulated: true, elastic: false };
    assert_eq!(TrainConfig::default().notes(&run), [""; 0]);
    // In a config made in code, the settings that differ from their defaults count as given.
    let chunks = TrainConfig { chunks: Some(2), ..TrainConfig::default() };
    assert_eq!(chunks.notes(&run).len(), 1);
    let useful = "stages = 4\nschedule = 'pipedream'\nversion-sync = 'newest'\nclip = 0.0\ncodec = 'none'";
    assert_eq!(notes(useful, 8, true), [""; 0]);
    let chimera = "stages = 4\nschedule = 'chimera'\ncodec = 'int4'\nbucket-mb = 1.0";
    assert_eq!(notes(chimera, 4, true), [""; 0], "two copies of the model are averaged");
}

#[test]
fn a_runs_own_file_gives_only_what_the_run_was_given() {
    let args = TrainArgs { sync_every: Some(20), steps: Some(100), ..TrainArgs::default() };
    let run = TrainConfig::fill(args);
    let text = run.to_toml();
    assert!(
        text.contains("\nsync-every = 20\n") && text.contains("\ncodec = \"int8\" # by default\n"),
        "{text}"
    );
    let again = TrainConfig::fill(TrainArgs::from_toml(&text, Path::new("config.toml")).unwrap());
    assert_eq!(again, run);
    assert!(again.was_given("sync-every") && !again.was_given("codec"));
    // A flag counts as given for any content of the file; so does a value in a user's own file.
    let flag = TrainArgs { codec: Some(again.codec), ..TrainArgs::default() };
    let file = TrainArgs::from_toml(&text, Path::new("config.toml")).unwrap();
    assert!(TrainConfig::fill(flag.or(file)).was_given("codec"));
    assert!(
        TrainConfig::fill(TrainArgs::from_toml("codec = 'int8' # mine", Path::new("a")).unwrap())
            .was_given("codec")
    );
}
