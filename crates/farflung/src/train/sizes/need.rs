//! Estimates the host memory that a run needs, by purpose. A pure function of the settings and the model's
//! shape; its own memory use does not depend on their values.
//!
//! `tests/it/sizes.rs` compares the estimates with the measured peaks of whole runs.

use std::ops::Range;

use farflung_base::{Axis, Bytes, Rank};
use farflung_comm::Algorithm;
use farflung_comm::tcp::{SEGMENT_BYTES, SharedMemory};
use farflung_compress::link::SampleShape;
use farflung_optim::LrSchedule;
use farflung_parallel::{Plan, whole_replicas};
use farflung_tensor::{DeviceName, Precision};
use farflung_zoo::ModelSpec;

use super::super::boundary::held_bytes;
use super::super::links::shared_memory;
use super::super::pieces::{CHUNK_LEN, CHUNK_WINDOW};
use super::buckets::{averaging, scattering, sharing};
use super::data::{Data, token_bytes};
use super::rank_memory::RankMemory;
use crate::config::choice::{Resume, StatePlace, StoreKind};
use crate::config::zero::ZeroWithin;
use crate::train::disk_state;
use crate::{RunSettings, TrainConfig};

/// Bytes of an f32.
const F32: u128 = size_of::<f32>() as u128;

/// Purposes of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(usize)]
pub(super) enum MemoryPurpose {
    Parameters,
    Gradients,
    Optimizer,
    Outer,
    Mark,
    KeptWork,
    Averaging,
    Residuals,
    Samples,
    Activations,
    Logits,
    Rounded,
    Losses,
    Evaluation,
    Checkpoint,
    Data,
    Schedule,
    Plans,
    Workers,
}

impl MemoryPurpose {
    const ALL: [Self; 19] = [
        Self::Parameters,
        Self::Gradients,
        Self::Optimizer,
        Self::Outer,
        Self::Mark,
        Self::KeptWork,
        Self::Averaging,
        Self::Residuals,
        Self::Samples,
        Self::Activations,
        Self::Logits,
        Self::Rounded,
        Self::Losses,
        Self::Evaluation,
        Self::Checkpoint,
        Self::Data,
        Self::Schedule,
        Self::Plans,
        Self::Workers,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Outer => "DiLoCo's anchor, delta and momentum",
            Self::Mark => "copies of the state for a stop within a step",
            Self::KeptWork => "work of a step that is kept if a member is lost (--keep-work)",
            Self::Averaging => "buckets and messages",
            Self::Residuals => "codec residuals",
            Self::Samples => "samples of boundaries",
            Self::Activations => "activations",
            Self::Logits => "logits",
            Self::Rounded => "rounded operands",
            Self::Losses => "losses of a step",
            Self::Evaluation => "evaluation",
            Self::Checkpoint => "checkpoint",
            Self::Data => "data",
            Self::Schedule => "schedule",
            Self::Plans => "plans of all-reduces",
            Self::Workers => "workers and program",
        }
    }
}

/// Bytes for each purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct MemoryNeed([u128; MemoryPurpose::ALL.len()]);

impl MemoryNeed {
    pub(super) fn add(&mut self, part: MemoryPurpose, bytes: u128) {
        let sum = &mut self.0[part as usize];
        *sum = sum.saturating_add(bytes);
    }

    /// Returns the sum over all purposes.
    pub(super) fn total(&self) -> u128 {
        self.0.iter().fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }

    fn and(mut self, other: &Self) -> Self {
        for part in MemoryPurpose::ALL {
            self.add(part, other.0[part as usize]);
        }
        self
    }

    /// Returns purposes and their bytes, largest first, without those below one percent of the total.
    pub(super) fn largest_first(&self) -> Vec<(&'static str, u128)> {
        let least = self.total() / 100;
        let mut parts: Vec<_> = MemoryPurpose::ALL.map(|part| (part.name(), self.0[part as usize])).into();
        parts.retain(|&(_, bytes)| bytes > least);
        parts.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        parts
    }
}

