//! The record of what a rank of a pool has done in a pass, from which the pass continues after another rank was
//! lost.

use std::collections::BTreeMap;

use farflung_parallel::pipeline::{Action, CellProgress, ComputeKind, Content, ResumedStep};

/// A message to another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KeptMessage {
    pub(super) microbatch: u32,
    pub(super) content: Content,
}

/// What a rank has done in a training pass, by microbatch.
#[derive(Debug, Default)]
pub(super) struct WorkRecord {
    /// What is done of each microbatch.
    pub(super) progress: BTreeMap<u32, CellProgress>,
    /// The messages that it has made for other ranks, as they are sent.
    pub(super) sent: BTreeMap<KeptMessage, Vec<u8>>,
    /// Sums of losses, if this rank has the model's last part.
    pub(super) losses: BTreeMap<u32, f64>,
    /// Whether the gradients may contain a part of a microbatch: adding it did not end.
    is_torn: bool,
}

impl WorkRecord {
    /// Returns whether the gradients are those of all microbatches whose work is complete.
    pub(super) const fn has_whole_gradients(&self) -> bool {
        !self.is_torn
    }
}

/// What is kept of a pass, and what of a pass was done before it began. Records nothing unless the run keeps
/// the work of steps that fail.
#[derive(Debug, Default)]
pub(super) struct KeptPass {
    keeps: bool,
    /// The record of the training pass; `None` in other passes.
    record: Option<WorkRecord>,
    resumed: Option<ResumedStep>,
    /// Whether the first step is the rest of one that failed, so that routes are not those of the plan.
    has_resumed: bool,
    /// Whether the next pass is the rest of `resumed`.
    is_due: bool,
}

impl KeptPass {
    /// Creates one. With `resumed`, the first training pass is the rest of that step.
    pub(super) fn new(keeps: bool, resumed: Option<ResumedStep>) -> Self {
        let has_resumed = resumed.is_some();
        Self { keeps, record: None, resumed, has_resumed, is_due: has_resumed }
    }

    /// Sets the work that this rank has done of the resumed step.
    pub(super) fn set_record(&mut self, record: WorkRecord) {
        self.record = Some(record);
    }

    /// Returns the work of the pass so far, and forgets it.
    pub(super) fn take_record(&mut self) -> Option<WorkRecord> {
        self.record.take()
    }

    /// Records that the step is committed: nothing of it is needed any more.
    pub(super) fn end(&mut self) {
        self.record = None;
    }

    /// Begins a pass. Returns whether it is the rest of a resumed step.
    pub(super) fn begin(&mut self, trains: bool) -> bool {
        let resumes = std::mem::take(&mut self.is_due) && trains;
        if !resumes {
            (self.resumed, self.record) = (None, None);
        }
        if self.keeps && trains {
            self.record.get_or_insert_default();
        }
        resumes
    }

    /// Returns whether a computation was done before the pass. `part` is its part of the model.
    pub(super) fn is_done(&self, action: Action, part: u32) -> bool {
        let Some(resumed) = &self.resumed else { return false };
        let done = resumed.progress(action.microbatch, part);
        match action.kind {
            ComputeKind::Recompute => done >= CellProgress::InputGradient,
            kind => CellProgress::after(kind).is_some_and(|after| done >= after),
        }
    }

    /// Returns whether the rank that takes a message of a part needs it.
    pub(super) fn needs(&self, microbatch: u32, part: u32, content: Content) -> bool {
        self.resumed.as_ref().is_none_or(|resumed| resumed.needs(microbatch, part, content))
    }

    /// Records that a computation begins, which adds to the gradients if it is of that kind.
    pub(super) fn begins(&mut self, kind: ComputeKind) {
        if let Some(record) = &mut self.record {
            record.is_torn |= CellProgress::after(kind) == Some(CellProgress::WeightGradient);
        }
    }

    /// Records that a computation is done.
    pub(super) fn did(&mut self, action: Action) {
        if let (Some(record), Some(after)) = (&mut self.record, CellProgress::after(action.kind)) {
            record.progress.insert(action.microbatch, after);
            record.is_torn = false;
        }
    }

    /// Keeps a message that is sent.
    pub(super) fn keep(&mut self, message: KeptMessage, bytes: &[u8]) {
        if let Some(record) = &mut self.record {
            record.sent.insert(message, bytes.to_vec());
        }
    }

    /// Returns a message that was made before the pass.
    pub(super) fn sent(&self, message: KeptMessage) -> Option<&[u8]> {
        self.record.as_ref()?.sent.get(&message).map(Vec::as_slice)
    }

    /// Returns the sums of losses from before the pass.
    pub(super) fn losses(&self) -> BTreeMap<u32, f64> {
        self.record.as_ref().map_or_else(BTreeMap::new, |record| record.losses.clone())
    }

    /// Keeps the sums of losses of the pass.
    pub(super) fn keep_losses(&mut self, losses: &BTreeMap<u32, f64>) {
        if let Some(record) = &mut self.record {
            record.losses.clone_from(losses);
        }
    }

    /// Returns whether routes are those of a step that was resumed, and not those of the plan.
    pub(super) const fn has_resumed(&self) -> bool {
        self.has_resumed
    }
}
