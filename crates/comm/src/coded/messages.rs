//! Transfers of messages by a coded program: encoded before they are sent, decoded when all messages of a step
//! have arrived. Independent of codec and algorithm.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use farflung_base::Rank;

use super::CodedValues;
use crate::element::ReduceOp;
use crate::error::CoderError;
use crate::interpret::{StepContext, StepStatus, Transfers};
use crate::message::{Incoming, Outgoing};
use crate::steps::{Code, CodedMessage, Phase, Program, Step};
use crate::transport::Port;
use crate::{CommError, MAX_MESSAGE};

/// Maximum number of senders for which every sender is polled each time. With more senders, only those are
/// polled that have new frames according to the network.
const FEW: usize = 2;

/// The values of a rank, and the state of the coded program that runs on them.
pub(crate) struct Messages<V> {
    values: V,
    op: ReduceOp,
    /// Messages that are available now, by index.
    held: Vec<Option<Arc<Vec<u8>>>>,
    lanes: Vec<Lane>,
}

/// Progress of a lane's current step.
#[derive(Default)]
struct Lane {
    /// Set once the step's messages are encoded.
    begun: bool,
    /// Queued messages by receiver, in the order of the step.
    out: Vec<(Rank, VecDeque<Outgoing>)>,
    /// Expected messages by sender, in the order of the step.
    coming: Vec<Coming>,
    /// Number of receivers to which messages are still to be sent, and of senders from which some are missing.
    unsent: usize,
    missing: usize,
}

/// Messages expected from one sender.
struct Coming {
    from: Rank,
    /// Indices of the messages; the first `here` have arrived.
    messages: Vec<usize>,
    here: usize,
    next: Incoming,
}

impl Coming {
    fn is_over(&self) -> bool {
        self.here == self.messages.len()
    }
}

/// Groups entries by rank, in the order of each rank's first entry.
fn by_rank<T>(entries: impl Iterator<Item = (Rank, T)>) -> Vec<(Rank, Vec<T>)> {
    let mut groups: Vec<(Rank, Vec<T>)> = Vec::new();
    let mut at = BTreeMap::new();
    for (rank, entry) in entries {
        let group = *at.entry(rank).or_insert_with(|| {
            groups.push((rank, Vec::new()));
            groups.len() - 1
        });
        groups[group].1.push(entry);
    }
    groups
}

impl<V: CodedValues> Messages<V> {
    pub(crate) fn new(program: &Program, values: V, op: ReduceOp) -> Self {
        let lanes = program.lanes.iter().map(|_| Lane::default()).collect();
        Self { values, op, held: vec![None; program.messages.len()], lanes }
    }

    /// Returns the code of a message, and the elements of its block.
    fn message(&self, at: &StepContext<'_>, number: usize) -> (Code, std::ops::Range<usize>) {
        let CodedMessage { block, code } = at.program.messages[number];
        (code, at.program.elements(&(block..block + 1), self.values.count()))
    }

    fn encode(&mut self, at: &StepContext<'_>, number: usize) -> Result<(), CommError> {
        let (code, range) = self.message(at, number);
        let mut out = Vec::new();
        match code {
            Code::Plain => self.values.encode_plain(range, &mut out),
            Code::Coded(phase) => {
                let divides = phase == Phase::Server && self.op == ReduceOp::Mean;
                let by = at.members.len();
                let divided = if divides { self.values.divide(range.clone(), by) } else { Ok(()) };
                divided.and_then(|()| self.values.encode(phase, range, &mut out))
            }
        }
        .map_err(|source| failed(at, source))?;
        if out.len() > MAX_MESSAGE {
            let receiver = at.step().coding.sends.iter().find(|(_, message)| *message == number);
            let peer = at.peer(receiver.map_or(Rank(0), |(to, _)| *to));
            return Err(CommError::TooLong { op: at.name, peer, max: MAX_MESSAGE });
        }
        self.held[number] = Some(Arc::new(out));
        Ok(())
    }

    /// Returns the bytes of a message that this step or the one before encoded or received.
    fn bytes(&self, number: usize) -> Arc<Vec<u8>> {
        Arc::clone(
            self.held[number].as_ref().expect("a program uses only messages that it has encoded or received"),
        )
    }

    /// Encodes the step's messages, and prepares its sends and receives.
    fn begin(&mut self, at: &StepContext<'_>) -> Result<(), CommError> {
        let coding = &at.step().coding;
        coding.encode.iter().try_for_each(|&number| self.encode(at, number))?;
        let outgoing = |&(to, number): &(Rank, usize)| (to, Outgoing::new(self.bytes(number)));
        let out = by_rank(coding.sends.iter().map(outgoing));
        let coming = |(from, messages)| Coming { from, messages, here: 0, next: Incoming::default() };
        let lane = Lane {
            begun: true,
            out: out.into_iter().map(|(to, messages)| (to, messages.into())).collect(),
            coming: by_rank(coding.recvs.iter().copied()).into_iter().map(coming).collect(),
            unsent: 0,
            missing: 0,
        };
        let (unsent, missing) = (lane.out.len(), lane.coming.len());
        self.lanes[at.lane] = Lane { unsent, missing, ..lane };
        Ok(())
    }

