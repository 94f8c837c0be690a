//! The files of a rank's checkpoint before they are written. Their sizes follow from the same list.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

use farflung_base::Rank;
use farflung_zoo::ModelSpec;
use farflung_zoo::weights::{Dtype, StoredLayout, TensorData, TensorView, config_text, write_tensors_to};

use super::super::job::Job;
use super::super::meet::model_facts;
use super::super::plan_start::PlanStart;
use super::super::planned;
use super::super::trainer::Trainer;
use super::{
    CheckpointRecord, Counters, MODEL, Named, OPTIMIZER, PLAN, SAMPLES, SETTINGS, TRAINER, Totals, samples,
};
use crate::{CheckpointWriter, Result};

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
    Tensors(Vec<Named>, BTreeMap<String, String>),
    Samples(Vec<(String, Cow<'a, [u8]>)>),
}

impl Content<'_> {
    /// Returns the length of the file; of its header only the names and a usual length of the rest.
    fn bytes(&self) -> u64 {
        let entry = |name: &str| name.len() as u64 + ENTRY;
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Tensors(named, _) => {
                named.iter().map(|tensor| entry(&tensor.name) + 4 * tensor.values.len() as u64).sum()
            }
            Self::Samples(held) => held.iter().map(|(name, bytes)| entry(name) + bytes.len() as u64).sum(),
        }
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Bytes(bytes) => out.write_all(bytes),
            Self::Tensors(named, metadata) => {
                let views: Vec<_> = named
                    .iter()
                    .map(|n| TensorView { name: &n.name, shape: &n.shape, data: TensorData::F32(&n.values) })
                    .collect();
                write_tensors_to(out, &views, metadata)
            }
            Self::Samples(held) => samples::write(held, out),
        }
    }
}

/// The files of a checkpoint.
pub(super) struct Contents<'a>(Vec<(&'static str, Content<'a>)>);

impl<'a> Contents<'a> {
    /// Collects what this rank saves after its current step.
    pub(super) fn of(trainer: &'a Trainer, job: &Job, totals: Totals, absent: &[Rank]) -> Result<Self> {
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let text = |text: String| Content::Bytes(text.into_bytes());
        let mut files = vec![
            ("config.json", text(config_text(&job.model, Dtype::F32))),
            (MODEL, Content::Tensors(as_stored(&job.model, trainer.weights()?), metadata)),
            (OPTIMIZER, Content::Tensors(trainer.states()?, BTreeMap::new())),
        ];
        let held = samples::held(trainer)?;
        if !held.is_empty() {
            files.push((SAMPLES, Content::Samples(held)));
        }
        files.push((SETTINGS, text(job.settings().to_toml())));
        files.push((PLAN, text(job.plan.to_string())));
        let record = record(trainer, job, totals, absent);
        let record = serde_json::to_vec_pretty(&record).expect("numbers and names can be written as JSON");
        files.push((TRAINER, Content::Bytes(record)));
        Ok(Self(files))
    }

    /// Returns the sizes of the files, and of the manifest and the folder.
    pub(super) fn size(&self) -> Size {
        let mut size = Size::default();
        self.0.iter().for_each(|(_, content)| size.add(content.bytes()));
        // The manifest, the folder, and the next content of `latest`.
        (0..3).for_each(|_| size.on_disk = size.on_disk.saturating_add(BLOCK));
        size
    }

    /// Returns the bytes of the weights.
    pub(super) fn weights(&self) -> u64 {
        self.0.iter().filter(|(name, _)| *name == MODEL).map(|(_, content)| content.bytes()).sum()
    }

    /// Writes the files.
    pub(super) fn write(&self, writer: &mut CheckpointWriter) -> Result<()> {
        self.0.iter().try_for_each(|(name, content)| writer.write_with(name, |out| content.write(out)))
    }
}

fn record(trainer: &Trainer, job: &Job, totals: Totals, absent: &[Rank]) -> CheckpointRecord {
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
        sequences: microbatches.map_or(job.plan.sequences(), |each| each * u64::from(job.plan.batch)),
        microbatches,
        seed: job.config.seed,
        sync: level.method.name.to_owned(),
        codec: level.codec_name().to_owned(),
        data_hash: job.data_identity.clone(),
        document_mask: job.config.document_mask,
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

/// Returns the weights as the family's files have them.
fn as_stored(model: &ModelSpec, weights: Vec<Named>) -> Vec<Named> {
    let stored = StoredLayout::of(model);
    let convert = |mut tensor: Named| {
        stored.to_file(&tensor.name, &mut tensor.shape, &mut tensor.values);
        tensor
    };
    weights.into_iter().map(convert).collect()
}
