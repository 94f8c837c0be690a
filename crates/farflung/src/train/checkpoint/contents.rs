//! The files of a rank's checkpoint before they are written. Their sizes follow from the same list.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

use farflung_base::Rank;
use farflung_zoo::weights::{Dtype, StoredLayout, TokenIds, config_text, write_f32_tensors, write_values};

use super::super::job::Job;
use super::super::meet::model_facts;
use super::super::pieces::{Piece, PieceValues};
use super::super::plan_start::PlanStart;
use super::super::planned;
use super::super::trainer::{IncomingWeights, Trainer};
use super::{
    CheckpointRecord, Counters, MODEL, OPTIMIZER, PLAN, SAMPLES, SETTINGS, TRAINER, Totals, samples,
};
use crate::path_models::PATHS;
use crate::{CheckpointWriter, PathModels, Result};

/// Bytes of a disk's block. Each file, and the folder itself, takes whole blocks.
const BLOCK: u64 = 4096;
/// Bytes of a tensor's entry in the header of its file, besides its name.
const ENTRY: u64 = 80;

/// Sizes of a checkpoint without compression, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Size {
    /// All files, without what the disk adds for its blocks.
    pub(super) bytes: u64,
    /// The same in whole blocks.
    pub(super) on_disk: u64,
    /// The largest file.
    pub(super) largest: u64,
}

impl Size {
    /// Adds a file.
    fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.on_disk = self.on_disk.saturating_add(bytes.div_ceil(BLOCK).saturating_mul(BLOCK));
        self.largest = self.largest.max(bytes);
    }

    /// Returns the size with a file of weights that is larger by `bytes`.
    pub(super) fn with_more_weights(mut self, bytes: u64) -> Self {
        self.bytes = self.bytes.saturating_add(bytes);
        self.on_disk = self.on_disk.saturating_add(bytes);
        self.largest = self.largest.max(bytes);
        self
    }
}

/// The content of a file.
enum Content<'a> {
    Bytes(Vec<u8>),
    Tensors(Vec<Piece<'a>>, BTreeMap<String, String>),
    Samples(Vec<(String, Cow<'a, [u8]>)>),
}

impl Content<'_> {
    /// Returns the length of the file; of its header only the names and a usual length of the rest.
    fn bytes(&self) -> u64 {
        let entry = |name: &str| name.len() as u64 + ENTRY;
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Tensors(named, _) => {
                named.iter().map(|piece| entry(&piece.name) + 4 * piece.len() as u64).sum()
            }
            Self::Samples(held) => held.iter().map(|(name, bytes)| entry(name) + bytes.len() as u64).sum(),
        }
    }

    fn write(
        &self,
        out: &mut dyn Write,
        stored: &StoredLayout,
        incoming: &mut Incoming<'_>,
    ) -> io::Result<()> {
        match self {
            Self::Bytes(bytes) => out.write_all(bytes),
            Self::Tensors(pieces, metadata) => {
                let shape = |piece: &Piece<'_>| {
                    if piece.cut {
                        piece.shape.clone()
                    } else {
                        stored.shape(&piece.name, piece.shape.clone())
                    }
                };
                let shapes: Vec<_> = pieces.iter().map(shape).collect();
                let entries = pieces.iter().zip(&shapes);
                let entries = entries.map(|(piece, shape)| (piece.name.as_str(), shape.as_slice()));
                write_f32_tensors(out, entries, metadata, |index, out| {
                    let piece = &pieces[index];
                    match &piece.values {
                        PieceValues::Elsewhere(from) => {
                            incoming.begun = index + 1;
                            return incoming.weights.write(*from, piece.len(), out);
                        }
                        PieceValues::Divided(divided) => {
                            incoming.begun = index + 1;
                            let whole = incoming.weights.join(divided).map_err(io::Error::other)?;
                            return write_values(out, &stored.values(&piece.name, &whole));
                        }
                        PieceValues::Flat(..) | PieceValues::Host(_) => {}
                    }
                    let write = |values: &[f32]| write_values(out, values);
                    piece.stored_values(stored, write).map_err(io::Error::other)??;
                    incoming.weights.go_on().map_err(io::Error::other)
                })
            }
            Self::Samples(held) => samples::write(held, out),
        }
    }
}

/// Weights of other ranks, as far as they were received.
struct Incoming<'a> {
    weights: IncomingWeights<'a>,
    /// Number of pieces of the weights of which the last that is elsewhere was begun.
    begun: usize,
}

/// The files of a checkpoint.
pub(super) struct Contents<'a> {
    files: Vec<(&'static str, Content<'a>)>,
    stored: StoredLayout,
    trainer: &'a Trainer,
    /// Whether rank 0 also has the weights of other ranks' parts.
    gathered: bool,
}

