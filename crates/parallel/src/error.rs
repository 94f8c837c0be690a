//! What can go wrong in this crate: input that cannot be read, or asks for what cannot be done. No I/O happens
//! here.

use farflung_base::{Bandwidth, Bytes, Rank};

use crate::Axis;
use crate::pipeline::{Action, Lowered, Method};

/// Every way in which a mesh, a topology file, a shape or a plan is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// The name of a mesh axis that does not exist.
    #[error("`{text}` is not a mesh axis (known: {})", Axis::names())]
    UnknownAxis {
        /// What was given.
        text: String,
    },
    /// A field of a plan has a value that cannot be.
    #[error("plan: `{field}` is {value}, expected {expected}")]
    Plan {
        /// The field, such as `level[0].codec`.
        field: String,
        /// Its value.
        value: String,
        /// What would have been right.
        expected: String,
    },
    /// A plan's text is not TOML, has a key that is not known, or a value of the wrong kind.
    #[error("plan, line {line}, `{text}`: {problem}")]
    PlanFile {
        /// The line, from 1.
        line: usize,
        /// The line as it stands in the text.
        text: String,
        /// What the TOML reader says, with the key.
        problem: String,
    },
    /// A plan's text is of another version.
    #[error("the plan is of version {version}, and this build reads version {known}")]
    PlanVersion {
        /// Its version.
        version: u32,
        /// The version that is known here.
        known: u32,
    },
    /// A mesh that is not written `axis=size,axis=size`.
    #[error("`{text}` is not a mesh such as `pipeline=2,data=4`")]
    MeshForm {
        /// The part that could not be read.
        text: String,
    },
    /// An axis that a mesh names twice.
    #[error("mesh axis {axis} is given twice")]
    DuplicateAxis {
        /// The axis.
        axis: Axis,
    },
    /// An axis without ranks.
    #[error("mesh axis {axis} has size 0")]
    EmptyAxis {
        /// The axis.
        axis: Axis,
    },
    /// More ranks than this crate lays out.
    #[error("{ranks} ranks are more than the {limit} that are supported")]
    TooManyRanks {
        /// The number asked for.
        ranks: u64,
        /// The most that is allowed here.
        limit: u64,
    },
    /// A rank that is not on the mesh.
    #[error("{rank} is not on a mesh of {size}")]
    OffMesh {
        /// The rank.
        rank: Rank,
        /// Ranks on the mesh.
        size: u32,
    },
    /// Coordinates that are too many, too few, or too large.
    #[error("coordinates {given:?} are not on a mesh of sizes {sizes:?}")]
    Coordinates {
        /// What was given.
        given: Vec<u32>,
        /// The sizes of the axes.
        sizes: Vec<u32>,
    },
    /// A topology file that is not TOML, has a key that is not known, or a value of the wrong kind.
    #[error("topology file, line {line}, `{text}`: {problem}")]
    TopologyFile {
        /// The line, from 1.
        line: usize,
        /// The line as it stands in the file.
        text: String,
        /// What the TOML reader says, with the key.
        problem: String,
    },
    /// A topology file that reads well and asks for something impossible.
    #[error("topology file, line {line}, `{text}`: {cause}")]
    TopologyLine {
        /// The line, from 1.
        line: usize,
        /// The line as it stands in the file.
        text: String,
        /// What is wrong there.
        cause: Box<ParallelError>,
    },
    /// A line of a preemption trace that cannot be.
    #[error("preemption trace, line {line}, `{text}`: expected {expected}")]
    TraceLine {
        /// The line, from 1.
        line: usize,
        /// The line as it stands in the text.
        text: String,
        /// What would have been right.
        expected: &'static str,
    },
    /// A name that is empty or has other characters than letters, digits, `-`, `_` and `.`.
    #[error("name `{name}` is not of letters, digits, `-`, `_` and `.`")]
    BadName {
        /// The name.
        name: String,
    },
    /// A name that two regions or devices have, or a pair that two links join.
    #[error("`{name}` is given twice")]
    Duplicate {
        /// The name, or `a - b` for a pair.
        name: String,
    },
    /// A name that no device and no region has.
    #[error("there is no {kind} `{name}` (known: {})", known.join(", "))]
    UnknownName {
        /// What the name should be of.
        kind: &'static str,
        /// The name.
        name: String,
        /// The names that exist.
        known: Vec<String>,
    },
    /// Two devices that nothing joins.
    #[error("no link between `{from}` and `{to}`, and no default")]
    MissingLink {
        /// One device.
        from: String,
        /// The other.
        to: String,
    },
    /// A pair of devices whose link carries nothing, or not within an hour.
    #[error("{from} to {to} has {bandwidth} for {bytes}: planners need links that take less than an hour")]
    UnusableLink {
        /// One device.
        from: Rank,
        /// The other.
        to: Rank,
        /// What joins them.
        bandwidth: Bandwidth,
        /// What would have to pass.
        bytes: Bytes,
    },
    /// A cluster without devices.
    #[error("there are no devices")]
    NoDevices,
    /// A quantity that must not be zero.
    #[error("{field} of {of} is zero")]
    Zero {
        /// What has the quantity.
        of: String,
        /// The quantity.
        field: &'static str,
    },
    /// A device without a speed, or with two.
    #[error("device `{name}` needs one of `flops` and `tokens_per_second`")]
    NeedsOneSpeed {
        /// The device.
        name: String,
    },
    /// A step that is not a whole number of microbatches.
    #[error("{tokens_per_step} tokens a step are not a multiple of the {microbatch_tokens} of a microbatch")]
    NotWhole {
        /// Tokens of all ranks in one optimizer step.
        tokens_per_step: u64,
        /// Tokens of one microbatch.
        microbatch_tokens: u64,
    },
    /// More microbatches for one rank than a plan counts.
    #[error("{microbatches} microbatches a step are more than a plan counts")]
    TooManyMicrobatches {
        /// Microbatches of all ranks.
        microbatches: u64,
    },
    /// Tensor sizes that do not add up to the model.
    #[error("the tensors have {tensors} parameters and the model {parameters}")]
    TensorsDiffer {
        /// Sum over the tensors.
        tensors: u64,
        /// What the shape says.
        parameters: u64,
    },
    /// A list with one entry per rank that has another length.
    #[error("{what} has {given} entries for {ranks} ranks")]
    PerRank {
        /// The list.
        what: &'static str,
        /// Its length.
        given: usize,
        /// Ranks of the mesh.
        ranks: usize,
    },
    /// A list with one entry per stage (or slice) that has another length.
    #[error("{what} has {given} entries and {stages} are needed")]
    PerStage {
        /// The list.
        what: &'static str,
        /// Its length.
        given: usize,
        /// What it should be.
        stages: usize,
    },
    /// A schedule whose ranks cannot follow arrivals.
    #[error("{rank} cannot follow arrivals: its schedule has {found}")]
    NotFollowed {
        /// The rank.
        rank: Rank,
        /// What stands against it.
        found: &'static str,
    },
    /// Sizes that a schedule's method cannot do.
    #[error("{method} does not do {given} {field}: it needs {needs}")]
    NotAdmitted {
        /// The method.
        method: Method,
        /// The setting.
        field: &'static str,
        /// Its value.
        given: u64,
        /// What it should be.
        needs: String,
    },
    /// More actions than a schedule may have.
    #[error("{actions} actions are more than the {limit} of a schedule")]
    TooLarge {
        /// Stages times microbatches times slices.
        actions: u128,
        /// The most that is allowed.
        limit: usize,
    },
    /// Stages that cannot be laid on ranks.
    #[error("{stages} stages cannot be {copies} copies of a model on {ranks} ranks, each with a stage")]
    Placement {
        /// Stages in all.
        stages: usize,
        /// The highest rank and one.
        ranks: usize,
        /// Copies of the model.
        copies: u32,
    },
    /// Text that is no action of a schedule.
    #[error("`{text}` is not an action such as `2F0`, `0I3`, `1B2.1` or `(0F7;7B3)`")]
    ActionForm {
        /// What was given.
        text: String,
    },
    /// A line of a schedule that cannot be read.
    #[error("line {line}: {cause}")]
    ScheduleLine {
        /// The line, from 1.
        line: usize,
        /// What is wrong there.
        cause: Box<ParallelError>,
    },
    /// A line of a schedule that does not begin with its rank.
    #[error("the line of {rank} begins with `r{}:`", rank.0)]
    RankLabel {
        /// The rank whose turn it is.
        rank: Rank,
    },
    /// An action that cannot be where it is.
    #[error("{rank} has {action}: {problem}")]
    Action {
        /// The action.
        action: Action,
        /// In whose list.
        rank: Rank,
        /// What is wrong.
        problem: &'static str,
    },
    /// An entry of a lowered list that cannot be where it is.
    #[error("{rank} has {entry}: {problem}")]
    Schedule {
        /// In whose list.
        rank: Rank,
        /// The entry, or the one that is missing.
        entry: Lowered,
        /// What is wrong.
        problem: &'static str,
    },
    /// An action that a schedule lacks.
    #[error("{action} is missing")]
    Missing {
        /// The action.
        action: Action,
    },
    /// A file with too few actions for its numbers, or none.
    #[error("{actions} actions are no schedule of {stages} stages and {microbatches} microbatches")]
    Incomplete {
        /// The highest stage and one.
        stages: u64,
        /// The highest microbatch and one.
        microbatches: u64,
        /// How many actions there are.
        actions: usize,
    },
    /// Ranks that wait for each other for ever.
    #[error("nobody can go on: {}", waiting_list(waiting))]
    Deadlock {
        /// Where each rank that is not done stands.
        waiting: Vec<(Rank, Lowered)>,
    },
    /// A rank of a script waits for an operation that does not end.
    #[error("rank {rank} waits at act {act} for what never ends")]
    NeverDone {
        /// Who.
        rank: Rank,
        /// The number of the act.
        act: usize,
    },
    /// Tokens that cannot be cut into slices of whole grains.
    #[error("{tokens} tokens are not up to 4096 slices of {grain}")]
    Grain {
        /// Tokens of a sequence.
        tokens: u64,
        /// Tokens of the least slice.
        grain: u64,
    },
    /// A chain of layers that no plan runs within its memory.
    #[error("no plan runs {layers} layers backward within {budget}")]
    Budget {
        /// Layers of the chain.
        layers: usize,
        /// What was allowed.
        budget: Bytes,
    },
    /// A chain of layers that no division among some machines lets fit.
    #[error(
        "no division of {layers} layers among {machines} machines in order fits: state and one microbatch need {needs}, all machines have {has}{}",
        would_fit(*layers, *machines, *needs, *has)
    )]
    TooSmall {
        /// Layers of the chain.
        layers: usize,
        /// Machines in order.
        machines: usize,
        /// State of all layers and activations of one microbatch.
        needs: Bytes,
        /// Memory of all machines that tell theirs.
        has: Bytes,
    },
    /// A device that cannot hold its replica.
    #[error("device `{device}` has {has} and a replica needs {needs}; sharded state is not built yet")]
    Memory {
        /// The device.
        device: String,
        /// What parameters, gradients and optimizer state take.
        needs: Bytes,
        /// What the device has.
        has: Bytes,
    },
    /// A machine that cannot hold its part of a plan.
    #[error(
        "machine `{device}` has {has} and its part of the plan takes {needs}, {} too much: a smaller --batch, more \
        machines or more memory would make it fit",
        Bytes(needs.0.saturating_sub(has.0))
    )]
    PartMemory {
        /// The machine.
        device: String,
        /// What it would hold at the most.
        needs: Bytes,
        /// What it has.
        has: Bytes,
    },
    /// A part of a plan that nothing here can carry out yet.
    #[error("{what} is not built yet")]
    NotBuilt {
        /// The part.
        what: String,
    },
}

/// The first few of those that wait.
fn waiting_list(waiting: &[(Rank, Lowered)]) -> String {
    let mut text: Vec<String> =
        waiting.iter().take(4).map(|(rank, op)| format!("{rank} waits at {op}")).collect();
    if waiting.len() > text.len() {
        text.push(format!("{} more ranks", waiting.len() - text.len()));
    }
    text.join(", ")
}

/// What more memory a model needs: of all machines, or of each where the sum is enough.
fn would_fit(layers: usize, machines: usize, needs: Bytes, has: Bytes) -> String {
    match needs.0.checked_sub(has.0) {
        Some(missing) if missing > 0 => {
            let more = match has.0 / machines.max(1) as u64 {
                // A machine has one layer at least.
                each if each > 0 && needs.0.div_ceil(each) <= layers as u64 => {
                    format!(", as {} machines like these or more have", needs.0.div_ceil(each))
                }
                _ => ", on machines that have more each".to_owned(),
            };
            format!(": at least {} more would be needed{more}", Bytes(missing))
        }
        _ => {
            ": the sum is enough, but no machine's part ends between two layers; more memory each, a smaller \
              `--batch`, or fewer `--microbatches` would help"
                .to_owned()
        }
    }
}
