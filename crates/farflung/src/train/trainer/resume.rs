//! Continuation of a step of pools that failed because a rank was lost: the other ranks keep what they have
//! computed, and only the work of the lost rank is done again.

use std::collections::BTreeMap;

use farflung_parallel::Plan;
use farflung_parallel::pipeline::{Action, CellProgress, ComputeKind, Content, KeptCell, ResumedStep};
use farflung_tensor::Tensor;

use super::Trainer;
use crate::train::executor::{Pass, RouterRecord};
use crate::train::job::Job;
use crate::train::kept_pass::{KeptMessage, WorkRecord};
use crate::train::part::SavedMicrobatch;
use crate::train::run_state::RunCounters;

/// What a rank has computed of a step that failed.
#[derive(Debug)]
pub(super) struct KeptWork {
    /// Number of steps done before it, and of microbatches of all ranks in them.
    step: u64,
    microbatches: u64,
    /// The saved loss scale, which is a factor of the gradients.
    scale: Vec<f32>,
    /// The part of the model.
    part: u32,
    record: WorkRecord,
    routers: RouterRecord,
    /// What the rank keeps of each microbatch whose work is not complete.
    held: BTreeMap<u32, SavedMicrobatch>,
    /// The sum of the gradients of the microbatches whose work is complete.
    grads: Tensor,
}

impl KeptWork {
    /// Returns what is done of each microbatch.
    fn cells(&self) -> Vec<KeptCell> {
        let cell = |(&microbatch, &progress)| KeptCell { microbatch, progress };
        self.record.progress.iter().map(cell).collect()
    }
}

/// Returns whether ranks compute a microbatch alike under two plans.
fn compute_alike(a: &Plan, b: &Plan) -> bool {
    a.parts == b.parts
        && a.boundaries == b.boundaries
        && a.batch == b.batch
        && a.microbatches == b.microbatches
}

impl Trainer {
    /// Keeps the work of the step in flight, which is dropped, if the run does so and nothing of it is missing.
    pub(super) fn keep_work(&mut self) {
        let executor = &mut self.executor;
        let Pass::Training { first } = executor.pass else { return };
        let Some(mut record) = executor.kept.take_record() else { return };
        let losses =
            executor.losses.drain(..).map(|(microbatch, loss)| Some((microbatch, loss.wait().ok()?)));
        let losses: Option<Vec<_>> = losses.collect();
        let held = std::mem::take(&mut executor.held);
        let mut routers = executor.routers.take_record();
        let placement = &executor.placement;
        let mut parts = executor.parts.iter_mut();
        let (Some((&stage, part)), None, Some(losses)) = (parts.next(), parts.next(), losses) else { return };
        record.losses.extend(losses);
        let (is_first, is_last) = (placement.is_first(stage), placement.is_last(stage));
        let mut held: BTreeMap<u32, SavedMicrobatch> =
            held.into_iter().map(|((_, microbatch, _), held)| (microbatch, held)).collect();
        let has_all = |microbatch: u32, progress: CellProgress| {
            let sent = |content| record.sent.contains_key(&KeptMessage { microbatch, content });
            let forward =
                if is_last { record.losses.contains_key(&microbatch) } else { sent(Content::Activation) };
            let backward = progress < CellProgress::InputGradient || is_first || sent(Content::Gradient);
            forward
                && backward
                && (progress == CellProgress::WeightGradient || held.contains_key(&microbatch))
        };
        let cells = record.progress.iter().map(|(&microbatch, &progress)| KeptCell { microbatch, progress });
        let lacking: Vec<KeptCell> = cells.filter(|cell| !has_all(cell.microbatch, cell.progress)).collect();
        // What a microbatch has added to the gradients cannot be taken away again.
        let is_added = |cell: &KeptCell| cell.progress == CellProgress::WeightGradient;
        if !record.has_whole_gradients() || lacking.iter().any(is_added) {
            return;
        }
        for KeptCell { microbatch, .. } in lacking {
            record.progress.remove(&microbatch);
            record.losses.remove(&microbatch);
            record.sent.retain(|message, _| message.microbatch != microbatch);
            held.remove(&microbatch);
            routers.forget(microbatch);
        }
        let Ok(grads) = part.take_own_gradients() else { return };
        self.kept = (!record.progress.is_empty()).then(|| KeptWork {
            step: self.step,
            microbatches: first,
            scale: self.scale.save().to_vec(),
            part: self.executor.placement.part(stage),
            record,
            routers,
            held,
            grads,
        });
    }

    /// Returns what this rank keeps of the step in flight for a plan in which it has the rank `rank`: nothing
    /// if it then has another part of the model, or if the step or its sequences are others. `job` is that of
    /// the step so far, `counted` the counters before the step.
    pub(in crate::train) fn kept_cells(
        &self,
        (job, next): (&Job, &Job),
        rank: u32,
        counted: &RunCounters,
    ) -> Vec<KeptCell> {
        let Some(kept) = &self.kept else { return Vec::new() };
        let part = next.plan.pools().and_then(|pools| pools.stage_of(rank));
        let same = part == Some(kept.part)
            && compute_alike(&job.plan, &next.plan)
            && (kept.step, kept.microbatches) == (counted.step, counted.microbatches)
            && kept.scale == counted.optimizer.scale;
        if same { kept.cells() } else { Vec::new() }
    }

    /// Takes over the work that another trainer of this rank has kept of the step that this one resumes.
    pub(super) fn resume_with(&mut self, before: &mut Self, step: &ResumedStep) {
        let Some(KeptWork { part, record, routers, mut held, grads, .. }) = before.kept.take() else {
            return;
        };
        // If this rank has not reported its work, others do it.
        let is_counted = |(&microbatch, &done): (&u32, &CellProgress)| {
            let rank = step.routes().get(microbatch as usize).and_then(|route| route.get(part as usize));
            rank == Some(&self.position) && step.progress(microbatch, part) == done
        };
        if !record.progress.iter().all(is_counted) {
            return;
        }
        // A microbatch may have another route now, and so another stage of the placement on this rank.
        for (rank, Action { kind, stage, microbatch, .. }) in self.schedule.schedule.order().actions() {
            if rank == self.position
                && kind == ComputeKind::Forward
                && let Some(held) = held.remove(&microbatch)
            {
                self.executor.held.insert((stage, microbatch, 0), held);
            }
        }
        let has_any = record.progress.values().any(|&done| done == CellProgress::WeightGradient);
        if let Some(part) = self.executor.parts.values_mut().next() {
            part.continue_with(has_any.then_some(grads));
        }
        self.executor.kept.set_record(record);
        self.executor.routers.set_record(routers);
    }

    /// Frees what this rank has computed of the step in flight: the step is done again as a whole.
    pub(in crate::train) fn forget_work(&mut self) {
        self.kept = None;
    }

    /// Returns whether this trainer's routes are those of a step that was resumed, and not those of the plan.
    pub(in crate::train) const fn has_resumed(&self) -> bool {
        self.executor.kept.has_resumed()
    }
}
