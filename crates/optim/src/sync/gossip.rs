//! Decentralised training: after each step a replica mixes its parameters with those of a few others.

use farflung_tensor::{Device, Op, Program, ProgramBuilder, Tensor};

use super::exchange::{Exchange, NeighbourMessage, Packing, from_bytes, to_bytes};
use super::mean::CommonMean;
use super::modulo::{Inferred, Modulo};
use super::neighbours::Graph;
use super::saved::optional;
use super::{Buffers, OWN_COPIES, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::{Average, OptimError};

/// Row of [`METHODS`](super::METHODS) for [`Gossip`] on a ring.
///
/// Source: Lian et al. 2017, "Can decentralized algorithms outperform centralized algorithms?", Alg. 1.
pub const D_PSGD: SyncMethod = SyncMethod {
    name: "d-psgd",
    summary: "each worker mixes its parameters with both neighbours on a ring after each step",
    each_step: false,
    reads: &["sync-every"],
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
    // Held: what was sent, the change, and the mean. Saved: the change, and the replica's own parameters.
    buffers: |_| Buffers { held: 3, saved: 2 },
    build: |s| Ok(Box::new(Gossip::new(s, Graph::Ring)?)),
};

/// Row of [`METHODS`](super::METHODS) for [`Gossip`] in pairs that change in each step.
///
/// Source: Gan et al. 2021, "BAGUA", its decentralised algorithm with `shift_one`.
pub const SHIFT_ONE: SyncMethod = SyncMethod {
    name: "shift-one",
    summary: "as d-psgd, but in pairs of workers; the pairs change in each step",
    build: |s| Ok(Box::new(Gossip::new(s, Graph::ShiftOne)?)),
    ..D_PSGD
};

/// Row of [`METHODS`](super::METHODS) for [`Gossip`] on exponential graphs.
///
/// Source: Ying et al. 2021, "Exponential graph is provably efficient for decentralized deep training". With
/// equal weights it is [`SGP`](super::SGP), whose push-sum weights then do not change.
pub const EXPONENTIAL: SyncMethod = SyncMethod {
    name: "exponential",
    summary: "as d-psgd, but each worker receives from one other: in turn the one 1, 2, 4 and so on ranks \
              before it",
    build: |s| Ok(Box::new(Gossip::new(s, Graph::Exponential)?)),
    ..D_PSGD
};

/// Row of [`METHODS`](super::METHODS) for [`Gossip`] in random pairs.
///
/// Source: Boyd et al. 2006, "Randomized gossip algorithms". All ranks draw the same pairs.
pub const RANDOM_PAIRS: SyncMethod = SyncMethod {
    name: "random-pairs",
    summary: "as d-psgd, but in pairs of workers that are drawn at random in each step",
    build: |s| {
        let seed = s.average.seed;
        Ok(Box::new(Gossip::new(s, Graph::RandomPairs { seed })?))
    },
    ..D_PSGD
};

/// After a step, each replica sends its parameters to its neighbours. Messages have the time of the next step
/// to arrive; then
///
/// ```text
/// x_i = x_i - step_i + sum over neighbours j of w_ij (x_j - x_i)      x: as they were sent
/// ```
///
/// Replicas always differ a little. The model of the run is their mean. It is computed for evaluations and
/// checkpoints, and after the last step all replicas set their parameters to it. Every `every` steps all
/// replicas synchronise only to exchange their losses. Replicas are weighted: `w_ij` are those of
/// [`Graph::weighted`], so that replicas converge to the weighted mean. Parameters are sent as f32, or modulo a
/// bound in a few bits.
#[derive(Debug)]
pub struct Gossip {
    graph: Graph,
    wire: Wire,
    weights: Vec<f64>,
    every: u64,
    packing: Packing,
    add: Program,
    /// Change that neighbours' parameters cause, once they arrived.
    change: Tensor,
    mean: CommonMean,
    exchange_state: ExchangeState,
    rounds: u64,
}

/// Encoding of parameters in messages.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wire {
    /// As f32.
    Plain,
    /// In a few bits, modulo a bound.
    Modulo {
        modulo: Modulo,
        /// Part of the distance to its neighbours that a replica moves. It must be smaller for fewer bits.
        rate: f64,
    },
}

/// State of neighbours' messages.
#[derive(Debug)]
enum ExchangeState {
    None,
    InFlight {
        /// Parameters that this rank sent.
        sent: Vec<f32>,
        round: u64,
        messages: Exchange,
    },
    /// Arrived: the result is in `change`.
    Arrived,
}

