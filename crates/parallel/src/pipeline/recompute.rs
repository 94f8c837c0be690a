//! Recomputation in a pipeline: which microbatches run their forward again before their backward.

use farflung_base::StageId;

use super::{Action, ComputeKind, ComputeOrder, Op};

impl ComputeOrder {
    /// Returns the order with each microbatch's forward run again right before its backward.
    ///
    /// If the backward directly follows its forward, as on the last stage of 1F1B, the activations were not
    /// freed and nothing is recomputed. A recomputation needs no gradient, so it can fill the time in which a
    /// rank waits for one.
    ///
    /// Source: Huang et al. 2019, "`GPipe`", section 2.3. Starting it before the gradient arrives follows
    /// Varuna (Athlur et al. 2022). An order that already recomputes, or has no backwards, is returned
    /// unchanged.
    ///
    /// ```
    /// use farflung_parallel::pipeline::{Method, Settings};
    ///
    /// let order = Method::OneFOneB.order(&Settings::new(2, 2))?.with_recompute();
    /// assert_eq!(order.to_string(), "r0: 0F0 0F1 0R0 0B0 0R1 0B1\nr1: 1F0 1B0 1F1 1B1\n");
    /// # Ok::<(), farflung_parallel::ParallelError>(())
    /// ```
    #[must_use]
    pub fn with_recompute(self) -> Self {
        self.with_recompute_of(|_| true)
    }

    /// Adds recomputations, as [`ComputeOrder::with_recompute`] does, on some of the stages.
    #[must_use]
    pub fn with_recompute_of(mut self, wanted: impl Fn(StageId) -> bool) -> Self {
        let own = self.actions().any(|(_, action)| action.kind == ComputeKind::Recompute);
        if own {
            // The order already contains recomputations, so none are added.
            return self;
        }
        for list in &mut self.lists {
            let mut with = Vec::with_capacity(list.len() * 3 / 2);
            for &op in list.iter() {
                for action in op.actions().filter(|a| a.yields_gradient() && wanted(a.stage)) {
                    let forward = Action { kind: ComputeKind::Forward, ..action };
                    if with.last() != Some(&Op::Run(forward)) {
                        with.push(Op::Run(Action { kind: ComputeKind::Recompute, ..action }));
                    }
                }
                with.push(op);
            }
            *list = with;
        }
        self
    }
}
