//! Predicts and runs whole plans on uneven machines, on which all traffic of a step shares the links.

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::Bytes;
use farflung::config::choice::{SamplingKind, SyncKind};
use farflung::optim::sync::DILOCO;
use farflung::parallel::pipeline::Method;
use farflung::parallel::{Plan, Recompute};
use farflung::train::Job;

use super::one_period;
use crate::harness::{Report, Threshold};
use crate::plan_exact::in_two_levels;
use crate::workers::{JobTransport, again, set_transport};

/// A set of machines and links.
struct Network {
    name: &'static str,
    text: &'static str,
}

const NETWORKS: [Network; 4] = [
    Network {
        name: "homes with slow uplinks",
        text: r#"
default = "1gbit,15ms"
[[device]]
name = "desk"
flops = "2 GFLOPS"
up = "40mbit"
down = "200mbit"
[[device]]
name = "laptop"
count = 2
flops = "1 GFLOPS"
up = "20mbit"
down = "100mbit"
[[device]]
name = "old"
flops = "500 MFLOPS"
up = "80mbit"
down = "80mbit"
"#,
    },
    Network {
        name: "two regions with a shared line each",
        text: r#"
[[region]]
name = "north"
inside = "1gbit,500us"
up = "50mbit"
down = "100mbit"
[[region]]
name = "south"
inside = "500mbit,1ms"
up = "100mbit"
down = "50mbit"
[[link]]
between = ["north", "south"]
link = "1gbit,20ms"
[[device]]
name = "n"
count = 2
flops = "1 GFLOPS"
region = "north"
[[device]]
name = "s"
count = 2
flops = "2 GFLOPS"
region = "south"
"#,
    },
    Network {
        name: "speeds of 8 to 1 on equal links",
        text: r#"
default = "200mbit,2ms"
[[device]]
name = "server"
flops = "4 GFLOPS"
[[device]]
name = "desk"
flops = "2 GFLOPS"
[[device]]
name = "laptop"
flops = "1 GFLOPS"
[[device]]
name = "phone"
flops = "500 MFLOPS"
"#,
    },
    Network {
        name: "an office and two homes",
        text: r#"
default = "100mbit,20ms"
[[region]]
name = "office"
inside = "1gbit,200us"
up = "60mbit"
down = "200mbit"
[[device]]
name = "rack"
count = 2
flops = "3 GFLOPS"
region = "office"
[[device]]
name = "alice"
flops = "1 GFLOPS"
up = "20mbit"
down = "50mbit"
[[device]]
name = "bob"
flops = "1500 MFLOPS"
up = "40mbit"
down = "250mbit"
"#,
    },
];

/// A way to train on four machines: settings, and a change to the plan that they make.
struct TrainingSetup {
    name: &'static str,
    config: TrainConfig,
    change: fn(&mut Plan),
}

const fn setup(name: &'static str, config: TrainConfig) -> TrainingSetup {
    TrainingSetup { name, config, change: |_| {} }
}

/// Cuts the model into parts of unequal length.
fn unevenly_cut(plan: &mut Plan) {
    let bounds = [0, 1, 3, 7, 10];
    for (part, ends) in plan.parts.iter_mut().zip(bounds.windows(2)) {
        part.layers = ends[0]..ends[1];
    }
}