/// Formats a number of bytes; unlike [`Bytes`] it has units above GB.
pub(super) fn size(bytes: u128) -> String {
    let units = [
        (1_000_000_000_000_000_000_000_u128, "ZB"),
        (1_000_000_000_000_000, "PB"),
        (1_000_000_000_000, "TB"),
    ];
    match units.into_iter().find(|&(unit, _)| bytes >= unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => Bytes(bytes as u64).to_string(),
    }
}

/// The inputs of an estimate: some ranks of a run, and their processes.
#[derive(Debug, Clone)]
pub(super) struct RankGroup<'a> {
    pub(super) config: &'a TrainConfig,
    /// The settings that no plan decides.
    pub(super) run: &'a RunSettings,
    pub(super) model: &'a ModelSpec,
    /// Memory that each rank of a pipeline needs; without a pipeline, one entry for every rank.
    pub(super) positions: &'a [RankMemory],
    /// Number of workers in all processes.
    pub(super) world: usize,
    pub(super) ranks: Range<usize>,
    /// Number of processes that run these ranks.
    pub(super) processes: usize,
    /// Number of processes on this machine with which one of them shares memory.
    pub(super) beside: usize,
    pub(super) data: Data,
    /// Number of actions in the schedules of a step and of an evaluation.
    pub(super) actions: u128,
}

/// Bytes per action of a schedule, over all of a rank's lists. Measured with 1f1b and zb-h1.
const ACTION: u128 = 80;
/// Bytes of the process before it reads data, without the pages of its binary that the system can drop.
/// Measured; a GPU backend takes 2 MB more.
const PROGRAM: u128 = 5 << 19;
/// Bytes of a worker besides model and data: mainly the 2 MiB page in which its buffers begin. Measured.
const WORKER: u128 = 5 << 19;
/// Bytes of a worker for each other worker: queues and codecs.
const PAIR: u128 = 512;
/// Bytes per step of an all-reduce whose algorithm is chosen by predicted time. To choose, a rank makes
/// `2 (n - 1)` steps for each of the `n` ranks; this is the total divided by `n^2`. Measured with 64, 100 and
/// 150 workers.
const STEP: u128 = 650;
/// Bytes of a sample at a boundary, besides its values.
const SAMPLE: u128 = 64;
/// Bytes of the GPT-2 tokenizer's tables. Measured.
const VOCABULARY: u128 = 40 << 20;
/// Bytes of a microbatch's pending loss, besides the losses of its tokens. Measured.
const ENTRY: u128 = 32;

