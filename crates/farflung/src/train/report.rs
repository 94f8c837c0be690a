//! What a run ends with: losses, bytes, time on the link, what plain synchronous all-reduce would have taken
//! there, and a sample.

use std::fmt;

use farflung_base::{Bytes, Link, Nanos, Topology};
use farflung_parallel::{Answer, WhatIf};
use farflung_tensor::Tensor;
use farflung_zoo::{Sampling, Stage, generate};
use serde::{Deserialize, Serialize};

use super::checkpoint::Totals;
use super::costs::modelled;
use super::job::Job;
use super::prices::{AveragePrices, planned_codec};
use crate::plot::loss_curve_svg;
use crate::{Error, PathCounters, PeerCounters, Result, RunDir, StepMetrics, run_dir};

/// The file in a run's folder.
pub(super) const REPORT: &str = "report.json";

/// Paths to peers that are told of in text.
const PATHS: usize = 8;

/// Text that the trained model wrote.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleText {
    /// What it was asked to continue.
    pub prompt: String,
    /// Its continuation.
    pub text: String,
}

/// Where a run's text came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataSource {
    /// The file or folder, in words.
    pub source: String,
    /// Hash of its tokens.
    pub hash: String,
}

/// What plain synchronous f32 all-reduce would have taken for a run on the same link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PlainAllReduce {
    /// Seconds of the run's clock.
    pub time_s: f64,
    /// Bytes that a worker would have sent.
    pub bytes_sent: u64,
}

/// The end of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Name of the model: see [`crate::model_name()`].
    pub model: String,
    /// Its parameters.
    pub parameters: u64,
    /// Where the text came from, and its hash.
    pub data: DataSource,
    /// Number of workers.
    pub workers: usize,
    /// Steps of the run.
    pub steps: u64,
    /// Tokens that all workers trained on.
    pub tokens: u64,
    /// Validation loss before the first step, in nats; unknown for a resumed run.
    pub val_loss_before: Option<f64>,
    /// Validation loss at the end.
    pub val_loss: Option<f64>,
    /// Mean training loss of the last tenth of the steps taken now, or of all steps where only the report was
    /// left to do.
    pub train_loss: Option<f64>,
    /// Bytes that one worker sent, frames and all.
    pub bytes_sent: u64,
    /// The run's clock in seconds: virtual on simulated links.
    pub time_s: f64,
    /// Whether that clock is virtual.
    pub simulated: bool,
    /// Seconds that really passed.
    pub wall_s: f64,
    /// All workers' tokens a second of the run's clock.
    pub tokens_per_s: f64,
    /// What plain synchronous f32 all-reduce would have taken on the same link.
    pub plain: Option<PlainAllReduce>,
    /// Hash of the parameters.
    pub hash: String,
    /// A sample, if one was wanted.
    pub sample: Option<SampleText>,
    /// Where the run's files are.
    pub folder: Option<String>,
    /// What rank 0 and each of its peers have exchanged since they met, and how the paths between them do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerCounters>,
    /// The table of other ways to run it.
    #[serde(skip)]
    what_if: Option<Answer>,
    /// One row a step.
    #[serde(skip)]
    pub rows: Vec<StepMetrics>,
}

/// A continuation of the prompt, if the settings want one.
pub(super) fn sample(job: &Job, stage: &Stage, params: &Tensor) -> Result<Option<SampleText>> {
    let config = &job.config;
    if config.sample_tokens == 0 || stage.config().vocab != job.tokenizer.vocab_size() {
        return Ok(None);
    }
    let sampling = Sampling {
        temperature: config.temperature as f32,
        top_k: config.top_k,
        top_p: config.top_p as f32,
        seed: config.seed,
    };
    let prompt = job.tokenizer.encode(&config.prompt);
    let mut tokens = Vec::new();
    generate(stage, params, &prompt, config.sample_tokens, &sampling, |t| {
        tokens.push(t);
        true
    })?;
    let text = String::from_utf8_lossy(&job.tokenizer.decode(&tokens)?).into_owned();
    Ok(Some(SampleText { prompt: config.prompt.clone(), text }))
}

/// What other ways to synchronise would have taken on this link.
fn what_if(job: &Job, link: Link) -> Result<Option<Answer>> {
    let plan = &job.plan;
    if job.world < 2 || plan.stages() > 1 || !plan.local_steps().are_equal() {
        return Ok(None);
    }
    let config = &job.config;
    // What a protocol sends follows from shapes, of which the question knows nothing.
    let Some(codec) = job.codec()?.codec().map(planned_codec) else { return Ok(None) };
    let flops = job.model.flops_per_token(job.model.context) as f64 * job.tokens_per_step() as f64;
    let parameters = job.model.parameters();
    let answer = WhatIf {
        parameters,
        ranks: job.world as u32,
        link,
        steps: u32::try_from(config.steps).unwrap_or(u32::MAX),
        compute: modelled(flops / f64::from(plan.replicas()), config.compute_rate),
        optimizer: Nanos::ZERO,
        buckets: ((parameters as f64 * 4.0 / plan.outermost().bucket_bytes as f64).ceil() as u32).max(1),
        codec,
        every: u32::try_from(config.sync_every).unwrap_or(u32::MAX),
    };
    let prices = AveragePrices::new(Topology::uniform(job.world, link));
    Ok(Some(answer.answer(&|algorithm, codec, values| prices.of(algorithm, codec, values))?))
}

