//! `DES-LOC`: local Adam whose parameters, first moments and second moments are averaged, each with its own
//! period.

use farflung_base::Bytes;
use farflung_comm::Algorithm;
use farflung_tensor::Tensor;

use super::mean::copy;
use super::saved::optional;
use super::{BufferSettings, Buffers, DiLoCo, OnMemberLoss, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::finite::is_finite;
use crate::transform::StateKind;
use crate::{Average, AverageConfig, Chain, Coding, OptimError, weigh};

/// Row of [`METHODS`](super::METHODS) for [`DesLoc`].
pub const DES_LOC: SyncMethod = SyncMethod {
    name: "des-loc",
    summary: "local Adam: parameters, first moments and second moments are averaged, each with its own period",
    each_step: false,
    reads: &["sync-every", "first-moment-every", "second-moment-every"],
    overlaps: false,
    replicas_differ: false,
    timed: false,
    every: None,
    codec: None,
    codes_server_changes: false,
    compensates: false,
    changing_weights: true,
    outer_momentum: None,
    on_member_loss: OnMemberLoss::MeanOfOthers,
    // Anchor, delta, the anchor from before a step that is being tried, and a mean of each optimizer state.
    buffers: |&BufferSettings { states, .. }| Buffers { held: 3 + states, saved: 1 },
    build: |s| Ok(Box::new(DesLoc::new(s)?)),
};

/// Numbers of steps between averages of the optimizer's moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MomentPeriods {
    /// Steps between averages of first moments.
    pub first: u64,
    /// Steps between averages of second moments.
    pub second: u64,
}

/// Averages parameters every `every` steps, first moments every [`MomentPeriods::first`] steps and second
/// moments every [`MomentPeriods::second`] steps. Lookahead's slow weights are averaged with the parameters.
/// What is not averaged stays different on each replica.
///
/// Means are weighted. With Adam, and P parameters on n ranks, a rank sends
/// `8 P (n - 1) / n (1 / every + 1 / first + 1 / second)` bytes per step. The codec is used for parameters
/// alone: where it rounded a second moment to zero, only `eps` would be left to divide by. With equal periods
/// the method is local Adam.
///
/// Source: Iacob et al. 2025, "`DES-LOC`: Desynced Low Communication Adaptive Optimizers for Training
/// Foundation Models", Alg. 1. Differs: moments are averaged together with parameters, so their periods are
/// multiples of `every`; replicas are weighted by their tokens.
#[derive(Debug)]
pub struct DesLoc {
    /// Averages parameters: an outer step by the whole mean.
    params: DiLoCo,
    every: u64,
    periods: MomentPeriods,
    /// Averages everything else, without a codec.
    plain: Average,
    /// Mean of each optimizer state, once it was averaged.
    means: Vec<Tensor>,
    /// Indices of the states whose means the next commit applies.
    due: Vec<usize>,
    /// Indices of the states whose means the last commit applied.
    applied: Vec<usize>,
}

impl MomentPeriods {
    /// Returns the paper's periods for parameters that are averaged every `every` steps.
    #[must_use]
    pub const fn of(every: u64) -> Self {
        Self { first: every.saturating_mul(3), second: every.saturating_mul(6) }
    }
}

fn multiple(field: &'static str, value: u64, every: u64) -> Result<(), OptimError> {
    let expected = "a multiple of the number of steps between averages of parameters";
    let refused = OptimError::Setting { transform: "sync", field, value: value as f64, expected };
    if value > 0 && value.is_multiple_of(every) { Ok(()) } else { Err(refused) }
}

/// Returns the name of the mean of an optimizer state.
fn mean_of(state: usize) -> String {
    format!("state{state}")
}

impl DesLoc {
    /// Creates the method with the parameters of `settings` as its anchor.
    ///
    /// Errors: [`OptimError::Setting`] if a period of moments is not a multiple of the parameters' period;
    /// those of [`Average::new`].
    pub fn new(settings: SyncSettings<'_>) -> Result<Self, OptimError> {
        let (every, periods) = (settings.every.max(1), settings.moments);
        multiple("first-moment-every", periods.first, every)?;
        multiple("second-moment-every", periods.second, every)?;
        let plain = AverageConfig {
            codec: Coding::default(),
            algorithm: Algorithm::Ring,
            warmup: 0,
            ..settings.average.clone()
        };
        let plain = Average::new(settings.comm.clone(), settings.device, settings.layout, plain)?;
        let params = DiLoCo::new(SyncSettings { outer_lr: 1.0, outer_momentum: 0.0, ..settings })?;
        Ok(Self { params, every, periods, plain, means: Vec::new(), due: Vec::new(), applied: Vec::new() })
    }

