//! Server of a model, or of a shard of it, that workers move whenever they are ready: a pure state machine that
//! gets messages with their times of arrival.

mod message;
mod nesterov;
mod quorum;

use farflung_base::{Nanos, Rank};
use farflung_comm::{Answer, Question, Service};
use farflung_compress::{Compressor, PayloadRef};

pub(super) use message::{FromServer, SyncRequest, ToServer};
pub use nesterov::DelayedNesterov;
pub use quorum::{Quorum, QuorumMean};

/// A worker's change of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct Push {
    /// Rank of the worker.
    pub from: u32,
    /// Time of arrival.
    pub at: Nanos,
    /// Step of the worker.
    pub step: u64,
    /// Weight of the worker in a mean, where 1 is an equal share.
    pub weight: f64,
    /// Change, as long as the model: the parameters from which the worker started minus those that it has
    /// reached.
    pub change: Vec<f32>,
}

/// A state vector of a [`ServerRule`], as long as the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RuleState<'a> {
    /// Name of the state.
    pub name: &'static str,
    /// Values of the state.
    pub values: &'a [f32],
}

/// A service that holds a model, or shards of models.
pub(super) trait ModelService: Service + std::fmt::Debug {
    /// Sets the model.
    fn set_model(&mut self, model: &[f32]);
    /// Restores the state of this name.
    fn restore(&mut self, name: &str, values: &[f32]);
    /// Continues after this number of changes, with workers that have not sent anything yet.
    fn resume(&mut self, pushes: u64);
}

/// Rule by which changes move a model. `push`, `advance_to` and `flush` return the workers to which the model
/// must be sent.
pub trait ServerRule: std::fmt::Debug + Send {
    /// Applies a change that arrived.
    fn push(&mut self, model: &mut [f32], push: &Push) -> Vec<u32>;
    /// Called before a message of this time is handled. Performs what was due before that time.
    fn advance_to(&mut self, _model: &mut [f32], _at: Nanos) -> Vec<u32> {
        Vec::new()
    }
    /// Called when all workers synchronise. Applies the changes that still wait.
    fn flush(&mut self, model: &mut [f32]) -> Vec<u32>;
    /// Returns the states of the rule.
    fn states(&self) -> Vec<RuleState<'_>>;
    /// Returns the state of this name for writing, to restore it.
    fn state_mut(&mut self, name: &str) -> Option<&mut [f32]>;
    /// Continues after this number of changes.
    fn resume(&mut self, _pushes: u64) {}
}

/// State of a worker, as a server stores it.
#[derive(Debug, Clone, Default)]
struct Worker {
    /// Number of changes that arrived from the worker.
    pushes: u64,
    /// Step of the worker at its last change; `None` after a restart from a checkpoint, until its first change.
    step: Option<u64>,
    /// Whether the model must be sent to the worker.
    due: bool,
    /// What the worker asks for in the current synchronisation; `None` until it has asked.
    meets: Option<SyncRequest>,
}

/// A model, or a shard of one, and the workers that move it.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) model: Vec<f32>,
    pub(super) rule: Box<dyn ServerRule>,
    workers: Vec<Worker>,
    /// Number of steps that a worker may be ahead of the slowest and still be sent the model; `None` sets no
    /// bound.
    staleness: Option<u64>,
    /// Codec of the changes, if they are compressed.
    codec: Option<Box<dyn Compressor>>,
    /// Number of changes of all workers.
    pub(super) pushes: u64,
}

impl Server {
    pub(super) fn new(
        model: Vec<f32>,
        rule: Box<dyn ServerRule>,
        workers: usize,
        staleness: Option<u64>,
    ) -> Self {
        let begun = Worker { step: Some(0), ..Worker::default() };
        Self { model, rule, workers: vec![begun; workers], staleness, codec: None, pushes: 0 }
    }

    /// Sets the codec through which workers may send changes.
    pub(super) fn with_codec(self, codec: Option<Box<dyn Compressor>>) -> Self {
        Self { codec, ..self }
    }