    fn send(&mut self, at: &StepContext<'_>, port: &mut dyn Port) -> Result<(), CommError> {
        let Lane { out, unsent, .. } = &mut self.lanes[at.lane];
        if *unsent == 0 {
            return Ok(());
        }
        for (to, messages) in out {
            while let Some(message) = messages.front_mut() {
                if !message.poll(port, at.peer(*to), at.tag, at.check)? {
                    break;
                }
                messages.pop_front();
                *unsent -= usize::from(messages.is_empty());
            }
        }
        Ok(())
    }

    /// Receives from the senders that have new frames, or from all senders if the network does not report which
    /// ones have.
    fn receive(&mut self, at: &StepContext<'_>, port: &mut dyn Port) -> Result<(), CommError> {
        let coming = &self.lanes[at.lane].coming;
        let all = 0..coming.len();
        let news = if coming.len() > FEW { port.senders_with_new_frames(at.tag) } else { None };
        let Some(news) = news else {
            return all.into_iter().try_for_each(|i| self.receive_from(at, i, port));
        };
        // Polled in the same order as if all senders were polled.
        let news: BTreeSet<_> = news.into_iter().collect();
        let new = |&i: &usize| news.contains(&at.peer(coming[i].from));
        let new: Vec<usize> = all.filter(new).collect();
        new.into_iter().try_for_each(|i| self.receive_from(at, i, port))
    }

    fn receive_from(&mut self, at: &StepContext<'_>, i: usize, port: &mut dyn Port) -> Result<(), CommError> {
        let Lane { coming, missing, .. } = &mut self.lanes[at.lane];
        let coming = &mut coming[i];
        while let Some(&number) = coming.messages.get(coming.here) {
            if !coming.next.poll(port, at.name, at.peer(coming.from), at.tag, at.check)? {
                break;
            }
            self.held[number] = Some(Arc::new(std::mem::take(&mut coming.next).bytes));
            coming.here += 1;
            *missing -= usize::from(coming.is_over());
        }
        Ok(())
    }

    /// Decodes the messages of the step, and drops those that the next step does not use.
    fn end_step(&mut self, at: &StepContext<'_>) -> Result<(), CommError> {
        let coding = &at.step().coding;
        for &(number, merge) in &coding.decode {
            let (code, range) = self.message(at, number);
            let bytes = self.bytes(number);
            match code {
                Code::Plain => self.values.decode_plain(range, &bytes, merge),
                Code::Coded(_) => self.values.decode(range, &bytes, merge),
            }
            .map_err(|source| failed(at, source))?;
        }
        for block in coding.complete.iter().filter(|_| self.op == ReduceOp::Mean) {
            let range = at.program.elements(&(*block..block + 1), self.values.count());
            self.values.divide(range, at.members.len()).map_err(|source| failed(at, source))?;
        }
        let next = at.program.lanes[at.lane].get(at.cursor + 1).map(|step| &step.coding);
        let kept: BTreeSet<usize> = next.map_or_else(BTreeSet::new, |next| {
            let sent = next.sends.iter().map(|(_, number)| *number);
            sent.chain(next.decode.iter().map(|(number, _)| *number)).collect()
        });
        let made = coding.encode.iter().copied().chain(coding.recvs.iter().map(|(_, number)| *number));
        let used = coding.sends.iter().map(|(_, number)| *number);
        for number in made.chain(used).filter(|number| !kept.contains(number)) {
            self.held[number] = None;
        }
        Ok(())
    }

    fn go_on(&mut self, at: &StepContext<'_>, port: &mut dyn Port) -> Result<StepStatus, CommError> {
        if !self.lanes[at.lane].begun {
            self.begin(at)?;
        }
        self.send(at, port)?;
        self.receive(at, port)?;
        let lane = &self.lanes[at.lane];
        if lane.unsent > 0 || lane.missing > 0 {
            return Ok(StepStatus::Waits);
        }
        self.end_step(at)?;
        Ok(StepStatus::Over)
    }
}

fn failed(at: &StepContext<'_>, source: CoderError) -> CommError {
    CommError::Coder { op: at.name, source: Arc::from(source) }
}

impl<V: CodedValues> Transfers for Messages<V> {
    type Output = V;

    fn enter(&mut self, lane: usize, _: Option<&Step>) {
        self.lanes[lane] = Lane::default();
    }

    fn advance(&mut self, at: &StepContext<'_>, port: &mut dyn Port) -> Result<StepStatus, CommError> {
        let turn = self.go_on(at, port);
        if !matches!(turn, Ok(StepStatus::Waits)) {
            port.end_new_frame_tracking(at.tag);
        }
        turn
    }

    fn waits_for(&self, at: &StepContext<'_>) -> Option<Rank> {
        let lane = &self.lanes[at.lane];
        let silent = lane.coming.iter().find(|coming| !coming.is_over()).map(|coming| coming.from);
        let deaf = || lane.out.iter().find(|(_, messages)| !messages.is_empty()).map(|(to, _)| *to);
        silent.or_else(deaf)
    }

    fn end(&mut self, _: usize) {}

    fn finish(self) -> V {
        self.values
    }
}
