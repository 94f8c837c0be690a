//! Encodes the messages of a rank's pipeline boundaries with the plan's codecs: hidden states to the next part,
//! and their gradients back. It does not depend on a schedule.

mod agree;
mod memory;
mod store;

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::{Bytes, Rank, StageId};
use farflung_compress::link::{LinkCodec, LinkSpec, MemoryStore, SampleShape};
use farflung_compress::{CompressError, HeldBytes, Payload, PayloadRef, RoundKey};
use farflung_compress::{State as _, StateMap};
use farflung_parallel::pipeline::{Content, Message, Placement};
use farflung_zoo::ModelSpec;

use super::bound_plan::BoundPlan;
use super::executor::trailing_bytes;
use super::job::Job;
use crate::{Error, Result, link_payload};
pub(super) use memory::{SamplesSeen, coded_bytes};
pub(super) use store::Stores;

/// Returns the bytes per sample that the two ends of a boundary store together.
pub(super) fn held_bytes(forward: LinkSpec, backward: LinkSpec, shape: SampleShape) -> u128 {
    let both_ends = |spec: LinkSpec| 2 * spec.samples(shape).map_or(0, |samples| samples.bytes()) as u128;
    both_ends(forward).saturating_add(both_ends(backward))
}

/// Returns the bytes of a microbatch across a boundary, over all slices. For codecs with stored samples, the
/// size after their first epoch.
///
/// Errors: those of the codec.
pub(super) fn bytes(
    plan: &BoundPlan,
    boundary: usize,
    content: Content,
    slices: &[Range<usize>],
    model: &ModelSpec,
) -> Result<Bytes> {
    let (spec, samples) = (plan.links()[boundary].of(content), plan.batch as usize);
    let channels = model.dim;
    // What goes with the hidden states.
    let mut sum = trailing_bytes(model, samples);
    for slice in slices {
        let shape = SampleShape { positions: slice.len(), channels };
        sum += if spec.is_plain() {
            samples * shape.len() * size_of::<f32>()
        } else {
            spec.build(shape, |samples| Ok(Box::new(MemoryStore::new(samples))))?.max_delta_payload(samples)
        };
    }
    Ok(Bytes(sum as u64))
}

/// One end of a boundary in one direction: the output of a stage, for one slice of sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct End {
    from: StageId,
    content: Content,
    slice: u16,
}

impl End {
    const fn of(message: Message) -> Self {
        Self { from: message.from, content: message.content, slice: message.slice }
    }

    /// Returns the end's name in checkpoints and file names.
    fn name(self) -> String {
        let content = match self.content {
            Content::Activation => "hidden",
            Content::Gradient => "gradient",
        };
        format!("stage-{}-{content}-slice-{}", self.from.0, self.slice)
    }
}

/// An end whose values are encoded, as in the plan.
#[derive(Debug)]
struct PlannedEnd {
    end: End,
    /// The rank at the other end.
    other: Rank,
    boundary: usize,
    spec: LinkSpec,
    /// Number of positions of the slice.
    positions: usize,
}

/// Returns the encoded ends of the rank at `position` of its pipeline.
fn ends(plan: &BoundPlan, placement: &Placement, position: Rank, slices: &[Range<usize>]) -> Vec<PlannedEnd> {
    let mut ends = Vec::new();
    for stage in placement.stages_of(position) {
        let part = placement.part(stage);
        let next = (part + 1 < placement.depth()).then(|| (stage, StageId(stage.0 + 1)));
        let before = (part > 0).then(|| (StageId(stage.0 - 1), stage));
        for (low, high) in [before, next].into_iter().flatten() {
            let other = placement.rank(if low == stage { high } else { low });
            if other == position {
                continue;
            }
            let boundary = placement.part(low) as usize;
            for (content, from) in [(Content::Activation, low), (Content::Gradient, high)] {
                let spec = plan.links()[boundary].of(content);
                if spec.is_plain() {
                    continue;
                }
                ends.extend((0..).zip(slices).map(|(slice, positions)| PlannedEnd {
                    end: End { from, content, slice },
                    other,
                    boundary,
                    spec,
                    positions: positions.len(),
                }));
            }
        }
    }
    ends
}

/// A codec, and the rank at the other end.
#[derive(Debug)]
struct Coded {
    codec: Box<dyn LinkCodec>,
    other: Rank,
    /// Number that separates this end's random numbers from those of other ends.
    stream: u32,
    remembers: bool,
}

