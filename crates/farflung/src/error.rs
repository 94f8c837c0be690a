//! The crate's one error: what failed, with the field, file or peer that is wrong, and the exit code that it
//! stands for.

mod sorts;

use std::io;
use std::path::PathBuf;

use farflung_comm::CommError;
use farflung_optim::OptimError;
use farflung_parallel::ParallelError;
use farflung_tensor::TensorError;
use farflung_zoo::ZooError;

use crate::signals::Signal;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong between the command line and the run's folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What a test placed in a run.
    #[error("a failure was placed at moment {moment} of step {step}")]
    Placed {
        /// The step.
        step: u64,
        /// The number of the [moment](crate::train::Moment).
        moment: u8,
    },
    /// This rank may not go on with the others of its run.
    #[error("this member may not go on: {reason}")]
    Removed {
        /// Why.
        reason: String,
    },
    /// Too few members of its run are left for this rank to go on: the others may have gone on without it.
    #[error("this member may not go on: {reason}{}", left.as_deref().map(ToString::to_string).unwrap_or_default())]
    NoMajority {
        /// How many are left, of how many.
        reason: String,
        /// What is saved, and what is not.
        left: Option<Box<crate::train::Leftover>>,
    },
    /// Nobody is left who has some of the model: its holders were lost, and nobody has a copy.
    #[error(
        "{tensor} of the model is lost with its member: no other member holds it, or can read a checkpoint \
         of it"
    )]
    PartLost {
        /// The first tensor that is missing.
        tensor: String,
    },
    /// A spare member of a run that is over.
    #[error("the run is over: this member was a spare, and holds no part of the model")]
    OverForSpare,
    /// This rank holds the others of its run up.
    #[error(
        "this member is too slow for the run: {reason}; a host's `--microbatches N` makes smaller shares, and its \
         `--balance equal` keeps everyone{left}"
    )]
    TooSlow {
        /// What a microbatch takes here and elsewhere.
        reason: String,
        /// What is saved.
        left: Box<crate::train::Leftover>,
    },
    /// No member of a run answers.
    #[error(
        "no member of the run answers at {addresses} within {after}: it may be over, or the ticket may be old"
    )]
    NobodyAnswers {
        /// Where.
        addresses: String,
        /// How long it was asked.
        after: farflung_base::Nanos,
    },
    /// The run of a folder goes on elsewhere.
    #[error(
        "the run of this folder goes on: {address} answers, one of {members} members; join it there with its ticket, or \
         give another folder with `--out`"
    )]
    StillRuns {
        /// Who answers.
        address: String,
        /// How many it knows.
        members: usize,
    },
    /// A list of members that cannot be one.
    #[error("no view of the run's members: {reason}")]
    NotAView {
        /// What is wrong with it.
        reason: String,
    },
    /// A setting of the command line or of a file has a value that cannot be.
    #[error("`{field}` is {value}, expected {expected}")]
    Setting {
        /// The setting's name, as in `--name`.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would have been right.
        expected: String,
    },
    /// Ranks of a job were started with different values of what all must have alike.
    #[error(
        "the {what} `{field}` is {}, expected the same on all ranks{}",
        values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and "),
        and_also(also)
    )]
    RanksDiffer {
        /// What differs: a setting, or a field of the plan.
        what: &'static str,
        /// Its name.
        field: String,
        /// The values, each with the ranks that have it.
        values: Vec<crate::train::RankValue>,
        /// Names of what differs too.
        also: Vec<String>,
    },
    /// This machine has another value than the members of the run that it would join.
    #[error("the {what} `{field}` is {own} here and {theirs} on the run's members, expected the same")]
    MemberDiffers {
        /// What differs.
        what: &'static str,
        /// Its name.
        field: String,
        /// The value here.
        own: String,
        /// That of the members.
        theirs: String,
    },
    /// Another rank failed at what all ranks must do before they go on.
    #[error("rank {rank} failed: {message}")]
    OnRank {
        /// The rank.
        rank: usize,
        /// What it says.
        message: String,
        /// Its exit code.
        code: u8,
    },
    /// Ranks would meet where others can reach them, and nothing proves who they are.
    #[error(
        "ranks meet at {at}, which other machines can reach, and nothing says who may join: give all ranks \
         the same --secret-file or FARFLUNG_SECRET, or a ticket of rank 0 (`farflung ticket`), or --insecure \
         where nobody else is in the network"
    )]
    Unprotected {
        /// Where they would meet.
        at: String,
    },
    /// Others can read a file that holds a secret.
    #[error("{path} holds a secret and others can read it (mode {mode:o}): chmod 600 {path}")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A key file is not one.
    #[error("{path} is no key: it has {got} bytes, expected {want}; move it away, and a new one is made")]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// Its length.
        got: usize,
        /// The length of keys.
        want: usize,
    },
    /// A ticket cannot be read.
    #[error("the ticket of {from} cannot be used")]
    Ticket {
        /// Where it came from.
        from: String,
        /// What is wrong with it.
        #[source]
        source: farflung_comm::secure::TicketError,
    },
    /// A run needs more memory than there is.
    #[error("{0}")]
    TooLarge(Box<crate::train::TooLarge>),
    /// A device gave other bits the second time, and the run was asked to be deterministic.
    #[error(
        "`{device}` gave other gradients for the same batch the second time; without `deterministic` a run goes on"
    )]
    NotRepeatable {
        /// The device.
        device: String,
    },
    /// A config file has a key that nobody knows.
    #[error("{path}:{line}: unknown key `{key}`{}", nearest.as_ref().map_or(String::new(), |n| format!(", did you mean `{n}`?")))]
    UnknownKey {
        /// The config file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The key as written.
        key: String,
        /// The known key that is spelled most like it, if one is near.
        nearest: Option<String>,
    },
    /// A key of a config file has a wrong value.
    #[error("{path}:{line}: `{key}` is {value}, expected {expected}")]
    ConfigValue {
        /// The config file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The key.
        key: String,
        /// What was given.
        value: String,
        /// What would have been right.
        expected: String,
    },
    /// A config file is not TOML.
    #[error("{path} is not TOML")]
    ConfigSyntax {
        /// The config file.
        path: PathBuf,
        /// What the parser says, with line and column.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// Some of a launcher's variables are set and one is not.
    #[error("{present} is set but {missing} is not: both are needed to join a job")]
    HalfSet {
        /// A variable that is set.
        present: &'static str,
        /// The one that is missing.
        missing: &'static str,
    },
    /// A launcher's variable cannot be read.
    #[error("the environment variable {name} is `{value}`, expected {expected}")]
    Variable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What would have been right.
        expected: &'static str,
    },
    /// A file or folder could not be read or written.
    #[error("failed to {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The folder given for a run holds something else.
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
        /// The process that holds it, where it said so.
        pid: Option<u32>,
    },
    /// A file of a checkpoint is not what was written.
    #[error("checkpoint file {path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How one can tell.
        what: &'static str,
    },
    /// A tensor has values that no model can be computed with, or that must not be saved.
    #[error("tensor `{tensor}` is not finite: its element {index} is {value}")]
    NotFinite {
        /// The tensor, of weights or of an optimizer's state.
        tensor: String,
        /// The first element that is not.
        index: usize,
        /// Its value.
        value: String,
    },
    /// The loss of the held-out text is not finite, so that the weights are of no use.
    #[error("after step {step} the validation loss is {loss}, which is not finite; nothing of it was saved")]
    LossNotFinite {
        /// Steps done.
        step: u64,
        /// The loss.
        loss: f64,
    },
    /// The gradients of a step are not finite, each time that it is computed.
    #[error("step {step} was tried {tries} times: {cause}; {}", not_finite(ranks))]
    StepNotFinite {
        /// The step.
        step: u64,
        /// How often it was tried.
        tries: u32,
        /// The ranks whose own gradients are not finite.
        ranks: Vec<farflung_base::Rank>,
        /// What is not finite.
        cause: Box<OptimError>,
    },
    /// Members of a pipeline saved parts of the model, and some are not on this disk.
    #[error(
        "the checkpoint {path} was saved by members that each held a part of the model, and none on this disk \
         has layers {} to {}: copy the folders of the other members into `members` of the run's folder, or name \
         an older checkpoint by --resume",
        layers.start, layers.end - 1
    )]
    PartsElsewhere {
        /// The checkpoint of the member that is to go on.
        path: PathBuf,
        /// From the first to the last layer that is missing.
        layers: std::ops::Range<usize>,
    },
    /// A rank's folder holds another rank's checkpoint.
    #[error("{path} is a checkpoint of rank {}, expected one of rank {}: are folders swapped?", owner.0, rank.0)]
    ForeignFolder {
        /// The checkpoint.
        path: PathBuf,
        /// Who wrote it.
        owner: farflung_base::Rank,
        /// Who was to go on from it.
        rank: farflung_base::Rank,
    },
    /// A rank's checkpoint is lost, and no other rank has its parts of the model.
    #[error(
        "the folder of rank {} has no good checkpoint of step {step}, and no other rank holds the same part of the model",
        rank.0
    )]
    NoCopy {
        /// The rank.
        rank: farflung_base::Rank,
        /// The step that the others have.
        step: u64,
    },
    /// A rank whose part of the model is needed did not answer.
    #[error("rank {} does not answer, and the model is not whole without its part", rank.0)]
    NoAnswer {
        /// The rank.
        rank: farflung_base::Rank,
    },
    /// Copies of the same values are no longer equal: a fault of a machine, or of this program.
    #[error("after step {step} {}; nothing of it was saved", diverged(what, ranks, *majority))]
    Diverged {
        /// Steps done.
        step: u64,
        /// What differs.
        what: String,
        /// The ranks that differ from the majority; all that hold a copy where there is none.
        ranks: Vec<farflung_base::Rank>,
        /// Whether more than half of the ranks that hold a copy are others.
        majority: bool,
    },
    /// A file name inside a checkpoint that would leave its folder, or that stands for something else.
    #[error("`{name}` cannot be the name of a checkpoint's file")]
    FileName {
        /// The name.
        name: String,
    },
    /// A line of `metrics.jsonl` is not a step.
    #[error("{path}:{line} is not a line of metrics")]
    Metrics {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What the parser says.
        #[source]
        source: serde_json::Error,
    },
    /// A line of `events.jsonl` is not an event.
    #[error("{path}:{line} is not an event")]
    Events {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What the parser says.
        #[source]
        source: serde_json::Error,
    },
    /// The source text of our own dependencies is not on this machine.
    #[error("the default text is not on this machine ({what}): give `--data PATH`")]
    NoCorpus {
        /// What was looked for and not found.
        what: String,
    },
    /// The default text is not the one that every bound was measured on.
    #[error("the default text has hash {found}, expected {expected}: give `--data PATH`")]
    CorpusHash {
        /// The hash of what was found.
        found: String,
        /// [`crate::corpus::EXPECTED`].
        expected: &'static str,
    },
    /// The loss curve could not be drawn.
    #[error("failed to draw the loss curve: {what}")]
    Plot {
        /// What the drawing library says.
        what: String,
    },
    /// A process of a launched job could not be started.
    #[error("failed to start rank {rank}")]
    Start {
        /// The rank.
        rank: usize,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A process of a launched job failed.
    #[error("rank {rank} failed: {status}")]
    Child {
        /// The first rank that failed.
        rank: usize,
        /// Its exit status, in words.
        status: std::process::ExitStatus,
        /// The exit code to pass on.
        code: u8,
    },
    /// The processes of a launched job on another machine failed.
    #[error("the ranks on {host} failed: {status}")]
    OnHost {
        /// The machine.
        host: String,
        /// The exit status there, in words.
        status: std::process::ExitStatus,
        /// The exit code to pass on.
        code: u8,
    },
    /// A machine of a launched job was not reached, or its connection was lost.
    #[error("ssh to {host} failed: see what it said, and try `ssh {host} true`")]
    Ssh {
        /// The machine.
        host: String,
        /// The exit code to pass on.
        code: u8,
    },
    /// ssh could not be started.
    #[error("failed to start `{command}`")]
    StartSsh {
        /// The command.
        command: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A peer was lost; the job can be started again.
    #[error("{peer} was lost")]
    PeerLost {
        /// Who.
        peer: farflung_base::PeerId,
        /// How one can tell.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// This rank has lost all others: it is the one that is cut off.
    #[error("rank {} has lost all other ranks: it is cut off from them", rank.0)]
    CutOff {
        /// This rank.
        rank: farflung_base::Rank,
        /// What it noticed first.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A tensor op failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A model, its data or its weights.
    #[error(transparent)]
    Zoo(#[from] ZooError),
    /// A plan or a topology file.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// A codec.
    #[error(transparent)]
    Compress(#[from] farflung_compress::CompressError),
    /// An optimizer.
    #[error(transparent)]
    Optim(OptimError),
    /// A collective, without a peer to blame.
    #[error(transparent)]
    Comm(CommError),
    /// What a rank of a pipeline got from another is not what was to come.
    #[error("{message} {problem}")]
    Message {
        /// Which message.
        message: String,
        /// How one can tell.
        problem: &'static str,
    },
    /// A boundary's codec could not pack or unpack what crosses it.
    #[error("{message}")]
    Boundary {
        /// Which message.
        message: String,
        /// Why.
        #[source]
        source: farflung_compress::CompressError,
    },
    /// Two runs that were compared part.
    #[error("step {step}: `{field}` is {left} and {right}")]
    Differ {
        /// The first step at which they do.
        step: u64,
        /// The field of `metrics.jsonl`.
        field: &'static str,
        /// Its value in the first run.
        left: String,
        /// Its value in the second run.
        right: String,
    },
    /// The user or the system asked for a stop, and there was nothing to save.
    #[error("stopped by {0}")]
    Stopped(Signal),
    /// The user or the system asked for a stop, and this is what the run leaves.
    #[error("stopped by {signal}{left}")]
    StoppedAt {
        /// Which signal.
        signal: Signal,
        /// What is saved, and what is not.
        left: Box<crate::train::Leftover>,
    },
    /// Another rank was stopped by its user or its system.
    #[error("rank {} was stopped{left}", rank.0)]
    StoppedBy {
        /// Who.
        rank: farflung_base::Rank,
        /// What is saved here, and what is not.
        left: Box<crate::train::Leftover>,
    },
}

/// The ranks whose own gradients are not finite, in words.
fn not_finite(ranks: &[farflung_base::Rank]) -> String {
    match ranks {
        [] => "each rank's own gradients are finite, and what they add up to is not".to_owned(),
        [_] => format!("{} has gradients that are not finite", crate::train::Ranks(ranks)),
        _ => format!("{} have gradients that are not finite", crate::train::Ranks(ranks)),
    }
}

/// The ranks whose copies differ, in words.
fn diverged(what: &str, ranks: &[farflung_base::Rank], majority: bool) -> String {
    let shown = crate::train::Ranks(ranks);
    match (ranks, majority) {
        ([_], _) => format!("{shown} has another copy of the {what} than the other ranks"),
        (_, true) => format!("{shown} have other copies of the {what} than most ranks"),
        (_, false) => format!("{shown} have different copies of the {what}, and no majority agrees"),
    }
}

/// Names of what differs besides, in words.
fn and_also(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [name] => format!(" (`{name}` differs too)"),
        names => {
            let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
            format!(" ({} differ too)", quoted.join(", "))
        }
    }
}
