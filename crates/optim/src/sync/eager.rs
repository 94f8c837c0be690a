//! Eager updates: `DiLoCo` whose averages take a whole round to arrive, while each replica applies its own
//! change at once.

use farflung_comm::Algorithm;
use farflung_compress::AverageSpec;
use farflung_tensor::Tensor;

use super::exchange::Packing;
use super::mean::CommonMean;
use super::saved::{optional_prefix, required};
use super::{Buffers, IN_FLIGHT, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::{Average, AverageConfig, OptimError};

/// Row of [`METHODS`](super::METHODS) for [`Eager`].
pub const EAGER: SyncMethod = SyncMethod {
    name: "eager",
    summary: "as diloco, but an average may arrive during the next round; each worker applies its own change \
              at once",
    each_step: false,
    reads: &["sync-every", "outer-lr", "outer-momentum"],
    overlaps: true,
    replicas_differ: true,
    timed: false,
    every: None,
    codec: None,
    codes_server_changes: false,
    compensates: false,
    changing_weights: false,
    // The mean is one round old. With the paper's momentum of 0.9 eight workers diverge once local steps come
    // near an optimum; with 0.5 they end 17 % above averaging at each step (bench local-vs-sync).
    outer_momentum: Some(0.0),
    on_member_loss: IN_FLIGHT,
    // Held: shared and own position and velocity and the last change; the next values of these five, between an
    // exchange and its commit; the mean in flight; the mean for evaluations; and copies of six for checkpoints.
    // Saved: these copies (of the four vectors, the change and the mean), and the replica's own parameters.
    buffers: |_| Buffers { held: 18, saved: 7 },
    build: |s| Ok(Box::new(Eager::new(s)?)),
};

/// Every `every` steps a replica's change `D_t = start - params` is sent to be averaged. The outer Nesterov
/// step is taken with the mean of the previous round, in which the replica's own part is replaced by the fresh
/// one:
///
/// ```text
/// D = mean(D_{t-1}) + w (D_t - D_{t-1});   v = mu v + D;   x -= lr (D + mu v);   params = start = x
/// ```
///
/// where `w` is the replica's weight in the mean. The step is linear in `D`. So `x` is the sum of two
/// positions, which are kept apart here: one that only the means move, the same on all replicas, and one that
/// this replica's own differences move. The model of the run is the mean of all replicas. After the last step,
/// all replicas set their parameters to it.
///
/// Source: Kale et al. 2025, "Eager Updates For Overlapped Communication and Computation in `DiLoCo`". Differs:
/// replicas are weighted by their tokens.
#[derive(Debug)]
pub struct Eager {
    every: u64,
    rate: f32,
    momentum: f32,
    copies: f64,
    packing: Packing,
    /// Position that means move: the same on all replicas.
    shared: Position,
    /// Position that this replica's own differences move.
    own: Position,
    /// Change that was sent last; `part` is its weight in the mean.
    left: Vec<f32>,
    part: f32,
    /// Average of changes.
    average: Average,
    /// Holds the change that is sent, and then the mean that arrives.
    buffer: Tensor,
    /// Average of parameters, without a codec.
    mean: CommonMean,
    exchange_state: ExchangeState,
    /// Values that the next commit applies.
    next: Option<Next>,
    goes_on: bool,
    rounds: u64,
    states: [Tensor; 2],
    own_states: [Tensor; 4],
}

/// A position and its velocity.
#[derive(Debug, Clone)]
struct Position {
    at: Vec<f32>,
    velocity: Vec<f32>,
}

/// Both positions after a step, and the change that caused the step.
#[derive(Debug)]
struct Next {
    shared: Position,
    own: Position,
    change: Vec<f32>,
    part: f32,
}

/// State of the previous round's mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExchangeState {
    /// There is none, or it was applied.
    None,
    /// In flight.
    InFlight,
    /// Arrived, in the buffer.
    Arrived,
}

