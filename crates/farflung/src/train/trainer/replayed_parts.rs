//! Parts of the model, or the whole model, on a process that takes no steps in the run yet: their state after a
//! step, and the replay of the steps since from the averaged gradients. The update is computed again, with the
//! same bits on the same kind of device. With local steps the synchronisations are replayed, from what the
//! replicas have averaged, and one replica's optimizer is fetched by itself.

use std::collections::BTreeSet;
use std::ops::Range;

use farflung_comm::Communicator;
use farflung_optim::sync::Synchroniser;
use farflung_optim::{Chain, Prepared, global_norm};
use farflung_tensor::{Device, Tensor};
use farflung_zoo::Stage;

use super::build::{chain, replayed_method};
use super::take_state::{TakingPart, take_optimizer};
use crate::train::job::Job;
use crate::train::pieces::StateKind;
use crate::train::run_state::{RunCounters, RunState, check_flat, flat_of};
use crate::{Error, Result};

pub(super) fn wrong_record(problem: &'static str) -> Error {
    Error::Message { message: "the record of a step".to_owned(), problem }
}

/// A part of the model with its optimizer.
#[derive(Debug)]
struct ReplayedPart {
    stage: Stage,
    params: Tensor,
    grads: Tensor,
    chain: Chain,
    /// With local steps: the method that averages, if the part has parameters.
    sync: Option<Box<dyn Synchroniser>>,
}

/// Parts of the model that are replayed step by step.
#[derive(Debug)]
pub(in crate::train) struct ReplayedParts {
    layers: Vec<Range<usize>>,
    parts: Vec<ReplayedPart>,
    counted: RunCounters,
    each_step: bool,
    is_whole: bool,
    /// With local steps: number of averages replayed since the optimizer was taken; `None` without it.
    optimizer_age: Option<u32>,
}

impl ReplayedParts {
    /// Makes the parts of a copy, with the settings of the run. `alone` contains this rank only.
    ///
    /// Errors: those of the model, if the layers of the copy are not in it; [`Error::Message`] if parts
    /// overlap, or if a tensor is missing or has another length.
    pub(in crate::train) fn new(
        (job, alone): (&Job, &Communicator),
        device: &Device,
        copy: &RunState,
    ) -> Result<Self> {
        let each_step = job.averages_each_step();
        let RunState { layers, counted, .. } = copy;
        if !are_disjoint(layers, job.model.layers()) {
            let message = "the copy of other members' parts".to_owned();
            return Err(Error::Message { message, problem: "has parts that overlap" });
        }
        let part = |layers: &Range<usize>| {
            let stage = Stage::new(&job.model, layers.clone(), device)?;
            let (mut params, grads) = (stage.zeros()?, stage.zeros()?);
            let (whole, every) = (0..stage.layout().len(), job.plan.outermost().every.into());
            let mut chain = chain(&job.config, device, (&stage, whole.into()), (1, every))?.chain;
            let mut sync = None;
            if !each_step && !stage.layout().is_empty() {
                sync = Some(replayed_method((job, alone), device, &stage, &params)?);
            }
            let taking = TakingPart {
                layout: stage.layout(),
                params: &mut params,
                chain: each_step.then_some((&mut chain, counted.optimizer.updates)),
                sync: sync.as_mut(),
            };
            taking.take(counted, &|name| copy.get(name))?;
            Ok::<_, Error>(ReplayedPart { stage, params, grads, chain, sync })
        };
        Ok(Self {
            parts: layers.iter().map(part).collect::<Result<_>>()?,
            is_whole: layers.len() == 1 && layers[0] == (0..job.model.layers()),
            layers: layers.clone(),
            counted: counted.clone(),
            each_step,
            optimizer_age: None,
        })
    }

    /// Returns the number of steps done.
    pub(in crate::train) const fn step(&self) -> u64 {
        self.counted.step
    }

    /// Returns the layers of each part.
    pub(in crate::train) fn layers(&self) -> &[Range<usize>] {
        &self.layers
    }

    /// Returns the number of averages replayed since the optimizer was taken; `None` without it.
    pub(in crate::train) const fn optimizer_age(&self) -> Option<u32> {
        self.optimizer_age
    }

    /// Applies the update of the next step, or with local steps the next average, from the bytes of its record.
    ///
    /// Errors: [`Error::Message`] for bytes that are not the record of that step and of these parts; those of
    /// the optimizer and of the method.
    pub(in crate::train) fn replay(&mut self, bytes: &[u8]) -> Result<()> {
        let record = RunState::from_bytes(bytes).ok_or_else(|| wrong_record("does not read as one"))?;
        if self.each_step {
            self.replay_step(&record)?;
        } else {
            self.replay_round(&record)?;
        }
        self.counted = record.counted;
        Ok(())
    }

    fn replay_step(&mut self, record: &RunState) -> Result<()> {
        if record.step() != self.step() + 1 {
            return Err(wrong_record("is not that of the next step"));
        }
        let others = |_| wrong_record("is not that of these parts of the model");
        let flat = |part: &ReplayedPart| {
            flat_of(part.stage.layout(), &StateKind::Gradients, &|name| record.get(name)).map_err(others)
        };
        let flats = self.parts.iter().map(flat).collect::<Result<Vec<_>>>()?;
        for (part, flat) in self.parts.iter_mut().zip(flats).filter(|(_, flat)| !flat.is_empty()) {
            part.grads.write(&flat)?;
        }
        let norm = match (record.squares, &self.parts[..]) {
            (Some(squares), _) => squares.sqrt(),
            (None, [part]) if self.is_whole => global_norm(&part.grads)?,
            (None, _) => return Err(wrong_record("has no norm of the gradients")),
        };
        let prepared = Prepared::with_norm(norm)?;
        for ReplayedPart { stage, params, grads, chain, .. } in &mut self.parts {
            if !stage.layout().is_empty() {
                chain.commit(params, grads, prepared)?;
            }
        }
        Ok(())
    }

