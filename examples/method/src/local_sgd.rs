//! Local SGD: copies train for themselves, and take the mean of their parameters every few steps.
//!
//! Source: McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data".

use farflung::optim::sync::{Buffers, OnMemberLoss, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use farflung::optim::{Average, OptimError};
use farflung::tensor::{Op, Tensor};

/// The row that is registered with farflung: the method's name, properties and constructor.
pub static LOCAL_SGD: SyncMethod = SyncMethod {
    name: "local-sgd",
    summary: "the mean of parameters every so many steps",
    each_step: false,
    reads: &["sync-every"],
    overlaps: false,
    replicas_differ: false,
    timed: false,
    every: None,
    codec: None,
    codes_server_changes: false,
    compensates: false,
    outer_momentum: None,
    on_member_loss: OnMemberLoss::Unsupported("a member that missed a mean has nowhere to take it from"),
    buffers: |_| Buffers { held: 1, saved: 0 },
    build: |settings| Ok(Box::new(LocalSgd::new(settings)?)),
};

#[derive(Debug)]
struct LocalSgd {
    average: Average,
    every: u64,
    mean: Tensor,
    averages: u64,
}

impl LocalSgd {
    fn new(settings: SyncSettings<'_>) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, every, .. } = settings;
        let mean = device.zeros(layout.len())?;
        Ok(Self { average: Average::new(comm, device, layout, average)?, every, mean, averages: 0 })
    }
}

fn copy(from: &Tensor, to: &mut Tensor) -> Result<(), OptimError> {
    Ok(from.device().run(Op::Cast { x: from.view(), y: to.view_mut() })?)
}

impl Synchroniser for LocalSgd {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.step.is_multiple_of(self.every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, _: StepEnd, _: f64) -> Result<(), OptimError> {
        copy(params, &mut self.mean)?;
        self.average.all(&mut self.mean)?;
        Ok(())
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        Some(&mut self.mean)
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        let finite = self.mean.to_vec::<f32>()?.iter().all(|value| value.is_finite());
        if finite { Ok(()) } else { Err(OptimError::StepNotFinite { name: "parameters".to_owned() }) }
    }
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        copy(&self.mean, params)?;
        self.average.commit();
        self.averages += 1;
        Ok(())
    }
    fn rollback(&mut self) {
        self.average.rollback();
    }
    fn on_params_set(&mut self, _: &Tensor) -> Result<(), OptimError> {
        Ok(())
    }
    fn steps(&self) -> u64 {
        self.averages
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }
    fn restore(&mut self, steps: u64, _: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        self.averages = steps;
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.average
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.average
    }
}
