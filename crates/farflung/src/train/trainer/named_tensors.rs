//! The state of a rank of a pipeline by tensor: the parameters and optimizer states of each, so that they can
//! be sent to any rank of any plan that needs them.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::StageId;
use farflung_optim::Chain;
use farflung_parallel::pipeline::{Placement, ResumedStep};
use farflung_parallel::plan::Needed;
use farflung_tensor::{Device, Param, ParamLayout, Tensor};
use farflung_zoo::Stage;
use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::train::bind::ReplicaSchedule;
use crate::train::floats::floats;
use crate::train::job::Job;
use crate::train::part::Part;
use crate::{Error, Result};

/// Counters of a run at the step to which some values belong.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::train) struct RunCounters {
    /// Number of steps done.
    pub(in crate::train) step: u64,
    /// Number of updates of the optimizer.
    pub(in crate::train) updates: u64,
    /// Number of rounds of averages.
    pub(in crate::train) rounds: u64,
    /// Number of microbatches of all replicas so far.
    pub(in crate::train) microbatches: u64,
    /// The saved loss scale.
    pub(in crate::train) scale: Vec<f32>,
    /// Number of states of the optimizer that follow the values of each tensor.
    pub(in crate::train) states: usize,
    /// With local steps: number of averages of the replicas so far.
    pub(in crate::train) outer_steps: u64,
    /// With local steps: the kinds of states that are tensors of their own, with the kind before the name.
    pub(in crate::train) kinds: Vec<String>,
}

/// Tensors by name: the parameters of each, followed by its optimizer states in the order of their names. With
/// local steps each state is a tensor of its own: see [`StateKind`](crate::train::pieces::StateKind).
#[derive(Debug, Clone, PartialEq)]
pub(in crate::train) struct NamedTensors {
    pub(in crate::train) counted: RunCounters,
    pub(in crate::train) tensors: BTreeMap<String, Vec<f32>>,
}

impl NamedTensors {
    /// Returns the names of its tensors.
    pub(in crate::train) fn names(&self) -> BTreeSet<String> {
        self.tensors.keys().cloned().collect()
    }

    /// Merges pieces that belong to the same step; `None` if there are none. If several have the same tensor,
    /// the first one counts.
    pub(in crate::train) fn merge(all: impl IntoIterator<Item = Self>) -> Option<Self> {
        all.into_iter().reduce(|mut all, more| {
            for (name, values) in more.tensors {
                all.tensors.entry(name).or_insert(values);
            }
            all
        })
    }
}

impl RunCounters {
    /// Returns what a rank needs that holds these tensors, given with their numbers of elements.
    pub(in crate::train) fn needed(&self, tensors: &BTreeMap<String, usize>) -> Vec<Needed> {
        let bytes = |len: usize| (len * (1 + self.states) * size_of::<f32>()) as u64;
        let of = |(name, &len): (&String, &usize)| {
            let kinds = self.kinds.iter().map(move |kind| format!("{kind}/{name}"));
            let names: Vec<String> = std::iter::once(name.clone()).chain(kinds).collect();
            names.into_iter().map(move |name| Needed { name, bytes: bytes(len) })
        };
        tensors.iter().flat_map(of).collect()
    }
}

impl NamedTensors {
    /// Encodes as bytes: the number of the bytes that follow (`u64`, little endian), the length of the head
    /// (`u64`), the head (counters, names and lengths), then all values as little-endian `f32`.
    pub(in crate::train) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 8];
        self.append_to(&mut bytes);
        let len = bytes.len() as u64 - 8;
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        bytes
    }

    /// Appends the output of [`NamedTensors::to_bytes`], without its first 8 bytes.
    pub(super) fn append_to(&self, bytes: &mut Vec<u8>) {
        let names: Vec<(&String, u64)> =
            self.tensors.iter().map(|(name, values)| (name, values.len() as u64)).collect();
        let head = postcard::to_stdvec(&(&self.counted, names)).expect("numbers and names are plain data");
        bytes.extend((head.len() as u64).to_le_bytes());
        bytes.extend(head);
        for values in self.tensors.values() {
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
    }

    /// Decodes the output of [`NamedTensors::append_to`]. Returns `None` if the bytes are not valid. Lengths in
    /// untrusted bytes are checked before anything is allocated.
    pub(in crate::train) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (len, rest) = bytes.split_first_chunk::<8>()?;
        let (head, mut rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        let (counted, names): (RunCounters, Vec<(String, u64)>) = postcard::from_bytes(head).ok()?;
        let mut tensors = BTreeMap::new();
        for (name, count) in names {
            let count = usize::try_from(count).ok()?;
            let (values, behind) = rest.split_at_checked(count.checked_mul(size_of::<f32>())?)?;
            rest = behind;
            tensors.insert(name, floats(values, count)?);
        }
        rest.is_empty().then_some(Self { counted, tensors })
    }
}

