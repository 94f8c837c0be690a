//! Executes a schedule: one rank's list, entry by entry, with a worker that computes and communicates. The
//! executor has no threads and no clock and does not block; the worker may.

use std::collections::BTreeMap;

use farflung_base::{Rank, StageId};

use super::{Action, Lowered, LoweredKind, Message, Op, Schedule, TransferDirection};

/// Operations of a rank. The executor decides when each runs.
pub trait Worker {
    /// Data passed between stages: hidden states or their gradients.
    type Data;
    /// A receive that was posted and may not be complete.
    type Pending;
    /// Error of the worker.
    type Error;

    /// Runs `action` and returns its output for another stage, if any. An output that no other stage needs is
    /// dropped.
    ///
    /// `input` is the output of the previous stage for a forward, and the gradient from the next stage for a
    /// backward. It is `None` at the model's input and output, and for `W`, `R` and `STEP`.
    ///
    /// Errors: those of the worker.
    fn compute(
        &mut self,
        action: Action,
        input: Option<Self::Data>,
    ) -> Result<Option<Self::Data>, Self::Error>;

    /// Runs a pair of actions, each of which may hide the other's communication. By default, runs the forward,
    /// then the backward.
    ///
    /// Errors: those of the worker.
    fn overlap(
        &mut self,
        forward: (Action, Option<Self::Data>),
        backward: (Action, Option<Self::Data>),
    ) -> Result<[Option<Self::Data>; 2], Self::Error> {
        Ok([self.compute(forward.0, forward.1)?, self.compute(backward.0, backward.1)?])
    }

    /// Starts to send a message. Messages to the same rank are sent in the order of these calls.
    ///
    /// Errors: those of the worker.
    fn send(&mut self, to: Rank, message: Message, data: Self::Data) -> Result<(), Self::Error>;

    /// Posts the receive of a message. Receives from the same rank are posted in the order of its sends.
    ///
    /// Errors: those of the worker.
    fn receive(&mut self, from: Rank, message: Message) -> Result<Self::Pending, Self::Error>;

    /// Blocks until a message has arrived and returns its data.
    ///
    /// Errors: those of the worker, including the loss of the peer.
    fn wait(&mut self, pending: Self::Pending) -> Result<Self::Data, Self::Error>;

    /// Starts a reduction, a gather, a free, an offload or a load. `microbatch` and `slice` are those of
    /// [`Lowered::Move`].
    ///
    /// Errors: those of the worker.
    fn start_transfer(
        &mut self,
        kind: LoweredKind,
        stage: StageId,
        microbatch: u32,
        slice: u16,
    ) -> Result<(), Self::Error>;

    /// Returns the data of a message that this rank computed before its executor was replaced by a new one
    /// ([`Executor::resume`]).
    ///
    /// Errors: those of the worker, for example if it did not keep the data.
    fn restore_output(&mut self, message: Message) -> Result<Self::Data, Self::Error>;
}

/// Whether entries are left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The list has more entries.
    More,
    /// All entries are done.
    Done,
}

/// Executes one rank's list of a schedule.
///
/// Its position is one number, [`Executor::at`]. Save it between two calls of [`Executor::step`], together with
/// the worker's state, to continue later, for example after a lost peer is replaced. A call that fails leaves
/// the position unchanged, but the input of its entry is lost: continue with a new executor.
#[derive(Debug)]
pub struct Executor<'a, W: Worker> {
    schedule: &'a Schedule,
    rank: Rank,
    at: usize,
    /// Receives that were posted and whose data was not used yet.
    awaited: BTreeMap<Message, W::Pending>,
    /// Outputs of this rank that were neither sent nor used by one of its stages.
    made: BTreeMap<Message, W::Data>,
}

impl<'a, W: Worker> Executor<'a, W> {
    /// Creates an executor at the start of a rank's list.
    ///
    /// # Panics
    /// If the schedule has no such rank.
    #[must_use]
    pub fn new(schedule: &'a Schedule, rank: Rank) -> Self {
        assert!(rank.index() < schedule.lists().len(), "{rank} of {}", schedule.lists().len());
        Self { schedule, rank, at: 0, awaited: BTreeMap::new(), made: BTreeMap::new() }
    }

