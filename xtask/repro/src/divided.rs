//! Runs whose ranks divide a small model or its sequences, compared with one process.

use anyhow::{Result, anyhow};
use farflung::TrainConfig;
use farflung::config::choice::OptimizerKind;
use farflung::optim::local::SGD;
use farflung::tensor::Device;
use farflung::train::{Job, Trainer};
use farflung::zoo::spec::HeadSpec;
use farflung::zoo::weights::{Dtype, TokenIds, config_text};
use farflung::zoo::{ModelSpec, Stage};

use crate::harness::{Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all, relative_l2};

const STEPS: usize = 10;
/// Microbatches of a step, of all replicas, and sequences in each.
pub(crate) const MICROBATCHES: usize = 4;
pub(crate) const BATCH: usize = 2;

/// Returns a small model of a family: with a tied head and learned positions, or with a head of its own.
pub(crate) fn small(family: &str) -> Result<ModelSpec> {
    let mut model = ModelSpec::preset(if family == "gpt2" { "nano" } else { "llama-nano" })?;
    model.context = 64;
    if family != "gpt2" {
        model.head = HeadSpec::Own;
    }
    Ok(model)
}

/// What a rank has of some steps.
pub(crate) struct OfRank {
    losses: Vec<f64>,
    /// The gradients of the first step, on rank 0.
    grads: Option<Vec<f32>>,
    /// Bytes that it sent in the second step.
    pub(crate) sent: u64,
}

/// The ranks of a run.
pub(crate) struct Divided {
    pub(crate) job: Job,
    pub(crate) ranks: Vec<OfRank>,
}

/// A run of one process, with which others are compared.
pub(crate) struct Alone {
    base: TrainConfig,
    job: Job,
    of: OfRank,
    whole: Stage,
}

impl Alone {
    pub(crate) fn train(model: &ModelSpec, seed: u64) -> Result<Self> {
        let base = TrainConfig {
            model: config_text(model, Dtype::F32, &TokenIds::default()),
            layers: None,
            heads: None,
            dim: None,
            context: Some(model.context),
            batch: BATCH,
            accumulate: MICROBATCHES,
            workers: 1,
            // Adam would turn the rounding of gradients that are 0, such as those of the keys' biases, into
            // steps.
            optimizer: OptimizerKind::of(&SGD),
            lr: 0.1,
            ..config(seed, false)
        };
        let job = job(base.clone(), JobTransport::Memory)?;
        let of = trained(&job)?.pop().ok_or_else(|| anyhow!("no rank"))?;
        let whole = Stage::whole(&job.model, &Device::cpu(1)?)?;
        Ok(Self { base, job, of, whole })
    }

    /// Returns the settings of the run.
    pub(crate) const fn base(&self) -> &TrainConfig {
        &self.base
    }

    /// Trains with other settings of the same model and data, and reports how far losses and gradients are off.
    pub(crate) fn compare(
        &self,
        report: &mut Report<'_>,
        row: &dyn Fn(&str) -> String,
        plan: TrainConfig,
    ) -> Result<Divided> {
        let job = again(&self.job, plan, JobTransport::Memory);
        let ranks = trained(&job)?;
        let losses = self.of.losses.iter().zip(&ranks[0].losses);
        let off = losses.map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max);
        let metric = row(&format!("largest relative difference of {STEPS} losses"));
        report.row(&metric, off, "", Threshold::AtMost(1e-5))?;
        let (grads, want) = (ranks[0].grads.as_ref(), self.of.grads.as_ref());
        let (grads, want) = grads.zip(want).ok_or_else(|| anyhow!("rank 0 gathers no gradients"))?;
        let mut farthest = 0.0_f64;
        for param in self.whole.layout().params() {
            let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let (own, want) = (&grads[param.range()], &want[param.range()]);
            // Of a small tensor relative to a norm of 0.01.
            farthest = farthest.max(relative_l2(own, want) * norm(want) / norm(want).max(1e-2));
        }
        let metric = row("gradients, relative to each tensor's norm");
        report.row(&metric, farthest, "", Threshold::AtMost(1e-5))?;
        Ok(Divided { job, ranks })
    }
}

fn trained(job: &Job) -> Result<Vec<OfRank>> {
    on_all(job, |worker| {
        let mut losses = vec![worker.step(false)?.loss];
        let grads = worker.gather_grads()?.map(|grads| grads.to_vec::<f32>()).transpose()?;
        let sent = |worker: &Trainer| worker.comm().stats().sent.payload.0;
        let before = sent(worker);
        losses.push(worker.step(false)?.loss);
        let sent = sent(worker) - before;
        for _ in 2..STEPS {
            losses.push(worker.step(false)?.loss);
        }
        Ok(OfRank { losses, grads, sent })
    })
}