impl Gossip {
    /// Creates the method on a graph over the ranks of `settings`.
    ///
    /// Errors: those of [`Average::new`].
    pub fn new(settings: SyncSettings<'_>, graph: Graph) -> Result<Self, OptimError> {
        Self::with_wire(settings, graph, Wire::Plain)
    }

    /// Creates the method with this encoding of messages.
    pub(super) fn with_wire(
        settings: SyncSettings<'_>,
        graph: Graph,
        wire: Wire,
    ) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, every, weights, .. } = settings;
        let average = Average::new(comm, device, layout, average)?;
        let mut p = ProgramBuilder::new();
        let (x, change) = (p.load(0), p.read(0));
        let sum = p.add(x, change);
        p.store(0, sum);
        Ok(Self {
            graph,
            wire,
            every: every.max(1),
            packing: Packing::new(layout),
            add: p.build()?,
            change: device.zeros(layout.len())?,
            mean: CommonMean::new(average, &weights, device, layout)?,
            weights,
            exchange_state: ExchangeState::None,
            rounds: 0,
        })
    }

    fn device(&self) -> Device {
        self.change.device().clone()
    }

    /// Waits for neighbours' messages, and writes the change that they cause.
    fn arrive(&mut self) -> Result<(), OptimError> {
        let (sent, round, messages) = match std::mem::replace(&mut self.exchange_state, ExchangeState::None) {
            ExchangeState::InFlight { sent, round, messages } => (sent, round, messages),
            other => {
                self.exchange_state = other;
                return Ok(());
            }
        };
        let mut change = vec![0.0_f32; sent.len()];
        for NeighbourMessage { from, weight, bytes } in messages.wait()? {
            let (theirs, mine, part) = match self.wire {
                Wire::Plain => (from_bytes(&bytes, sent.len(), from)?, None, weight),
                Wire::Modulo { modulo, rate } => {
                    let Inferred { values, own } = modulo.decode(&bytes, &sent, round, from)?;
                    (values, Some(own), rate * weight)
                }
            };
            let mine = mine.as_ref().unwrap_or(&sent);
            for ((change, mine), theirs) in change.iter_mut().zip(mine).zip(theirs) {
                *change += part as f32 * (theirs - mine);
            }
        }
        self.packing.unpack(&change, &mut self.change)?;
        self.exchange_state = ExchangeState::Arrived;
        Ok(())
    }
}

impl Synchroniser for Gossip {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn mix(&mut self, params: &mut Tensor, _: StepEnd, _: f64) -> Result<(), OptimError> {
        self.arrive()?;
        if matches!(self.exchange_state, ExchangeState::Arrived) {
            let (program, reads) = (&self.add, &[self.change.view()]);
            self.device().run(Op::Map { program, scalars: &[], reads, writes: &mut [params.view_mut()] })?;
            self.exchange_state = ExchangeState::None;
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
        if after.last {
            return Ok(false);
        }
        let sent = self.packing.pack(params)?;
        let comm = self.mean.average.communicator();
        let (rank, round) = (comm.rank().0, self.rounds);
        let bytes = match self.wire {
            Wire::Plain => to_bytes(&sent),
            Wire::Modulo { modulo, .. } => modulo.encode(&sent, round),
        };
        let messages = Exchange::start(comm, self.graph.weighted(rank, &self.weights, round), round, &bytes);
        self.exchange_state = ExchangeState::InFlight { sent, round, messages };
        self.rounds += 1;
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
        self.arrive()
    }
    fn drop_in_flight(&mut self) {
        self.exchange_state = ExchangeState::None;
        self.mean.average.open();
    }
    fn rollback(&mut self) {
        self.mean.rollback();
    }
    fn on_params_set(&mut self, _: &Tensor) -> Result<(), OptimError> {
        Ok(())
    }
    fn steps(&self) -> u64 {
        self.rounds
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        if matches!(self.exchange_state, ExchangeState::Arrived) {
            vec![("change", &self.change)]
        } else {
            Vec::new()
        }
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.change.shape().len();
        let change = optional(get, "change", expected)?;
        if let Some(values) = &change {
            self.change.write(values)?;
        }
        self.exchange_state = if change.is_some() { ExchangeState::Arrived } else { ExchangeState::None };
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
