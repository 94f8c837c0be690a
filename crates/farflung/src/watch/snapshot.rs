//! What the page of a run shows, as plain data: the JSON of `/snapshot`.

use serde::Serialize;

use super::curve::Curve;

/// How a run stands, as far as its files tell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Snapshot {
    /// All but the curve.
    #[serde(flatten)]
    pub summary: Summary,
    /// Loss, tokens and bytes by step.
    pub curve: Curve,
}

/// How a run stands, without its curve.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// What the run is.
    pub run: RunFacts,
    /// Whether it goes on.
    pub phase: Phase,
    /// Its newest step.
    pub latest: Latest,
    /// What it gets done.
    pub goodput: Goodput,
    /// Who trains, by rank; of runs whose members come and go also those that are gone.
    pub members: Vec<MemberFacts>,
    /// Ranks of the plan that are not among `members`, because they are too many to draw.
    pub more_members: usize,
    /// The links between neighbours, by the positions in `members`.
    pub links: Vec<LinkFacts>,
    /// Where the time of the newest steps went, oldest first.
    pub timeline: Vec<StepFacts>,
    /// What happened, oldest first.
    pub events: Vec<EventFacts>,
    /// How many older events are left out.
    pub more_events: u64,
    /// What could not be read.
    pub problems: Vec<Problem>,
}

/// What a run is: from its plan, settings and declared links.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RunFacts {
    /// The folder's name.
    pub name: String,
    /// The model's name.
    pub model: Option<String>,
    /// Its trainable parameters.
    pub parameters: Option<u64>,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// Copies of the model that train.
    pub replicas: Option<u32>,
    /// Stages of each copy.
    pub stages: Option<u32>,
    /// How replicas stay one model.
    pub method: Option<String>,
    /// What packs their averages.
    pub codec: Option<String>,
    /// Whether links are simulated, so that the run's clock is virtual.
    pub simulated: Option<bool>,
}

/// Whether a run goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Phase {
    /// No step is done.
    Waiting,
    /// There are steps, and nothing says that it has ended.
    Running,
    /// Its report is there.
    Finished,
    /// It ended before its last step.
    Ended {
        /// Why.
        reason: String,
    },
}

/// The newest step's numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Latest {
    /// Steps done.
    pub step: u64,
    /// The run's clock in seconds.
    pub time_s: f64,
    /// Seconds that really passed.
    pub wall_s: f64,
    /// Tokens that all workers trained on.
    pub tokens: u64,
    /// Mean loss of the step's tokens, in nats.
    pub train_loss: Option<f64>,
    /// Loss of the held-out text when it was last computed, in nats.
    pub val_loss: Option<f64>,
    /// Bytes that the process which writes has sent.
    pub bytes_sent: u64,
    /// Bytes that it has received.
    pub bytes_received: u64,
    /// Bytes that it sends in a step: the mean of the newest steps.
    pub bytes_per_step: Option<f64>,
    /// Seconds of the run's clock for a step: the mean of the newest steps.
    pub step_s: Option<f64>,
}

/// Tokens of committed steps per second. What a crash or a lost member threw away is not among the tokens,
/// and the time that it took is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Goodput {
    /// Tokens a second of wall clock, over all steps.
    pub tokens_per_s: Option<f64>,
    /// Tokens a second of wall clock, over the newest steps.
    pub recent_tokens_per_s: Option<f64>,
    /// Tokens a second of the run's clock, over all steps.
    pub clock_tokens_per_s: Option<f64>,
    /// Share of the run's clock in which members did not change, of 1; where members come and go.
    pub unchanged: Option<f64>,
}

/// A member of the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct MemberFacts {
    /// Its machine, or its number among members that come and go.
    pub name: String,
    /// Its rank, while it has one.
    pub rank: Option<u32>,
    /// Which copy of the model it works on.
    pub replica: Option<u32>,
    /// Which stage of it.
    pub stage: Option<u32>,
    /// Its part of a step's sequences, of 1.
    pub share: Option<f64>,
    /// Whether it belongs to the run.
    pub presence: Presence,
    /// Where it listens.
    pub address: Option<String>,
    /// For whom it has said that it waits.
    pub waits_for: Option<String>,
    /// The newest step that it has told of.
    pub step: Option<u64>,
    /// Bytes that it has sent.
    pub bytes_sent: Option<u64>,
}

/// Whether a member belongs to the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Presence {
    /// It trains.
    #[default]
    Here,
    /// It waits to become a member.
    Waiting,
    /// It has left, or was lost.
    Gone,
}

/// A link between two members, in the direction in which it is slower.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LinkFacts {
    /// A position in [`Summary::members`].
    pub from: usize,
    /// Another.
    pub to: usize,
    /// What goes over it.
    pub carries: Carries,
    /// Bits a second, where they are declared and limited.
    pub bits_per_s: Option<u64>,
    /// One-way latency in seconds, where it is declared.
    pub latency_s: Option<f64>,
}

/// What goes over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Carries {
    /// Averages of replicas.
    Averages,
    /// Hidden states and their gradients, between two stages.
    Activations,
}

/// A step's time on each rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepFacts {
    /// Steps done.
    pub step: u64,
    /// Of each rank that has told of it.
    pub ranks: Vec<RankTime>,
}

/// Where a rank's time of a step went, in seconds of the run's clock.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RankTime {
    /// The rank.
    pub rank: u32,
    /// It computed.
    pub compute_s: f64,
    /// It waited for other stages, or for ranks that reached the average later.
    pub wait_s: f64,
    /// It waited for averages, votes and exchanges that were on their way.
    pub communicate_s: f64,
}

/// An event.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EventFacts {
    /// Steps done.
    pub step: u64,
    /// The run's clock in seconds.
    pub time_s: f64,
    /// Its name in the file.
    pub kind: String,
    /// In words.
    pub text: String,
    /// Whether it is one that somebody should look at.
    pub alarming: bool,
    /// Ranks that have told of it.
    pub ranks: Vec<u32>,
}

/// A file of which something could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file, within the run's folder.
    pub file: String,
    /// Lines that are not what belongs there.
    pub bad_lines: u64,
    /// Lines that are too long.
    pub long_lines: u64,
    /// What is wrong with the last of them, or with the file.
    pub what: String,
}
