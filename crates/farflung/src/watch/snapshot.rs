//! The data that a run's page shows: the JSON of `/snapshot`.

use serde::Serialize;

use super::curve::Curve;
use crate::CountedMemory;
use crate::metrics::MixtureMetrics;

/// State of a run, as far as its files tell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Snapshot {
    /// Everything except the curve.
    #[serde(flatten)]
    pub summary: Summary,
    /// Loss, tokens and bytes by step.
    pub curve: Curve,
}

/// State of a run, without its curve.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Facts about the run as a whole.
    pub run: RunFacts,
    /// Whether the run is still going.
    pub phase: Phase,
    /// The run's newest step.
    pub latest: Latest,
    /// Tokens of committed steps per second.
    pub goodput: Goodput,
    /// The members by rank; in runs whose members come and go, also those that wait to join or have left.
    pub members: Vec<MemberFacts>,
    /// Number of members that are left out of `members`.
    pub more_members: usize,
    /// The links between neighbours; ends are positions in `members`.
    pub links: Vec<LinkFacts>,
    /// Times of the newest steps on each rank, oldest first.
    pub timeline: Vec<StepFacts>,
    /// What routers of experts chose in the newest step, by layer.
    pub experts: Vec<MixtureMetrics>,
    /// Memory of the process that writes the metrics, in the newest step.
    pub memory: Option<CountedMemory>,
    /// Events, oldest first.
    pub events: Vec<EventFacts>,
    /// Number of older events that are left out.
    pub more_events: u64,
    /// Files and lines that could not be read.
    pub problems: Vec<Problem>,
}

/// Facts about a run from its plan, settings and declared links.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RunFacts {
    /// The folder's name.
    pub name: String,
    /// The model's name.
    pub model: Option<String>,
    /// Number of the model's trainable parameters.
    pub parameters: Option<u64>,
    /// Number of steps of the whole run.
    pub steps: Option<u64>,
    /// Number of replicas.
    pub replicas: Option<u32>,
    /// Number of stages of each replica.
    pub stages: Option<u32>,
    /// Number of ranks that divide each layer.
    pub tensor: Option<u32>,
    /// Method of synchronisation between replicas.
    pub method: Option<String>,
    /// Codec of averages.
    pub codec: Option<String>,
    /// Whether links are simulated, so that the run's clock is virtual.
    pub simulated: Option<bool>,
}

/// Whether a run is still going.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Phase {
    /// No step is done yet.
    Waiting,
    /// Some steps are done, and there is no sign that the run has ended.
    Running,
    /// The run has written its report.
    Finished,
    /// The run ended before its last step.
    Ended {
        /// The reason why the run ended.
        reason: String,
    },
}

/// Metrics of the newest step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Latest {
    /// Number of steps done.
    pub step: u64,
    /// The run's clock in seconds.
    pub time_s: f64,
    /// Seconds of real time.
    pub wall_s: f64,
    /// Number of tokens on which all workers together trained.
    pub tokens: u64,
    /// Mean loss of the step's tokens, in nats.
    pub train_loss: Option<f64>,
    /// Last computed loss on the held-out text, in nats.
    pub val_loss: Option<f64>,
    /// Total bytes sent by the process that writes the metrics.
    pub bytes_sent: u64,
    /// Bytes received by that process.
    pub bytes_received: u64,
    /// Bytes that the same process sends per step: the mean of the newest steps.
    pub bytes_per_step: Option<f64>,
    /// Seconds of the run's clock per step: the mean of the newest steps.
    pub step_s: Option<f64>,
}

/// Goodput: tokens of committed steps per second. Work lost with a member does not count, but the time spent on
/// it does. In a run that was resumed, neither the work after the checkpoint nor the time of that work counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Goodput {
    /// Tokens per second of real time, over all steps.
    pub tokens_per_s: Option<f64>,
    /// Tokens per second of real time, over the newest steps.
    pub recent_tokens_per_s: Option<f64>,
    /// Tokens per second of the run's clock, over all steps.
    pub clock_tokens_per_s: Option<f64>,
    /// Fraction of the run's clock during which no change of members was under way; only if members come and
    /// go.
    pub unchanged: Option<f64>,
}

/// A member of the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct MemberFacts {
    /// Name of the member's machine, or the member's number if members come and go.
    pub name: String,
    /// The member's rank, while it has one.
    pub rank: Option<u32>,
    /// The replica to which the member belongs.
    pub replica: Option<u32>,
    /// The member's stage in the replica.
    pub stage: Option<u32>,
    /// The member's number among those that divide the layers of its stage, if several do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<u32>,
    /// The member's fraction of a step's sequences.
    pub share: Option<f64>,
    /// Whether the member belongs to the run.
    pub presence: Presence,
    /// How far it is with the state of the run, while it waits to join.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
    /// The address at which the member listens.
    pub address: Option<String>,
    /// The member for which this member waits, by its last report.
    pub waits_for: Option<String>,
    /// The newest step that the member reported.
    pub step: Option<u64>,
    /// Bytes sent by the member.
    pub bytes_sent: Option<u64>,
}

/// Whether a member belongs to the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Presence {
    /// The member trains.
    #[default]
    Here,
    /// The member waits to join.
    Waiting,
    /// The member has left or was lost.
    Gone,
}

/// A link between two members. Bandwidth and latency are those of the direction with less bandwidth; if both
/// have the same, of the one with less latency.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LinkFacts {
    /// Position of one member in [`Summary::members`].
    pub from: usize,
    /// Position of the other member.
    pub to: usize,
    /// Kind of data that is sent over the link.
    pub carries: Carries,
    /// Bandwidth in bits per second: the declared one if it is limited. Without declared links, what one of the
    /// two has measured ([`PathCounters::rate`](crate::PathCounters::rate)).
    pub bits_per_s: Option<u64>,
    /// One-way latency in seconds: the declared one, or else half of the shortest round trip that one of the
    /// two has measured.
    pub latency_s: Option<f64>,
}

/// Kind of data that is sent over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Carries {
    /// Averages of replicas.
    Averages,
    /// Hidden states and their gradients, between two stages.
    Activations,
    /// Hidden states and their gradients, between ranks that divide layers.
    Layers,
}

/// A step's time on each rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepFacts {
    /// Number of steps done.
    pub step: u64,
    /// Times of each rank that reported the step.
    pub ranks: Vec<RankTime>,
}

/// Times of a step on a rank, by use, in seconds of the run's clock.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RankTime {
    /// The rank.
    pub rank: u32,
    /// Seconds of computing.
    pub compute_s: f64,
    /// Seconds of waiting for other stages, or for ranks that reached the average later.
    pub wait_s: f64,
    /// Seconds of waiting for averages, votes and exchanges in progress.
    pub communicate_s: f64,
}

/// An event.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EventFacts {
    /// Number of steps done.
    pub step: u64,
    /// The run's clock in seconds.
    pub time_s: f64,
    /// The event's name in the file.
    pub kind: String,
    /// Description of the event.
    pub text: String,
    /// Whether the event should be highlighted.
    pub alarming: bool,
    /// Ranks that reported the event.
    pub ranks: Vec<u32>,
}

/// A file with lines or content that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// Path of the file within the run's folder; `--ticket-file` if no member answered.
    pub file: String,
    /// Number of lines of the wrong form.
    pub bad_lines: u64,
    /// Number of lines that are too long.
    pub long_lines: u64,
    /// The error in the last such line, or in the file.
    pub what: String,
}