/// Returns a part's tensors by name: the parameters of each, followed by its optimizer states in the order of
/// their names.
///
/// Errors: those of the device.
pub(super) fn tensors_of(
    layout: &ParamLayout,
    params: &Tensor,
    chain: &Chain,
) -> Result<BTreeMap<String, Vec<f32>>> {
    let params = params.to_vec::<f32>()?;
    let mut states = BTreeMap::new();
    for (name, state) in chain.states() {
        states.insert(name.to_owned(), state.to_vec::<f32>()?);
    }
    let values = |param: &Param| {
        let all = std::iter::once(&params).chain(states.values());
        all.flat_map(|flat| &flat[param.range()]).copied().collect()
    };
    Ok(layout.params().iter().map(|param| (param.name.clone(), values(param))).collect())
}

/// Replaces a part's parameters and optimizer states by the tensors that `get` returns by name; the optimizer
/// has taken `updates` updates.
///
/// Errors: [`Error::Message`] if a tensor is missing or has another length; those of the optimizer.
pub(super) fn restore<'a>(
    (layout, into, chain): (&ParamLayout, &mut Tensor, &mut Chain),
    updates: u64,
    get: &dyn Fn(&str) -> Option<&'a [f32]>,
) -> Result<()> {
    let names: Vec<String> = chain.states().map(|(name, _)| name.to_owned()).collect();
    let mut flats = vec![vec![0.0_f32; layout.len()]; 1 + names.len()];
    for param in layout.params() {
        let len = param.shape.len();
        let whole = get(&param.name).filter(|values| values.len() == len * flats.len());
        let values = whole.ok_or_else(|| Error::Message {
            message: format!("{} of the run's state", param.name),
            problem: "is missing or has the wrong length",
        })?;
        for (flat, values) in flats.iter_mut().zip(values.chunks_exact(len.max(1))) {
            flat[param.range()].copy_from_slice(values);
        }
    }
    let (params, states) = flats.split_first().expect("there are parameters");
    // [`tensors_of`] writes the states in the order of their names.
    let mut sorted = names.clone();
    sorted.sort_unstable();
    let by_name: BTreeMap<&str, &Vec<f32>> = sorted.iter().map(String::as_str).zip(states).collect();
    write(into, params)?;
    Ok(chain.restore(updates, |name| by_name.get(name).map(|values| values.as_slice()))?)
}

fn names_of(layout: &ParamLayout) -> impl Iterator<Item = (String, usize)> {
    layout.params().iter().map(|param| (param.name.clone(), param.shape.len()))
}

/// Returns the names of the tensors that each rank of the job's pipeline holds, with their numbers of elements.
///
/// Errors: those of [`ReplicaSchedule::new`].
pub(in crate::train) fn needs(job: &Job) -> Result<Vec<BTreeMap<String, usize>>> {
    let schedule = ReplicaSchedule::new(job, 0)?;
    let (placement, device) = (schedule.placement(), Device::cpu(1)?);
    let holds = |stage: StageId| {
        let layers = schedule.layers[placement.part(stage) as usize].clone();
        Ok::<_, Error>(Stage::new(&job.model, layers, &device)?)
    };
    let of_rank = |placement: &Placement, rank| {
        let mut tensors = BTreeMap::new();
        for stage in placement.homes_of(rank) {
            tensors.extend(names_of(holds(stage)?.layout()));
        }
        Ok(tensors)
    };
    (0..placement.ranks()).map(farflung_base::Rank).map(|rank| of_rank(placement, rank)).collect()
}