impl Position {
    fn new(at: Vec<f32>) -> Self {
        Self { velocity: vec![0.0; at.len()], at }
    }

    /// Takes a Nesterov step.
    fn step(&mut self, rate: f32, momentum: f32, change: impl Iterator<Item = f32>) {
        for ((x, v), d) in self.at.iter_mut().zip(&mut self.velocity).zip(change) {
            *v = momentum * *v + d;
            *x -= rate * (d + momentum * *v);
        }
    }
}

const SHARED: [&str; 2] = ["anchor", "momentum"];
const OWN: [&str; 4] = ["own", "own-momentum", "change", "mean"];

impl Eager {
    /// Creates the method at the parameters of `settings`.
    ///
    /// Errors: those of [`Average::new`].
    pub fn new(settings: SyncSettings<'_>) -> Result<Self, OptimError> {
        let SyncSettings {
            comm,
            device,
            layout,
            average,
            every,
            outer_lr,
            outer_momentum,
            weights,
            params,
            ..
        } = settings;
        let packing = Packing::new(layout);
        let zeros = || device.zeros(layout.len());
        let copies = comm.size() as f64;
        let plain = AverageConfig {
            codec: AverageSpec::default().into(),
            warmup: 0,
            algorithm: Algorithm::Ring,
            ..average.clone()
        };
        let plain = Average::new(comm.clone(), device, layout, plain)?;
        let average = Average::new(comm, device, layout, average)?;
        let shared = Position::new(packing.pack(params)?);
        let nothing = vec![0.0; packing.len()];
        Ok(Self {
            every: every.max(1),
            rate: outer_lr as f32,
            momentum: outer_momentum as f32,
            copies,
            shared,
            own: Position::new(nothing.clone()),
            left: nothing,
            part: 0.0,
            mean: CommonMean::new(plain, &weights, device, layout)?,
            average,
            buffer: zeros()?,
            exchange_state: ExchangeState::None,
            next: None,
            goes_on: false,
            rounds: 0,
            states: [zeros()?, zeros()?],
            own_states: [zeros()?, zeros()?, zeros()?, zeros()?],
            packing,
        })
    }

    /// Returns the parameters at which this replica's round began.
    fn start(&self) -> impl Iterator<Item = f32> {
        self.shared.at.iter().zip(&self.own.at).map(|(shared, own)| shared + own)
    }

    /// Waits for the mean of the previous round.
    fn arrive(&mut self) -> Result<(), OptimError> {
        if self.exchange_state == ExchangeState::InFlight {
            self.average.finish_all(&mut self.buffer)?;
            self.average.commit();
            self.exchange_state = ExchangeState::Arrived;
        }
        Ok(())
    }

    /// Computes the step of a round, with this replica's weight in the mean.
    fn plan(&mut self, params: &Tensor, weight: f64) -> Result<(), OptimError> {
        let part = (weight / self.copies) as f32;
        let now = self.packing.pack(params)?;
        let change: Vec<f32> = self.start().zip(&now).map(|(start, now)| start - now).collect();
        let (mut shared, mut own) = (self.shared.clone(), self.own.clone());
        if self.exchange_state == ExchangeState::Arrived {
            let mean = self.packing.pack(&self.buffer)?;
            shared.step(self.rate, self.momentum, mean.into_iter());
        }
        let (before, left) = (self.part, &self.left);
        let fresh = change.iter().zip(left).map(|(now, left)| part * now - before * left);
        own.step(self.rate, self.momentum, fresh);
        self.next = Some(Next { shared, own, change, part });
        Ok(())
    }
}

