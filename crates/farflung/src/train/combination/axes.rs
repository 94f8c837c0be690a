//! The axes of choices that are checked for combinations, with the values from their tables.

use farflung_comm::Algorithm;
use farflung_compress::AverageSpec;
use farflung_compress::link::LinkSpec;
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::Method;
use farflung_tensor::Precision;
use farflung_zoo::Objective;

use crate::TrainConfig;
use crate::config::choice::{OptimizerKind, SamplingKind, StatePlace, SyncKind, TransportName};
use crate::config::value::Setting;
use crate::config::zero::ZeroWithin;
use crate::transports::{IROH, MPI, MPI_NATIVE};

/// An axis: a setting with one value per run.
#[derive(Debug)]
pub struct Axis {
    /// The setting, as in `--name`.
    pub name: &'static str,
    /// The axis's values; rules about other axes are checked with the first one. For codecs one of each method,
    /// with numbers filled in.
    pub values: fn() -> Vec<String>,
    /// Sets the axis to one of these values.
    pub set: fn(&mut TrainConfig, &str),
}

/// Value of the axis of schedules for runs without a pipeline.
const NO_STAGES: &str = "no-stages";

/// Value of the axis of tensor ranks at which they divide sequences, too.
const TWO_AND_SEQUENCES: &str = "2-sequences";

/// Value of the axis of ZeRO at which replicas divide weights in groups, and encode them, too.
const THREE_IN_GROUPS: &str = "3-in-groups";

/// Parses a value of an axis.
fn read<T: Setting>(text: &str) -> T {
    T::parse(text).expect("an axis reads its own values")
}

fn words<T: ToString>(values: impl IntoIterator<Item = T>) -> Vec<String> {
    values.into_iter().map(|value| value.to_string()).collect()
}

/// Returns one codec for each method and selection of the table, with numbers in place of the table's
/// placeholders.
fn codecs() -> Vec<String> {
    let numbers = [
        ("[:BLOCK]", ""),
        ("[/...]", ""),
        ("AMOUNT", "0.1"),
        ("KEPTofCHUNK", "4of16"),
        ("VALUE", "0.01"),
        ("STRIDE[xMULTIPLE]", "2x2"),
        ("STRIDE", "2"),
        ("SIDE", "4"),
        ("RANK", "2"),
    ];
    let filled = |name: String| numbers.iter().fold(name, |name, (word, number)| name.replace(word, number));
    let mut names: Vec<String> = AverageSpec::names().into_iter().map(filled).collect();
    names.extend(["rolling:2/topk:0.2/int4".to_owned(), "dct:4/topk:0.5".to_owned()]);
    names
}

/// Returns codecs of a boundary: codecs for boundaries only, and one codec of each kind that averages support.
fn boundaries() -> Vec<String> {
    words(["none", "f16", "int8", "topk:0.5/f16", "direct:4", "aqsgd:4", "aqsgd:8/int8"])
}

