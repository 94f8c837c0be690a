//! Averages of 0/1 Adam. At first, gradients are averaged: as plain f32 in steps that change the variance, and
//! through the codec in other steps. Later, the values that local steps accumulated are averaged.

use farflung_base::Bytes;
use farflung_tensor::Tensor;

use super::mean::copy;
use super::{Buffers, OnMemberLoss, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::finite::is_finite;
use crate::transform::SyncSchedule;
use crate::{AccumulatedUpdate, Average, AverageConfig, Chain, Coding, OptimError, weigh};

/// Row of [`METHODS`](super::METHODS) for [`ZeroOne`].
pub const ZERO_ONE: SyncMethod = SyncMethod {
    name: "zero-one",
    summary: "for --optimizer zero-one-adam: gradients in 1 bit, later local steps that are averaged in 1 bit",
    each_step: false,
    reads: &["sync-every"],
    overlaps: false,
    replicas_differ: false,
    timed: false,
    every: None,
    codec: Some("sign"),
    codes_server_changes: false,
    compensates: false,
    changing_weights: false,
    outer_momentum: None,
    on_member_loss: OnMemberLoss::Unsupported(
        "a member that missed an average cannot restore what the optimizers of the others have accumulated",
    ),
    // Anchor and mean.
    buffers: |_| Buffers { held: 2, saved: 0 },
    build: |s| Ok(Box::new(ZeroOne::new(s)?)),
};

/// Synchronises replicas whose optimizer is [`zero_one_adam`](crate::zero_one_adam), by its [`SyncSchedule`].
/// Before `freeze`, the gradients of each step are averaged, as f32 in steps that change the variance and
/// through the codec in other steps. After it, replicas average through the codec what their local steps
/// accumulated.
///
/// The codec's residuals are reset at `freeze`, because the averaged values have another scale from then on.
/// Each mean is weighted.
///
/// Source: Lu et al. 2022, "0/1 Adam", Alg. 1; `DeepSpeed`'s `zoadam.py`.
#[derive(Debug)]
pub struct ZeroOne {
    rounds: SyncSchedule,
    /// Averages gradients in steps in which the variance changes.
    plain: Average,
    /// Averages everything else.
    coded: Average,
    /// Number of steps done.
    step: u64,
    /// Number of steps done at the last synchronisation.
    last_sync: u64,
    /// Parameters at the last synchronisation.
    anchor: Tensor,
    /// What local steps accumulated: first this replica's values, then the mean of all.
    mean: Tensor,
    /// Whether the next commit applies `mean`.
    exchanged: bool,
}

impl ZeroOne {
    /// Creates the method with the rounds of the optimizer, and with the parameters of `settings` as its
    /// anchor.
    ///
    /// Errors: [`OptimError::Setting`] if there are no rounds; those of [`Average::new`].
    pub fn new(settings: SyncSettings<'_>) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, params, rounds, .. } = settings;
        let Some(rounds) = rounds else {
            let (transform, field) = ("sync", "optimizer");
            let expected = "an optimizer with rounds, such as zero-one-adam";
            return Err(OptimError::Setting { transform, field, value: 0.0, expected });
        };
        let config = AverageConfig { warmup: 0, ..average };
        let plain = AverageConfig { codec: Coding::default(), ..config.clone() };
        let mut anchor = device.zeros(layout.len())?;
        copy(params, &mut anchor)?;
        Ok(Self {
            rounds,
            plain: Average::new(comm.clone(), device, layout, plain)?,
            coded: Average::new(comm, device, layout, config)?,
            step: 0,
            last_sync: 0,
            anchor,
            mean: device.zeros(layout.len())?,
            exchanged: false,
        })
    }
}

/// Reason why the optimizer accumulates, for `expect`.
const ACCUMULATES: &str = "an optimizer with rounds accumulates its updates";

impl Synchroniser for ZeroOne {
    fn gradients(&mut self) -> Option<&mut Average> {
        if self.rounds.is_local(self.step) {
            None
        } else if self.rounds.varies(self.step) {
            Some(&mut self.plain)
        } else {
            Some(&mut self.coded)
        }
    }
    fn averages_gradients(&self) -> bool {
        !self.rounds.is_local(self.step)
    }
    fn mix(&mut self, params: &mut Tensor, after: StepEnd, _: f64) -> Result<(), OptimError> {
        self.step = after.step;
        if !self.rounds.is_local(after.step - 1) {
            self.last_sync = after.step;
            if after.step == self.rounds.freeze {
                self.coded.restore("", self.coded.round(), |_| Some(&[]))?;
                copy(params, &mut self.anchor)?;
            }
        }
        Ok(())
    }
    fn is_due(&self, after: StepEnd) -> bool {
        self.rounds.synchronises(after.step - 1) || after.last
    }
    fn exchange(&mut self, _: &Tensor, _: StepEnd, _: f64) -> Result<(), OptimError> {
        Err(OptimError::Setting {
            transform: "sync",
            field: "optimizer",
            value: 0.0,
            expected: "a call of exchange_accumulated, because the optimizer accumulates its updates",
        })
    }
    fn exchange_accumulated(
        &mut self,
        _: &Tensor,
        chain: &Chain,
        after: StepEnd,
        weight: f64,
    ) -> Result<(), OptimError> {
        if self.rounds.is_local(after.step - 1) {
            copy(chain.accumulated().expect(ACCUMULATES), &mut self.mean)?;
            weigh(&mut self.mean, weight)?;
            self.coded.all(&mut self.mean)?;
            self.exchanged = true;
        }
        Ok(())
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        if self.exchanged { Some(&mut self.mean) } else { None }
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        if self.exchanged && !is_finite(self.mean.view())? {
            return Err(OptimError::StepNotFinite { name: "accumulated updates".to_owned() });
        }
        Ok(())
    }
    fn commit(&mut self, _: &mut Tensor) -> Result<(), OptimError> {
        self.plain.commit();
        self.coded.commit();
        Ok(())
    }
    fn commit_accumulated(&mut self, params: &mut Tensor, chain: &mut Chain) -> Result<(), OptimError> {
        if std::mem::take(&mut self.exchanged) {
            let meets = AccumulatedUpdate {
                mean: &self.mean,
                anchor: &self.anchor,
                steps: self.last_sync..self.step,
            };
            chain.apply_accumulated(meets, params)?;
            copy(params, &mut self.anchor)?;
            self.last_sync = self.step;
        }
        self.commit(params)
    }
    fn agreed(&self) -> Option<&Tensor> {
        (!self.averages_gradients()).then_some(&self.anchor)
    }
    fn drop_in_flight(&mut self) {
        // Drops the local steps since the last synchronisation.
        self.step = self.last_sync;
        self.plain.open();
        self.coded.open();
    }
    fn rollback(&mut self) {
        self.exchanged = false;
        self.plain.rollback();
        self.coded.rollback();
    }
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError> {
        copy(params, &mut self.anchor)
    }
    fn steps(&self) -> u64 {
        self.step
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }
    fn restore(&mut self, steps: u64, _: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        // Checkpoints are made only after a synchronisation.
        (self.step, self.last_sync, self.exchanged) = (steps, steps, false);
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.coded
    }
    fn held(&self) -> Bytes {
        self.plain.held() + self.coded.held()
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.coded
    }
}