impl RankGroup<'_> {
    /// Returns the peak memory of the ranks.
    pub(super) fn need(&self) -> MemoryNeed {
        let mut all = MemoryNeed::default();
        for rank in self.ranks.clone() {
            all = all.and(&self.of_rank(rank));
        }
        let (ranks, processes) = (self.ranks.len() as u128, self.processes as u128);
        let world = self.world as u128;
        all.add(MemoryPurpose::Workers, PROGRAM * processes + WORKER * ranks + PAIR * ranks * world);
        if shared_memory(self.run) == SharedMemory::WherePossible {
            // All processes together have each segment once.
            let times = if self.processes == 1 { 2 } else { processes };
            let segments = (times * self.beside as u128).div_ceil(2);
            all.add(MemoryPurpose::Workers, segments * SEGMENT_BYTES as u128);
        }
        if priced(self.config.algorithm) {
            all.add(MemoryPurpose::Plans, STEP * ranks * world * world);
        }
        if self.data.tokenizer {
            all.add(MemoryPurpose::Workers, VOCABULARY * processes);
        }
        all.add(MemoryPurpose::Schedule, self.actions.saturating_mul(ACTION).saturating_mul(ranks));
        // Text is tokenized before workers exist, so its peak counts only as far as it exceeds everything else.
        let times = |bytes: u64| u128::from(bytes).saturating_mul(processes);
        let before = times(self.data.reading).saturating_sub(all.total());
        all.add(MemoryPurpose::Data, before.max(times(self.data.tokens)));
        all
    }

    /// Returns the memory that one rank needs, without the data and its share of the process.
    fn of_rank(&self, rank: usize) -> MemoryNeed {
        let config = self.config;
        let tensor = config.tensor.max(1);
        let replicas = whole_replicas(self.world, self.positions.len(), tensor).max(1);
        let mesh = Plan::mesh_of(replicas as u32, self.positions.len() as u32)
            .and_then(|mesh| mesh.and(Axis::Tensor, tensor as u32));
        // Workers that form no whole pipelines are refused later.
        let at = mesh.and_then(|mesh| mesh.at(Rank(rank as u32))).unwrap_or_default();
        let position = &self.positions[at.pipeline as usize];
        let mut need = MemoryNeed::default();
        let model = position.parameters.saturating_mul(F32);
        let every = config.period();
        let local = config.optimizer.memory(&self.run.local(LrSchedule::constant(config.lr), 1, every));
        let (states, work) = (local.states as u128, local.work as u128);
        let method = config.sync.row();
        let outer = (method.buffers)(&self.run.buffer_settings(method, config.averaged_codec(), every));
        let apart = u128::from(config.sync.replicas_differ);
        let here = in_host_memory(config.device.of(rank));
        if here {
            let state = config.share_of_state(at.data as usize, replicas);
            let units = position.units.saturating_mul(F32);
            // The units of a layer, and those of the next one on their way, which are copied when they arrive.
            let in_group = match config.zero_within {
                ZeroWithin::No => 0,
                ZeroWithin::Region => model.div_ceil(2),
                ZeroWithin::Neighbours(count) => model.div_ceil(count.into()),
            };
            let divided = state.of(model).saturating_add(2 * units).saturating_add(in_group);
            let weights = if config.divides_weights() { divided } else { model };
            let versions = position.versions.saturating_mul(F32);
            need.add(MemoryPurpose::Parameters, weights.saturating_add(versions));
            let divided = state.of(model).saturating_add(units);
            need.add(MemoryPurpose::Gradients, if config.divides_gradients() { divided } else { model });
            if config.state == StatePlace::Device {
                need.add(MemoryPurpose::Optimizer, state.of(model.saturating_mul(states + work)));
            }
            // The replica's own parameters are kept aside while the common ones are in use.
            need.add(MemoryPurpose::Outer, model.saturating_mul(outer.held as u128 + apart));
        }

        if config.state == StatePlace::Disk {
            // Pieces on their way pass through the host's memory, also those of a GPU.
            let own = config.share_of_state(at.data as usize, replicas).of(model);
            let whole = config.optimizer.row().per_tensor.then(|| self.largest_tensor());
            let is_late = here && own == model;
            need.add(MemoryPurpose::Optimizer, disk_state::memory(own, (states, work), whole, is_late));
        }

        // The copy of the state for a stop within a step. It is on the rank's device if each step makes one,
        // else in the host's memory.
        let mark = match (position.within, outer.held > 0) {
            (_, true) => model.saturating_mul(states + apart),
            (true, false) if here => model.saturating_mul(states + 1),
            _ => 0,
        };
        need.add(MemoryPurpose::Mark, mark);
        if config.is_pooled() && config.keep_work {
            // The rank's own gradients before they are averaged, and its messages of a step, two for each
            // microbatch at most.
            let hidden = u128::from(self.model.hidden_bytes(config.batch as u64));
            let messages = hidden.saturating_mul(2 * super::super::planned::microbatches(config) as u128);
            need.add(MemoryPurpose::KeptWork, messages.saturating_add(if here { model } else { 0 }));
        }

        // Number of ranks that average the same part of the model.
        let holders = replicas * position.copies as usize;
        let bucket = (config.bucket_mb * 1e6) as usize;
        let own = config.share_of_state(at.data as usize, replicas).of(model);
        let saved = if config.divides_gradients() {
            let unit = position.units.saturating_mul(F32);
            need.add(MemoryPurpose::Averaging, scattering(unit, (own, model), holders, bucket));
            0
        } else {
            self.averaging(&mut need, model, holders, here)
        };
        if config.zero > 0 {
            let bytes = sharing(model, own, holders, bucket);
            let sums = if config.divides_gradients() { 0 } else { bytes.sums };
            let windows = if config.divides_weights() { 0 } else { bytes.windows };
            need.add(MemoryPurpose::Averaging, sums.saturating_add(windows));
        }
        self.activations(&mut need, position, here);

        need.add(MemoryPurpose::Samples, self.samples(replicas));

        let batch = config.batch as u128;
        let tokens = batch.saturating_mul(self.model.context as u128);
        let losses = if self.positions.len() == 1 { tokens.saturating_mul(F32) } else { 0 };
        let microbatches = super::super::planned::microbatches(config) as u128;
        need.add(MemoryPurpose::Losses, microbatches.saturating_mul(losses.saturating_add(ENTRY)));
        need.add(MemoryPurpose::Evaluation, self.run.eval_windows() as u128 * size_of::<i64>() as u128);
        // Ids of inputs and targets, 4 bytes each, in the sampler's buffers and as tensors; with documents or
        // prefixes also where they begin or end, and the weights of targets.
        let uneven = config.document_mask || config.objective.has_prefix() || self.run.reads_lines();
        let buffers = if uneven { 8 } else { 4 };
        need.add(MemoryPurpose::Losses, tokens.saturating_mul(buffers * F32));

        need.add(MemoryPurpose::Checkpoint, self.checkpoint(rank, model, here).saturating_add(saved));
        // A run whose state is on disk continues from there.
        if config.resume != Resume::No && config.state == StatePlace::Device {
            // The weights and all states are read before they are moved into the rank's buffers.
            let read = model.saturating_mul(1 + states + outer.saved as u128);
            need.add(MemoryPurpose::Checkpoint, read.saturating_add(saved));
        }
        need
    }

    /// Returns the bytes of the model's largest tensor.
    fn largest_tensor(&self) -> u128 {
        let sizes = self.model.tensors().into_iter().map(|tensor| tensor.shape.iter().product::<usize>());
        F32.saturating_mul(sizes.max().unwrap_or(0) as u128)
    }

    /// Returns the bytes that saving needs besides the saved values: they are written tensor by tensor.
    fn checkpoint(&self, rank: usize, model: u128, here: bool) -> u128 {
        let largest = self.largest_tensor().min(model);
        // A tensor of which several ranks have pieces is joined before it is written.
        let copies = u128::from(!here || self.config.state == StatePlace::Disk)
            + u128::from(self.config.tensor > 1 || self.config.divides_weights())
            + u128::from(self.model.names.outputs_first || self.model.mixtures().next().is_some());
        // Chunks of weights that are on their way to rank 0.
        let replicas = whole_replicas(self.world, self.positions.len(), self.config.tensor.max(1));
        let givers = self.positions.len()
            * if self.config.divides_weights() { replicas } else { self.config.tensor.max(1) };
        let senders = if rank == 0 { givers - 1 } else { usize::from(givers > 1) };
        largest.saturating_mul(copies).saturating_add(F32 * (senders * CHUNK_WINDOW * CHUNK_LEN) as u128)
    }

    /// Adds the buckets, messages and residuals of a part of the model that `holders` ranks average. Returns
    /// the bytes of the residuals in a checkpoint.
    fn averaging(&self, need: &mut MemoryNeed, model: u128, holders: usize, here: bool) -> u128 {
        let config = self.config;
        if holders == 1 {
            return 0;
        }
        let codec = config.averaged_codec();
        let coded = codec.codec().is_some() && !codec.is_plain();
        let bucket = (config.bucket_mb * 1e6) as usize;
        let bytes = averaging(&codec, model, holders, bucket);
        // Buffers and residuals of codecs are on the rank's device.
        let (buckets, residuals) = if coded && !here { (0, 0) } else { (bytes.buckets, bytes.residuals) };
        need.add(MemoryPurpose::Averaging, buckets.saturating_add(bytes.messages));
        need.add(MemoryPurpose::Residuals, residuals);
        bytes.saved
    }

    /// Returns the bytes that boundary codecs hold in memory for the windows that a replica sees, divided
    /// equally among the ranks of its pipeline.
    fn samples(&self, replicas: usize) -> u128 {
        let (config, sharers) = (self.config, self.positions.len() as u128);
        if sharers == 1 || config.boundary_store != StoreKind::Memory {
            return 0;
        }
        let shape = SampleShape { positions: self.model.context, channels: self.model.dim };
        let of_one = held_bytes(config.boundary, config.boundary_backward, shape);
        let chunks = config.chunks.unwrap_or(config.schedule.default_chunks() as usize) as u128;
        let boundaries = (sharers * chunks).saturating_sub(1);
        let width = token_bytes(config);
        let windows = u128::from(self.data.tokens / width) / (self.model.context.max(1) * replicas) as u128;
        let microbatches = super::super::planned::microbatches(config) as u128;
        let seen = (config.batch as u128).saturating_mul(microbatches).saturating_mul(config.steps.into());
        // Each of the four maps of a boundary (two ends, two directions) needs a few words per sample.
        let each = if of_one == 0 { 0 } else { of_one + 4 * SAMPLE };
        windows.min(seen).saturating_mul(each).saturating_mul(boundaries) / sharers
    }

    /// Adds the activations and logits of the microbatches between their forward and backward passes.
    fn activations(&self, need: &mut MemoryNeed, position: &RankMemory, here: bool) {
        let config = self.config;
        let tokens = (config.batch as u128).saturating_mul(self.model.context as u128);
        if !here {
            need.add(MemoryPurpose::Activations, tokens.saturating_mul(position.away).saturating_mul(F32));
            return;
        }
        need.add(MemoryPurpose::Activations, tokens.saturating_mul(position.held).saturating_mul(F32));
        need.add(MemoryPurpose::Logits, tokens.saturating_mul(position.logits).saturating_mul(F32));
        if config.precision != Precision::F32 {
            // `round.rs` keeps rounded copies of both operands, each as large as the largest so far.
            let (dim, vocab) = (self.model.dim as u128, self.model.vocab as u128);
            let inner = self.model.blocks.iter().map(|run| run.block.mlp.width).max().unwrap_or(0) as u128;
            let widest = if position.logits > 0 { vocab.max(inner) } else { inner };
            let rounded = tokens.saturating_mul(widest).saturating_add(widest.saturating_mul(dim));
            need.add(MemoryPurpose::Rounded, rounded.saturating_mul(F32));
        }
    }
}

/// Returns whether a rank builds the steps of all ranks to choose an algorithm by predicted time. Other
/// algorithms do so only for buffers that are large for the number of ranks, and then keep few.
const fn priced(algorithm: Algorithm) -> bool {
    matches!(algorithm, Algorithm::Auto)
}

/// Returns whether a device's tensors are in the host's memory. `auto` may open a GPU if this build supports
/// any, and then counts as one, so that no run is refused for memory that it does not use.
fn in_host_memory(device: DeviceName) -> bool {
    match device {
        DeviceName::Cpu => true,
        DeviceName::Auto => !cfg!(any(feature = "wgpu", feature = "cuda")),
        DeviceName::Wgpu(_) | DeviceName::Cuda(_) => false,
    }
}