impl Report {
    pub(super) fn new(
        job: &Job,
        (simulated, link): (bool, Option<Link>),
        (val_loss_before, val_loss): (Option<f64>, Option<f64>),
        rows: Vec<StepMetrics>,
        totals: Totals,
        hash: String,
        sample: Option<SampleText>,
    ) -> Result<Self> {
        let what_if = link.map(|link| what_if(job, link)).transpose()?.flatten();
        let tail = &rows[rows.len() - rows.len().div_ceil(10)..];
        let mean = |tail: &[StepMetrics]| tail.iter().map(|r| r.train_loss).sum::<f64>() / tail.len() as f64;
        let tokens = job.tokens_after(job.config.steps);
        Ok(Self {
            model: crate::model_name(&job.model),
            parameters: job.model.parameters(),
            data: DataSource { source: job.source.clone(), hash: job.hash.clone() },
            workers: job.world,
            steps: job.config.steps,
            tokens,
            val_loss_before,
            val_loss,
            train_loss: if tail.is_empty() { None } else { Some(mean(tail)) },
            bytes_sent: totals.bytes_sent,
            time_s: totals.time_s,
            simulated,
            wall_s: totals.wall_s,
            tokens_per_s: tokens as f64 / totals.time_s.max(1e-9),
            plain: what_if.as_ref().map(|a| PlainAllReduce {
                time_s: a.plain().time.as_secs_f64(),
                bytes_sent: a.plain().sent.0,
            }),
            hash,
            sample,
            peers: rows.last().map_or_else(Vec::new, |row| row.peers.clone()),
            folder: job.out.as_ref().map(|p| p.display().to_string()),
            what_if,
            rows,
        })
    }

    /// How many workers, for how many steps.
    fn scale(&self) -> String {
        let plural = |one| if one { "" } else { "s" };
        let (workers, steps) = (self.workers, self.steps);
        format!("{workers} worker{}, {steps} step{}", plural(workers == 1), plural(steps == 1))
    }

    /// The peers on real networks, the longest round trips first.
    fn paths(&self) -> Vec<(&PeerCounters, PathCounters)> {
        let known = self.peers.iter().filter_map(|peer| Some((peer, peer.path?)));
        let mut paths: Vec<_> = known.collect();
        let round_trip = |path: &PathCounters| path.round_trip_s.unwrap_or(0.0);
        paths.sort_by(|(_, a), (_, b)| round_trip(b).total_cmp(&round_trip(a)));
        paths
    }

    /// Writes `report.json` and `loss.svg` into the run's folder.
    pub(super) fn write(&self, run: &RunDir) -> Result<()> {
        let rows = crate::metrics::read(&run.path().join("metrics.jsonl"))?;
        let title = format!("{}, {}", self.model, self.scale());
        run.replace("loss.svg", loss_curve_svg(&title, &rows)?.as_bytes())?;
        let json = serde_json::to_vec_pretty(self).map_err(|e| Error::Io {
            action: "encode",
            path: run.path().join(REPORT),
            source: e.into(),
        })?;
        run.replace(REPORT, &json)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |s: f64| Nanos::from_secs_f64(s).to_string();
        writeln!(
            f,
            "{}: {} parameters, {}, {} tokens of {} ({})",
            self.model,
            self.parameters,
            self.scale(),
            self.tokens,
            self.data.source,
            self.data.hash.get(..12).unwrap_or(&self.data.hash)
        )?;
        if let Some(after) = self.val_loss {
            let before = self.val_loss_before.map_or(String::new(), |b| format!("{b:.4} -> "));
            let training = self.train_loss.map_or(String::new(), |l| format!(" (training {l:.4})"));
            writeln!(f, "validation loss   {before}{after:.4} nats{training}")?;
        }
        writeln!(f, "sent per worker   {}", Bytes(self.bytes_sent))?;
        let clock = if self.simulated { "on the simulated link" } else { "on the clock" };
        writeln!(
            f,
            "time              {} {clock}, {:.0} tokens/s ({} really passed)",
            seconds(self.time_s),
            self.tokens_per_s,
            seconds(self.wall_s)
        )?;
        let paths = self.paths();
        for (peer, path) in paths.iter().take(PATHS) {
            let (sent, received) = (Bytes(peer.bytes_sent), Bytes(peer.bytes_received));
            writeln!(f, "peer {:<13}sent it {sent}, received {received}; {path}", peer.peer)?;
        }
        if paths.len() > PATHS {
            writeln!(f, "                  and {} peers with shorter round trips", paths.len() - PATHS)?;
        }
        if let Some(PlainAllReduce { time_s: time, bytes_sent: sent }) = self.plain {
            writeln!(
                f,
                "plain all-reduce  {} and {} there: {:.1} times the time, {:.1} times the bytes",
                seconds(time),
                Bytes(sent),
                time / self.time_s,
                sent as f64 / self.bytes_sent.max(1) as f64
            )?;
        }
        if let Some(answer) = &self.what_if {
            write!(f, "\n{answer}")?;
        }
        if let Some(sample) = &self.sample {
            writeln!(f, "\nsample\n{}{}", sample.prompt, sample.text)?;
        }
        if let Some(folder) = &self.folder {
            let checkpoint = run_dir::folder(self.steps);
            writeln!(f, "\n{folder}: metrics.jsonl, loss.svg, report.json, {checkpoint}/")?;
        }
        Ok(())
    }
}
