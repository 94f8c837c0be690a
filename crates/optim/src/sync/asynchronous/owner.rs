//! A worker's view of one server, and of the shard of the model that this server holds.

use std::collections::VecDeque;
use std::ops::Range;

use farflung_base::{PeerId, Pending, Rank};
use farflung_comm::{CommError, Communicator, ServiceTags, WaitMode};

use super::packer::Packer;
use crate::OptimError;
use crate::sync::server::{FromServer, ToServer};

/// Tags of the messages between workers and servers.
pub(super) const TAGS: ServiceTags = ServiceTags { ask: 0x5E47_0001, answer: 0x5E47_0002 };

/// Parameters at the time when a change was sent.
#[derive(Debug)]
struct SentChange {
    /// Number of the change, counted from 1.
    number: u64,
    /// Step of the worker.
    step: u64,
    params: Vec<f32>,
}

/// A server's model that was not applied yet.
#[derive(Debug)]
struct ReceivedModel {
    model: Vec<f32>,
    /// The worker's parameters when it sent the newest change that the model includes.
    sent: Vec<f32>,
}

/// Route of a worker's messages to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sync) enum Route {
    /// Directly to the server's rank.
    Direct,
    /// To the service of the worker's own rank, with these bytes in front.
    Own(Rank, [u8; 5]),
}

/// A server as a worker sees it.
#[derive(Debug)]
pub(in crate::sync) struct ServerHandle {
    rank: Rank,
    route: Route,
    range: Range<usize>,
    /// Parameters from which the next change is measured.
    base: Vec<f32>,
    /// Changes that no answer includes yet.
    sent: VecDeque<SentChange>,
    received: Option<ReceivedModel>,
    changes: u64,
    /// Codec of the changes, if there is one.
    packer: Option<Packer>,
    leaving: Vec<Pending<Result<(), CommError>>>,
    /// The next message, if its reception was started.
    next: Option<Pending<Result<Vec<u8>, CommError>>>,
}

/// Returns the error for an answer that is invalid or has another length than expected.
pub(super) fn refused(from: Rank, want: usize, got: usize) -> OptimError {
    CommError::Mismatch { op: "parameter server", peer: PeerId(from.0), want, got }.into()
}

/// Moves values by `to - from`. Values where both are equal keep their bits.
fn shift(values: &mut [f32], from: &[f32], to: &[f32]) {
    for ((value, from), to) in values.iter_mut().zip(from).zip(to) {
        if from.to_bits() != to.to_bits() {
            *value = to + (*value - from);
        }
    }
}

impl ServerHandle {
    /// Creates the view of the server of a range, whose model is `values` now.
    pub(in crate::sync) fn new(rank: Rank, range: Range<usize>, values: &[f32]) -> Self {
        Self {
            rank,
            route: Route::Direct,
            range,
            base: values.to_vec(),
            sent: VecDeque::new(),
            received: None,
            changes: 0,
            packer: None,
            leaving: Vec::new(),
            next: None,
        }
    }

    /// Sets the codec of the changes.
    pub(super) fn with_packer(self, packer: Option<Packer>) -> Self {
        Self { packer, ..self }
    }

    /// Sets the route of the messages.
    pub(in crate::sync) fn with_route(self, route: Route) -> Self {
        Self { route, ..self }
    }

    pub(super) const fn rank(&self) -> Rank {
        self.rank
    }

    pub(super) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Sends a message.
    pub(super) fn send(&mut self, comm: &Communicator, message: Vec<u8>) {
        self.leaving.retain(|leaving| !leaving.is_ready());
        let leaving = match self.route {
            Route::Direct => comm.start_send(self.rank, TAGS.ask, message),
            Route::Own(me, before) => comm.start_send(me, TAGS.ask, [&before[..], &message].concat()),
        };
        self.leaving.push(leaving);
    }

    /// Returns the message with the change of the parameters since the last such message. `round` is the
    /// codec's round.
    pub(super) fn push(
        &mut self,
        params: &[f32],
        (step, round): (u64, u64),
        weight: f64,
    ) -> Result<Vec<u8>, OptimError> {
        let params = params[self.range()].to_vec();
        let change: Vec<f32> = self.base.iter().zip(&params).map(|(base, now)| base - now).collect();
        let payload = self.packer.as_mut().map(|packer| packer.pack(&change, round)).transpose()?.flatten();
        let message = match payload {
            Some(payload) => ToServer::Packed { step, weight, payload },
            None => ToServer::Push { step, weight, change },
        };
        self.base.copy_from_slice(&params);
        self.changes += 1;
        self.sent.push_back(SentChange { number: self.changes, step, params });
        Ok(message.to_bytes())
    }

