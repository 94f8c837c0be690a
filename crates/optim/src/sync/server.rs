//! The server of a model, or of a shard of it, that workers move whenever they are ready: a pure state machine
//! that is handed messages with their times.

mod message;
mod nesterov;
mod quorum;

use farflung_base::{Nanos, Rank};
use farflung_comm::{Answer, Asked, Service};
use farflung_compress::{Compressor, PayloadRef};

pub(super) use message::{FromServer, ToServer, Wants};
pub use nesterov::DelayedNesterov;
pub use quorum::{Quorum, QuorumMean};

/// A worker's change of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct Push {
    /// The worker.
    pub from: u32,
    /// When it came.
    pub at: Nanos,
    /// The worker's step.
    pub step: u64,
    /// The worker's part of a mean, where 1 is an equal part.
    pub weight: f64,
    /// What the worker had before less what it has now: as long as the model.
    pub change: Vec<f32>,
}

/// A vector that a [`ServerRule`] remembers, as long as the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RuleState<'a> {
    /// Its name.
    pub name: &'static str,
    /// Its values.
    pub values: &'a [f32],
}

/// What a rank serves of a model.
pub(super) trait Serves: Service + std::fmt::Debug {
    /// The model is this from now on.
    fn stand_at(&mut self, model: &[f32]);
    /// Sets what it remembers under a name.
    fn restore(&mut self, name: &str, values: &[f32]);
    /// It goes on after so many changes, with workers of which nothing has come yet.
    fn resume(&mut self, pushes: u64);
}

/// How changes move a model. What it returns are workers that are to be told of the model.
pub trait ServerRule: std::fmt::Debug + Send {
    /// A change came.
    fn push(&mut self, model: &mut [f32], push: &Push) -> Vec<u32>;
    /// Something is about to come at this time: what was only waiting for it happens.
    fn reach(&mut self, _model: &mut [f32], _at: Nanos) -> Vec<u32> {
        Vec::new()
    }
    /// All workers have met: nothing waits any longer.
    fn flush(&mut self, model: &mut [f32]) -> Vec<u32>;
    /// What it remembers.
    fn states(&self) -> Vec<RuleState<'_>>;
    /// One of these, to be restored.
    fn state_mut(&mut self, name: &str) -> Option<&mut [f32]>;
    /// It goes on after so many changes.
    fn resume(&mut self, _pushes: u64) {}
}

/// What a server knows of a worker.
#[derive(Debug, Clone, Default)]
struct Worker {
    /// Changes that came of it.
    pushes: u64,
    /// Its step at the last of them; `None` where it goes on from a checkpoint and nothing came since.
    step: Option<u64>,
    /// Whether it is to be told of the model.
    due: bool,
    /// What it wants to know once all workers have met.
    meets: Option<Wants>,
}

/// A model, or a shard of one, and the workers that move it.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) model: Vec<f32>,
    pub(super) rule: Box<dyn ServerRule>,
    workers: Vec<Worker>,
    /// How many steps a worker may be ahead of the slowest before it is told of the model.
    staleness: Option<u64>,
    /// What changes come through, if they are packed.
    codec: Option<Box<dyn Compressor>>,
    /// Changes of all workers.
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

    /// The same, whose workers may send changes through a codec.
    pub(super) fn with_codec(self, codec: Option<Box<dyn Compressor>>) -> Self {
        Self { codec, ..self }
    }

    /// Reads a message; `None` if it is none.
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

    /// The step of the slowest worker, of those that have told theirs.
    fn slowest(&self) -> u64 {
        self.workers.iter().filter_map(|worker| worker.step).min().unwrap_or(0)
    }

    /// Messages to those that are due and not too far ahead; to all that are due where all have met.
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

    /// All workers have met.
    fn meet(&mut self) -> Vec<Answer> {
        let told = self.rule.flush(&mut self.model);
        self.mark(told);
        let mut answers = self.answers(true);
        for (rank, worker) in (0..).zip(&mut self.workers) {
            let Some(wants) = worker.meets.take() else { continue };
            let states = match wants {
                Wants::Model | Wants::End => Vec::new(),
                Wants::All => self.rule.states().iter().flat_map(|state| state.values).copied().collect(),
            };
            let values = [&self.model[..], &states].concat();
            let met = FromServer::Met { pushes: self.pushes, values };
            answers.push(Answer::new(Rank(rank), met.to_bytes()));
        }
        answers
    }
}

impl Serves for Server {
    fn stand_at(&mut self, model: &[f32]) {
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
    fn receive(&mut self, Asked { from, at, bytes }: Asked) -> Vec<Answer> {
        let told = self.rule.reach(&mut self.model, at);
        self.mark(told);
        let known = self.read(&bytes);
        let (Some(message), Some(worker)) = (known, self.workers.get_mut(from.index())) else {
            return vec![Answer::new(from, FromServer::Refused.to_bytes())];
        };
        match message {
            ToServer::Push { step, weight, change } => {
                // Of what was waiting only for this moment, those hear that sent it.
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
            // It was decoded as it was read.
            ToServer::Packed { .. } => Vec::new(),
            ToServer::Meet { wants } => {
                worker.meets = Some(wants);
                if self.workers.iter().all(|worker| worker.meets.is_some()) {
                    self.meet()
                } else {
                    Vec::new()
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