/// All axes.
pub const AXES: &[Axis] = &[
    Axis {
        name: "schedule",
        values: || {
            std::iter::once(NO_STAGES.to_owned())
                .chain(Method::ALL.map(|method| method.to_string()))
                .collect()
        },
        set: |config, value| {
            config.stages = if value == NO_STAGES { 1 } else { 2 };
            config.schedule = if value == NO_STAGES { Method::OneFOneB } else { read(value) };
        },
    },
    Axis { name: "codec", values: codecs, set: |config, value| config.codec = read::<AverageSpec>(value) },
    Axis {
        name: "boundary",
        values: boundaries,
        set: |config, value| config.boundary = read::<LinkSpec>(value),
    },
    Axis {
        name: "boundary-backward",
        values: boundaries,
        set: |config, value| config.boundary_backward = read::<LinkSpec>(value),
    },
    Axis {
        name: "sync",
        values: || words(SyncKind::all()),
        set: |config, value| config.sync = read::<SyncKind>(value),
    },
    Axis {
        name: "optimizer",
        values: || words(OptimizerKind::all()),
        set: |config, value| config.optimizer = read(value),
    },
    Axis {
        name: "tensor",
        values: || words(["1", "2", TWO_AND_SEQUENCES]),
        set: |config, value| {
            config.sequence_parallel = value == TWO_AND_SEQUENCES;
            config.tensor = if value == "1" { 1 } else { 2 };
        },
    },
    Axis {
        name: "context-parallel",
        values: || words(["1", "2"]),
        set: |config, value| config.context_parallel = read(value),
    },
    Axis {
        name: "zero",
        values: || words(["0", "1", "2", "3", THREE_IN_GROUPS]),
        set: |config, value| {
            let in_groups = value == THREE_IN_GROUPS;
            config.zero = if in_groups { 3 } else { read(value) };
            config.zero_within = if in_groups { ZeroWithin::Neighbours(2) } else { ZeroWithin::No };
            config.zero_codec = read(if in_groups { "int8,int4" } else { "none" });
        },
    },
    Axis {
        name: "state",
        values: || words([StatePlace::Device, StatePlace::Disk]),
        set: |config, value| config.state = read(value),
    },
    Axis { name: "expert", values: || words(["1", "2"]), set: |config, value| config.expert = read(value) },
    Axis {
        name: "expert-codec",
        values: || words(["none", "int8"]),
        set: |config, value| config.expert_codec = read::<LinkSpec>(value),
    },
    Axis {
        name: "paths",
        values: || words(["1", "2"]),
        set: |config, value| config.paths = Some(read(value)),
    },
    Axis {
        name: "lookahead",
        values: || words(["0", "2"]),
        set: |config, value| config.lookahead = read(value),
    },
    Axis {
        name: "precision",
        values: || words([Precision::F32, Precision::Bf16, Precision::F16]),
        set: |config, value| config.precision = read(value),
    },
    Axis {
        name: "recompute",
        values: || words([Recompute::None, Recompute::Full, Recompute::EachLayer, Recompute::Layers(1)]),
        set: |config, value| config.recompute = read(value),
    },
    Axis {
        name: "sampling",
        values: || words([SamplingKind::Random, SamplingKind::Epochs]),
        set: |config, value| config.sampling = read(value),
    },
    Axis {
        name: "own-data",
        values: || words([false, true]),
        set: |config, value| config.own_data = read(value),
    },
    Axis {
        name: "document-mask",
        values: || words([false, true]),
        set: |config, value| config.document_mask = read(value),
    },
    Axis {
        name: "attention",
        values: || words(["full", "window:6", "bigbird:3,1,1+block:2/full"]),
        set: |config, value| config.attention = Some(read(value)),
    },
    Axis {
        name: "objective",
        values: || words(Objective::ALL),
        set: |config, value| config.objective = read(value),
    },
    Axis { name: "clip", values: || words(["0", "1"]), set: |config, value| config.clip = read(value) },
    Axis {
        name: "overlap",
        values: || words([true, false]),
        set: |config, value| config.overlap = read(value),
    },
    Axis {
        name: "algorithm",
        values: || words(Algorithm::ALL.into_iter().chain([Algorithm::AllGather, Algorithm::Auto])),
        set: |config, value| config.algorithm = read(value),
    },
    Axis {
        name: "transport",
        // iroh and mpi are left out: they support the same choices as tcp, but their processes need keys, or
        // mpirun. The benches `nat` and `engines` test them.
        values: || {
            words(
                TransportName::all()
                    .filter(|row| ![IROH, MPI, MPI_NATIVE].iter().any(|other| other.name == row.name)),
            )
        },
        set: |config, value| config.transport = read(value),
    },
];

/// Returns the settings in which pairs are checked: the first value of each axis (no codec and no clipping, for
/// example), in a pipeline of two stages.
pub(super) fn base() -> TrainConfig {
    let mut config = TrainConfig { stages: 2, ..TrainConfig::default() };
    for axis in AXES.iter().filter(|axis| axis.name != "schedule") {
        (axis.set)(&mut config, &(axis.values)()[0]);
    }
    config
}

/// Returns the number of values on all axes.
#[must_use]
pub fn all_values() -> usize {
    AXES.iter().map(|axis| (axis.values)().len()).sum()
}