    fn replay_round(&mut self, record: &RunState) -> Result<()> {
        if record.counted.outer_steps != self.counted.outer_steps + 1 {
            return Err(wrong_record("is not that of the next round"));
        }
        let get = |name: &str| record.get(name);
        let kinds: BTreeSet<StateKind> =
            record.tensors.keys().filter_map(|name| StateKind::averaged_of(name)).collect();
        for ReplayedPart { stage, chain, sync, .. } in &mut self.parts {
            let Some(sync) = sync else { continue };
            // What the record has of one tensor, it has of all.
            kinds.iter().try_for_each(|kind| check_flat(stage.layout(), kind, &get))?;
            let averaged =
                |kind: &str| flat_of(stage.layout(), &StateKind::Averaged(kind.to_owned()), &get).ok();
            sync.set_averaged(chain, &averaged)?;
            sync.prepare()?;
        }
        for ReplayedPart { params, chain, sync, .. } in &mut self.parts {
            if let Some(sync) = sync {
                sync.commit_accumulated(params, chain)?;
                sync.average_mut().restore("", record.counted.rounds, |_| Some(&[]))?;
            }
        }
        self.optimizer_age = self.optimizer_age.map(|since| since.saturating_add(1));
        Ok(())
    }

    /// Takes the optimizer of a replica after the last average.
    ///
    /// Errors: [`Error::Message`] for bytes that are not the optimizer of these parts.
    pub(in crate::train) fn take_optimizer(&mut self, bytes: &[u8]) -> Result<()> {
        let wrong =
            |problem| Error::Message { message: "the optimizer of another member".to_owned(), problem };
        let optimizer = RunState::from_bytes(bytes).ok_or_else(|| wrong("does not read as one"))?;
        for ReplayedPart { stage, chain, .. } in &mut self.parts {
            let updates = chain.step();
            take_optimizer((stage.layout(), chain), updates, &|name| optimizer.get(name))
                .map_err(|_| wrong("does not belong to these parts of the model"))?;
        }
        self.optimizer_age = Some(0);
        Ok(())
    }

    fn add_optimizer(&self, into: &mut RunState) -> Result<()> {
        for ReplayedPart { stage, chain, .. } in &self.parts {
            for (name, state) in chain.states() {
                into.add(stage.layout(), &StateKind::Optimizer(name.to_owned()), state)?;
            }
        }
        Ok(())
    }

    /// Returns the optimizer's state, without counters, as a member would send it.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn optimizer(&self) -> Result<RunState> {
        let mut state = RunState { layers: self.layers.clone(), ..RunState::default() };
        self.add_optimizer(&mut state)?;
        Ok(state)
    }

    /// Returns the state that all replicas have in common, as a member would send it.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn shared_state(&self) -> Result<RunState> {
        let (counted, layers) = (self.counted.clone(), self.layers.clone());
        let mut state = RunState { counted, layers, ..RunState::default() };
        if self.each_step {
            self.add_optimizer(&mut state)?;
        }
        for ReplayedPart { stage, params, sync, .. } in &self.parts {
            state.add(stage.layout(), &StateKind::Parameters, params)?;
            for (name, values) in sync.iter().flat_map(|sync| sync.states()) {
                state.add(stage.layout(), &StateKind::Method(name.to_owned()), values)?;
            }
        }
        Ok(state)
    }

    /// Adds the optimizer to the state that all replicas have in common, if it was fetched. The counters stay
    /// those that all have in common: the number of updates is that of the members.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn with_optimizer(&self, mut state: RunState) -> Result<RunState> {
        if self.optimizer_age.is_none() {
            return Ok(state);
        }
        self.add_optimizer(&mut state)?;
        for (name, _) in self.parts.iter().flat_map(|part| part.chain.states()) {
            let kind = StateKind::Optimizer(name.to_owned()).name();
            if !state.counted.kinds.contains(&kind) {
                state.counted.kinds.push(kind);
            }
        }
        Ok(state)
    }
}

/// Returns whether these layers can be those of the parts of one rank: so many parts that they fit into the
/// model, without a layer that is in two of them. Otherwise a few bytes could ask for many models.
fn are_disjoint(parts: &[Range<usize>], model: usize) -> bool {
    let mut sorted: Vec<&Range<usize>> = parts.iter().collect();
    sorted.sort_unstable_by_key(|part| (part.start, part.end));
    parts.len() <= model + 1 && sorted.windows(2).all(|pair| pair[0].end <= pair[1].start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_rank_share_no_layer() {
        assert!(
            are_disjoint(&[0..2, 6..8], 8)
                && are_disjoint(&[6..8, 0..2], 8)
                && are_disjoint(&[2..3, 3..3], 8)
        );
        assert!(!are_disjoint(&[0..2, 1..3], 8) && !are_disjoint(&[0..8, 0..8], 8));
        assert!(!are_disjoint(&vec![3..3; 10], 8));
    }
}
