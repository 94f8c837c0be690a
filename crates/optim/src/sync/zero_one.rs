//! 0/1 Adam's averages: gradients plainly where the variance changes and through the codec elsewhere, then what
//! local steps gathered.

use farflung_tensor::Tensor;

use super::mean::copy;
use super::{After, Buffers, Missing, SyncMethod, SyncSettings, Synchroniser};
use crate::finite::is_finite;
use crate::transform::Rounds;
use crate::{Average, AverageConfig, Chain, Coding, Meets, OptimError, weigh};

/// [`ZeroOne`].
pub const ZERO_ONE: SyncMethod = SyncMethod {
    name: "zero-one",
    summary: "what --optimizer zero-one-adam takes: gradients in 1 bit, then local steps that meet in 1 bit",
    each_step: false,
    reads: &["sync-every"],
    overlaps: false,
    timed: false,
    every: None,
    codec: Some("sign"),
    codes_changes: false,
    compensates: false,
    outer_momentum: None,
    missing: Missing::Refused("a member that is behind cannot take what the others' optimizers gathered"),
    // The anchor, and the mean.
    buffers: |_| Buffers { held: 2, saved: 0 },
    build: |s| Ok(Box::new(ZeroOne::new(s)?)),
};

/// Keeps the replicas of [`zero_one_adam`](crate::zero_one_adam) one model, by its [`Rounds`]: before `freeze`
/// each step's gradients are averaged, as f32 where the variance changes and through the codec elsewhere; after
/// it replicas average what their local steps gathered, through the codec.
///
/// The codec's residuals begin anew at `freeze`: what is averaged has another scale from then on. A replica's
/// part of each mean is its weight.
///
/// Source: Lu et al. 2022, "0/1 Adam", Alg. 1; `DeepSpeed`'s `zoadam.py`.
#[derive(Debug)]
pub struct ZeroOne {
    rounds: Rounds,
    /// Of gradients where the variance changes.
    plain: Average,
    /// Of all else.
    coded: Average,
    /// Steps done.
    step: u64,
    /// Steps when replicas last met.
    met: u64,
    /// The parameters as they were then.
    anchor: Tensor,
    /// What was gathered, its own and then of all.
    mean: Tensor,
    /// Whether `mean` is about to be taken.
    exchanged: bool,
}

impl ZeroOne {
    /// With the rounds of the optimizer, anchored at the parameters of `settings`.
    ///
    /// Errors: [`OptimError::Setting`] without rounds; those of [`Average::new`].
    pub fn new(settings: SyncSettings<'_>) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, params, rounds, .. } = settings;
        let Some(rounds) = rounds else {
            let (transform, field) = ("sync", "optimizer");
            let expected = "one with rounds, as zero-one-adam";
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
            met: 0,
            anchor,
            mean: device.zeros(layout.len())?,
            exchanged: false,
        })
    }
}

/// Why an optimizer gathers.
const GATHERS: &str = "an optimizer with rounds gathers";

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
    fn mix(&mut self, params: &mut Tensor, after: After, _: f64) -> Result<(), OptimError> {
        self.step = after.step;
        if !self.rounds.is_local(after.step - 1) {
            self.met = after.step;
            if after.step == self.rounds.freeze {
                self.coded.restore("", self.coded.round(), |_| Some(&[]))?;
                copy(params, &mut self.anchor)?;
            }
        }
        Ok(())
    }
    fn is_due(&self, after: After) -> bool {
        self.rounds.meets(after.step - 1) || after.last
    }
    fn exchange(&mut self, _: &Tensor, _: After, _: f64) -> Result<(), OptimError> {
        Err(OptimError::Setting {
            transform: "sync",
            field: "optimizer",
            value: 0.0,
            expected: "one that gathers: call exchange_gathered",
        })
    }
    fn exchange_gathered(
        &mut self,
        _: &Tensor,
        chain: &Chain,
        after: After,
        weight: f64,
    ) -> Result<(), OptimError> {
        if self.rounds.is_local(after.step - 1) {
            copy(chain.gathered().expect(GATHERS), &mut self.mean)?;
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
            return Err(OptimError::StepNotFinite { name: "gathered".to_owned() });
        }
        Ok(())
    }
    fn commit(&mut self, _: &mut Tensor) -> Result<(), OptimError> {
        self.plain.commit();
        self.coded.commit();
        Ok(())
    }
    fn commit_gathered(&mut self, params: &mut Tensor, chain: &mut Chain) -> Result<(), OptimError> {
        if std::mem::take(&mut self.exchanged) {
            let meets = Meets { mean: &self.mean, anchor: &self.anchor, steps: self.met..self.step };
            chain.take_gathered(meets, params)?;
            copy(params, &mut self.anchor)?;
            self.met = self.step;
        }
        self.commit(params)
    }
    fn agreed(&self) -> Option<&Tensor> {
        (!self.averages_gradients()).then_some(&self.anchor)
    }
    fn abandon(&mut self) {
        // Local steps since replicas last met are dropped.
        self.step = self.met;
        self.plain.open();
        self.coded.open();
    }
    fn rollback(&mut self) {
        self.exchanged = false;
        self.plain.rollback();
        self.coded.rollback();
    }
    fn moved(&mut self, params: &Tensor) -> Result<(), OptimError> {
        copy(params, &mut self.anchor)
    }
    fn steps(&self) -> u64 {
        self.step
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }
    fn restore(&mut self, steps: u64, _: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        // It is saved where replicas have met.
        (self.step, self.met, self.exchanged) = (steps, steps, false);
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.coded
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.coded
    }
}
