//! `NoLoCo`: local steps, then an outer step with one other replica instead of all.

use farflung_tensor::Tensor;

use super::exchange::{Exchange, NeighbourMessage, Packing, from_bytes, to_bytes};
use super::mean::{CommonMean, copy};
use super::neighbours::Graph;
use super::saved::optional;
use super::{Buffers, OWN_COPIES, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::{Average, OptimError};

/// Row of [`METHODS`](super::METHODS) for [`NoLoCo`].
pub const NOLOCO: SyncMethod = SyncMethod {
    name: "noloco",
    summary: "as diloco, but workers average in random pairs, drawn anew each time, instead of over all \
              workers",
    each_step: false,
    reads: &["sync-every", "outer-lr", "outer-momentum"],
    overlaps: false,
    replicas_differ: true,
    timed: false,
    every: None,
    codec: Some("none"),
    codes_server_changes: false,
    compensates: false,
    changing_weights: false,
    outer_momentum: Some(0.5),
    on_member_loss: OWN_COPIES,
    // Held: slow parameters, momentum, their next values, the mean. Saved: the first two, own parameters.
    buffers: |_| Buffers { held: 5, saved: 3 },
    build: |s| Ok(Box::new(NoLoCo::new(s)?)),
};

/// Every `every` steps replicas exchange in random pairs `{i, j}`, the same on all ranks; if their number is
/// odd, one is alone. A replica has slow parameters `s`, and has moved from them by `d = params - s`:
///
/// ```text
/// v_i = mu v_i + eta mean(d_i, d_j) + eta (mean(s_i, s_j) - s_i);   s_i += v_i;   params_i = s_i
/// ```
///
/// Means are weighted. Each replica sends `8 P + 4` bytes for `P` parameters. Slow parameters always differ a
/// little; the model of the run is the mean of all replicas. After the last step, all replicas set their
/// parameters to it.
///
/// Source: Kolehmainen et al. 2025, "`NoLoCo`", and its code.
#[derive(Debug)]
pub struct NoLoCo {
    graph: Graph,
    every: u64,
    rate: f32,
    momentum: f32,
    packing: Packing,
    outer: Outer,
    /// Next outer state, which is taken once all ranks agreed.
    next: Outer,
    mean: CommonMean,
    /// Whether `next` holds an outer step that was not committed yet.
    stepped: bool,
    rounds: u64,
}

#[derive(Debug)]
struct Outer {
    slow: Tensor,
    velocity: Tensor,
}

/// Message of a replica: its weight, its `d` and its `s`.
struct OuterMessage {
    weight: f32,
    moved: Vec<f32>,
    slow: Vec<f32>,
}

impl NoLoCo {
    /// Creates the method with the parameters of `settings` as slow parameters.
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
            params,
            weights,
            ..
        } = settings;
        let outer = || {
            let (mut slow, velocity) = (device.zeros(layout.len())?, device.zeros(layout.len())?);
            copy(params, &mut slow)?;
            Ok::<_, OptimError>(Outer { slow, velocity })
        };
        Ok(Self {
            graph: Graph::RandomPairs { seed: average.seed },
            every: every.max(1),
            rate: outer_lr as f32,
            momentum: outer_momentum as f32,
            packing: Packing::new(layout),
            outer: outer()?,
            next: outer()?,
            mean: CommonMean::new(Average::new(comm, device, layout, average)?, &weights, device, layout)?,
            stepped: false,
            rounds: 0,
        })
    }

    /// Computes the outer step with the replica that this one is paired with.
    fn step(&mut self, params: &Tensor, weight: f64) -> Result<(), OptimError> {
        let slow = self.packing.pack(&self.outer.slow)?;
        let params = self.packing.pack(params)?;
        let moved: Vec<f32> = params.iter().zip(&slow).map(|(params, slow)| params - slow).collect();
        let own = OuterMessage { weight: weight as f32, moved, slow };
        let comm = self.mean.average.communicator();
        let meeting = self.graph.meeting(comm.rank().0, comm.size() as u32, self.rounds);
        let other = Exchange::start(comm, meeting, self.rounds, &own.bytes()).wait()?.pop();
        let other = other.map(|arrived| OuterMessage::read(&arrived, own.slow.len())).transpose()?;
        let mut velocity = self.packing.pack(&self.outer.velocity)?;
        for (i, v) in velocity.iter_mut().enumerate() {
            let (d, s) = other.as_ref().map_or((own.moved[i], own.slow[i]), |other| other.mean_with(&own, i));
            *v = self.momentum * *v + self.rate * d + self.rate * (s - own.slow[i]);
        }
        let slow: Vec<f32> = own.slow.iter().zip(&velocity).map(|(slow, v)| slow + v).collect();
        self.packing.unpack(&velocity, &mut self.next.velocity)?;
        self.packing.unpack(&slow, &mut self.next.slow)
    }
}

impl OuterMessage {
    fn bytes(&self) -> Vec<u8> {
        let Self { weight, moved, slow } = self;
        to_bytes(&[&[*weight][..], moved, slow].concat())
    }

    fn read(arrived: &NeighbourMessage, len: usize) -> Result<Self, OptimError> {
        let values = from_bytes(&arrived.bytes, 1 + 2 * len, arrived.from)?;
        let (moved, slow) = values[1..].split_at(len);
        Ok(Self { weight: values[0], moved: moved.to_vec(), slow: slow.to_vec() })
    }

    /// Returns the weighted means of both replicas' `d` and of their `s`, for element `i`.
    fn mean_with(&self, own: &Self, i: usize) -> (f32, f32) {
        let all = self.weight + own.weight;
        let moved = (self.weight * self.moved[i] + own.weight * own.moved[i]) / all;
        let slow = (self.weight * self.slow[i] + own.weight * own.slow[i]) / all;
        (moved, slow)
    }
}

impl Synchroniser for NoLoCo {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.step.is_multiple_of(self.every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, after: StepEnd, weight: f64) -> Result<(), OptimError> {
        self.stepped = !after.last;
        if self.stepped {
            self.step(params, weight)?;
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
        if std::mem::take(&mut self.stepped) {
            std::mem::swap(&mut self.outer, &mut self.next);
            copy(&self.outer.slow, params)?;
            self.rounds += 1;
        }
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
    fn rollback(&mut self) {
        self.stepped = false;
        self.mean.rollback();
    }
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError> {
        copy(params, &mut self.outer.slow)
    }
    fn steps(&self) -> u64 {
        self.rounds
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        vec![("slow", &self.outer.slow), ("momentum", &self.outer.velocity)]
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.outer.slow.shape().len();
        let (slow, velocity) = (optional(get, "slow", expected)?, optional(get, "momentum", expected)?);
        if let (Some(slow), Some(velocity)) = (slow, velocity) {
            self.outer.slow.write(&slow)?;
            self.outer.velocity.write(&velocity)?;
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