impl<'a> Contents<'a> {
    /// Collects what this rank saves after its current step: on rank 0 with the weights of other ranks' parts,
    /// if they are `gathered`. Their values are read as they are written.
    pub(super) fn of(
        trainer: &'a Trainer,
        job: &Job,
        totals: Totals,
        absent: &[Rank],
        gathered: bool,
    ) -> Result<Self> {
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let text = |text: String| Content::Bytes(text.into_bytes());
        let mut files = vec![
            ("config.json", text(config_text(&job.model, Dtype::F32, &TokenIds::of(&*job.tokenizer)))),
            (MODEL, Content::Tensors(trainer.weights(gathered)?, metadata)),
            (OPTIMIZER, Content::Tensors(trainer.states()?, BTreeMap::new())),
        ];
        let tokenizer = job.tokenizer.files();
        files.extend(tokenizer.into_iter().map(|(name, bytes)| (name, Content::Bytes(bytes.into_owned()))));
        let held = samples::held(trainer)?;
        if !held.is_empty() {
            files.push((SAMPLES, Content::Samples(held)));
        }
        if let Some(router) = &job.text_parts.router {
            files.push((PATHS, text(PathModels::of(&job.plan, trainer.rank(), router).to_json())));
        }
        files.push((SETTINGS, text(job.settings().to_toml())));
        files.push((PLAN, text(job.plan.to_string())));
        let record = record(trainer, job, totals, absent);
        let record = serde_json::to_vec_pretty(&record).expect("numbers and names can be written as JSON");
        files.push((TRAINER, Content::Bytes(record)));
        Ok(Self { files, stored: StoredLayout::of(&job.model), trainer, gathered })
    }

    /// Returns the step after which it is saved.
    pub(super) fn step(&self) -> u64 {
        self.trainer.counters().step
    }

    /// Returns the sizes of the files, and of the manifest and the folder.
    pub(super) fn size(&self) -> Size {
        let mut size = Size::default();
        self.files.iter().for_each(|(_, content)| size.add(content.bytes()));
        // The manifest, the folder, and the next content of `latest`.
        (0..3).for_each(|_| size.on_disk = size.on_disk.saturating_add(BLOCK));
        size
    }

    /// Sends the weights that rank 0 writes for this rank.
    pub(super) fn send_weights(&self) -> Result<()> {
        self.trainer.send_weights(&self.stored)
    }

    /// Writes the files. Whether or not that succeeds, the weights of other ranks are received.
    pub(super) fn write(&self, begun: Result<CheckpointWriter>) -> Result<CheckpointWriter> {
        let mut incoming = Incoming { weights: self.trainer.receive_weights(self.gathered), begun: 0 };
        let written = begun.and_then(|mut writer| {
            self.files.iter().try_for_each(|(name, content)| {
                writer.write_with(name, |out| content.write(out, &self.stored, &mut incoming))
            })?;
            Ok(writer)
        });
        let Incoming { weights, begun } = incoming;
        let pieces = self.files.iter().filter_map(|(_, content)| match content {
            Content::Tensors(pieces, _) => Some(pieces),
            Content::Bytes(_) | Content::Samples(_) => None,
        });
        weights.finish(pieces.flatten().skip(begun))?;
        written
    }
}

/// Returns the counters of a checkpoint, and what must be the same when the run is continued.
pub(super) fn record(trainer: &Trainer, job: &Job, totals: Totals, absent: &[Rank]) -> CheckpointRecord {
    let Counters { step, outer_step, rounds } = trainer.counters();
    let level = job.plan.outermost();
    // A member that restarts alone takes as many, whatever its share was.
    let microbatches = job.elastic.then(|| planned::microbatches(job.settings()) as u64);
    CheckpointRecord {
        rank: if job.elastic { 0 } else { trainer.rank().0 },
        world: if job.elastic { 1 } else { job.world },
        model: model_facts(job),
        parts: trainer.layers(),
        stages: job.plan.stages() as usize,
        experts: job.plan.experts.clone(),
        tensor_weights: job.plan.recorded_width(),
        tensor: trainer.tensor(),
        sequence_parallel: job.plan.sequence_parallel,
        context: job.plan.recorded_context(),
        zero_weights: job.plan.recorded_state(),
        zero_by_unit: job.plan.divides_gradients(),
        paths: job.plan.recorded_paths(),
        routing: job.text_parts.routing.clone(),
        sequences: microbatches.map_or(job.plan.sequences(), |each| each * u64::from(job.plan.batch)),
        microbatches,
        seed: job.config.seed,
        sync: level.method.name.to_owned(),
        codec: level.codec_name().to_owned(),
        data_hash: job.data_identity.clone(),
        document_mask: job.config.document_mask,
        objective: job.config.objective,
        step,
        outer_step,
        rounds,
        totals,
        plan_start: job.elastic.then(|| PlanStart { step, microbatches: job.microbatches_after(step) }),
        view: job.view,
        absent: absent.iter().map(|rank| rank.0).collect(),
        residuals: trainer.residual_layouts(level.codec_name()),
    }
}