fn setups(base: &TrainConfig) -> Result<Vec<TrainingSetup>> {
    let pipeline = TrainConfig { stages: 4, microbatches: Some(8), ..base.clone() };
    let two = TrainConfig { stages: 2, microbatches: Some(4), ..base.clone() };
    let replicas = TrainConfig { accumulate: 2, ..base.clone() };
    let by = |config: &TrainConfig, schedule| TrainConfig { schedule, ..config.clone() };
    let diloco =
        |config: &TrainConfig| TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 3, ..config.clone() };
    let crossing = |config: &TrainConfig, forward: &str, backward: &str| -> Result<TrainConfig> {
        Ok(TrainConfig {
            sampling: SamplingKind::Epochs,
            boundary: forward.parse()?,
            boundary_backward: backward.parse()?,
            ..config.clone()
        })
    };
    let averages = |config: &TrainConfig, codec: &str| -> Result<TrainConfig> {
        Ok(TrainConfig { codec: codec.parse()?, ..config.clone() })
    };
    let recomputed =
        |plan: &mut Plan| plan.parts.iter_mut().for_each(|part| part.recompute = Recompute::Full);
    Ok(vec![
        setup("4 replicas", replicas.clone()),
        setup("4 replicas, averages in int8", averages(&replicas, "int8+ef")?),
        setup("4 replicas, averages in int4", averages(&replicas, "int4+ef")?),
        setup("4 replicas, averages by PowerSGD", averages(&replicas, "powersgd:4")?),
        setup("2 x 2, 1f1b, averages by PowerSGD", averages(&two, "powersgd:4")?),
        TrainingSetup {
            name: "4 replicas, averages in buckets of 300 kB",
            change: |plan| plan.levels[0].bucket_bytes = 300_000,
            ..setup("", replicas.clone())
        },
        TrainingSetup {
            name: "4 replicas, averages in int8 in buckets of 300 kB, all at the end",
            change: |plan| (plan.levels[0].bucket_bytes, plan.levels[0].overlap) = (300_000, false),
            ..setup("", averages(&replicas, "int8+ef")?)
        },
        TrainingSetup {
            name: "4 replicas of 1, 2, 1 and 4 microbatches within 1.3 MB of activations",
            change: |plan| {
                plan.microbatches = vec![1, 2, 1, 4];
                plan.parts.iter_mut().for_each(|part| part.recompute = Recompute::Within(Bytes(1_300_000)));
            },
            ..setup("", replicas.clone())
        },
        TrainingSetup {
            name: "4 replicas, averages in f32 in two levels",
            change: |plan| in_two_levels(plan, &[&[0, 1], &[2, 3]]),
            ..setup("", replicas.clone())
        },
        TrainingSetup {
            name: "4 replicas, averages in int8 in two levels",
            change: |plan| in_two_levels(plan, &[&[0, 1], &[2, 3]]),
            ..setup("", averages(&replicas, "int8+ef")?)
        },
        setup("4 replicas, DiLoCo", diloco(&replicas)),
        setup("4 replicas, DiLoCo in int8", averages(&diloco(&replicas), "int8+ef")?),
        setup("4 stages of 1f1b", by(&pipeline, Method::OneFOneB)),
        TrainingSetup {
            name: "4 stages of 1f1b, of 1, 2, 4 and 3 layers that are recomputed",
            change: |plan| {
                unevenly_cut(plan);
                plan.parts.iter_mut().for_each(|part| part.recompute = Recompute::Full);
            },
            ..setup("", pipeline.clone())
        },
        setup(
            "4 stages of zb-h1, boundaries in int8",
            by(&crossing(&pipeline, "int8", "int8")?, Method::ZbH1),
        ),
        setup("4 stages of 1f1b, boundaries in int4 and e4m3", crossing(&pipeline, "int4", "e4m3")?),
        setup("4 stages of pipedream", by(&pipeline, Method::PipeDream)),
        setup("4 stages of gpipe", by(&pipeline, Method::GPipe)),
        setup("4 stages of terapipe", by(&pipeline, Method::TeraPipe)),
        setup("4 stages of varuna", by(&pipeline, Method::Varuna)),
        setup("2 x 2, 1f1b", two.clone()),
        TrainingSetup {
            name: "2 x 2, zb-h1, of 6 and 2 microbatches",
            change: |plan| plan.microbatches = vec![6, 2],
            ..setup("", by(&two, Method::ZbH1))
        },
        setup("2 x 2, zbv, averages in int8", by(&averages(&two, "int8+ef")?, Method::ZbV)),
        setup(
            "2 x 2, interleaved, boundaries in int8, averages in int8",
            by(&averages(&crossing(&two, "int8", "int8")?, "int8+ef")?, Method::Interleaved),
        ),
        TrainingSetup {
            name: "2 x 2, zbv, averages in int8 in buckets of 300 kB",
            change: |plan| plan.levels[0].bucket_bytes = 300_000,
            ..setup("", by(&averages(&two, "int8+ef")?, Method::ZbV))
        },
        setup("2 x 2, chimera", by(&two, Method::Chimera)),
        setup("2 x 2, pipedream", by(&two, Method::PipeDream)),
        setup("2 x 2, DiLoCo", diloco(&two)),
        TrainingSetup { change: recomputed, ..setup("2 x 2, DiLoCo with recompute", diloco(&two)) },
        setup(
            "2 x 2, DiLoCo in int8, boundaries in int8",
            averages(&diloco(&crossing(&two, "int8", "int8")?), "int8+ef")?,
        ),
    ])
}

/// Tests all setups on all networks. With `quick`, it tests every fourth setup on each network.
pub(super) fn run(report: &mut Report<'_>, first: &Job, quick: bool) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    for (i, Network { name: place, text }) in NETWORKS.iter().enumerate() {
        let file = folder.path().join(format!("place{i}.toml"));
        std::fs::write(&file, text).context("failed to write the topology")?;
        let base = TrainConfig { topology: Some(file), stages: 1, ..TrainConfig::clone(&first.given) };
        let wanted = |(j, _): &(usize, TrainingSetup)| !quick || (i + j).is_multiple_of(4);
        for (_, TrainingSetup { name, config, change }) in
            setups(&base)?.into_iter().enumerate().filter(wanted)
        {
            let over = JobTransport::Simulated(config.link);
            let job = again(first, config, over);
            let mut plan = Plan::from(&job.plan);
            change(&mut plan);
            let mut job = job.with_plan(plan)?;
            set_transport(&mut job, over);
            let (_, taken) = one_period(&job)?;
            let row = |what: &str| format!("{place}: {name}: {what}");
            report.row(&row("predicted"), taken.predicted.as_secs_f64() * 1e3, "ms", Threshold::None)?;
            report.row(
                &row("error of the prediction"),
                taken.percent_error(),
                "%",
                Threshold::AtMost(1.0),
            )?;
        }
    }
    Ok(())
}
