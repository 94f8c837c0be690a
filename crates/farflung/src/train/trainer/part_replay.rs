//! Parts of the model on a process that takes no steps in the run's pipelines yet: their state after a step,
//! and the replay of the steps since from the averaged gradients of these parts. The update is computed again,
//! with the same bits on the same kind of device.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::StageId;
use farflung_comm::Communicator;
use farflung_optim::sync::Synchroniser;
use farflung_optim::{Chain, Prepared};
use farflung_tensor::{Device, Tensor};
use farflung_zoo::Stage;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Trainer;
use super::build::{chain, replayed_method};
use super::named_tensors::{NamedTensors, RunCounters, restore, tensors_of};
use super::round_tensors::restore_shared;
use crate::train::fault::Fault;
use crate::train::job::Job;
use crate::{Error, Result};

/// The state of a rank's parts after a step, for another process that will hold the same parts.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::train) struct PartCopy {
    /// The layers of each part, in the order of the parts.
    layers: Vec<Range<usize>>,
    pieces: NamedTensors,
}

/// From this, the update of a step is computed again, or with local steps the average after a round.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PartRecord {
    /// Sum of the squares of the gradients of the whole model; 0 with local steps.
    pub(super) squares: f64,
    /// Averaged gradients by tensor, with the run's counters after the step. With local steps: what the
    /// replicas have averaged, with its kind before each name.
    pub(super) grads: NamedTensors,
}

/// Encodes a head (its length as `u64`, little endian, then its bytes) and the tensors after it.
fn encode(head: &impl Serialize, tensors: &NamedTensors) -> Vec<u8> {
    let head = postcard::to_stdvec(head).expect("numbers can be serialized");
    let mut bytes = (head.len() as u64).to_le_bytes().to_vec();
    bytes.extend(head);
    tensors.append_to(&mut bytes);
    bytes
}

/// Decodes the output of [`encode`]; `None` if the bytes are not valid.
fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<(T, NamedTensors)> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    let (head, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    Some((postcard::from_bytes(head).ok()?, NamedTensors::from_bytes(rest)?))
}

impl PartCopy {
    pub(in crate::train) fn to_bytes(&self) -> Vec<u8> {
        let layers: Vec<(usize, usize)> = self.layers.iter().map(|range| (range.start, range.end)).collect();
        encode(&layers, &self.pieces)
    }

    /// Decodes the output of [`PartCopy::to_bytes`]; `None` if the bytes are not valid. Lengths in untrusted
    /// bytes are checked before anything is allocated.
    pub(in crate::train) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (layers, pieces) = decode::<Vec<(usize, usize)>>(bytes)?;
        Some(Self { layers: layers.into_iter().map(|(start, end)| start..end).collect(), pieces })
    }

    /// Returns the number of steps done when it was copied.
    pub(in crate::train) const fn step(&self) -> u64 {
        self.pieces.counted.step
    }

    /// Returns the layers of each part.
    pub(in crate::train) fn layers(&self) -> &[Range<usize>] {
        &self.layers
    }

    /// Returns its tensors by name.
    pub(in crate::train) fn into_pieces(self) -> NamedTensors {
        self.pieces
    }
}

impl PartRecord {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        encode(&self.squares, &self.grads)
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (squares, grads) = decode(bytes)?;
        Some(Self { squares, grads })
    }

    /// Flips the bit that a test requests, in the last tensor.
    pub(super) fn inject_fault(&mut self, fault: Fault) {
        fault.flip_bit_in_last(&mut self.grads.tensors);
    }
}

impl Trainer {
    /// Returns the state of this rank's parts after the last step. With local steps: what all replicas have in
    /// common after the last average.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn part_copy(&self, job: &Job) -> Result<PartCopy> {
        Ok(self.copy_of(self.pieces(job)?))
    }

    /// Returns the copy of this rank's parts with these tensors.
    pub(in crate::train) fn copy_of(&self, pieces: NamedTensors) -> PartCopy {
        let number = |stage: &StageId| self.executor.placement.part(*stage) as usize;
        let layers =
            self.executor.parts.keys().map(|stage| self.schedule.layers[number(stage)].clone()).collect();
        PartCopy { layers, pieces: if self.each_step { pieces } else { pieces.shared() } }
    }

    /// Returns the record of the step that was just committed. Only valid until the next step begins.
    ///
    /// Errors: those of the device; [`Error::Message`] if the vote on the step had no norm of the gradients.
    pub(super) fn part_record(&self, job: &Job) -> Result<PartRecord> {
        if !self.each_step {
            return self.part_round_record(job);
        }
        let squares = self.committed().squares;
        let squares = squares.ok_or_else(|| wrong("has no norm of the gradients"))?;
        let mut tensors = BTreeMap::new();
        for part in self.executor.parts.values() {
            let grads = part.grads.to_vec::<f32>()?;
            for param in part.stage.layout().params() {
                tensors.insert(param.name.clone(), grads[param.range()].to_vec());
            }
        }
        Ok(PartRecord { squares, grads: NamedTensors { counted: self.counted(job), tensors } })
    }
}

pub(super) fn wrong(problem: &'static str) -> Error {
    Error::Message { message: "the record of a step".to_owned(), problem }
}

/// A part of the model with its optimizer.
#[derive(Debug)]
pub(super) struct ReplayedPart {
    pub(super) stage: Stage,
    pub(super) params: Tensor,
    grads: Tensor,
    pub(super) chain: Chain,
    /// With local steps: the method that averages, if the part has parameters.
    pub(super) sync: Option<Box<dyn Synchroniser>>,
}

