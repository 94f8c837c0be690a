//! Recomputation in a pipeline: which microbatches run their forward again before their backward.

use super::{Action, ComputeKind, ComputeOrder, Op};

impl ComputeOrder {
    /// The same order with each microbatch's forward run again right before its backward.
    ///
    /// Where the backward follows its forward at once, as on the last stage of 1F1B, nothing was let go of and
    /// nothing is run again. Where a rank would wait for a gradient, the recomputation needs no gradient and
    /// fills the wait.
    ///
    /// Source: Huang et al. 2019, "`GPipe`", section 2.3; that it is issued ahead of the gradient is Varuna's
    /// (Athlur et al. 2022). An order that recomputes already is not changed, nor is one without backwards.
    ///
    /// ```
    /// use farflung_parallel::pipeline::{Method, Settings};
    ///
    /// let order = Method::OneFOneB.order(&Settings::new(2, 2))?.with_recompute();
    /// assert_eq!(order.to_string(), "r0: 0F0 0F1 0R0 0B0 0R1 0B1\nr1: 1F0 1B0 1F1 1B1\n");
    /// # Ok::<(), farflung_parallel::ParallelError>(())
    /// ```
    #[must_use]
    pub fn with_recompute(mut self) -> Self {
        let own = self.actions().any(|(_, action)| action.kind == ComputeKind::Recompute);
        if own {
            // An author who recomputes has said where.
            return self;
        }
        for list in &mut self.lists {
            let mut with = Vec::with_capacity(list.len() * 3 / 2);
            for &op in list.iter() {
                for action in op.actions().filter(|a| a.yields_gradient()) {
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