    /// Returns what the codec lost of changes; `None` without a codec.
    pub(super) fn residual(&self) -> Option<Result<Vec<f32>, OptimError>> {
        self.packer.as_ref().map(|packer| packer.residual(self.range.len()))
    }

    /// Restores what [`ServerHandle::residual`] returned, from this server's range of `all`.
    pub(super) fn set_residual(&mut self, all: &[f32]) -> Result<(), OptimError> {
        let range = self.range();
        Ok(self.packer.as_mut().map_or(Ok(()), |packer| packer.restore(&all[range]))?)
    }

    /// Returns the step of the oldest change that no answer includes yet.
    pub(super) fn awaits(&self) -> Option<u64> {
        self.sent.front().map(|sent| sent.step)
    }

    pub(super) const fn has_answer(&self) -> bool {
        self.received.is_some()
    }

    /// Receives what has arrived by now.
    pub(super) fn receive_ready(&mut self, comm: &Communicator) -> Result<(), OptimError> {
        while !self.sent.is_empty() {
            let next = self.next.get_or_insert_with(|| comm.start_recv(self.rank, TAGS.answer));
            if comm.first(&mut [next], WaitMode::Now).is_none() {
                break;
            }
            self.receive(comm)?;
        }
        Ok(())
    }

    /// Waits for the next message, which must be a model.
    pub(super) fn receive(&mut self, comm: &Communicator) -> Result<(), OptimError> {
        match self.message(comm)? {
            FromServer::Moved { pushes, model } => self.answer(pushes, model),
            _ => Err(refused(self.rank, 9 + 4 * self.range.len(), 0)),
        }
    }

    fn message(&mut self, comm: &Communicator) -> Result<FromServer, OptimError> {
        let next = self.next.take().unwrap_or_else(|| comm.start_recv(self.rank, TAGS.answer));
        let bytes = next.wait()?;
        FromServer::from_bytes(&bytes)
            .ok_or_else(|| refused(self.rank, 9 + 4 * self.range.len(), bytes.len()))
    }

    fn answer(&mut self, pushes: u64, model: Vec<f32>) -> Result<(), OptimError> {
        let (want, got) = (self.range.len(), model.len());
        let mut newest = None;
        while self.sent.front().is_some_and(|sent| sent.number <= pushes) {
            newest = self.sent.pop_front();
        }
        match newest {
            Some(sent) if want == got => {
                // The answer also includes the changes before this one.
                self.received = Some(ReceivedModel { model, sent: sent.params });
                Ok(())
            }
            _ => Err(refused(self.rank, 9 + 4 * want, 9 + 4 * got)),
        }
    }

    /// Waits until all workers have synchronised at the server. Returns the number of changes at the server,
    /// and its values.
    pub(super) fn wait_for_sync(&mut self, comm: &Communicator) -> Result<(u64, Vec<f32>), OptimError> {
        loop {
            match self.message(comm)? {
                FromServer::Moved { pushes, model } => self.answer(pushes, model)?,
                FromServer::Synchronised { pushes, values } => return Ok((pushes, values)),
                FromServer::Refused => return Err(refused(self.rank, 2, 0)),
            }
        }
    }

    /// Applies the newest model. What the worker learned since it sent the change that the model includes is
    /// kept.
    pub(super) fn apply_model(&mut self, params: &mut [f32]) {
        let Some(ReceivedModel { model, sent }) = self.received.take() else { return };
        shift(&mut params[self.range()], &sent, &model);
        shift(&mut self.base, &sent, &model);
        self.sent.iter_mut().for_each(|later| shift(&mut later.params, &sent, &model));
    }

    /// Measures the next change from these parameters. Drops what is in flight.
    pub(super) fn reset_base(&mut self, params: &[f32]) {
        self.base.copy_from_slice(&params[self.range.clone()]);
        self.sent.clear();
        self.received = None;
    }

    /// Sets a model that is to be applied.
    pub(super) fn set_answer(&mut self, model: &[f32], sent: &[f32]) {
        let (model, sent) = (model[self.range()].to_vec(), sent[self.range()].to_vec());
        self.received = Some(ReceivedModel { model, sent });
    }

    /// Returns three vectors: the base; the newest model; and the parameters when the worker sent the last
    /// change that this model includes. Without a model to apply, the last two are the base.
    pub(super) fn vectors(&self) -> [&[f32]; 3] {
        let waits = self.received.as_ref();
        [
            &self.base,
            waits.map_or(&self.base, |answered| &answered.model),
            waits.map_or(&self.base, |answered| &answered.sent),
        ]
    }
}
