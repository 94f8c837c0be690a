//! Compares schedules of the trainer with one process that trains on the same microbatches.

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::parallel::pipeline::{Method, Updates, VersionSync};
use farflung::tensor::{Device, Tensor};
use farflung::train::{Job, Trainer, refusal};
use farflung::zoo::layer::Grads;
use farflung::zoo::{Input, Output, Stage, Targets, stage};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, farthest, job, on_all, plain_sgd, relative_l2};

pub(crate) const BENCH: Bench = Bench {
    name: "pipeline-exact",
    claim: "each synchronous schedule gives the results of one process, with the same bits where gradients \
            are summed in the same order; PipeDream and 2BW give the results of one process that uses the \
            same stale weights",
    source: "Huang et al. 2019; Narayanan et al. 2019 and 2021; Qi et al. 2023 and 2024",
    seed: 1337,
    run,
};

const LAYERS: usize = 4;

/// Results of a run.
struct Trace {
    losses: Vec<f64>,
    first_grads: Vec<f32>,
    params: Vec<f32>,
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let (steps, cuts): (u64, &[usize]) = if options.quick { (3, &[2]) } else { (10, &[2, 4]) };
    let base = TrainConfig { layers: Some(LAYERS), batch: 2, clip: 0.0, ..config(report.seed(), false) };
    let first = job(TrainConfig { workers: 1, ..base.clone() }, JobTransport::Memory)?;
    for &stages in cuts {
        let microbatches = 2 * stages;
        let alone = TrainConfig { workers: 1, accumulate: microbatches, ..base.clone() };
        let alone = alone_trace(&again(&first, alone, JobTransport::Memory), steps)?;
        for schedule in Method::ALL.into_iter().filter(|m| m.is_synchronous() && refusal(*m).is_none()) {
            let config = TrainConfig {
                workers: stages,
                stages,
                schedule,
                microbatches: Some(microbatches),
                ..base.clone()
            };
            let piped = piped_trace(&again(&first, config, JobTransport::Memory), steps)?;
            let in_order = !matches!(
                schedule,
                Method::GPipe | Method::BreadthFirst | Method::Chimera | Method::DualPipe | Method::TeraPipe
            );
            compare(report, &format!("{schedule} on {stages} stages"), (&piped, &alone), in_order, &first)?;
        }
    }
    for (schedule, updates) in [
        (Method::PipeDream, Updates::Stashed { sync: VersionSync::Newest }),
        (Method::PipeDream, Updates::Stashed { sync: VersionSync::Vertical }),
        (Method::PipeDream2Bw, Updates::TwoVersions { every: LAYERS as u32 }),
    ] {
        let version_sync = match updates {
            Updates::Stashed { sync } => sync,
            _ => VersionSync::Newest,
        };
        let config = TrainConfig {
            workers: LAYERS,
            stages: LAYERS,
            schedule,
            version_sync,
            microbatches: Some(3 * LAYERS),
            ..plain_sgd(base.clone(), 0.2)
        };
        let job = again(&first, config, JobTransport::Memory);
        let (piped, stale) = (piped_trace(&job, steps)?, stale_trace(&job, updates, steps)?);
        let name = format!("{schedule} on {LAYERS} stages, {updates}");
        report.row(
            &format!("{name}: largest difference of losses"),
            farthest(&piped.losses, &stale.losses),
            "nats",
            Threshold::AtMost(1e-6),
        )?;
        let params = relative_l2(&piped.params, &stale.params);
        report.row(&format!("{name}: parameters, relative l2"), params, "", Threshold::AtMost(1e-6))?;
    }
    Ok(())
}

/// Compares two runs. `in_order` is true if each part's gradients are summed from the first microbatch to the
/// last, on one rank.
fn compare(
    report: &mut Report<'_>,
    name: &str,
    (piped, alone): (&Trace, &Trace),
    in_order: bool,
    job: &Job,
) -> Result<()> {
    report.row(
        &format!("{name}: largest difference of losses"),
        farthest(&piped.losses, &alone.losses),
        "nats",
        Threshold::AtMost(1e-6),
    )?;
    let grads = relative_l2(&piped.first_grads, &alone.first_grads);
    report.row(&format!("{name}: first gradient, relative l2"), grads, "", Threshold::AtMost(1e-6))?;
    // The token table's two gradients are first summed separately, then added. A single process uses another
    // order.
    let table = job.model.vocab * job.model.dim;
    let pairs = piped.first_grads.iter().zip(&alone.first_grads).skip(table);
    let differing = pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let mark = if in_order { Threshold::AtMost(0.0) } else { Threshold::None };
    let metric = format!("{name}: first gradient except the token table's, values whose bits differ");
    report.row(&metric, differing as f64, "", mark)
}

fn alone_trace(job: &Job, steps: u64) -> Result<Trace> {
    let trace = |worker: &mut Trainer| {
        let mut trace = Trace { losses: Vec::new(), first_grads: Vec::new(), params: Vec::new() };
        for step in 0..steps {
            trace.losses.push(worker.step(false)?.loss);
            if step == 0 {
                trace.first_grads = worker.grads().to_vec()?;
            }
        }
        trace.params = worker.params().to_vec()?;
        Ok(trace)
    };
    Ok(on_all(job, trace)?.remove(0))
}

