//! Event-triggered averages: a tensor is sent to neighbours only once it has changed enough.

use std::ops::Range;

use farflung_base::{PeerId, Rank};
use farflung_comm::CommError;
use farflung_tensor::{Param, Tensor};

use super::exchange::{Exchange, NeighbourMessage, Packing, from_bytes, to_bytes};
use super::mean::CommonMean;
use super::neighbours::{Graph, Neighbours};
use super::saved::optional_prefix;
use super::{Buffers, OWN_COPIES, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::{Average, OptimError};

/// Row of [`METHODS`](super::METHODS) for [`EventTriggered`].
pub const EVENT: SyncMethod = SyncMethod {
    name: "event",
    summary: "as d-psgd, but a tensor is sent only once it has changed by --trigger since it was last sent",
    each_step: false,
    reads: &["sync-every", "trigger"],
    overlaps: true,
    replicas_differ: true,
    timed: false,
    every: None,
    codec: Some("none"),
    codes_server_changes: false,
    compensates: false,
    changing_weights: false,
    outer_momentum: None,
    on_member_loss: OWN_COPIES,
    // Held: parameters as last sent here and by two neighbours, and the change; a copy of each for checkpoints;
    // and the mean. Saved: the copies, and the replica's own parameters.
    buffers: |_| Buffers { held: 9, saved: 5 },
    build: |s| Ok(Box::new(EventTriggered::new(s)?)),
};

/// Replicas on a ring store their own and their neighbours' parameters as they were last sent, `x'`. After each
/// step a replica sends those tensors with `|x - x'| >= trigger |x'|`. One step later all replicas mix what
/// they stored:
///
/// ```text
/// x_i = x_i - step_i + sum over neighbours j of w_ij (x'_j - x'_i)
/// ```
///
/// Mixing preserves the mean over all replicas, whatever was not sent. With a trigger of 0 it is
/// [`D_PSGD`](super::D_PSGD). A round sends to each neighbour one bit per tensor (rounded up to bytes), and 4
/// bytes per value of the tensors that changed.
///
/// Source: Ghosh et al. 2021, "`EventGraD`: event-triggered communication in parallel machine learning".
/// Differs: the threshold is relative to the tensor's norm, where in the paper it follows the tensor's last
/// changes; replicas mix the parameters as they were sent.
#[derive(Debug)]
pub struct EventTriggered {
    trigger: f64,
    every: u64,
    /// Neighbours, the same in each round.
    meeting: Neighbours,
    packing: Packing,
    /// Range of each tensor in packed values.
    tensors: Vec<Range<usize>>,
    /// Parameters as this replica last sent them.
    sent: Vec<f32>,
    /// Parameters as each neighbour last sent them.
    heard: Vec<Received>,
    exchange_state: ExchangeState,
    mean: CommonMean,
    rounds: u64,
    /// Buffers of a checkpoint: sent, heard from the first and from the second neighbour, and the change to be
    /// applied.
    settled: [Tensor; 4],
}

/// Parameters as a neighbour last sent them.
#[derive(Debug)]
struct Received {
    from: u32,
    values: Vec<f32>,
}

#[derive(Debug)]
enum ExchangeState {
    None,
    InFlight(Exchange),
    /// Arrived: the change that neighbours cause.
    Arrived(Vec<f32>),
}

const STATE_NAMES: [&str; 4] = ["sent", "heard-before", "heard-after", "change"];

impl EventTriggered {
    /// Creates the method on a ring of the ranks of `settings`.
    ///
    /// Errors: those of [`Average::new`].
    pub fn new(settings: SyncSettings<'_>) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, every, trigger, weights, params, .. } = settings;
        let packing = Packing::new(layout);
        let sent = packing.pack(params)?;
        let meeting = match weights.len() {
            0 => Graph::Ring.meeting(comm.rank().0, comm.size() as u32, 0),
            _ => Graph::Ring.weighted(comm.rank().0, &weights, 0),
        };
        let heard = meeting.from.iter().map(|n| Received { from: n.rank, values: sent.clone() }).collect();
        let mut end = 0;
        let tensors = layout.params().iter().map(Param::range).map(|range| {
            end += range.len();
            end - range.len()..end
        });
        let zeros = || device.zeros(layout.len());
        Ok(Self {
            trigger,
            every: every.max(1),
            tensors: tensors.collect(),
            sent,
            heard,
            exchange_state: ExchangeState::None,
            mean: CommonMean::new(Average::new(comm, device, layout, average)?, &weights, device, layout)?,
            meeting,
            rounds: 0,
            settled: [zeros()?, zeros()?, zeros()?, zeros()?],
            packing,
        })
    }

    /// Returns a message with the tensors of `now` that have changed enough: one bit for each tensor, then the
    /// values. These tensors are recorded as sent.
    fn message(&mut self, now: &[f32]) -> Vec<u8> {
        let mut mask = vec![0_u8; self.tensors.len().div_ceil(8)];
        let mut values = Vec::new();
        for (i, range) in self.tensors.iter().enumerate() {
            let (now, sent) = (&now[range.clone()], &mut self.sent[range.clone()]);
            let square = |x: f32| f64::from(x) * f64::from(x);
            let moved: f64 = now.iter().zip(&*sent).map(|(now, sent)| square(now - sent)).sum();
            let size: f64 = sent.iter().map(|&sent| square(sent)).sum();
            if moved >= self.trigger * self.trigger * size {
                mask[i / 8] |= 1 << (i % 8);
                values.extend_from_slice(now);
                sent.copy_from_slice(now);
            }
        }
        mask.extend(to_bytes(&values));
        mask
    }

    /// Stores what a neighbour sent.
    fn store_message(&mut self, from: Rank, bytes: &[u8]) -> Result<(), OptimError> {
        let bits = self.tensors.len().div_ceil(8);
        let short = || {
            let (op, peer, want, got) = ("gossip", PeerId(from.0), bits, bytes.len());
            OptimError::from(CommError::Mismatch { op, peer, want, got })
        };
        let (mask, values) = bytes.split_at_checked(bits).ok_or_else(short)?;
        let is_sent = |i: usize| mask[i / 8] >> (i % 8) & 1 == 1;
        let sent =
            || self.tensors.iter().enumerate().filter(|(i, _)| is_sent(*i)).map(|(_, range)| range.clone());
        let values = from_bytes(values, sent().map(|range| range.len()).sum(), from)?;
        let Some(heard) = self.heard.iter_mut().find(|heard| heard.from == from.0) else { return Ok(()) };
        let mut start = 0;
        for range in sent() {
            let len = range.len();
            heard.values[range].copy_from_slice(&values[start..start + len]);
            start += len;
        }
        Ok(())
    }

    /// Waits for neighbours' messages, and computes the change that they cause.
    fn arrive(&mut self) -> Result<(), OptimError> {
        let messages = match std::mem::replace(&mut self.exchange_state, ExchangeState::None) {
            ExchangeState::InFlight(messages) => messages,
            other => {
                self.exchange_state = other;
                return Ok(());
            }
        };
        let mut change = vec![0.0_f32; self.sent.len()];
        for NeighbourMessage { from, weight, bytes } in messages.wait()? {
            self.store_message(from, &bytes)?;
            let Some(heard) = self.heard.iter().find(|heard| heard.from == from.0) else { continue };
            for ((change, mine), theirs) in change.iter_mut().zip(&self.sent).zip(&heard.values) {
                *change += weight as f32 * (theirs - mine);
            }
        }
        self.exchange_state = ExchangeState::Arrived(change);
        Ok(())
    }
}

impl Synchroniser for EventTriggered {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn mix(&mut self, params: &mut Tensor, _: StepEnd, _: f64) -> Result<(), OptimError> {
        self.arrive()?;
        if let ExchangeState::Arrived(change) =
            std::mem::replace(&mut self.exchange_state, ExchangeState::None)
        {
            let mut values = self.packing.pack(params)?;
            values.iter_mut().zip(&change).for_each(|(value, change)| *value += change);
            self.packing.unpack(&values, params)?;
        }
        Ok(())
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.step.is_multiple_of(self.every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, after: StepEnd, _: f64) -> Result<(), OptimError> {
        self.mean.exchange(params, after.last)
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        self.mean.exchanged()
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        self.mean.prepare()
    }
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        self.mean.commit(params)
    }
    fn start_exchanges(&mut self, params: &Tensor, after: StepEnd, _: f64) -> Result<bool, OptimError> {
        if !after.last {
            let now = self.packing.pack(params)?;
            let message = self.message(&now);
            let comm = self.mean.average.communicator();
            self.exchange_state =
                ExchangeState::InFlight(Exchange::start(comm, self.meeting.clone(), self.rounds, &message));
            self.rounds += 1;
        }
        Ok(false)
    }
    fn replicas_differ(&self) -> bool {
        true
    }
    fn gather_common(&mut self, params: &Tensor) -> Result<(), OptimError> {
        self.mean.gather(params)
    }
    fn common(&self) -> Option<&Tensor> {
        self.mean.common()
    }
    fn wait_in_flight(&mut self) -> Result<(), OptimError> {
        self.arrive()?;
        let nothing = Vec::new();
        let heard = |i: usize| self.heard.get(i).map_or(&self.sent, |heard| &heard.values);
        let change =
            if let ExchangeState::Arrived(change) = &self.exchange_state { change } else { &nothing };
        for (tensor, values) in self.settled.iter_mut().zip([&self.sent, heard(0), heard(1), change]) {
            if !values.is_empty() {
                self.packing.unpack(values, tensor)?;
            }
        }
        Ok(())
    }
    fn drop_in_flight(&mut self) {
        self.exchange_state = ExchangeState::None;
        self.mean.average.open();
    }
    fn rollback(&mut self) {
        self.mean.rollback();
    }
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError> {
        self.sent = self.packing.pack(params)?;
        self.heard.iter_mut().for_each(|heard| heard.values.clone_from(&self.sent));
        Ok(())
    }
    fn steps(&self) -> u64 {
        self.rounds
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        let waits = usize::from(matches!(self.exchange_state, ExchangeState::Arrived(_)));
        STATE_NAMES.into_iter().zip(&self.settled).take(3 + waits).collect()
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.settled[0].shape().len();
        let saved = optional_prefix(get, &STATE_NAMES, expected)?;
        for (tensor, values) in self.settled.iter_mut().zip(&saved) {
            tensor.write(values)?;
        }
        let found: Vec<_> = saved.iter().map(|values| self.packing.pack_host(values)).collect();
        self.exchange_state = ExchangeState::None;
        if let [sent, before, after, change @ ..] = &found[..] {
            self.sent.clone_from(sent);
            for (heard, values) in self.heard.iter_mut().zip([before, after]) {
                heard.values.clone_from(values);
            }
            if let [change] = change {
                self.exchange_state = ExchangeState::Arrived(change.clone());
            }
        }
        self.rounds = steps;
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.mean.average
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.mean.average
    }
}
