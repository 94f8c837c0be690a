//! Carries a schedule out: one rank's list, entry by entry, with a worker that knows what computing and sending
//! are. No threads, no waiting of its own, no clock: the worker brings them.

use std::collections::BTreeMap;

use farflung_base::{Rank, StageId};

use super::{Action, Lowered, LoweredKind, Message, Op, Schedule, Way};

/// What a rank can do. The executor says when.
pub trait Worker {
    /// What stages hand to each other: hidden states, or their gradients.
    type Data;
    /// A message that was asked for and may still be on its way.
    type Pending;
    /// Why something failed.
    type Error;

    /// Runs `action` on `input`: the output of the stage before for a forward, the gradient from the stage
    /// behind for a backward; `None` at the model's input and output, and for `W`, `R` and `STEP`. Answers with
    /// what another stage needs of it; what it answers when none does is let go.
    ///
    /// Errors: the worker's own.
    fn compute(
        &mut self,
        action: Action,
        input: Option<Self::Data>,
    ) -> Result<Option<Self::Data>, Self::Error>;

    /// Runs a pair whose halves may hide each other's communication; by default the forward, then the backward.
    ///
    /// Errors: the worker's own.
    fn overlap(
        &mut self,
        forward: (Action, Option<Self::Data>),
        backward: (Action, Option<Self::Data>),
    ) -> Result<[Option<Self::Data>; 2], Self::Error> {
        Ok([self.compute(forward.0, forward.1)?, self.compute(backward.0, backward.1)?])
    }

    /// Starts to send. Messages to a rank leave in the order of these calls.
    ///
    /// Errors: the worker's own.
    fn send(&mut self, to: Rank, message: Message, data: Self::Data) -> Result<(), Self::Error>;

    /// Starts to receive. Messages from a rank are asked for in the order in which it sends them.
    ///
    /// Errors: the worker's own.
    fn receive(&mut self, from: Rank, message: Message) -> Result<Self::Pending, Self::Error>;

    /// Ends to receive, however long that takes.
    ///
    /// Errors: the worker's own, a peer that was lost among them.
    fn wait(&mut self, pending: Self::Pending) -> Result<Self::Data, Self::Error>;

    /// Starts a reduction, or gathers, frees, offloads or loads; `microbatch` and `slice` are those of
    /// [`Lowered::Move`].
    ///
    /// Errors: the worker's own.
    fn shift(
        &mut self,
        kind: LoweredKind,
        stage: StageId,
        microbatch: u32,
        slice: u16,
    ) -> Result<(), Self::Error>;

    /// Gives again what this rank's own computation made, after the executor was made anew.
    ///
    /// Errors: the worker's own, if it kept nothing.
    fn recall(&mut self, message: Message) -> Result<Self::Data, Self::Error>;
}

/// Whether there is more to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The list has further entries.
    More,
    /// The list has ended.
    Done,
}

/// One rank's way through a schedule.
///
/// Where it stands is one number, [`Executor::at`]: save it between two steps with what the worker holds, and
/// go on from there later, after a lost peer is whole again for example. A step that fails leaves the number as
/// it was, but its input is gone: go on with a new executor.
#[derive(Debug)]
pub struct Executor<'a, W: Worker> {
    schedule: &'a Schedule,
    rank: Rank,
    at: usize,
    /// Asked for, not used.
    awaited: BTreeMap<Message, W::Pending>,
    /// Made here, not used by a stage of this rank and not sent.
    made: BTreeMap<Message, W::Data>,
}

impl<'a, W: Worker> Executor<'a, W> {
    /// At the start of a rank's list.
    ///
    /// # Panics
    /// If the schedule has no such rank.
    #[must_use]
    pub fn new(schedule: &'a Schedule, rank: Rank) -> Self {
        assert!(rank.index() < schedule.lists().len(), "{rank} of {}", schedule.lists().len());
        Self { schedule, rank, at: 0, awaited: BTreeMap::new(), made: BTreeMap::new() }
    }

    /// Where an executor of the same schedule and rank stood: what was on its way is asked for again, in order,
    /// and what was made here and not used is [recalled](Worker::recall).
    ///
    /// Errors: the worker's own.
    ///
    /// # Panics
    /// If the schedule has no such rank.
    pub fn resume(schedule: &'a Schedule, rank: Rank, at: usize, worker: &mut W) -> Result<Self, W::Error> {
        let mut executor = Self::new(schedule, rank);
        let placement = schedule.order().placement();
        let list = &schedule.lists()[rank.index()];
        executor.at = at.min(list.len());
        // What the entries so far leave open.
        let (mut awaited, mut made): (Vec<Message>, Vec<Message>) = (Vec::new(), Vec::new());
        for entry in &list[..executor.at] {
            match (entry, entry.message(placement)) {
                (_, Some((Way::Receive, message))) => awaited.push(message),
                (_, Some((Way::Send, message))) => made.retain(|&m| m != message),
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
            executor.made.insert(message, worker.recall(message)?);
        }
        Ok(executor)
    }

    /// Entries that are done.
    #[must_use]
    pub const fn at(&self) -> usize {
        self.at
    }

    /// Does the next entry.
    ///
    /// Errors: the worker's own.
    ///
    /// # Panics
    /// If the worker has computed nothing where another stage needs it.
    pub fn step(&mut self, worker: &mut W) -> Result<Progress, W::Error> {
        let list = &self.schedule.lists()[self.rank.index()];
        let Some(&entry) = list.get(self.at) else { return Ok(Progress::Done) };
        let placement = self.schedule.order().placement();
        match (entry, entry.message(placement)) {
            (Lowered::Compute(op), _) => self.compute(op, worker)?,
            (_, Some((Way::Send, message))) => {
                let data = self.made.remove(&message).expect("the worker made what a schedule sends");
                worker.send(placement.rank(message.to()), message, data)?;
            }
            (_, Some((Way::Receive, message))) => {
                let pending = worker.receive(placement.rank(message.from), message)?;
                self.awaited.insert(message, pending);
            }
            (Lowered::Move { kind, stage, microbatch, slice }, None) => {
                worker.shift(kind, stage, microbatch, slice)?;
            }
        }
        self.at += 1;
        Ok(if self.at < list.len() { Progress::More } else { Progress::Done })
    }

    /// Does all entries that are left.
    ///
    /// Errors: the worker's own; the executor stands before the entry that failed.
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

    /// What an action takes from another stage, wherever that is.
    fn input(&mut self, action: Action, worker: &mut W) -> Result<Option<W::Data>, W::Error> {
        let Some(message) = Message::taken_by(action, self.schedule.order().placement()) else {
            return Ok(None);
        };
        match self.awaited.remove(&message) {
            Some(pending) => worker.wait(pending).map(Some),
            None => Ok(Some(self.made.remove(&message).expect("the worker made what is used here"))),
        }
    }

    /// Keeps what another stage needs until it is used or sent.
    fn keep(&mut self, action: Action, output: Option<W::Data>) {
        let message = Message::made_by(action, self.schedule.order().placement());
        if let (Some(message), Some(data)) = (message, output) {
            self.made.insert(message, data);
        }
    }
}

/// Carries out `rank`'s list of `schedule` from the start to the end.
///
/// Errors: the worker's own.
///
/// # Panics
/// If the schedule has no such rank.
pub fn run<W: Worker>(schedule: &Schedule, rank: Rank, worker: &mut W) -> Result<(), W::Error> {
    Executor::new(schedule, rank).run(worker)
}