fn piped_trace(job: &Job, steps: u64) -> Result<Trace> {
    let trace = |rank: &mut Trainer| {
        let mut losses = Vec::new();
        let mut first_grads = None;
        for step in 0..steps {
            losses.push(rank.step(false)?.loss);
            if step == 0 {
                first_grads = rank.gather_grads()?;
            }
        }
        let (Some(grads), Some(params)) = (first_grads, rank.gather_params()?) else { return Ok(None) };
        Ok(Some(Trace { losses, first_grads: grads.to_vec()?, params: params.to_vec()? }))
    };
    on_all(job, trace)?.into_iter().flatten().next().context("no rank has the model")
}

/// Trains in one process, with one layer per part. Each part uses the version of its weights that the update
/// rule gives.
fn stale_trace(job: &Job, updates: Updates, steps: u64) -> Result<Trace> {
    let config = &job.config;
    let device = Device::cpu(1)?;
    let parts: Vec<Stage> =
        (0..LAYERS).map(|k| Stage::new(&job.model, k..k + 1, &device)).collect::<Result<_, _>>()?;
    let mut params: Vec<Vec<f32>> =
        parts.iter().map(|s| Ok(s.init(config.seed)?.to_vec()?)).collect::<Result<_>>()?;
    let microbatches = job.plan.microbatches[0];
    let per_update = if let Updates::TwoVersions { every } = updates { every } else { 1 };
    let tokens = (job.plan.batch as usize * job.model.context) as f32;
    let sampler = job.sampler(0)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let mut versions = vec![params.clone()];
        let mut sums: Vec<Vec<f32>> = params.iter().map(|p| vec![0.0; p.len()]).collect();
        let mut loss = 0.0;
        for micro in 0..microbatches {
            let seen = (0..LAYERS as u32).map(|k| {
                let version = updates.version(k, LAYERS as u32, micro) as usize;
                let values = &versions[version][k as usize];
                Ok(device.tensor(values, values.len())?)
            });
            let seen: Vec<Tensor> = seen.collect::<Result<_>>()?;
            let drawn = sampler.batch(step * u64::from(microbatches) + u64::from(micro))?;
            let tensor = |ids: &[u32]| parts[0].tokens(ids, job.model.context);
            let batch = (tensor(&drawn.inputs)?, tensor(&drawn.targets)?);
            loss += backward(&parts, &seen, batch, 1.0 / (tokens * per_update as f32), &mut sums)?;
            if (micro + 1).is_multiple_of(per_update) {
                // The token table has two users, so both get the sum of its gradients.
                for i in parts[0].layout().params()[0].range() {
                    let sum = sums[0][i] + sums[LAYERS - 1][i];
                    (sums[0][i], sums[LAYERS - 1][i]) = (sum, sum);
                }
                for (p, sum) in params.iter_mut().zip(&mut sums) {
                    p.iter_mut().zip(&*sum).for_each(|(p, g)| *p -= config.lr as f32 * g);
                    sum.fill(0.0);
                }
                versions.push(params.clone());
            }
        }
        losses.push(loss / (f64::from(tokens) * f64::from(microbatches)));
    }
    let whole = Stage::whole(&job.model, &device)?;
    let mut all = vec![0.0; whole.layout().len()];
    for (part, values) in parts.iter().zip(&params) {
        for param in part.layout().params() {
            let to = &whole.layout().params()[whole.layout().find(&param.name)?];
            all[to.range()].copy_from_slice(&values[param.range()]);
        }
    }
    Ok(Trace { losses, first_grads: Vec::new(), params: all })
}

/// Runs forward and backward of a microbatch and adds the gradients to `sums`. Returns the sum of the losses.
fn backward(
    parts: &[Stage],
    params: &[Tensor],
    (tokens, targets): (Tensor, Tensor),
    scale: f32,
    sums: &mut [Vec<f32>],
) -> Result<f64> {
    let (mut hidden, mut kept, mut loss) = (None, Vec::new(), 0.0);
    let mut tokens = Some(tokens);
    for (k, (part, p)) in parts.iter().zip(params).enumerate() {
        let input = match hidden.take() {
            Some(x) => Input::Hidden(x),
            None => Input::Tokens(tokens.take().context("only the first part takes tokens")?),
        };
        let targets = (k + 1 == parts.len()).then_some(Targets::all(&targets, scale));
        let (output, saved) = part.forward(p, input, targets)?;
        kept.push(saved);
        match output {
            Output::Hidden(x) => hidden = Some(x),
            Output::Losses(losses) => loss = stage::total(&losses)?,
        }
    }
    let mut dy = None;
    for (k, saved) in kept.into_iter().enumerate().rev() {
        let mut flat = parts[k].zeros()?;
        let mut grads = Grads::flat(&mut flat, false);
        dy = parts[k].backward(&params[k], saved, dy, &mut grads, |_, _| {})?;
        sums[k].iter_mut().zip(flat.to_vec::<f32>()?).for_each(|(sum, g)| *sum += g);
    }
    Ok(loss)
}