impl Trainer {
    /// Returns this rank's parameters and optimizer states by tensor; with local steps, those after the last
    /// average.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn pieces(&self, job: &Job) -> Result<NamedTensors> {
        if !self.each_step {
            return self.round_pieces(job);
        }
        let mut tensors = BTreeMap::new();
        for part in self.executor.parts.values() {
            tensors.extend(tensors_of(part.stage.layout(), &part.params, &part.chain)?);
        }
        Ok(NamedTensors { counted: self.counted(job), tensors })
    }

    /// Returns the run's counters at this rank's last step.
    pub(in crate::train) fn counted(&self, job: &Job) -> RunCounters {
        let parts = || self.executor.parts.values();
        RunCounters {
            step: self.step,
            updates: parts().map(|part| part.chain.step()).max().unwrap_or(0),
            rounds: self.counters().rounds,
            microbatches: job.microbatches_after(self.step),
            scale: self.scale.save().to_vec(),
            states: parts().map(|part| part.chain.states().count()).max().unwrap_or(0),
            outer_steps: self.counters().outer_step,
            kinds: Vec::new(),
        }
    }

    /// Replaces this rank's counters, parameters and optimizer states. `get` returns the values of a tensor by
    /// its name. Residuals of codecs belong to the blocks of another plan, so codecs begin without any.
    ///
    /// Errors: [`Error::Message`] if a tensor is missing or has another length; those of the optimizer.
    pub(in crate::train) fn take_pieces<'a>(
        &mut self,
        counted: &RunCounters,
        get: &dyn Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<()> {
        if self.each_step {
            self.take_step_pieces(counted, get)?;
        } else {
            self.take_round_pieces(counted, get)?;
        }
        self.scale.restore(&counted.scale);
        self.step = counted.step;
        self.window.clear();
        self.unmet = false;
        self.resync.restart(self.step);
        Ok(())
    }

    fn take_step_pieces<'a>(
        &mut self,
        counted: &RunCounters,
        get: &dyn Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<()> {
        for part in self.executor.parts.values_mut() {
            let Part { stage, params, chain, .. } = part;
            restore((stage.layout(), params, chain), counted.updates, get)?;
            if let Some(sync) = &mut part.sync {
                sync.on_params_set(&part.params)?;
                sync.average_mut().restore("", counted.rounds, |_| Some(&[]))?;
            }
        }
        Ok(())
    }

    /// Makes this rank's trainer in the run's next plan, on the same device, with the values that `get` returns
    /// by name. If all ranks resume the step in which they lost another rank, it takes over the work of this
    /// one.
    ///
    /// Errors: those of [`Trainer::new`] and [`Trainer::take_pieces`].
    pub(in crate::train) fn moved_to<'a>(
        &mut self,
        (job, resumed): (&Job, Option<&ResumedStep>),
        comm: farflung_comm::Communicator,
        counted: &RunCounters,
        get: &dyn Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<Self> {
        let device = (self.plain.clone(), self.executor.interrupt.clone());
        let mut next = Self::on(job, comm, device, resumed)?;
        next.take_pieces(counted, get)?;
        if let Some(step) = resumed {
            next.resume_with(self, step);
        }
        // If all return to an earlier step, the last one is dropped, and there is nothing to record.
        if next.step == self.step {
            next.undecided.carry(self.undecided);
        }
        Ok(next)
    }
}

fn write(into: &mut Tensor, values: &[f32]) -> Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    Ok(into.write(values)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_and_other_bytes_are_none() {
        let counted = RunCounters {
            step: 7,
            updates: 7,
            rounds: 3,
            microbatches: 28,
            scale: vec![1.0],
            kinds: vec!["outer.anchor".to_owned()],
            ..RunCounters::default()
        };
        let tensors = BTreeMap::from([("a".to_owned(), vec![1.0_f32, -2.0]), ("b".to_owned(), vec![3.0])]);
        let pieces = NamedTensors { counted, tensors };
        let bytes = pieces.to_bytes();
        assert_eq!(bytes[..8], (bytes.len() as u64 - 8).to_le_bytes());
        assert_eq!(NamedTensors::from_bytes(&bytes[8..]), Some(pieces));
        for end in 8..bytes.len() {
            assert_eq!(NamedTensors::from_bytes(&bytes[8..end]), None);
        }
        assert_eq!(NamedTensors::from_bytes(&[&bytes[8..], &[0]].concat()), None);
        assert_eq!(NamedTensors::from_bytes(&[0xFF; 40]), None);
    }
}
