//! The error type of this crate: input that cannot be parsed, or that asks for something impossible. The crate
//! does no I/O.

use farflung_base::{Axis, Bandwidth, Bytes, Rank, UnknownName};

use crate::pipeline::{Action, Lowered, Method};
use crate::step::StepOp;

/// Error for an invalid mesh, topology file, model shape, plan, schedule or preemption trace, or for a request
/// that cannot be fulfilled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// An operation of a rank's step does not pair with others.
    #[error("step, `{op}`: {problem}")]
    StepOp {
        /// The operation.
        op: StepOp,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A line of a rank's step begins with the name of no moment.
    #[error("`{text}` is no moment of a step: pass, reduce, commit, mix, meet, depart")]
    StepMoment {
        /// The name.
        text: String,
    },
    /// A mesh axis has an unknown name.
    #[error(transparent)]
    UnknownAxis(UnknownName),
    /// A field of a plan has an invalid value.
    #[error("plan: `{field}` is {value}, expected {expected}")]
    Plan {
        /// Path of the field, such as `level[0].codec`.
        field: String,
        /// Value of the field.
        value: String,
        /// Description of valid values.
        expected: String,
    },
    /// The text of a plan is not TOML, has an unknown key, or a value of the wrong kind.
    #[error("plan, line {line}, `{text}`: {problem}")]
    PlanFile {
        /// Number of the line, from 1.
        line: usize,
        /// Text of the line.
        text: String,
        /// Message of the TOML parser.
        problem: String,
    },
    /// The text of a plan has another version.
    #[error("the plan has version {version}, but this build reads version {known}")]
    PlanVersion {
        /// Version of the text.
        version: u32,
        /// Version that this build reads.
        known: u32,
    },
    /// A mesh is not in the form `axis=size,axis=size`.
    #[error("`{text}` is not a mesh such as `pipeline=2,data=4`")]
    MeshForm {
        /// The part that could not be parsed.
        text: String,
    },
    /// A mesh has an axis twice.
    #[error("mesh axis {axis} is given twice")]
    DuplicateAxis {
        /// The axis.
        axis: Axis,
    },
    /// A mesh has an axis that is a view of others.
    #[error("{axis} is not an axis of a mesh: it is a view of data x tensor, whose ranks it divides")]
    ViewAxis {
        /// The view.
        axis: Axis,
    },
    /// A mesh axis has size 0.
    #[error("mesh axis {axis} has size 0")]
    EmptyAxis {
        /// The axis.
        axis: Axis,
    },
    /// The number of ranks is above a limit.
    #[error("{ranks} ranks are too many: at most {limit} are supported")]
    TooManyRanks {
        /// Number of ranks.
        ranks: u64,
        /// Maximum for this use.
        limit: u64,
    },
    /// A rank is outside the mesh.
    #[error("{rank} is not on a mesh of {size} ranks")]
    OffMesh {
        /// The rank.
        rank: Rank,
        /// Number of ranks of the mesh.
        size: u32,
    },
    /// A coordinate is not below the size of its axis, which is 1 for an axis that the mesh lacks.
    #[error("coordinates {given} are not on the mesh {mesh}")]
    OffAxis {
        /// The given coordinates.
        given: String,
        /// The mesh, as text.
        mesh: String,
    },
    /// A topology file is not TOML, has an unknown key, or a value of the wrong kind.
    #[error("topology file, line {line}, `{text}`: {problem}")]
    TopologyFile {
        /// Number of the line, from 1.
        line: usize,
        /// Text of the line.
        text: String,
        /// Message of the TOML parser.
        problem: String,
    },
    /// A topology file is valid TOML but its content is invalid.
    #[error("topology file, line {line}, `{text}`: {cause}")]
    TopologyLine {
        /// Number of the line, from 1.
        line: usize,
        /// Text of the line.
        text: String,
        /// What is wrong in that line.
        cause: Box<ParallelError>,
    },
    /// A line of a preemption trace is invalid.
    #[error("preemption trace, line {line}, `{text}`: expected {expected}")]
    TraceLine {
        /// Number of the line, from 1.
        line: usize,
        /// Text of the line.
        text: String,
        /// Description of a valid line.
        expected: &'static str,
    },
    /// A name is empty or has characters other than letters, digits, `-`, `_` and `.`.
    #[error("name `{name}` is empty or has characters other than letters, digits, `-`, `_` and `.`")]
    BadName {
        /// The name.
        name: String,
    },
    /// Two regions or devices have the same name, or two links join the same pair.
    #[error("`{name}` is given twice")]
    Duplicate {
        /// The name, or `a - b` for a pair.
        name: String,
    },
    /// Nothing of this kind has this name: no device, region, included topology or schedule.
    #[error("there is no {kind} `{name}` (known: {})", known.join(", "))]
    UnknownName {
        /// Kind of thing that the name should refer to.
        kind: &'static str,
        /// The unknown name.
        name: String,
        /// Names that exist.
        known: Vec<String>,
    },
    /// Two devices have no link between them.
    #[error("there is no link between `{from}` and `{to}`, and no default link")]
    MissingLink {
        /// Name of one device.
        from: String,
        /// Name of the other device.
        to: String,
    },
    /// The link of a pair of devices has no bandwidth, or needs more than 73 minutes for the bytes.
    #[error(
        "the link from {from} to {to} has {bandwidth} for {bytes}: planners need links on which this takes \
         at most 73 minutes"
    )]
    UnusableLink {
        /// One rank.
        from: Rank,
        /// The other rank.
        to: Rank,
        /// Bandwidth of the link.
        bandwidth: Bandwidth,
        /// Bytes to transfer.
        bytes: Bytes,
    },
    /// A cluster has no devices.
    #[error("there are no devices")]
    NoDevices,
    /// A quantity is zero and must not be.
    #[error("{field} of {of} is zero")]
    Zero {
        /// The thing that has the quantity.
        of: String,
        /// Name of the quantity.
        field: &'static str,
    },
    /// A device has no speed, or two.
    #[error("device `{name}` needs either `flops` or `tokens_per_second`")]
    NeedsOneSpeed {
        /// Name of the device.
        name: String,
    },
    /// The tokens of a step are not a whole number of microbatches.
    #[error(
        "{tokens_per_step} tokens per step are not a multiple of the {microbatch_tokens} tokens of a \
         microbatch"
    )]
    NotWhole {
        /// Number of tokens of all ranks in one optimizer step.
        tokens_per_step: u64,
        /// Number of tokens in one microbatch.
        microbatch_tokens: u64,
    },
    /// The number of microbatches does not fit in the type that a plan uses for it.
    #[error("{microbatches} microbatches per step are more than a plan can hold")]
    TooManyMicrobatches {
        /// Number of microbatches of all ranks.
        microbatches: u64,
    },
    /// The sizes of the tensors do not add up to the model's parameters.
    #[error("the tensors have {tensors} parameters in all, but the model has {parameters}")]
    TensorsDiffer {
        /// Sum of the sizes of the tensors.
        tensors: u64,
        /// Number of parameters in the model's shape.
        parameters: u64,
    },
    /// A list with one entry per rank has the wrong length.
    #[error("{what} has {given} entries, expected {ranks}, one for each rank")]
    PerRank {
        /// Name of the list.
        what: &'static str,
        /// Length of the list.
        given: usize,
        /// Length that is needed: the number of ranks.
        ranks: usize,
    },
    /// A list with one entry per stage (or slice) has the wrong length.
    #[error("{what} has {given} entries, expected {stages}")]
    PerStage {
        /// Name of the list.
        what: &'static str,
        /// Length of the list.
        given: usize,
        /// Length that is needed.
        stages: usize,
    },
    /// The schedule does not allow this rank to work in the order of arrivals.
    #[error("{rank} cannot run microbatches in the order of arrival: its schedule has {found}")]
    NotFollowed {
        /// The rank.
        rank: Rank,
        /// The feature of the schedule that prevents working in the order of arrivals.
        found: &'static str,
    },
    /// A schedule's method does not support the given sizes.
    #[error("schedule {method} does not support {given} {field}: it needs {needs}")]
    NotAdmitted {
        /// The method.
        method: Method,
        /// Name of the setting.
        field: &'static str,
        /// Value of the setting.
        given: u64,
        /// Description of the supported values.
        needs: String,
    },
    /// A schedule has too many actions.
    #[error("{actions} actions of a schedule are too many: at most {limit} are supported")]
    TooLarge {
        /// Stages times microbatches times slices.
        actions: u128,
        /// Maximum for this number.
        limit: usize,
    },
    /// A list in a file is too long, or a search needs a table that is too large.
    #[error("{found} {what} are too many: at most {limit} are supported")]
    TooMany {
        /// The things that are too many, such as `entries of devices`.
        what: &'static str,
        /// Their number.
        found: u128,
        /// Maximum for this number.
        limit: usize,
    },
    /// Stages cannot be assigned to ranks.
    #[error(
        "{stages} stages cannot form {copies} equal copies of a model on {ranks} ranks with a stage on each \
         rank"
    )]
    Placement {
        /// Number of stages in all.
        stages: usize,
        /// Highest rank plus one.
        ranks: usize,
        /// Number of copies of the model.
        copies: u32,
    },
    /// Text is not an action of a schedule.
    #[error("`{text}` is not an action such as `2F0`, `0I3`, `1B2.1` or `(0F7;7B3)`")]
    ActionForm {
        /// The given text.
        text: String,
    },
    /// A line of a schedule cannot be parsed.
    #[error("line {line}: {cause}")]
    ScheduleLine {
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong in that line.
        cause: Box<ParallelError>,
    },
    /// A line of a schedule does not begin with its rank.
    #[error("the line of {rank} must begin with `r{}:`", rank.0)]
    RankLabel {
        /// Rank that the line must begin with.
        rank: Rank,
    },
    /// An action is invalid at its place in a rank's list.
    #[error("{rank}, {action}: {problem}")]
    Action {
        /// The action.
        action: Action,
        /// Rank whose list contains the action.
        rank: Rank,
        /// What is wrong.
        problem: &'static str,
    },
    /// An entry is invalid at its place in a lowered list.
    #[error("{rank}, {entry}: {problem}")]
    Schedule {
        /// Rank whose list contains the entry.
        rank: Rank,
        /// The entry, or the missing entry.
        entry: Lowered,
        /// What is wrong.
        problem: &'static str,
    },
    /// A schedule lacks an action.
    #[error("{action} is missing")]
    Missing {
        /// The missing action.
        action: Action,
    },
    /// A file has no actions, or too few for the highest stage and microbatch in it.
    #[error(
        "{actions} actions are too few for a schedule of {stages} stages and {microbatches} microbatches"
    )]
    Incomplete {
        /// Highest stage plus one.
        stages: u64,
        /// Highest microbatch plus one.
        microbatches: u64,
        /// Number of actions.
        actions: usize,
    },
    /// Ranks wait for each other forever.
    #[error("deadlock: {}", waiting_list(waiting))]
    Deadlock {
        /// The entry at which each unfinished rank waits.
        waiting: Vec<(Rank, Lowered)>,
    },
    /// A rank of a script waits for an operation that never ends.
    #[error("{rank} waits at op {op} of its script for an operation that never ends")]
    NeverDone {
        /// The waiting rank.
        rank: Rank,
        /// Index of the op at which the rank waits.
        op: usize,
    },
    /// A sequence cannot be divided into slices of whole grains.
    #[error("{tokens} tokens cannot be divided into at most 4096 slices of {grain} tokens")]
    Grain {
        /// Number of tokens of the sequence.
        tokens: u64,
        /// Number of tokens of the smallest slice.
        grain: u64,
    },
    /// No plan runs a chain of layers within the memory.
    #[error("no order of recomputation runs the backward pass of {layers} layers within {budget}")]
    Budget {
        /// Number of layers of the chain.
        layers: usize,
        /// The memory allowed.
        budget: Bytes,
    },
    /// A chain of layers does not fit on the machines, however it is divided.
    #[error(
        "no division of {layers} layers among {machines} machines in this order fits in memory: state and one \
         microbatch need {needs}, all machines have {has}{}",
        would_fit(*layers, *machines, *needs, *has)
    )]
    TooSmall {
        /// Number of layers of the chain.
        layers: usize,
        /// Number of machines.
        machines: usize,
        /// State of all layers plus the activations of one microbatch.
        needs: Bytes,
        /// Total memory of the machines whose memory is known.
        has: Bytes,
    },
    /// The memory of a device is too small for its replica.
    #[error("device `{device}` has {has}, but a replica needs {needs}; sharded state is not supported yet")]
    Memory {
        /// Name of the device.
        device: String,
        /// Least bytes of the replica: parameters, gradients and optimizer state; if recomputation was planned
        /// too, also activations.
        needs: Bytes,
        /// Memory of the device.
        has: Bytes,
    },
    /// The memory of a machine is too small for its part of a plan.
    #[error(
        "machine `{device}` has {has}, but its part of the plan takes {needs}, {} too much: use a smaller \
         --batch, more machines or more memory",
        Bytes(needs.0.saturating_sub(has.0))
    )]
    PartMemory {
        /// Name of the machine.
        device: String,
        /// Peak memory of the machine's part.
        needs: Bytes,
        /// Memory of the machine.
        has: Bytes,
    },
    /// A plan uses a feature that is not implemented yet.
    #[error("{what} is not supported yet")]
    NotBuilt {
        /// The feature.
        what: String,
    },
}

/// Lists the first few waiting ranks.
fn waiting_list(waiting: &[(Rank, Lowered)]) -> String {
    let mut text: Vec<String> =
        waiting.iter().take(4).map(|(rank, op)| format!("{rank} waits at {op}")).collect();
    if waiting.len() > text.len() {
        text.push(format!("{} more ranks", waiting.len() - text.len()));
    }
    text.join(", ")
}

/// Says how much more memory a model needs in total, or what would help if the total is enough.
fn would_fit(layers: usize, machines: usize, needs: Bytes, has: Bytes) -> String {
    match needs.0.checked_sub(has.0) {
        Some(missing) if missing > 0 => {
            let more = match has.0 / machines.max(1) as u64 {
                // Each machine needs at least one layer.
                each if each > 0 && needs.0.div_ceil(each) <= layers as u64 => {
                    format!(", for example {} machines like these", needs.0.div_ceil(each))
                }
                _ => ", on machines with more memory each".to_owned(),
            };
            format!(": at least {} more are needed{more}", Bytes(missing))
        }
        _ => {
            ": the total is enough, but not with whole layers on each machine; more memory on each machine, a \
             smaller `--batch`, or fewer `--microbatches` would help"
                .to_owned()
        }
    }
}
