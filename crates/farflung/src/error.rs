//! The crate's error type: what failed, with the field, file or peer at fault, and the exit code of each error.

mod classify;
mod launch;
mod model;
mod state;
mod texts;

use std::io;
use std::path::PathBuf;

use farflung_comm::CommError;
use farflung_optim::OptimError;
use farflung_parallel::ParallelError;
use farflung_tensor::TensorError;
use farflung_zoo::ZooError;

use crate::signals::Signal;
pub use launch::LaunchError;
pub use model::ModelError;
pub use state::StateError;
pub(crate) use texts::causes;
use texts::{and_also, diverged, not_finite};

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The failures of this crate's functions and commands.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A failure that a test injected into a run.
    #[error("a test injected a failure at moment {moment} of step {step}")]
    InjectedFailure {
        /// The step.
        step: u64,
        /// The number of the [moment](crate::train::Moment) within the step.
        moment: u8,
    },
    /// This rank may not continue with the other ranks of its run.
    #[error("this member cannot continue: {reason}")]
    Removed {
        /// Why this rank may not continue.
        reason: String,
    },
    /// Too few members of its run are left for this rank to continue: the others may have continued without it.
    #[error(
        "this member cannot continue: {reason}{}",
        left.as_deref().map(ToString::to_string).unwrap_or_default()
    )]
    NoMajority {
        /// The reason why this rank cannot continue, such as the number of members that are left.
        reason: String,
        /// The steps that are saved, and those that are dropped.
        left: Option<Box<crate::train::StopSummary>>,
    },
    /// Part of the model is lost: the members that held it are gone, and no other member has a copy.
    #[error(
        "{tensor} of the model is lost: the member that held it failed, and no other member has it or can \
         read a checkpoint of it{}",
        left.as_deref().map(ToString::to_string).unwrap_or_default()
    )]
    PartLost {
        /// The parts that this rank has saved.
        left: Option<Box<crate::train::StopSummary>>,
        /// The first tensor that is missing.
        tensor: String,
    },
    /// The run has ended while this member was a spare.
    #[error("the run has ended: this member was a spare, and has no part of the model")]
    OverForSpare,
    /// This rank is too slow: the other ranks of its run wait for it.
    #[error(
        "this member is too slow for the run: {reason}; to keep it, start the host with more \
         `--microbatches` (smaller shares) or with `--balance equal` (no member is removed for its \
         speed){left}"
    )]
    TooSlow {
        /// The time of a microbatch here and on the other members.
        reason: String,
        /// The steps that are saved, and those that are dropped.
        left: Box<crate::train::StopSummary>,
    },
    /// The members refuse this newcomer, for this reason.
    #[error("the members of the run refuse this machine: {0}")]
    JoinRefused(String),
    /// No member of a run answers.
    #[error(
        "no member of the run answered at {addresses} within {after}: the run may have ended, or the ticket \
         may be outdated"
    )]
    NobodyAnswers {
        /// The addresses that were tried, and the outcome of each.
        addresses: String,
        /// Time for which the addresses were tried.
        after: farflung_base::Nanos,
    },
    /// The run of a folder is still running on other members.
    #[error(
        "the run of this folder is still running: {address} answers{}; join the run with its ticket, or give \
         another folder with `--out`",
        .expired.then_some(", and says that the ticket in this folder has expired").unwrap_or_default()
    )]
    StillRuns {
        /// The address of the member that answers.
        address: String,
        /// Whether the member refuses the folder's ticket because it has expired.
        expired: bool,
    },
    /// A list of members is not a valid view.
    #[error("invalid list of the run's members: {reason}")]
    NotAView {
        /// The reason why the list is not a view.
        reason: String,
    },
    /// A setting of the command line or of a file has an invalid value.
    #[error("`{field}` is {value}, expected {expected}")]
    Setting {
        /// The setting's name, as in `--name`.
        field: &'static str,
        /// The value that was given.
        value: String,
        /// The values that are allowed.
        expected: String,
    },
    /// Ranks of a job were started with different values of a setting that must be the same on all.
    #[error(
        "the {what} `{field}` is {}, expected the same on all ranks{}",
        values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and "),
        and_also(also)
    )]
    RanksDiffer {
        /// The kind of value that differs: a setting, or a field of the plan.
        what: &'static str,
        /// Name of the setting or field.
        field: String,
        /// The values, each with the ranks that have it.
        values: Vec<crate::train::RankValue>,
        /// Names of the other settings or fields that differ.
        also: Vec<String>,
    },
    /// This machine has a different value from the members of the run that it tries to join.
    #[error("the {what} `{field}` is {own} here and {theirs} on the run's members, expected the same")]
    MemberDiffers {
        /// The kind of value that differs: a setting, or a field of the plan.
        what: &'static str,
        /// Name of the setting or field.
        field: String,
        /// The value here.
        own: String,
        /// The value on the members.
        theirs: String,
    },
    /// Another rank failed at something that all ranks must do before they continue.
    #[error("rank {rank} failed: {message}")]
    OnRank {
        /// The rank.
        rank: usize,
        /// That rank's error message.
        message: String,
        /// That rank's exit code.
        code: u8,
    },
    /// Ranks would meet at an address that other machines can reach, without proof of identity.
    #[error(
        "ranks meet at {at}, which other machines can reach, and no secret protects the run: give all ranks \
         the same --secret-file or FARFLUNG_SECRET, or a ticket of rank 0 (`farflung ticket`), or --insecure \
         on a network that only you use"
    )]
    Unprotected {
        /// The address of the meeting place.
        at: String,
    },
    /// A file that holds a secret is readable by other users.
    #[error("{path} contains a secret, and other users can read it (mode {mode:o}): run `chmod 600 {path}`")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// The file's permission bits.
        mode: u32,
    },
    /// A key file has the wrong length.
    #[error(
        "{path} is not a key file: it has {got} bytes, expected {want}; move it away, and a new key is \
         created"
    )]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// The file's length in bytes.
        got: usize,
        /// The length of a key in bytes.
        want: usize,
    },
    /// A ticket cannot be parsed.
    #[error("the ticket in {from} is invalid")]
    Ticket {
        /// The file or variable that held it.
        from: String,
        /// The error in the ticket.
        #[source]
        source: farflung_comm::secure::TicketError,
    },
    /// A run needs more memory than is available.
    #[error("{0}")]
    TooLarge(Box<crate::train::TooLarge>),
    /// A device computed different bits for the same batch, and the run was asked to be deterministic.
    #[error(
        "device `{device}` computed different results when it repeated the same batch; to train on it \
         anyway, leave out `deterministic`"
    )]
    NotRepeatable {
        /// The device.
        device: String,
    },
    /// A config file has an unknown key.
    #[error("{path}:{line}: unknown key `{key}`{}", nearest.as_ref().map_or(String::new(), |n| format!(", did you mean `{n}`?")))]
    UnknownKey {
        /// The config file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The key as written.
        key: String,
        /// The known key with the most similar spelling, if one is similar enough.
        nearest: Option<String>,
    },
    /// A key of a config file has an invalid value.
    #[error("{path}:{line}: `{key}` is {value}, expected {expected}")]
    ConfigValue {
        /// The config file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The key.
        key: String,
        /// The value that was given.
        value: String,
        /// The values that are allowed.
        expected: String,
    },
    /// A config file is not valid TOML.
    #[error("{path} is not valid TOML")]
    ConfigSyntax {
        /// The config file.
        path: PathBuf,
        /// The parser's error, with line and column.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// Some of a launcher's variables or a flag for joining a job are set, and a required variable is not.
    #[error("{present} is set but {missing} is not: both are needed to join a job")]
    HalfSet {
        /// A variable or flag that is set.
        present: &'static str,
        /// The variable that is missing.
        missing: &'static str,
    },
    /// A launcher's variable cannot be parsed.
    #[error("the environment variable {name} is `{value}`, expected {expected}")]
    Variable {
        /// The variable.
        name: &'static str,
        /// The variable's value.
        value: String,
        /// The values that are allowed.
        expected: &'static str,
    },
    /// A file or folder could not be read or written, or another operation of the system failed.
    #[error("failed to {action} {path}")]
    Io {
        /// The operation, such as "read".
        action: &'static str,
        /// The path of the file or folder, or what else the operation was about.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// An input cannot be used, such as a file that is missing; another start does not help.
    #[error(transparent)]
    Input(Box<Self>),
    /// A folder, a pipe or a device has the name of a file that a run writes.
    #[error("{path} is {what}, expected a file of the run: move it away")]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// There is no room for a checkpoint on the disk.
    #[error("{0}")]
    NoRoom(Box<crate::train::NoRoom>),
    /// There is no room for a checkpoint on another rank's disk.
    #[error("rank {rank}: {message}")]
    NoRoomOn {
        /// The rank.
        rank: usize,
        /// That rank's error message.
        message: String,
        /// That rank's exit code.
        code: u8,
    },
    /// The optimizer's state on disk cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The folder given for a run is not empty and not a run's folder.
    #[error("{path} is not empty and is not a run's folder: give another `--out`")]
    NotARun {
        /// The folder.
        path: PathBuf,
    },
    /// The folder given for a new run holds a run already.
    #[error("{path} already holds a run: give `--resume auto` to continue it, or another `--out`")]
    RunExists {
        /// The folder.
        path: PathBuf,
    },
    /// Another process trains in the same folder.
    #[error("{path} is in use by another run{}", pid.map_or(String::new(), |p| format!(" (process {p})")))]
    Locked {
        /// The run's folder.
        path: PathBuf,
        /// The process that holds the lock, if its id could be read.
        pid: Option<u32>,
    },
    /// A file of a checkpoint is missing or has changed since it was written.
    #[error("checkpoint file {path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How the damage was detected.
        what: &'static str,
    },
    /// A tensor has values that are not finite; such values must not be computed with or saved.
    #[error("tensor `{tensor}` is not finite: its element {index} is {value}")]
    NotFinite {
        /// The tensor: a weight, or a state of the optimizer.
        tensor: String,
        /// Index of the first element that is not finite.
        index: usize,
        /// The element's value.
        value: String,
    },
    /// The loss on the held-out text is not finite, so the weights are not usable.
    #[error("after step {step} the validation loss is {loss}, which is not finite; this state was not saved")]
    LossNotFinite {
        /// Number of steps done.
        step: u64,
        /// The loss.
        loss: f64,
    },
    /// The training loss of the steps that measure a device is not finite.
    #[error("after {steps} measured steps the training loss is {loss}, which is not finite")]
    MeasuredLossNotFinite {
        /// Number of steps done.
        steps: u64,
        /// The loss.
        loss: f64,
    },
    /// The gradients of a step were not finite in several attempts.
    #[error("step {step} was tried {tries} times: {cause}; {}", not_finite(ranks))]
    StepNotFinite {
        /// The step.
        step: u64,
        /// Number of attempts.
        tries: u32,
        /// The ranks whose own gradients are not finite; empty if only their sum is not.
        ranks: Vec<farflung_base::Rank>,
        /// The error that names the value that is not finite.
        cause: Box<OptimError>,
    },
    /// Members of a pipeline each saved a part of the model, and some parts are not on this disk.
    #[error(
        "the checkpoint {path} was saved by members that each held a part of the model, and none on this \
         disk has layers {} to {}: copy the folders of the other members into the folder `members` of the \
         run's folder, or give an older checkpoint with --resume",
        layers.start, layers.end - 1
    )]
    PartsElsewhere {
        /// The checkpoint of the member that should continue.
        path: PathBuf,
        /// Range from the first to the last missing layer.
        layers: std::ops::Range<usize>,
    },
    /// A rank's folder holds another rank's checkpoint.
    #[error("{path} is a checkpoint of rank {}, expected one of rank {}: are folders swapped?", owner.0, rank.0)]
    ForeignFolder {
        /// The checkpoint.
        path: PathBuf,
        /// The rank that wrote it.
        owner: farflung_base::Rank,
        /// The rank that should continue from it.
        rank: farflung_base::Rank,
    },
    /// A rank's checkpoint is lost, and no other rank holds the same parts of the model.
    #[error(
        "the folder of rank {} has no good checkpoint of step {step}, and no other rank holds the same \
         part of the model and of the optimizer's state",
        rank.0
    )]
    NoCopy {
        /// The rank without a checkpoint.
        rank: farflung_base::Rank,
        /// The step of the other ranks' checkpoint.
        step: u64,
    },
    /// A rank whose part of the model is needed does not answer, or is at another step.
    #[error("rank {} does not answer or is at another step, and the model is incomplete without its part", rank.0)]
    NoAnswer {
        /// The rank.
        rank: farflung_base::Rank,
    },
    /// Copies of the same values are no longer equal: a machine or this program computed wrongly.
    #[error("after step {step} {}; this state was not saved", diverged(what, ranks, *majority))]
    Diverged {
        /// Number of steps done.
        step: u64,
        /// Name of the values that differ.
        what: String,
        /// The ranks that differ from the majority, or all ranks that hold a copy if there is no majority.
        ranks: Vec<farflung_base::Rank>,
        /// Whether more than half of the ranks that hold a copy agree with each other.
        majority: bool,
    },
    /// A file name inside a checkpoint points out of its folder, or is reserved.
    #[error("`{name}` cannot be the name of a checkpoint's file")]
    FileName {
        /// The name.
        name: String,
    },
    /// A line of `metrics.jsonl` is not a step.
    #[error("{path}:{line} is not a valid line of metrics")]
    Metrics {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The parser's error.
        #[source]
        source: serde_json::Error,
    },
    /// A line of `events.jsonl` is not an event.
    #[error("{path}:{line} is not a valid event")]
    Events {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The parser's error.
        #[source]
        source: serde_json::Error,
    },
    /// The default training text, the source of some of our dependencies, is not on this machine.
    #[error("the default text is not on this machine ({what}): give `--data PATH`")]
    NoCorpus {
        /// Description of the file or folder that was not found.
        what: String,
    },
    /// The default text on this machine does not have the expected hash.
    #[error("the default text has hash {found}, expected {expected}: give `--data PATH`")]
    CorpusHash {
        /// The hash of the text that was found.
        found: String,
        /// [`crate::corpus::EXPECTED`].
        expected: &'static str,
    },
    /// A plot (of the loss, or of `farflung compress`) could not be drawn.
    #[error("failed to draw the plot: {what}")]
    Plot {
        /// The drawing library's error.
        what: String,
    },
    /// A process or a machine of a launched job could not be started, or failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A path that is no model or checkpoint, or a setting that differs from a model's.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A peer was lost; the job can be started again.
    #[error("{peer} was lost")]
    PeerLost {
        /// The peer.
        peer: farflung_base::PeerId,
        /// How the loss was detected.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// This rank has lost all other ranks, so it is probably cut off itself.
    #[error("rank {} has lost all other ranks: it is cut off from them", rank.0)]
    CutOff {
        /// This rank.
        rank: farflung_base::Rank,
        /// The first failure that it noticed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A tensor op failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// An error of a model, its data or its weights.
    #[error(transparent)]
    Zoo(ZooError),
    /// An error of a plan, a schedule, a planner or a topology file.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// An error of a codec.
    #[error(transparent)]
    Compress(#[from] farflung_compress::CompressError),
    /// An error of an optimizer.
    #[error(transparent)]
    Optim(OptimError),
    /// An error of a transport or collective that names no peer.
    #[error(transparent)]
    Comm(CommError),
    /// A message between ranks of a pipeline is not the one that was expected.
    #[error("{message} {problem}")]
    Message {
        /// Description of the message.
        message: String,
        /// The reason why the message is wrong.
        problem: &'static str,
    },
    /// The codec of a pipeline boundary could not encode or decode a message.
    #[error("{message}")]
    Boundary {
        /// Description of the message.
        message: String,
        /// The codec's error.
        #[source]
        source: farflung_compress::CompressError,
    },
    /// Two compared runs differ.
    #[error("step {step}: `{field}` is {left} in the first run and {right} in the second")]
    Differ {
        /// The first step at which they differ.
        step: u64,
        /// The field of `metrics.jsonl`.
        field: &'static str,
        /// The field's value in the first run.
        left: String,
        /// The field's value in the second run.
        right: String,
    },
    /// A signal asked for a stop, and there was nothing to save.
    #[error("stopped by {0}")]
    Stopped(Signal),
    /// A second signal has ended the process before it could save.
    #[error("ended at once by a second {signal}; {}", classify::last_checkpoint(saved.as_deref()))]
    EndedAtOnce {
        /// The signal.
        signal: Signal,
        /// The newest checkpoint.
        saved: Option<PathBuf>,
    },
    /// A signal asked for a stop; `left` describes what the run leaves on disk.
    #[error("stopped by {signal}{left}")]
    StoppedAt {
        /// The signal.
        signal: Signal,
        /// The steps that are saved, and those that are dropped.
        left: Box<crate::train::StopSummary>,
    },
    /// Another rank was stopped by a signal.
    #[error("rank {} was stopped{left}", rank.0)]
    StoppedBy {
        /// The rank that was stopped.
        rank: farflung_base::Rank,
        /// The steps that this rank has saved, and those that it has dropped.
        left: Box<crate::train::StopSummary>,
    },
}