    /// Returns whether states of a kind are averaged after a step.
    const fn averages(&self, kind: StateKind, after: StepEnd) -> bool {
        let every = match kind {
            StateKind::Weights => self.every,
            StateKind::FirstMoment => self.periods.first,
            StateKind::SecondMoment => self.periods.second,
        };
        after.step.is_multiple_of(every)
    }
}

impl Synchroniser for DesLoc {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn is_due(&self, after: StepEnd) -> bool {
        self.params.is_due(after)
    }
    fn exchange(&mut self, params: &Tensor, after: StepEnd, weight: f64) -> Result<(), OptimError> {
        self.params.exchange(params, after, weight)
    }
    fn exchange_accumulated(
        &mut self,
        params: &Tensor,
        chain: &Chain,
        after: StepEnd,
        weight: f64,
    ) -> Result<(), OptimError> {
        self.due.clear();
        for (number, (kind, state)) in chain.kinds().enumerate() {
            if self.means.len() == number {
                self.means.push(state.device().zeros(state.shape())?);
            }
            if self.averages(kind, after) {
                let mean = &mut self.means[number];
                copy(state, mean)?;
                weigh(mean, weight)?;
                self.plain.all(mean)?;
                self.plain.commit();
                self.due.push(number);
            }
        }
        self.params.exchange(params, after, weight)
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        self.params.exchanged()
    }
    fn exchanged_beside(&mut self) -> Vec<&mut Tensor> {
        let means = self.means.iter_mut().enumerate();
        means.filter(|(number, _)| self.due.contains(number)).map(|(_, mean)| mean).collect()
    }
    fn averaged(&self) -> Vec<(String, &Tensor)> {
        let means = self.applied.iter().map(|&number| (mean_of(number), &self.means[number]));
        self.params.averaged().into_iter().chain(means).collect()
    }
    fn set_averaged(
        &mut self,
        chain: &Chain,
        get: &dyn Fn(&str) -> Option<Vec<f32>>,
    ) -> Result<(), OptimError> {
        self.due.clear();
        for (number, (_, state)) in chain.kinds().enumerate() {
            if self.means.len() == number {
                self.means.push(state.device().zeros(state.shape())?);
            }
            if let Some(values) = optional(get, &mean_of(number), state.shape().len())? {
                self.means[number].write(&values)?;
                self.due.push(number);
            }
        }
        self.params.set_averaged(chain, get)
    }
    fn averaged_states(&self) -> &[usize] {
        &self.applied
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        for &state in &self.due {
            if !is_finite(self.means[state].view())? {
                return Err(OptimError::StepNotFinite { name: "moments".to_owned() });
            }
        }
        self.params.prepare()
    }
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        self.applied = std::mem::take(&mut self.due);
        self.params.commit(params)
    }
    fn commit_accumulated(&mut self, params: &mut Tensor, chain: &mut Chain) -> Result<(), OptimError> {
        for (number, (_, state)) in chain.kinds_mut().enumerate() {
            if self.due.contains(&number) {
                copy(&self.means[number], state)?;
            }
        }
        self.commit(params)
    }
    fn agreed(&self) -> Option<&Tensor> {
        self.params.agreed()
    }
    fn drop_in_flight(&mut self) {
        self.due.clear();
        self.plain.open();
        self.params.drop_in_flight();
    }
    fn rollback(&mut self) {
        self.due.clear();
        self.plain.rollback();
        self.params.rollback();
    }
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError> {
        self.params.on_params_set(params)
    }
    fn steps(&self) -> u64 {
        self.params.steps()
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        self.params.states()
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        self.params.restore(steps, get)
    }
    fn average(&self) -> &Average {
        self.params.average()
    }
    fn held(&self) -> Bytes {
        self.params.average().held() + self.plain.held()
    }
    fn average_mut(&mut self) -> &mut Average {
        self.params.average_mut()
    }
}
