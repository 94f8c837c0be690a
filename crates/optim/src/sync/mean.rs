//! The mean of copies that are apart: the model of the run, and what all take after the last step.

use farflung_tensor::{Device, Op, ParamLayout, Tensor};

use crate::finite::is_finite;
use crate::{Average, OptimError, weigh};

/// Copies a flat buffer.
pub(super) fn copy(from: &Tensor, to: &mut Tensor) -> Result<(), OptimError> {
    Ok(from.device().run(Op::Cast { x: from.view(), y: to.view_mut() })?)
}

/// The mean of all copies by their weights, exactly the same on all.
#[derive(Debug)]
pub(super) struct CommonMean {
    pub(super) average: Average,
    /// This copy's part of the mean, where 1 is an equal part.
    weight: f64,
    mean: Tensor,
    /// Whether it was computed for [`CommonMean::common`].
    gathered: bool,
    /// Whether all copies are about to take it.
    last: bool,
}

impl CommonMean {
    /// With all copies' weights, which are 1 where there are none.
    pub(super) fn new(
        average: Average,
        weights: &[f64],
        device: &Device,
        layout: &ParamLayout,
    ) -> Result<Self, OptimError> {
        let weight = weights.get(average.communicator().rank().index()).copied().unwrap_or(1.0);
        Ok(Self { average, weight, mean: device.zeros(layout.len())?, gathered: false, last: false })
    }

    /// This copy's part of means from now on, where 1 is an equal part.
    pub(super) const fn set_weight(&mut self, weight: f64) {
        self.weight = weight;
    }

    fn compute(&mut self, params: &Tensor) -> Result<(), OptimError> {
        copy(params, &mut self.mean)?;
        weigh(&mut self.mean, self.weight)?;
        self.average.all(&mut self.mean)?;
        Ok(())
    }

    /// After the last step: computes the mean, which [`CommonMean::commit`] takes.
    pub(super) fn exchange(&mut self, params: &Tensor, last: bool) -> Result<(), OptimError> {
        self.last = last;
        if last { self.compute(params) } else { Ok(()) }
    }

    /// The mean that is about to be taken.
    pub(super) fn exchanged(&mut self) -> Option<&mut Tensor> {
        if self.last { Some(&mut self.mean) } else { None }
    }

    /// Errors: [`OptimError::StepNotFinite`] for a mean that is not finite.
    pub(super) fn prepare(&self) -> Result<(), OptimError> {
        if self.last && !is_finite(self.mean.view())? {
            return Err(OptimError::StepNotFinite { name: "parameters".to_owned() });
        }
        Ok(())
    }

    /// Takes the mean after the last step.
    pub(super) fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        if std::mem::take(&mut self.last) {
            copy(&self.mean, params)?;
            self.average.commit();
        }
        Ok(())
    }

    pub(super) fn rollback(&mut self) {
        self.last = false;
        self.average.rollback();
    }

    /// Computes the mean for [`CommonMean::common`].
    pub(super) fn gather(&mut self, params: &Tensor) -> Result<(), OptimError> {
        self.compute(params)?;
        self.average.commit();
        self.gathered = true;
        Ok(())
    }

    /// The mean as it was gathered last.
    pub(super) fn common(&self) -> Option<&Tensor> {
        self.gathered.then_some(&self.mean)
    }
}