impl Synchroniser for Eager {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.step.is_multiple_of(self.every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, after: StepEnd, weight: f64) -> Result<(), OptimError> {
        if std::mem::take(&mut self.goes_on) {
            return self.mean.exchange(params, true);
        }
        self.arrive()?;
        self.plan(params, weight)?;
        self.goes_on = after.last;
        Ok(())
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        self.mean.exchanged()
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        self.mean.prepare()
    }
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        if let Some(Next { shared, own, change, part }) = self.next.take() {
            (self.shared, self.own, self.left, self.part) = (shared, own, change, part);
            let start: Vec<f32> = self.start().collect();
            self.packing.unpack(&start, params)?;
            self.exchange_state = ExchangeState::None;
            self.rounds += 1;
        }
        self.mean.commit(params)
    }
    fn start_exchanges(&mut self, _: &Tensor, after: StepEnd, _: f64) -> Result<bool, OptimError> {
        if !after.step.is_multiple_of(self.every) || after.last {
            return Ok(false);
        }
        let scaled: Vec<f32> = self.left.iter().map(|d| self.part * self.copies as f32 * d).collect();
        self.packing.unpack(&scaled, &mut self.buffer)?;
        self.average.open();
        self.average.start_all(&self.buffer)?;
        self.exchange_state = ExchangeState::InFlight;
        Ok(false)
    }
    fn needs_another_exchange(&self) -> bool {
        self.goes_on
    }
    fn replicas_differ(&self) -> bool {
        true
    }
    fn gather_common(&mut self, params: &Tensor) -> Result<(), OptimError> {
        self.arrive()?;
        self.mean.gather(params)
    }
    fn common(&self) -> Option<&Tensor> {
        self.mean.common()
    }
    fn wait_in_flight(&mut self) -> Result<(), OptimError> {
        self.arrive()?;
        for (tensor, values) in self.states.iter_mut().zip([&self.shared.at, &self.shared.velocity]) {
            self.packing.unpack(values, tensor)?;
        }
        let part = self.part;
        let left: Vec<f32> = self.left.iter().map(|d| part * d).collect();
        let mean = self.packing.pack(&self.buffer)?;
        let own = [&self.own.at, &self.own.velocity, &left, &mean];
        for (tensor, values) in self.own_states.iter_mut().zip(own) {
            self.packing.unpack(values, tensor)?;
        }
        Ok(())
    }
    fn drop_in_flight(&mut self) {
        self.exchange_state = ExchangeState::None;
        self.average.open();
    }
    fn rollback(&mut self) {
        (self.next, self.goes_on) = (None, false);
        self.mean.rollback();
    }
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError> {
        self.shared.at = self.packing.pack(params)?;
        self.own = Position::new(vec![0.0; self.packing.len()]);
        Ok(())
    }
    fn steps(&self) -> u64 {
        self.rounds
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        SHARED.into_iter().zip(&self.states).collect()
    }
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        let came = if self.exchange_state == ExchangeState::Arrived { OWN.len() } else { OWN.len() - 1 };
        OWN.into_iter().zip(&self.own_states).take(came).collect()
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.buffer.shape().len();
        let found = |name: &str| required(get, name, expected);
        let shared = SHARED.iter().map(|name| found(name)).collect::<Result<Vec<_>, _>>()?;
        let own = optional_prefix(get, &OWN, expected)?;
        let [at, velocity] = [self.packing.pack_host(&shared[0]), self.packing.pack_host(&shared[1])];
        let own: Vec<_> = own.iter().map(|flat| self.packing.pack_host(flat)).collect();
        self.shared = Position { at, velocity };
        self.exchange_state = ExchangeState::None;
        if let [at, velocity, change, mean @ ..] = &own[..] {
            self.own = Position { at: at.clone(), velocity: velocity.clone() };
            // The change was saved multiplied by its weight.
            (self.left, self.part) = (change.clone(), 1.0);
            if let [mean] = mean {
                self.packing.unpack(mean, &mut self.buffer)?;
                self.exchange_state = ExchangeState::Arrived;
            }
        } else {
            self.own = Position::new(vec![0.0; self.packing.len()]);
            self.left.fill(0.0);
        }
        self.rounds = steps;
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.average
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.average
    }
}
