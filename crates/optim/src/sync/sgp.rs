//! Stochastic gradient push: gossip in which parameters are sent with a weight and divided by it.

use farflung_comm::ReduceOp;
use farflung_tensor::Tensor;

use super::exchange::{Exchange, NeighbourMessage, Packing, from_bytes, to_bytes};
use super::mean::CommonMean;
use super::neighbours::{Graph, Neighbours};
use super::saved::optional;
use super::{Buffers, OWN_COPIES, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::{Average, OptimError};

/// Row of [`METHODS`](super::METHODS) for [`PushSum`] on exponential graphs.
pub const SGP: SyncMethod = SyncMethod {
    name: "sgp",
    summary: "as exponential, by push-sum: each worker sends half of its weighted parameters and of its \
              weight, and divides what it then has",
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
    // Held: what was sent, the change, the mean, two weights. Saved: the change, both weights, own parameters.
    buffers: |_| Buffers { held: 5, saved: 4 },
    build: |s| Ok(Box::new(PushSum::new(s, Graph::Exponential)?)),
};

/// A replica has parameters `z` and a push-sum weight `m`. After a step it splits `m` and `m z` into equal
/// parts, keeps one and sends one to each of its neighbours in the graph. The shares form a matrix whose
/// columns sum to 1, while its rows need not. So the sums of `m` and of `m z` over all replicas are preserved.
/// Messages have the time of the next step to arrive; then
///
/// ```text
/// m_i' = kept m_i + sum over arrived m_j
/// z_i  = (kept m_i z_i + sum over arrived m_j z_j - w_i step_i) / m_i'      z: as they were sent
/// ```
///
/// Weights `m` begin as a replica's share of the tokens, `w`, so that all replicas converge to the mean by
/// tokens. They are integers, so that their sum is preserved exactly: among `n` replicas an equal share is
/// `2^23 / n`, and `w` is rounded to an integer. A message has `4 + 4 P` bytes for `P` parameters.
///
/// The model of the run is the mean of `z` weighted by `m`. After the last step, all replicas set their
/// parameters to it.
///
/// Source: Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning", Alg. 1. Differs: a
/// replica sends the parameters with which the next step begins, as in the paper's overlapped form; replicas
/// are weighted by their tokens.
#[derive(Debug)]
pub struct PushSum {
    graph: Graph,
    every: u64,
    packing: Packing,
    /// Weight of this replica's own steps.
    own: u32,
    /// Push-sum weight of the current parameters.
    mass: u32,
    /// Change that neighbours' parameters cause, once they arrived: `z = own / mass' z + change`.
    change: Tensor,
    mean: CommonMean,
    exchange_state: ExchangeState,
    rounds: u64,
    /// Both weights in the form of a checkpoint: of the current parameters, and after the change.
    masses: [Tensor; 2],
}

/// State of neighbours' messages.
#[derive(Debug)]
enum ExchangeState {
    None,
    InFlight {
        /// Parameters that this rank sent; `kept` is the weight that it kept.
        sent: Vec<f32>,
        kept: u32,
        messages: Exchange,
    },
    /// Arrived: the result is in `change`.
    Arrived {
        /// Weight after the change.
        mass: u32,
    },
}

const CHANGE: &str = "change";
const MASSES: [&str; 2] = ["push-weight", "next-push-weight"];

impl PushSum {
    /// Creates the method on a graph over the ranks of `settings`.
    ///
    /// Errors: those of [`Average::new`].
    pub fn new(settings: SyncSettings<'_>, graph: Graph) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, every, weights, .. } = settings;
        let (size, rank) = (comm.size(), comm.rank().index());
        // The sum of all weights is then exact in f32.
        let parts = f64::from(1_u32 << 23) / size as f64;
        let own = weights.get(rank).copied().unwrap_or(1.0) * parts;
        let own = own.round().clamp(1.0, f64::from(1_u32 << 23)) as u32;
        let average = Average::new(comm, device, layout, average)?;
        Ok(Self {
            graph,
            every: every.max(1),
            packing: Packing::new(layout),
            own,
            mass: own,
            change: device.zeros(layout.len())?,
            mean: CommonMean::new(average, &weights, device, layout)?,
            exchange_state: ExchangeState::None,
            rounds: 0,
            masses: [device.zeros(layout.len())?, device.zeros(layout.len())?],
        })
    }

    /// Waits for neighbours' messages, and writes the change that they cause.
    fn arrive(&mut self) -> Result<(), OptimError> {
        let (sent, kept, messages) = match std::mem::replace(&mut self.exchange_state, ExchangeState::None) {
            ExchangeState::InFlight { sent, kept, messages } => (sent, kept, messages),
            other => {
                self.exchange_state = other;
                return Ok(());
            }
        };
        let mut sums: Vec<f64> = sent.iter().map(|z| f64::from(kept) * f64::from(*z)).collect();
        let mut mass = kept;
        for NeighbourMessage { from, bytes, .. } in messages.wait()? {
            // A message that is too short for its weight also has the wrong length for its parameters.
            let (head, rest) = bytes.split_first_chunk::<4>().unwrap_or((&[0; 4], &[]));
            let (weight, theirs) = (u32::from_le_bytes(*head), from_bytes(rest, sent.len(), from)?);
            sums.iter_mut().zip(theirs).for_each(|(sum, z)| *sum += f64::from(weight) * f64::from(z));
            mass = mass.saturating_add(weight);
        }
        let (all, part) = (f64::from(mass), self.part(mass));
        let change = sums.iter().zip(&sent).map(|(sum, z)| (sum / all - part * f64::from(*z)) as f32);
        self.packing.unpack(&change.collect::<Vec<f32>>(), &mut self.change)?;
        self.exchange_state = ExchangeState::Arrived { mass };
        Ok(())
    }

    /// Returns the share of its own step that a replica of this weight takes.
    fn part(&self, mass: u32) -> f64 {
        f64::from(self.own) / f64::from(mass)
    }

    /// Sets the replica's weight in the mean to its current push-sum weight. All ranks must call it.
    fn weigh(&mut self) -> Result<(), OptimError> {
        let comm = self.mean.average.communicator();
        let mut all = [f64::from(self.mass)];
        comm.all_reduce(&mut all, ReduceOp::Sum)?;
        let part = f64::from(self.mass) * comm.size() as f64 / all[0];
        self.mean.set_weight(part);
        Ok(())
    }
}

impl Synchroniser for PushSum {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn mix(&mut self, params: &mut Tensor, _: StepEnd, _: f64) -> Result<(), OptimError> {
        self.arrive()?;
        if let ExchangeState::Arrived { mass } = self.exchange_state {
            let (mut values, change) = (self.packing.pack(params)?, self.packing.pack(&self.change)?);
            let part = self.part(mass);
            let moved = values.iter_mut().zip(change);
            moved.for_each(|(z, change)| *z = (part * f64::from(*z) + f64::from(change)) as f32);
            self.packing.unpack(&values, params)?;
            (self.mass, self.exchange_state) = (mass, ExchangeState::None);
        }
        Ok(())
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.step.is_multiple_of(self.every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, after: StepEnd, _: f64) -> Result<(), OptimError> {
        if after.last {
            self.weigh()?;
        }
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
        let meeting: Neighbours = self.graph.meeting(comm.rank().0, comm.size() as u32, self.rounds);
        let pushed = self.mass / (meeting.to.len() as u32 + 1);
        let kept = self.mass - pushed * meeting.to.len() as u32;
        let bytes = [&pushed.to_le_bytes()[..], &to_bytes(&sent)].concat();
        let messages = Exchange::start(comm, meeting, self.rounds, &bytes);
        self.exchange_state = ExchangeState::InFlight { sent, kept, messages };
        self.rounds += 1;
        Ok(false)
    }
    fn replicas_differ(&self) -> bool {
        true
    }
    fn gather_common(&mut self, params: &Tensor) -> Result<(), OptimError> {
        self.weigh()?;
        self.mean.gather(params)
    }
    fn common(&self) -> Option<&Tensor> {
        self.mean.common()
    }
    fn wait_in_flight(&mut self) -> Result<(), OptimError> {
        self.arrive()?;
        let next = if let ExchangeState::Arrived { mass } = self.exchange_state { mass } else { self.mass };
        for (mass, saved) in [self.mass, next].into_iter().zip(&mut self.masses) {
            let all = vec![mass as f32; saved.shape().len()];
            saved.write(&all)?;
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
        let mut states: Vec<(&str, &Tensor)> = MASSES.into_iter().zip(&self.masses).collect();
        if matches!(self.exchange_state, ExchangeState::Arrived { .. }) {
            states.push((CHANGE, &self.change));
        }
        states
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.change.shape().len();
        let change = optional(get, CHANGE, expected)?;
        let mut masses = [self.own; 2];
        for (mass, name) in masses.iter_mut().zip(MASSES) {
            // Padding is not part of a checkpoint.
            let saved = optional(get, name, expected)?.unwrap_or_default();
            let saved = saved.into_iter().fold(0.0, f32::max);
            *mass = if saved >= 1.0 { saved as u32 } else { *mass };
        }
        let [mass, next] = masses;
        if let Some(values) = &change {
            self.change.write(values)?;
        }
        self.exchange_state =
            if change.is_some() { ExchangeState::Arrived { mass: next } } else { ExchangeState::None };
        (self.mass, self.rounds) = (mass, steps);
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.mean.average
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.mean.average
    }
}
