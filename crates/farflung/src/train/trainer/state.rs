//! A rank's state in checkpoints, written and restored: weights and optimizer states by the names of tensors,
//! which any plan can read, and residuals of codecs, which only the rank that wrote them can.

use std::collections::BTreeMap;
use std::path::Path;

use farflung_base::StageId;
use farflung_tensor::ParamLayout;

use super::{Trainer, by_number};
use crate::Result;
use crate::config::choice::StoreKind;
use crate::train::boundary::{Boundaries, Stores};
use crate::train::checkpoint::{
    AVERAGE, Counters, LOSS_SCALE, Needed, OwnTensors, Residuals, RestoredResiduals, Source,
};
use crate::train::executor::Executor;
use crate::train::job::Job;
use crate::train::part::{Part, copy};
use crate::train::pieces::{Piece, PieceValues, StateKind};

impl Trainer {
    /// Returns the first layer of each part that the rank holds, and the one after its last.
    pub(in crate::train) fn layers(&self) -> Vec<(usize, usize)> {
        let layers = |&stage: &StageId| {
            let layers = &self.schedule.layers[self.executor.placement.part(stage) as usize];
            (layers.start, layers.end)
        };
        self.executor.parts.keys().map(layers).collect()
    }

    /// Runs `work` with the parameters that all replicas have in common. If replicas differ, these replace each
    /// replica's own parameters meanwhile. A collective: all ranks must call it.
    pub(in crate::train) fn with_common<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let Executor { parts, placement, .. } = &mut self.executor;
        if parts.values().any(|part| part.own.is_some()) {
            return work(self);
        }
        for (_, part) in by_number(parts, placement) {
            let Some(sync) = part.sync.as_mut().filter(|sync| sync.replicas_differ()) else { continue };
            sync.gather_common(&part.params)?;
            if let Some(common) = sync.common() {
                let common = copy(common)?;
                part.own = Some(std::mem::replace(&mut part.params, common));
            }
        }
        let done = work(self);
        for part in self.executor.parts.values_mut() {
            if let Some(own) = part.own.take() {
                part.params = own;
            }
        }
        done
    }

    /// Waits for exchanges between replicas that are in flight, since their results belong to the saved state.
    /// A collective: all ranks must call it.
    pub(in crate::train) fn wait_in_flight(&mut self) -> Result<()> {
        self.wait_for_states()?;
        let Executor { parts, placement, .. } = &mut self.executor;
        let syncs = by_number(parts, placement).into_iter().filter_map(|(_, part)| part.sync.as_mut());
        syncs.into_iter().try_for_each(|sync| Ok(sync.wait_in_flight()?))
    }

    /// Returns which tensors its parts have.
    pub(in crate::train) fn needed(&self) -> Needed {
        let mut parts = BTreeMap::new();
        for param in self.executor.parts.values().flat_map(|part| part.stage.layout().params()) {
            *parts.entry(param.name.clone()).or_default() += 1;
        }
        let width = self.stage().share().clone();
        Needed::Parts(OwnTensors { parts, width })
    }

    /// Returns the numbers of steps, of the method's averages, and of rounds.
    pub(in crate::train) fn counters(&self) -> Counters {
        let sync = self.executor.parts.values().find_map(|part| part.sync.as_ref());
        Counters {
            step: self.step,
            outer_step: sync.map_or(0, |sync| sync.steps()),
            rounds: sync.map_or(0, |sync| sync.average().round()),
        }
    }

    /// Returns the state of its parts that is of these kinds.
    pub(super) fn pieces_of(
        &self,
        is_wanted: impl Fn(&StateKind) -> bool,
    ) -> impl Iterator<Item = Piece<'_>> {
        self.executor.parts.values().flat_map(move |part| {
            let states = part.states(self.each_step).into_iter().filter(|state| is_wanted(&state.kind));
            states.flat_map(|state| state.pieces(&part.stage)).collect::<Vec<_>>()
        })
    }

    /// Returns the optimizer states by tensor, the loss scale, and the residuals. A tensor that two parts share
    /// is returned once.
    pub(in crate::train) fn states(&self) -> Result<Vec<Piece<'_>>> {
        let pieces = self.pieces_of(|kind| *kind != StateKind::Parameters);
        let by_name: BTreeMap<_, _> = pieces.map(|piece| (piece.name.clone(), piece)).collect();
        let host = |name: String, values: Vec<f32>| Piece {
            name,
            shape: vec![values.len()],
            cut: false,
            values: PieceValues::Host(values),
        };
        let mut states: Vec<Piece<'_>> = by_name.into_values().collect();
        states.push(host(LOSS_SCALE.to_owned(), self.scale.save().to_vec()));
        for (stage, part) in &self.executor.parts {
            if let Some(sync) = &part.sync {
                let saved = sync.average().save(&average_prefix(*stage))?;
                states.extend(saved.into_iter().map(|(name, values)| host(name, values)));
            }
        }
        Ok(states)
    }

    /// Returns the codecs of the pipeline boundaries, with their state.
    pub(in crate::train) const fn boundaries(&self) -> &Boundaries {
        &self.executor.boundaries
    }

    /// Returns the codecs of the pipeline boundaries for writing.
    pub(in crate::train) const fn boundaries_mut(&mut self) -> &mut Boundaries {
        &mut self.executor.boundaries
    }

    /// Moves the stores of boundary samples to where the settings request them: in memory, or in files in the
    /// rank's folder.
    ///
    /// Errors: files that cannot be opened.
    pub(in crate::train) fn hold_samples(&mut self, job: &Job, folder: Option<&Path>) -> Result<()> {
        let (Some(folder), Some(windows)) = (folder, self.executor.source.windows()) else { return Ok(()) };
        // The trainer was made with stores in memory: nothing to do.
        let mapped = match job.config.boundary_store {
            StoreKind::Memory => return Ok(()),
            StoreKind::File => false,
            StoreKind::Mapped => true,
        };
        let stores = Stores::files(folder, mapped, windows);
        let slices = self.division.positions(self.tensor, &self.schedule.slices)?;
        let placement = &self.executor.placement;
        self.executor.boundaries = Boundaries::new(job, placement, self.position, &slices, &stores)?;
        Ok(())
    }

    /// Drops, at both ends of each boundary, the samples that the two ends do not hold equally. Returns the
    /// number of samples that this rank dropped. A collective: all ranks must call it.
    pub(in crate::train) fn agree_on_samples(&mut self) -> Result<usize> {
        let Executor { boundaries, comm, pipeline, source, .. } = &mut self.executor;
        boundaries.agree(comm, pipeline, source.windows().unwrap_or(0))
    }

    /// Returns, for each average, a hash of what its residuals belong to: the codec, the parameters of each
    /// bucket, and the ranges that this rank encodes. The names are the prefixes of its states.
    pub(in crate::train) fn residual_layouts(&self, codec: &str) -> BTreeMap<String, String> {
        let layout = |(stage, part): (&StageId, &Part)| {
            let text = format!("{codec}; {}", part.sync.as_ref()?.average().residual_layout());
            Some((average_prefix(*stage), blake3::hash(text.as_bytes()).to_hex().to_string()))
        };
        self.executor.parts.iter().filter_map(layout).collect()
    }

    /// Restores the state of the checkpoint `from`, for averages with the codec `codec`. Residuals are restored
    /// only if this rank wrote them with its current parts, and for the same ranges of values.
    pub(in crate::train) fn restore(&mut self, from: &mut Source, codec: &str) -> Result<RestoredResiduals> {
        let layouts = self.residual_layouts(codec);
        let mut restored: Vec<String> = Vec::new();
        let updates = self.samples.taken(from.step()) * self.updates;
        for (stage, part) in &mut self.executor.parts {
            let layout = part.stage.layout().clone();
            let whole = (0..layout.len()).into();
            let own = if part.weights.is_some() { part.chain.shard() } else { &whole };
            part.params.write(&from.take_weights(&layout, own)?)?;
            part.params_changed();
            restore_chain(part, &layout, from, updates)?;
            let Some(sync) = &mut part.sync else { continue };
            sync.on_params_set(&part.params)?;
            // If the checkpoint was written under another division of the model, state that differs between
            // replicas and exchanges in flight cannot be assigned to ranks. Only the shared state is restored
            // then.
            let (alike, whole) = (from.residuals != Residuals::None, (0..layout.len()).into());
            let shared: Vec<String> = sync.states().into_iter().map(|(name, _)| name.to_owned()).collect();
            let state = |name: &str| {
                let known = alike || shared.iter().any(|shared| shared == name);
                known
                    .then(|| from.flat(&StateKind::Method(name.to_owned()).name(), &layout, &whole))
                    .flatten()
            };
            sync.restore(from.outer_step(), &state)?;
            if let Some(own) = from
                .flat(&StateKind::OwnParameters.name(), &layout, &whole)
                .filter(|_| alike && sync.replicas_differ())
            {
                part.params.write(&own)?;
            }
            let (prefix, average) = (average_prefix(*stage), sync.average_mut());
            match from.residuals {
                Residuals::Own if from.has_residuals_of(&prefix, layouts.get(&prefix)) => {
                    average.restore(&prefix, from.rounds(), |name| from.state(name))?;
                    restored.push(prefix);
                }
                // The residuals are another rank's or of other ranges, and are not restored, but all ranks must
                // be in the same round: random masks are drawn from its number.
                Residuals::Own | Residuals::Others => {
                    average.restore(&prefix, from.rounds(), |_| Some(&[]))?;
                }
                Residuals::None => {}
            }
        }
        self.scale.restore(from.state(LOSS_SCALE).unwrap_or_default());
        self.step = from.step();
        self.window.clear();
        self.resync.restart(self.step);
        // A note already says that another rank's are not used.
        let all = from.residuals == Residuals::Others || !from.has_other_residuals(&restored);
        Ok(if all { RestoredResiduals::Kept } else { RestoredResiduals::Dropped })
    }
}

/// Returns the prefix of the names of an average's states.
fn average_prefix(stage: StageId) -> String {
    format!("{AVERAGE}{stage}.")
}

/// Restores a part's optimizer from a checkpoint's states, after `updates` updates.
fn restore_chain(part: &mut Part, layout: &ParamLayout, from: &mut Source, updates: u64) -> Result<()> {
    if part.disk.is_some() {
        // Its states are written to the disk later.
        part.chain.resume_at(updates);
        return Ok(());
    }
    let names: Vec<String> = part.chain.states().map(|(name, _)| name.to_owned()).collect();
    let shard = part.chain.shard().clone();
    let states: BTreeMap<String, Vec<f32>> = names
        .into_iter()
        .filter_map(|name| {
            let state = StateKind::Optimizer(name.clone());
            Some((name, from.take_flat(&state.name(), layout, &shard)?))
        })
        .collect();
    Ok(part.chain.restore(updates, |name| states.get(name).map(Vec::as_slice))?)
}
