//! Synchronous data parallelism: the gradients of each step are averaged.

use farflung_tensor::Tensor;

use super::{Buffers, OnMemberLoss, StepEnd, SyncMethod, Synchroniser};
use crate::{Average, OptimError};

/// Row of [`METHODS`](super::METHODS) for [`Ddp`].
pub const DDP: SyncMethod = SyncMethod {
    name: "ddp",
    summary: "gradients are averaged at each step",
    each_step: true,
    reads: &[],
    overlaps: false,
    replicas_differ: false,
    timed: false,
    every: Some(1),
    codec: None,
    codes_server_changes: false,
    compensates: false,
    changing_weights: true,
    outer_momentum: None,
    on_member_loss: OnMemberLoss::MeanOfOthers,
    buffers: |_| Buffers { held: 0, saved: 0 },
    build: |s| Ok(Box::new(Ddp::new(Average::with_apart(s.comm, s.apart, s.device, s.layout, s.average)?))),
};

/// Averages gradients at each step, so that replicas never differ.
///
/// Source: Li et al. 2020, "PyTorch Distributed".
#[derive(Debug)]
pub struct Ddp {
    average: Average,
}

impl Ddp {
    /// Creates the method with an average for gradients.
    #[must_use]
    pub const fn new(average: Average) -> Self {
        Self { average }
    }
}

impl Synchroniser for Ddp {
    fn gradients(&mut self) -> Option<&mut Average> {
        Some(&mut self.average)
    }
    fn is_due(&self, _: StepEnd) -> bool {
        false
    }
    fn exchange(&mut self, _: &Tensor, _: StepEnd, _: f64) -> Result<(), OptimError> {
        Ok(())
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        None
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        Ok(())
    }
    fn commit(&mut self, _: &mut Tensor) -> Result<(), OptimError> {
        self.average.commit();
        Ok(())
    }
    fn rollback(&mut self) {
        self.average.rollback();
    }
    fn on_params_set(&mut self, _: &Tensor) -> Result<(), OptimError> {
        Ok(())
    }
    fn steps(&self) -> u64 {
        0
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }
    fn restore(&mut self, _: u64, _: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.average
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.average
    }
}
