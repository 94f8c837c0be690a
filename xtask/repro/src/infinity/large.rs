//! GPT-2 124M with AdamW, whose moments are on disk: memory, and the time of a step beside computing alone and
//! the disk alone.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use farflung::compress::AverageSpec;
use farflung::config::choice::{StatePlace, TokenizerKind};
use farflung::parallel::Recompute;
use farflung::store::{Arrays, Layout, Store, Stream};
use farflung::tensor::{Device, Tensor};
use farflung::train::{Job, Trainer, connections};
use farflung::{Stop, TrainConfig};

use crate::binary::farflung;
use crate::harness::{Report, Threshold};
use crate::machine::{now, peak_of};
use crate::workers::{JobTransport, with_transport};

const GIB: f64 = (1_u64 << 30) as f64;
/// Rounds of the comparison, each with all arms.
const ROUNDS: usize = 5;
/// Steps of an arm in a round.
const STEPS: usize = 2;

/// Flags of a step of 1,024 tokens.
const FLAGS: &str = "train --model gpt2 --tokenizer byte --vocab 50257 --batch 1 --context 256 --accumulate 4 \
                     --recompute full --workers 1 --transport memory --threads 2 --warmup 0 --steps 3 --eval-every 0 \
                     --eval-batches 1 --sample-tokens 0 --save-end false";

/// Returns the highest resident memory of a run, in bytes.
fn peak(state: &str) -> Result<f64> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let out = folder.path().join("run").display().to_string();
    let mut words: Vec<&str> = FLAGS.split_whitespace().collect();
    words.extend(["--state", state, "--out", &out]);
    let mut child = farflung(&words)?.stderr(Stdio::null()).spawn().context("failed to start `farflung`")?;
    let mut peak = 0;
    let ended = loop {
        peak = peak_of(child.id()).unwrap_or(0).max(peak);
        if let Some(ended) = child.try_wait()? {
            break ended;
        }
        thread::sleep(Duration::from_millis(20));
    };
    anyhow::ensure!(ended.success(), "a run with `--state {state}` failed: {ended}");
    Ok(peak as f64)
}

fn config(seed: u64, state: StatePlace) -> TrainConfig {
    let config = TrainConfig {
        model: "gpt2".to_owned(),
        tokenizer: TokenizerKind::Byte,
        vocab: Some(50_257),
        batch: 1,
        context: Some(256),
        accumulate: 4,
        recompute: Recompute::Full,
        workers: 1,
        threads: 2,
        warmup: 0,
        codec: AverageSpec::default(),
        seed,
        state,
        ..TrainConfig::default()
    };
    with_transport(config, JobTransport::Memory)
}

fn trainer(job: &Job) -> Result<Trainer> {
    let connection = connections(job, None)?.pop().context("one worker")?;
    Ok(Trainer::new(job, connection.comm, 2)?)
}

/// Memory of a piece: two moments and parameters.
struct Piece([Tensor; 3]);

impl Arrays for Piece {
    fn array(&self, number: usize) -> &[u8] {
        self.0[number].host::<f32>().map_or(&[], bytemuck::cast_slice)
    }

    fn array_mut(&mut self, number: usize) -> &mut [u8] {
        self.0[number].host_mut::<f32>().map_or(&mut [], bytemuck::cast_slice_mut)
    }
}

/// Elements of a piece, as the trainer has them.
const PIECE: usize = 1 << 20;

/// The disk alone: reads and writes what a step does.
struct DiskAlone {
    stream: Stream<Piece>,
    generation: u64,
}

impl DiskAlone {
    fn new(folder: &Path, parameters: usize) -> Result<Self> {
        let pieces = vec![(4 * PIECE) as u64; parameters.div_ceil(PIECE)];
        let store = Store::open(&folder.join("alone"), Layout::new([0; 32], 3, pieces, 1000))?;
        let cpu = Device::cpu(1)?;
        let piece =
            || -> Result<Piece> { Ok(Piece([cpu.zeros(PIECE)?, cpu.zeros(PIECE)?, cpu.zeros(PIECE)?])) };
        let buffers = (0..4).map(|_| piece()).collect::<Result<_>>()?;
        Ok(Self { stream: Stream::new(Arc::new(store), None, buffers, 2), generation: 0 })
    }

    fn step(&mut self) -> Result<()> {
        self.generation += 1;
        self.stream.begin(self.generation);
        for _ in 0..self.stream.store().layout().pieces() {
            let piece = self.stream.take()?;
            self.stream.give(piece, &[])?;
        }
        self.stream.commit(Vec::new())?;
        Ok(self.stream.wait()?)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

pub(super) fn run(report: &mut Report<'_>) -> Result<()> {
    let held = peak("device")?;
    report.row("peak resident memory, state in memory", held / GIB, "GiB", Threshold::None)?;
    report.row("peak resident memory, state on disk", peak("disk")? / GIB, "GiB", Threshold::AtMost(1.2))?;

    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let jobs = [StatePlace::Device, StatePlace::Disk].map(|state| config(report.seed(), state));
    let [device, disk] = jobs.map(|config| Job::new(config, 1, Stop::manual()));
    let (device, disk) = (device?, disk?);
    let (mut computes, mut both) = (trainer(&device)?, trainer(&disk)?);
    both.keep_state_in(&disk, &folder.path().join("state"))?;
    let mut alone = DiskAlone::new(folder.path(), device.model.parameters() as usize)?;
    let mut times: [Vec<f64>; 3] = Default::default();
    let mut ratios = Vec::new();
    for round in 0..=ROUNDS {
        let mut took = [0.0; 3];
        let begun = now();
        for _ in 0..STEPS {
            computes.step(false)?;
        }
        took[0] = begun.elapsed().as_secs_f64() / STEPS as f64;
        let begun = now();
        for _ in 0..STEPS {
            both.step(false)?;
        }
        took[1] = begun.elapsed().as_secs_f64() / STEPS as f64;
        let begun = now();
        for _ in 0..STEPS {
            alone.step()?;
        }
        took[2] = begun.elapsed().as_secs_f64() / STEPS as f64;
        // The first round reads nothing.
        if round > 0 {
            ratios.push(took[1] / took[0].max(took[2]));
            times.iter_mut().zip(took).for_each(|(all, one)| all.push(one));
        }
        report.progress(&format!("round {round}: compute, with the disk, the disk alone: {took:.2?} s"))?;
    }
    let same = computes.hash()? == both.hash()?;
    let metric = "weights that differ from those with state in memory, after all steps";
    report.row(metric, f64::from(u8::from(!same)), "1", Threshold::AtMost(0.0))?;
    for (name, all) in
        ["a step with state in memory", "a step with state on disk", "the disk alone"].iter().zip(times)
    {
        report.row(&format!("{name}, median of {ROUNDS}"), median(all), "s", Threshold::None)?;
    }
    let metric = "a step with state on disk over the longer of computing and the disk alone, median";
    report.row(metric, median(ratios), "x", Threshold::AtMost(1.10))
}