    /// Creates an executor at position `at` of a rank's list. Posts again, in order, the receives that were
    /// open there, and [recalls](Worker::restore_output) the outputs of this rank that were not yet used.
    ///
    /// Errors: those of the worker.
    ///
    /// # Panics
    /// If the schedule has no such rank.
    pub fn resume(schedule: &'a Schedule, rank: Rank, at: usize, worker: &mut W) -> Result<Self, W::Error> {
        let mut executor = Self::new(schedule, rank);
        let placement = schedule.order().placement();
        let list = &schedule.lists()[rank.index()];
        executor.at = at.min(list.len());
        // Messages that are open after the entries before `at`.
        let (mut awaited, mut made): (Vec<Message>, Vec<Message>) = (Vec::new(), Vec::new());
        for entry in &list[..executor.at] {
            match (entry, entry.message(placement)) {
                (_, Some((TransferDirection::Receive, message))) => awaited.push(message),
                (_, Some((TransferDirection::Send, message))) => made.retain(|&m| m != message),
                (Lowered::Compute(op), None) => {
                    for action in op.actions() {
                        if let Some(message) = Message::taken_by(action, placement) {
                            awaited.retain(|&m| m != message);
                            made.retain(|&m| m != message);
                        }
                        made.extend(Message::made_by(action, placement));
                    }
                }
                (Lowered::Move { .. }, None) => {}
            }
        }
        for message in awaited {
            let pending = worker.receive(placement.rank(message.from), message)?;
            executor.awaited.insert(message, pending);
        }
        for message in made {
            executor.made.insert(message, worker.restore_output(message)?);
        }
        Ok(executor)
    }

    /// Returns the number of entries done.
    #[must_use]
    pub const fn at(&self) -> usize {
        self.at
    }

    /// Executes the next entry.
    ///
    /// Errors: those of the worker.
    ///
    /// # Panics
    /// If the worker returned no output where another stage needs one.
    pub fn step(&mut self, worker: &mut W) -> Result<Progress, W::Error> {
        let list = &self.schedule.lists()[self.rank.index()];
        let Some(&entry) = list.get(self.at) else { return Ok(Progress::Done) };
        self.entry(entry, worker)?;
        self.at += 1;
        Ok(if self.at < list.len() { Progress::More } else { Progress::Done })
    }

    /// Executes an entry, which may be from a list that contains more than the schedule's.
    ///
    /// Errors: those of the worker.
    ///
    /// # Panics
    /// If an entry needs an output that no earlier one has computed.
    pub(crate) fn entry(&mut self, entry: Lowered, worker: &mut W) -> Result<(), W::Error> {
        let placement = self.schedule.order().placement();
        match (entry, entry.message(placement)) {
            (Lowered::Compute(op), _) => self.compute(op, worker)?,
            (_, Some((TransferDirection::Send, message))) => {
                let data = self
                    .made
                    .remove(&message)
                    .expect("the worker returned the output that the schedule sends");
                worker.send(placement.rank(message.to()), message, data)?;
            }
            (_, Some((TransferDirection::Receive, message))) => {
                let pending = worker.receive(placement.rank(message.from), message)?;
                self.awaited.insert(message, pending);
            }
            (Lowered::Move { kind, stage, microbatch, slice }, None) => {
                worker.start_transfer(kind, stage, microbatch, slice)?;
            }
        }
        Ok(())
    }

    /// Executes all remaining entries.
    ///
    /// Errors: those of the worker. The executor's position is then the entry that failed.
    pub fn run(&mut self, worker: &mut W) -> Result<(), W::Error> {
        while self.step(worker)? == Progress::More {}
        Ok(())
    }

    fn compute(&mut self, op: Op, worker: &mut W) -> Result<(), W::Error> {
        match op {
            Op::Run(action) => {
                let input = self.input(action, worker)?;
                let output = worker.compute(action, input)?;
                self.keep(action, output);
            }
            Op::Overlap { forward, backward } => {
                let x = self.input(forward, worker)?;
                let dy = self.input(backward, worker)?;
                let [y, dx] = worker.overlap((forward, x), (backward, dy))?;
                self.keep(forward, y);
                self.keep(backward, dx);
            }
        }
        Ok(())
    }

    /// Returns an action's input from another stage, received or computed on this rank.
    fn input(&mut self, action: Action, worker: &mut W) -> Result<Option<W::Data>, W::Error> {
        let Some(message) = Message::taken_by(action, self.schedule.order().placement()) else {
            return Ok(None);
        };
        match self.awaited.remove(&message) {
            Some(pending) => worker.wait(pending).map(Some),
            None => Ok(Some(
                self.made.remove(&message).expect("the worker returned the output that is used here"),
            )),
        }
    }

    /// Stores an output until another stage uses it or it is sent.
    fn keep(&mut self, action: Action, output: Option<W::Data>) {
        let message = Message::made_by(action, self.schedule.order().placement());
        if let (Some(message), Some(data)) = (message, output) {
            self.made.insert(message, data);
        }
    }
}

/// Executes `rank`'s list of `schedule` from start to end.
///
/// Errors: those of the worker.
///
/// # Panics
/// If the schedule has no such rank.
pub fn run<W: Worker>(schedule: &Schedule, rank: Rank, worker: &mut W) -> Result<(), W::Error> {
    Executor::new(schedule, rank).run(worker)
}
