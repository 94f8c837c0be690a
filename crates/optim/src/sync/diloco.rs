//! DiLoCo: local steps, then an outer step by the average change of the parameters.

use farflung_tensor::Tensor;

use super::saved::required;
use super::{BufferSettings, Buffers, OnMemberLoss, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::{Average, Chain, OptimError, OuterOptimizer, Prepared, diloco_outer, weigh};

/// Name of the averaged change of the parameters.
const DELTA: &str = "delta";

/// Row of [`METHODS`](super::METHODS) for [`DiLoCo`].
pub const DILOCO: SyncMethod = SyncMethod {
    name: "diloco",
    summary: "parameters are averaged every --sync-every steps, with an outer Nesterov step",
    each_step: false,
    reads: &["sync-every", "outer-lr", "outer-momentum"],
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
    // Anchor, delta and outer momentum, and the anchor and momentum from before a step that is being tried.
    buffers: |&BufferSettings { momentum, .. }| {
        let momentum = usize::from(momentum != 0.0);
        Buffers { held: 3 + 2 * momentum, saved: 1 + momentum }
    },
    build: |s| Ok(Box::new(DiLoCo::new(s)?)),
};

/// Averages `anchor - params` every `every` steps and moves the anchor by it.
///
/// Source: Douillard et al. 2023, "DiLoCo", Alg. 1. Differs: replicas are weighted by the tokens that they
/// trained on, and the last step of a run always averages.
#[derive(Debug)]
pub struct DiLoCo {
    average: Average,
    outer: OuterOptimizer,
    every: u64,
    prepared: Option<Prepared>,
}

impl DiLoCo {
    /// Creates the method with the parameters of `settings` as its anchor.
    ///
    /// Errors: those of [`Average::new`] and of the outer chain.
    pub fn new(settings: SyncSettings<'_>) -> Result<Self, OptimError> {
        let SyncSettings {
            comm,
            apart,
            device,
            layout,
            average,
            every,
            outer_lr,
            outer_momentum,
            params,
            ..
        } = settings;
        let outer = diloco_outer(outer_lr, outer_momentum).build(device, layout)?;
        Ok(Self {
            average: Average::with_apart(comm, apart, device, layout, average)?,
            outer: OuterOptimizer::new(outer, params)?,
            every: every.max(1),
            prepared: None,
        })
    }
}

impl Synchroniser for DiLoCo {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.step.is_multiple_of(self.every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, _: StepEnd, weight: f64) -> Result<(), OptimError> {
        let delta = self.outer.delta(params)?;
        weigh(delta, weight)?;
        self.average.all(delta)?;
        Ok(())
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        Some(self.outer.averaged_mut())
    }
    fn averaged(&self) -> Vec<(String, &Tensor)> {
        vec![(DELTA.to_owned(), self.outer.averaged())]
    }
    fn set_averaged(&mut self, _: &Chain, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let delta = self.outer.averaged_mut();
        let values = required(get, DELTA, delta.shape().len())?;
        Ok(delta.write(&values)?)
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        let prepared = self.outer.prepare()?;
        self.outer.try_step(prepared)?;
        self.prepared = Some(prepared);
        Ok(())
    }
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        if let Some(prepared) = self.prepared.take() {
            self.outer.commit(params, prepared)?;
            self.average.commit();
        }
        Ok(())
    }
    fn agreed(&self) -> Option<&Tensor> {
        Some(self.outer.anchor())
    }
    fn rollback(&mut self) {
        self.prepared = None;
        self.outer.undo();
        self.average.rollback();
    }
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError> {
        self.outer.anchor_at(params)
    }
    fn steps(&self) -> u64 {
        self.outer.step()
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        self.outer.states().collect()
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let names: Vec<String> = self.outer.states().map(|(name, _)| name.to_owned()).collect();
        let found: Vec<(String, Vec<f32>)> =
            names.into_iter().filter_map(|name| get(&name).map(|values| (name, values))).collect();
        let find = |name: &str| found.iter().find(|(n, _)| n == name).map(|(_, values)| values.as_slice());
        self.outer.restore(steps, find)
    }
    fn average(&self) -> &Average {
        &self.average
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.average
    }
}
