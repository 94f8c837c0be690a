//! Checks on machines of unequal speed that the trainer uses the shares that `farflung plan` chooses, and takes
//! the predicted time.

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::Link;
use farflung::parallel::{Cluster, Limits, ModelShape, Plan, plan};
use farflung::train::{AveragePrices, Job, Trainer, planned_model};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, config, farthest, job, on_all, set_transport};

pub(crate) const BENCH: Bench = Bench {
    name: "uneven-plan",
    claim: "on machines with speeds 4:2:1:1 a planned step takes the work divided by the total speed, and a \
            step with equal shares takes twice that; the losses are those of one process",
    source: "ours",
    seed: 1337,
    run,
};

const MICROBATCHES: usize = 16;

const MACHINES: &str = r#"
default = "100gbit,10us"
[[device]]
name = "fast"
flops = "400 MFLOPS"
[[device]]
name = "half"
flops = "200 MFLOPS"
[[device]]
name = "slow"
count = 2
flops = "100 MFLOPS"
"#;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let steps = if options.quick { 2 } else { 10 };
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let file = folder.path().join("machines.toml");
    std::fs::write(&file, MACHINES).context("failed to write the topology")?;
    let cluster: Cluster = MACHINES.parse()?;

    let base = TrainConfig { batch: 1, workers: 1, accumulate: MICROBATCHES, ..config(report.seed(), false) };
    let whole = job(base.clone(), JobTransport::Memory)?;
    let losses = timed(&whole, steps)?.0;

    let model = &whole.model;
    let tokens = (MICROBATCHES * model.context) as u64;
    let shape = ModelShape {
        tensors: model.tensors().iter().map(|t| t.count() as u64).collect(),
        flops_per_token: model.flops_per_token(model.context),
        ..ModelShape::dense(model.parameters(), model.context as u64, tokens)
    };
    let prices = AveragePrices::new(cluster.topology()?);
    let price = |algorithm, codec: &_, values| prices.of(algorithm, codec, values);
    let planned = plan(&shape, &cluster, &Limits::default(), &price)?.plan(planned_model("small", model))?;
    let shares: Vec<String> = planned.microbatches.iter().map(ToString::to_string).collect();
    report.row(
        &format!("microbatches {}", shares.join(" ")),
        planned.all_microbatches() as f64,
        "",
        Threshold::None,
    )?;

    let there = whole.with_config(TrainConfig { topology: Some(file), ..with_machines(base) }, 4)?;
    let on = |plan: Plan| -> Result<(Vec<f64>, f64)> {
        let mut job = there.with_plan(plan)?;
        set_transport(&mut job, JobTransport::Simulated(Link::FREE));
        timed(&job, steps)
    };
    let equal = Plan { microbatches: vec![MICROBATCHES as u32 / 4; 4], ..planned.clone() };
    let (seen, took) = on(planned)?;
    let (_, took_equal) = on(equal)?;
    let work = tokens as f64 * model.flops_per_token(model.context) as f64;
    let ideal = work / 800e6;
    report.row("work divided by total speed", ideal, "s", Threshold::None)?;
    report.row(
        "the plan's step relative to work divided by total speed",
        took / ideal,
        "",
        Threshold::AtMost(1.05),
    )?;
    report.row(
        "a step with equal shares relative to work divided by total speed",
        took_equal / ideal,
        "",
        Threshold::AtLeast(1.9),
    )?;
    report.row("largest difference of losses", farthest(&seen, &losses), "nats", Threshold::AtMost(1e-5))
}

fn with_machines(config: TrainConfig) -> TrainConfig {
    TrainConfig { workers: 4, accumulate: MICROBATCHES / 4, ..config }
}

/// Returns the losses of `steps` steps, and the virtual time of one step.
fn timed(job: &Job, steps: u64) -> Result<(Vec<f64>, f64)> {
    let ranks = on_all(job, |rank: &mut Trainer| {
        let begun = rank.comm().now();
        let losses = (0..steps).map(|_| Ok(rank.step(false)?.loss)).collect::<Result<Vec<f64>>>()?;
        Ok((losses, rank.comm().now().saturating_sub(begun).as_secs_f64() / steps as f64))
    })?;
    let slowest = ranks.iter().map(|(_, time)| *time).fold(0.0, f64::max);
    Ok((ranks.into_iter().next().unwrap_or_default().0, slowest))
}
