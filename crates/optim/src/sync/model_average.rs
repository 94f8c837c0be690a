//! Asynchronous model averaging: replicas train on while their parameters are averaged in the background,
//! started by a timer.

use farflung_base::{Bytes, Nanos, Pending};
use farflung_comm::{CommError, Communicator, ReduceOp, WaitMode};
use farflung_tensor::Tensor;

use super::exchange::Packing;
use super::mean::CommonMean;
use super::{Buffers, IN_FLIGHT, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::{Average, OptimError};

/// Row of [`METHODS`](super::METHODS) for [`ModelAverage`].
pub const ASYNC_AVERAGE: SyncMethod = SyncMethod {
    name: "async-average",
    summary: "the parameters of all workers are averaged every --average-interval, while the workers continue \
              to train",
    each_step: false,
    reads: &["average-interval", "sync-warmup", "meet-every"],
    overlaps: true,
    replicas_differ: true,
    timed: true,
    every: Some(1),
    codec: Some("none"),
    codes_server_changes: false,
    compensates: false,
    changing_weights: false,
    outer_momentum: None,
    on_member_loss: IN_FLIGHT,
    // Held: parameters that were sent, the change to apply, the mean for evaluations, and what a
    // synchronisation averages. Saved: the replica's own parameters.
    buffers: |_| Buffers { held: 4, saved: 1 },
    build: |s| Ok(Box::new(ModelAverage::new(s)?)),
};

/// Gradients are averaged in the first `warmup` steps. After them a replica joins a round of averaging with its
/// current parameters and trains on. At the end of the step in which the mean arrives, it applies what the
/// others have learned:
///
/// ```text
/// params = params + mean(sent of all replicas) - sent
/// ```
///
/// A replica joins the next round at the end of the first step that ends at least `interval` later. A round
/// begins when the first replica joins and arrives once the last has joined, so that all replicas are in the
/// same rounds. If a replica needs three times as long for a step, it takes one step in a round where others
/// take three. A round sends `8 P (n - 1) / n` bytes per replica. Every `meet_every` steps all replicas
/// synchronise to exchange their losses: they complete a round that some have joined, and each joins the next
/// one at the end of its next step. The model of the run is the mean of all replicas.
///
/// Replicas are weighted by their tokens. Two runs give the same bits only on a simulated network, which has a
/// virtual clock: results depend on when messages arrive.
///
/// Source: Gan et al. 2021, "BAGUA", its `async_model_average`. There, parameters are locked from the start of
/// a step's forward pass to the end of its backward pass; the timer runs from a round's end, as here.
#[derive(Debug)]
pub struct ModelAverage {
    interval: Nanos,
    warmup: u64,
    meet_every: u64,
    packing: Packing,
    /// Communicator of the rounds alone, since replicas join them at different steps. It has no deadline, since
    /// the last replica may join late.
    background: Communicator,
    /// This replica's weight in a mean, where 1 is an equal share.
    weight: f32,
    round_state: RoundState,
    /// Time from which on the next round may be joined.
    due: Nanos,
    /// Number of rounds joined.
    rounds: u64,
    /// Number of steps done; `last_sync` is their number at the last synchronisation.
    step: u64,
    last_sync: u64,
    /// Average of gradients.
    gradients: Average,
    mean: CommonMean,
    /// Parameters in a synchronisation, including what came back with the last round.
    here: Tensor,
}

/// State of a round of averaging on this replica.
#[derive(Debug)]
enum RoundState {
    None,
    InFlight {
        sent: Vec<f32>,
        mean: Pending<Result<Vec<f32>, CommError>>,
    },
    /// Arrived: the mean minus what was sent.
    Arrived(Vec<f32>),
}

impl ModelAverage {
    /// Creates the method for the ranks of `settings`. All ranks must call it together.
    ///
    /// Errors: those of [`Average::new`]; a peer that was lost.
    pub fn new(settings: SyncSettings<'_>) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, asynchronous, weights, .. } = settings;
        let background = comm.split(0, comm.rank().0)?.with_deadline(Nanos::MAX);
        let own = weights.get(comm.rank().index()).copied().unwrap_or(1.0);
        let of = |config| Average::new(comm.clone(), device, layout, config);
        Ok(Self {
            interval: asynchronous.interval,
            warmup: asynchronous.warmup,
            meet_every: asynchronous.meet_every.max(1),
            packing: Packing::new(layout),
            background,
            weight: own as f32,
            round_state: RoundState::None,
            due: Nanos::ZERO,
            rounds: 0,
            step: 0,
            last_sync: 0,
            gradients: of(average.clone())?,
            mean: CommonMean::new(of(average)?, &weights, device, layout)?,
            here: device.zeros(layout.len())?,
        })
    }

    fn comm(&self) -> &Communicator {
        self.mean.average.communicator()
    }

    /// Joins the next round with the current parameters.
    fn join(&mut self, params: &Tensor) -> Result<(), OptimError> {
        let sent = self.with_arrived(params)?;
        self.leave(sent);
        Ok(())
    }

    fn leave(&mut self, sent: Vec<f32>) {
        let weighted = sent.iter().map(|x| self.weight * x).collect();
        let mean = self.background.start_all_reduce(weighted, ReduceOp::Mean);
        self.round_state = RoundState::InFlight { sent, mean };
        self.rounds += 1;
    }

    /// Returns the parameters plus what came back and was not applied yet.
    fn with_arrived(&self, params: &Tensor) -> Result<Vec<f32>, OptimError> {
        let mut values = self.packing.pack(params)?;
        if let RoundState::Arrived(moved) = &self.round_state {
            values.iter_mut().zip(moved).for_each(|(x, moved)| *x += moved);
        }
        Ok(values)
    }

    /// Waits for the round that was joined.
    fn arrive(&mut self) -> Result<(), OptimError> {
        self.round_state = match std::mem::replace(&mut self.round_state, RoundState::None) {
            RoundState::InFlight { sent, mean } => {
                let mut moved = mean.wait()?;
                moved.iter_mut().zip(&sent).for_each(|(mean, sent)| *mean -= sent);
                RoundState::Arrived(moved)
            }
            other => other,
        };
        Ok(())
    }

    /// Returns whether the round that was joined has arrived by now.
    fn has_arrived(&mut self) -> bool {
        match &mut self.round_state {
            RoundState::InFlight { mean, .. } => self.background.first(&mut [mean], WaitMode::Now).is_some(),
            RoundState::Arrived(_) => true,
            RoundState::None => false,
        }
    }

    /// Applies what came back.
    fn apply_arrived(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        let values = self.with_arrived(params)?;
        self.round_state = RoundState::None;
        self.packing.unpack(&values, params)
    }

    /// Completes the newest round that any replica has joined. All replicas must call it.
    fn complete(&mut self, params: &Tensor) -> Result<(), OptimError> {
        let mut rounds = [self.rounds];
        self.comm().all_reduce(&mut rounds, ReduceOp::Max)?;
        if self.rounds < rounds[0] {
            // All replicas have joined the previous round, since otherwise none could have joined this one.
            self.arrive()?;
            let sent = self.with_arrived(params)?;
            let before = std::mem::replace(&mut self.round_state, RoundState::None);
            self.leave(sent);
            self.arrive()?;
            if let (RoundState::Arrived(moved), RoundState::Arrived(before)) = (&mut self.round_state, before)
            {
                moved.iter_mut().zip(before).for_each(|(moved, before)| *moved += before);
            }
        }
        self.arrive()
    }
}

impl Synchroniser for ModelAverage {
    fn gradients(&mut self) -> Option<&mut Average> {
        if self.averages_gradients() { Some(&mut self.gradients) } else { None }
    }
    fn averages_gradients(&self) -> bool {
        self.step < self.warmup
    }
    fn mix(&mut self, params: &mut Tensor, after: StepEnd, _: f64) -> Result<(), OptimError> {
        self.step = after.step;
        if after.step <= self.warmup {
            return Ok(());
        }
        if self.has_arrived() {
            self.arrive()?;
            self.apply_arrived(params)?;
            self.due = self.comm().now().saturating_add(self.interval);
        }
        let idle = matches!(self.round_state, RoundState::None) && !after.last;
        if idle && self.comm().now() >= self.due {
            self.join(params)?;
        }
        Ok(())
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.step <= self.warmup || after.step.is_multiple_of(self.meet_every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, after: StepEnd, _: f64) -> Result<(), OptimError> {
        if after.step > self.warmup {
            self.complete(params)?;
        }
        let values = self.with_arrived(params)?;
        self.packing.unpack(&values, &mut self.here)?;
        self.mean.exchange(&self.here, after.last)
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        self.mean.exchanged()
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        self.mean.prepare()
    }
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        self.gradients.commit();
        self.apply_arrived(params)?;
        self.last_sync = self.step;
        self.due = Nanos::ZERO;
        self.mean.commit(params)
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
    fn drop_in_flight(&mut self) {
        self.round_state = RoundState::None;
        // Drops the steps since the last synchronisation.
        self.step = self.last_sync;
        self.gradients.open();
        self.mean.average.open();
    }
    fn rollback(&mut self) {
        self.gradients.rollback();
        self.mean.rollback();
    }
    fn on_params_set(&mut self, _: &Tensor) -> Result<(), OptimError> {
        Ok(())
    }
    fn steps(&self) -> u64 {
        self.step
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }
    fn restore(&mut self, steps: u64, _: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        // Checkpoints are made only after a synchronisation, when nothing is in flight.
        (self.step, self.last_sync, self.rounds) = (steps, steps, 0);
        (self.round_state, self.due) = (RoundState::None, Nanos::ZERO);
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.gradients
    }
    fn held(&self) -> Bytes {
        self.gradients.held() + self.mean.average.held()
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.gradients
    }
}