/// The encoded ends of a rank.
#[derive(Debug, Default)]
pub(super) struct Boundaries {
    ends: BTreeMap<End, Coded>,
    seed: u64,
    payload: Payload,
}

/// A message with the numbers of its samples and of its microbatch, counted over all steps and replicas.
#[derive(Debug, Clone, Copy)]
pub(super) struct BoundaryMessage<'a> {
    pub(super) message: Message,
    pub(super) samples: &'a [u64],
    pub(super) microbatch: u64,
}

impl Boundaries {
    /// Makes the ends of the rank at `position` of its pipeline.
    ///
    /// Errors: those of `stores`.
    pub(super) fn new(
        job: &Job,
        placement: &Placement,
        position: Rank,
        slices: &[Range<usize>],
        stores: &Stores,
    ) -> Result<Self> {
        let mut coded = BTreeMap::new();
        for PlannedEnd { end, other, boundary, spec, positions } in
            ends(&job.plan, placement, position, slices)
        {
            let shape = SampleShape { positions, channels: job.model.dim };
            let codec = spec.build(shape, |samples| stores.open(&end.name(), samples))?;
            let stream = 2 * boundary as u32 + u32::from(end.content == Content::Gradient);
            let stream = stream * slices.len() as u32 + u32::from(end.slice);
            coded.insert(end, Coded { codec, other, stream, remembers: spec.remembers() });
        }
        Ok(Self { ends: coded, seed: job.config.seed, payload: Payload::new() })
    }

    /// Encodes values to be sent; `None` if they are sent unencoded.
    ///
    /// Values that a codec cannot encode, since they are not finite or too large, are sent as plain f32, and
    /// the codec stores nothing of them. All ranks notice the overflow when they agree on the step.
    pub(super) fn encode(
        &mut self,
        crossing: BoundaryMessage<'_>,
        values: &[f32],
    ) -> Result<Option<Vec<u8>>> {
        let Some(end) = self.ends.get_mut(&End::of(crossing.message)) else { return Ok(None) };
        let key = RoundKey {
            seed: self.seed,
            round: crossing.microbatch,
            shard: end.stream,
            rank: Rank::default(),
        };
        link_payload::encode(&mut *end.codec, crossing.samples, values, key, &mut self.payload)
            .map_err(|source| failed(crossing.message, source))?;
        Ok(Some(self.payload.as_bytes().to_vec()))
    }

    /// Decodes `count` values that were received; `None` if they are sent unencoded.
    pub(super) fn decode(
        &mut self,
        crossing: BoundaryMessage<'_>,
        bytes: &[u8],
        count: usize,
    ) -> Result<Option<Vec<f32>>> {
        let Some(end) = self.ends.get_mut(&End::of(crossing.message)) else { return Ok(None) };
        let mut values = vec![0.0; count];
        let decoded = PayloadRef::parse(bytes).and_then(|payload| {
            link_payload::decode(&mut *end.codec, crossing.samples, payload, &mut values)
        });
        decoded.map_err(|source| failed(crossing.message, source))?;
        Ok(Some(values))
    }

    /// Makes the codecs' changes permanent, after all ranks have agreed on the step.
    pub(super) fn commit(&mut self) {
        self.ends.values_mut().for_each(|end| end.codec.commit());
    }

    /// Restores the codecs' state before the step, which is dropped.
    pub(super) fn rollback(&mut self) {
        self.ends.values_mut().for_each(|end| end.codec.rollback());
    }

    /// Returns the bytes of the samples that the codecs store.
    pub(super) fn held(&self) -> HeldBytes {
        self.ends.values().map(|end| end.codec.held()).sum()
    }

    /// Returns the codecs' states, by name.
    ///
    /// Errors: none between steps.
    pub(super) fn save(&self) -> Result<StateMap<'_>> {
        let mut all = StateMap::new();
        for (end, coded) in &self.ends {
            coded.codec.save(&format!("{}/", end.name()), &mut all)?;
        }
        Ok(all)
    }

    /// Restores the states that [`Boundaries::save`] returned.
    ///
    /// Errors: entries with another shape.
    pub(super) fn load(&mut self, from: &mut StateMap<'_>) -> Result<()> {
        for (end, coded) in &mut self.ends {
            coded.codec.load(&format!("{}/", end.name()), from)?;
        }
        Ok(())
    }

    /// Clears the codecs: the stored samples belonged to another rank.
    pub(super) fn forget_all(&mut self) {
        self.ends.values_mut().for_each(|end| end.codec.reset());
    }
}

fn failed(message: Message, source: CompressError) -> Error {
    Error::Boundary { message: message.to_string(), source }
}
