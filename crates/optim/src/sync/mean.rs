//! Mean of replicas that differ. It is the model of the run; after the last step all replicas set their
//! parameters to it.

use farflung_tensor::{Device, Op, ParamLayout, Tensor};

use crate::finite::is_finite;
use crate::{Average, OptimError, weigh};

/// Copies a flat buffer.
pub(super) fn copy(from: &Tensor, to: &mut Tensor) -> Result<(), OptimError> {
    Ok(from.device().run(Op::Cast { x: from.view(), y: to.view_mut() })?)
}

/// Mean of all replicas by their weights, the same on all of them to the bit.
#[derive(Debug)]
pub(super) struct CommonMean {
    pub(super) average: Average,
    /// This replica's weight in the mean, where 1 is an equal share.
    weight: f64,
    mean: Tensor,
    /// Whether the mean was computed for [`CommonMean::common`].
    gathered: bool,
    /// Whether the next commit sets the parameters to the mean.
    last: bool,
}

impl CommonMean {
    /// Creates the mean with the weights of all replicas. An empty list means 1 for each.
    pub(super) fn new(
        average: Average,
        weights: &[f64],
        device: &Device,
        layout: &ParamLayout,
    ) -> Result<Self, OptimError> {
        let weight = weights.get(average.communicator().rank().index()).copied().unwrap_or(1.0);
        Ok(Self { average, weight, mean: device.zeros(layout.len())?, gathered: false, last: false })
    }

    /// Sets this replica's weight in later means, where 1 is an equal share.
    pub(super) const fn set_weight(&mut self, weight: f64) {
        self.weight = weight;
    }

    fn compute(&mut self, params: &Tensor) -> Result<(), OptimError> {
        copy(params, &mut self.mean)?;
        weigh(&mut self.mean, self.weight)?;
        self.average.all(&mut self.mean)?;
        Ok(())
    }

    /// Computes the mean after the last step, for [`CommonMean::commit`]. Does nothing after other steps.
    pub(super) fn exchange(&mut self, params: &Tensor, last: bool) -> Result<(), OptimError> {
        self.last = last;
        if last { self.compute(params) } else { Ok(()) }
    }

    /// Returns the mean that the next commit applies.
    pub(super) fn exchanged(&mut self) -> Option<&mut Tensor> {
        if self.last { Some(&mut self.mean) } else { None }
    }

    /// Checks that the mean that the next commit applies is finite.
    ///
    /// Errors: [`OptimError::StepNotFinite`] if it is not.
    pub(super) fn prepare(&self) -> Result<(), OptimError> {
        if self.last && !is_finite(self.mean.view())? {
            return Err(OptimError::StepNotFinite { name: "parameters".to_owned() });
        }
        Ok(())
    }

    /// Sets the parameters to the mean, after the last step.
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

    /// Returns the mean that [`CommonMean::gather`] computed last.
    pub(super) fn common(&self) -> Option<&Tensor> {
        self.gathered.then_some(&self.mean)
    }
}