    /// Decodes a message; `None` if it is invalid.
    pub(super) fn read(&self, bytes: &[u8]) -> Option<ToServer> {
        match ToServer::from_bytes(bytes, self.model.len())? {
            ToServer::Packed { step, weight, payload } => {
                let mut change = vec![0.0; self.model.len()];
                let payload = PayloadRef::parse(&payload).ok()?;
                self.codec.as_ref()?.decompress(payload, &mut change).ok()?;
                Some(ToServer::Push { step, weight, change })
            }
            message => Some(message),
        }
    }

    fn mark(&mut self, told: Vec<u32>) {
        for worker in told {
            if let Some(worker) = self.workers.get_mut(worker as usize) {
                worker.due = true;
            }
        }
    }

    /// Returns the step of the slowest worker among those whose step is known.
    fn slowest(&self) -> u64 {
        self.workers.iter().filter_map(|worker| worker.step).min().unwrap_or(0)
    }

    /// Returns messages with the model for the workers that are due and not too far ahead; with `all`, for all
    /// that are due.
    fn answers(&mut self, all: bool) -> Vec<Answer> {
        let slowest = self.slowest();
        let mut answers = Vec::new();
        for (rank, worker) in (0..).zip(&mut self.workers) {
            let ahead = worker.step.unwrap_or(0).saturating_sub(slowest);
            if worker.due && (all || self.staleness.is_none_or(|most| ahead <= most)) {
                worker.due = false;
                let moved = FromServer::Moved { pushes: worker.pushes, model: self.model.clone() };
                answers.push(Answer::new(Rank(rank), moved.to_bytes()));
            }
        }
        answers
    }

    /// Answers all workers, once all of them asked to synchronise.
    fn answer_sync(&mut self) -> Vec<Answer> {
        let told = self.rule.flush(&mut self.model);
        self.mark(told);
        let mut answers = self.answers(true);
        for (rank, worker) in (0..).zip(&mut self.workers) {
            let Some(wants) = worker.meets.take() else { continue };
            let states = match wants {
                SyncRequest::Model | SyncRequest::End => Vec::new(),
                SyncRequest::All => {
                    self.rule.states().iter().flat_map(|state| state.values).copied().collect()
                }
            };
            let values = [&self.model[..], &states].concat();
            let met = FromServer::Synchronised { pushes: self.pushes, values };
            answers.push(Answer::new(Rank(rank), met.to_bytes()));
        }
        answers
    }
}

impl ModelService for Server {
    fn set_model(&mut self, model: &[f32]) {
        self.model.copy_from_slice(model);
    }
    fn restore(&mut self, name: &str, values: &[f32]) {
        if let Some(state) = self.rule.state_mut(name) {
            state.copy_from_slice(values);
        }
    }
    fn resume(&mut self, pushes: u64) {
        self.pushes = pushes;
        self.rule.resume(pushes);
        self.workers.fill(Worker::default());
    }
}

impl Service for Server {
    fn receive(&mut self, Question { from, at, bytes }: Question) -> Vec<Answer> {
        let told = self.rule.advance_to(&mut self.model, at);
        self.mark(told);
        let known = self.read(&bytes);
        let (Some(message), Some(worker)) = (known, self.workers.get_mut(from.index())) else {
            return vec![Answer::new(from, FromServer::Refused.to_bytes())];
        };
        match message {
            ToServer::Push { step, weight, change } => {
                // The workers whose changes `advance_to` merged are answered first, with a model that does not
                // include this change.
                let mut answers = self.answers(false);
                let worker = &mut self.workers[from.index()];
                worker.pushes += 1;
                worker.step = Some(step);
                self.pushes += 1;
                let told = self.rule.push(&mut self.model, &Push { from: from.0, at, step, weight, change });
                self.mark(told);
                answers.extend(self.answers(false));
                answers
            }
            // `read` has decoded it to a `Push`.
            ToServer::Packed { .. } => Vec::new(),
            ToServer::Synchronise { wants } => {
                worker.meets = Some(wants);
                if self.workers.iter().all(|worker| worker.meets.is_some()) {
                    self.answer_sync()
                } else {
                    Vec::new()
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