/// Parts of the model that are replayed step by step.
#[derive(Debug)]
pub(in crate::train) struct ReplayedParts {
    layers: Vec<Range<usize>>,
    pub(super) parts: Vec<ReplayedPart>,
    pub(super) counted: RunCounters,
    each_step: bool,
    /// With local steps: number of averages replayed since the optimizer was taken; `None` without it.
    pub(super) optimizer: Option<u32>,
}

impl ReplayedParts {
    /// Makes the parts of a copy, with the settings of the run. `alone` contains this rank only.
    ///
    /// Errors: those of the model, if the layers of the copy are not in it; [`Error::Message`] if parts
    /// overlap, or if a tensor is missing or has another length.
    pub(in crate::train) fn new(
        (job, alone): (&Job, &Communicator),
        device: &Device,
        copy: &PartCopy,
    ) -> Result<Self> {
        let each_step = job.averages_each_step();
        let PartCopy { layers, pieces } = copy;
        if !are_disjoint(layers, job.model.layers()) {
            let message = "the copy of other members' parts".to_owned();
            return Err(Error::Message { message, problem: "has parts that overlap" });
        }
        let get = |name: &str| pieces.tensors.get(name).map(Vec::as_slice);
        let part = |layers: &Range<usize>| {
            let stage = Stage::new(&job.model, layers.clone(), device)?;
            let (mut params, grads) = (stage.zeros()?, stage.zeros()?);
            let mut chain = chain(&job.config, device, &stage, (1, job.plan.outermost().every.into()))?;
            let mut sync = None;
            if each_step {
                restore((stage.layout(), &mut params, &mut chain), pieces.counted.updates, &get)?;
            } else if !stage.layout().is_empty() {
                sync = Some(replayed_method((job, alone), device, &stage, &params)?);
                restore_shared((stage.layout(), &mut params, sync.as_mut()), &pieces.counted, &get)?;
            }
            Ok::<_, Error>(ReplayedPart { stage, params, grads, chain, sync })
        };
        let parts = layers.iter().map(part).collect::<Result<_>>()?;
        let (layers, counted) = (layers.clone(), pieces.counted.clone());
        Ok(Self { layers, parts, counted, each_step, optimizer: None })
    }

    /// Returns the number of steps done.
    pub(in crate::train) const fn step(&self) -> u64 {
        self.counted.step
    }

    /// Returns the layers of each part.
    pub(in crate::train) fn layers(&self) -> &[Range<usize>] {
        &self.layers
    }

    /// Returns the number of averages replayed since the optimizer was taken; `None` if it was not.
    pub(in crate::train) const fn optimizer(&self) -> Option<u32> {
        self.optimizer
    }

    /// Applies the update of the next step, or with local steps the next average, from the bytes of its record.
    ///
    /// Errors: [`Error::Message`] for bytes that are not the record of that step and of these parts; those of
    /// the optimizer.
    pub(in crate::train) fn replay(&mut self, bytes: &[u8]) -> Result<()> {
        let PartRecord { squares, grads } =
            PartRecord::from_bytes(bytes).ok_or_else(|| wrong("does not read as one"))?;
        if !self.each_step {
            return self.replay_round(grads);
        }
        if grads.counted.step != self.counted.step + 1 {
            return Err(wrong("is not that of the next step"));
        }
        let mut flats = Vec::new();
        for part in &self.parts {
            let layout = part.stage.layout();
            let mut flat = vec![0.0; layout.len()];
            for param in layout.params() {
                let values =
                    grads.tensors.get(&param.name).filter(|values| values.len() == param.shape.len());
                let values = values.ok_or_else(|| wrong("is not that of these parts of the model"))?;
                flat[param.range()].copy_from_slice(values);
            }
            flats.push(flat);
        }
        let prepared = Prepared::with_norm(squares.sqrt())?;
        for (part, flat) in self.parts.iter_mut().zip(flats) {
            if !flat.is_empty() {
                part.grads.write(&flat)?;
                part.chain.commit(&mut part.params, &part.grads, prepared)?;
            }
        }
        self.counted = grads.counted;
        Ok(())
    }

    /// Returns the state of the parts, as a rank that holds them would send it.
    ///
    /// Errors: those of the device.
    pub(in crate::train) fn copy(&self) -> Result<PartCopy> {
        let mut tensors = BTreeMap::new();
        if self.each_step {
            for ReplayedPart { stage, params, chain, .. } in &self.parts {
                tensors.extend(tensors_of(stage.layout(), params, chain)?);
            }
        } else {
            tensors = self.shared_tensors()?;
        }
        Ok(PartCopy {
            layers: self.layers.clone(),
            pieces: NamedTensors { counted: self.counted.clone(), tensors },
        })
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

    #[test]
    fn copies_and_records_come_back_and_other_bytes_are_none() {
        let counted = RunCounters { step: 7, scale: vec![1.0], ..RunCounters::default() };
        let tensors = BTreeMap::from([("a".to_owned(), vec![1.0_f32, -2.0]), ("b".to_owned(), vec![3.0])]);
        let pieces = NamedTensors { counted, tensors };
        let copy = PartCopy { layers: vec![0..2, 4..6], pieces: pieces.clone() };
        let bytes = copy.to_bytes();
        assert_eq!(PartCopy::from_bytes(&bytes), Some(copy));
        let record = PartRecord { squares: 2.5, grads: pieces };
        assert_eq!(PartRecord::from_bytes(&record.to_bytes()), Some(record));
        for end in 0..bytes.len() {
            assert_eq!(PartCopy::from_bytes(&bytes[..end]), None);
            assert_eq!(PartRecord::from_bytes(&bytes[..end]), None);
        }
        assert_eq!(PartCopy::from_bytes(&[0xFF; 40]), None);
    }
}
