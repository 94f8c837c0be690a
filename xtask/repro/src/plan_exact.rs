//! Checks that a run gives the results of one process under any plan: meshes, unequal shares and layers,
//! schedules, levels, transports.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use farflung::TrainConfig;
use farflung::base::{Algorithm, Bytes, ContextCut, Link};
use farflung::parallel::pipeline::Method;
use farflung::parallel::plan::NO_CODEC;
use farflung::parallel::{BoundaryCodecs, Level, Part, Pipeline, Plan, Recompute, ScheduleSource};
use farflung::train::{Job, Trainer};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, config, farthest, job, on_all, set_transport};

pub(crate) const BENCH: Bench = Bench {
    name: "plan-exact",
    claim: "plans of any mesh, with unequal shares and layers, in one level or two, under any schedule and \
            over any transport, give the losses of one process, and its bits where gradients are summed in \
            the same order",
    source: "ours",
    seed: 1337,
    run,
};

const LAYERS: u32 = 4;

/// Microbatches of a step, over all replicas.
const ALL: u32 = 8;

/// A plan in short: microbatches of each replica, the layers at which the model is cut, and the schedule.
#[derive(Clone, Copy)]
struct Shape {
    microbatches: &'static [u32],
    /// Number of ranks in a pipeline.
    stages: u32,
    /// First layer of each part, except the first part.
    cuts: &'static [u32],
    method: Method,
    recompute: Recompute,
    /// Regions of replicas; empty for one level.
    regions: &'static [&'static [u32]],
    /// True if gradients are summed in the same order as in one process.
    in_order: bool,
}

const fn shape(microbatches: &'static [u32], stages: u32, cuts: &'static [u32], method: Method) -> Shape {
    Shape { microbatches, stages, cuts, method, recompute: Recompute::None, regions: &[], in_order: false }
}

const fn same_order(shape: Shape) -> Shape {
    Shape { in_order: true, ..shape }
}

const fn in_regions(regions: &'static [&'static [u32]], shape: Shape) -> Shape {
    Shape { regions, ..shape }
}

const SHAPES: [Shape; 31] = [
    same_order(shape(&[8], 1, &[], Method::OneFOneB)),
    same_order(Shape { recompute: Recompute::Layers(2), ..shape(&[8], 1, &[], Method::OneFOneB) }),
    // A budget below the 1.1 MB that four layers keep of a microbatch.
    same_order(Shape {
        recompute: Recompute::Within(Bytes(600_000)),
        ..shape(&[8], 1, &[], Method::OneFOneB)
    }),
    shape(&[4, 4], 1, &[], Method::OneFOneB),
    shape(&[7, 1], 1, &[], Method::OneFOneB),
    shape(&[3, 5], 1, &[], Method::OneFOneB),
    shape(&[4, 2, 1, 1], 1, &[], Method::OneFOneB),
    shape(&[1, 2, 5], 1, &[], Method::OneFOneB),
    same_order(shape(&[8], 2, &[2], Method::OneFOneB)),
    same_order(shape(&[8], 2, &[1], Method::OneFOneB)),
    same_order(shape(&[8], 2, &[3], Method::ZbH1)),
    shape(&[8], 2, &[3], Method::GPipe),
    same_order(shape(&[8], 4, &[1, 2, 3], Method::OneFOneB)),
    same_order(Shape { recompute: Recompute::Full, ..shape(&[8], 3, &[1, 3], Method::OneFOneB) }),
    same_order(shape(&[8], 2, &[1, 2, 3], Method::Interleaved)),
    same_order(shape(&[8], 2, &[1, 2, 3], Method::ZbV)),
    same_order(shape(&[8], 2, &[1, 1, 2], Method::Hanayo)),
    shape(&[8], 2, &[1], Method::Chimera),
    shape(&[4, 4], 2, &[2], Method::OneFOneB),
    shape(&[6, 2], 2, &[1], Method::OneFOneB),
    shape(&[5, 3], 2, &[3], Method::ZbH1),
    shape(&[6, 2], 2, &[1, 2, 3], Method::Interleaved),
    shape(&[3, 5], 2, &[1, 2, 3], Method::ZbV),
    shape(&[6, 2], 2, &[2], Method::Chimera),
    Shape { recompute: Recompute::Layers(1), ..shape(&[2, 6], 3, &[1, 3], Method::Varuna) },
    in_regions(&[&[0, 1], &[2, 3]], shape(&[2, 2, 2, 2], 1, &[], Method::OneFOneB)),
    in_regions(&[&[0, 1], &[2, 3]], shape(&[4, 2, 1, 1], 1, &[], Method::OneFOneB)),
    in_regions(&[&[2], &[0, 1]], shape(&[1, 2, 5], 1, &[], Method::OneFOneB)),
    in_regions(&[&[0, 2], &[1]], shape(&[3, 4, 1], 2, &[3], Method::ZbH1)),
    in_regions(&[&[0, 1], &[2]], shape(&[2, 4, 2], 2, &[1, 2, 3], Method::Interleaved)),
    in_regions(&[&[0], &[1]], shape(&[5, 3], 2, &[1, 2, 3], Method::ZbV)),
];

/// Changes a plan to two levels: averages are plain inside regions, which are groups of replicas, and use the
/// level's codec between them.
pub(crate) fn in_two_levels(plan: &mut Plan, regions: &[&[u32]]) {
    let mut outer = plan.levels.remove(0);
    let algorithm = if outer.codec == NO_CODEC { Algorithm::Ring } else { Algorithm::Direct };
    outer.algorithm = Algorithm::Hierarchical;
    let groups = regions.iter().map(|region| region.to_vec()).collect();
    let inner = Level { groups, codec: NO_CODEC.to_owned(), algorithm, ..outer.clone() };
    plan.levels = vec![inner, outer];
}

pub(crate) fn plan(
    base: &Plan,
    microbatches: &[u32],
    stages: u32,
    cuts: &[u32],
    method: Method,
) -> Result<Plan> {
    let bounds: Vec<u32> = [&[0], cuts, &[base.model.layers]].concat();
    let part = |ends: &[u32]| Part { layers: ends[0]..ends[1], recompute: Recompute::None, offload: 0 };
    let replicas = microbatches.len() as u32;
    Ok(Plan {
        mesh: Plan::mesh_of(replicas, stages)?,
        context: ContextCut::default(),
        tensor_weights: Vec::new(),
        sequence_parallel: false,
        zero: 0,
        zero_weights: Vec::new(),
        zero_tensors: false,
        zero_codec: NO_CODEC.to_owned(),
        zero_groups: Vec::new(),
        machines: (0..replicas * stages).map(|rank| format!("worker.{rank}")).collect(),
        microbatches: microbatches.to_vec(),
        parts: bounds.windows(2).map(part).collect(),
        boundaries: vec![BoundaryCodecs::default(); cuts.len()],
        pipeline: Pipeline { schedule: ScheduleSource::Named(method), ..Pipeline::default() },
        ..base.clone()
    })
}

/// Returns the job of one process with all microbatches.
pub(crate) fn alone(seed: u64, microbatches: u32) -> Result<Job> {
    let base = TrainConfig { layers: Some(LAYERS as usize), batch: 2, workers: 1, ..config(seed, false) };
    job(TrainConfig { accumulate: microbatches as usize, ..base }, JobTransport::Memory)
}

/// Returns the losses of `steps` steps, and the parameters after them.
pub(crate) fn trace(job: &Job, steps: u64) -> Result<(Vec<f64>, Vec<f32>)> {
    let ranks = on_all(job, |rank: &mut Trainer| {
        let losses = (0..steps).map(|_| Ok(rank.step(false)?.loss)).collect::<Result<Vec<f64>>>()?;
        let params = rank.gather_params()?.map(|p| p.to_vec::<f32>()).transpose()?;
        Ok((losses, params))
    })?;
    let mut first = ranks.into_iter();
    let (losses, params) = first.next().unwrap_or_default();
    Ok((losses, params.unwrap_or_default()))
}

/// Returns the gradients of a job's first step by tensor name. Each is from a rank that has the tensor in its
/// first part. The token table is left out, because the gradients of its two users are summed separately if
/// they are on different ranks.
fn first_gradients(job: &Job) -> Result<BTreeMap<String, Vec<u32>>> {
    let ranks = on_all(job, |rank: &mut Trainer| {
        rank.step(false)?;
        let all = rank.grads().to_vec::<f32>()?;
        let tensors = rank.stage().layout().params().iter().filter(|p| p.name != "wte.weight");
        let bits = tensors.map(|p| (p.name.clone(), all[p.range()].iter().map(|g| g.to_bits()).collect()));
        Ok(bits.collect::<Vec<_>>())
    })?;
    Ok(ranks.into_iter().flatten().collect())
}

/// Returns the plan of a shape for the job of one process.
fn plan_of(shape: &Shape, whole: &Job) -> Result<Plan> {
    let mut plan = plan(&whole.plan, shape.microbatches, shape.stages, shape.cuts, shape.method)?;
    for part in &mut plan.parts {
        let count = part.layers.end - part.layers.start;
        part.recompute = match shape.recompute {
            Recompute::Layers(n) if count > 0 => Recompute::Layers(n.min(count)),
            Recompute::Layers(_) => Recompute::None,
            other => other,
        };
    }
    if !shape.regions.is_empty() {
        in_two_levels(&mut plan, shape.regions);
    }
    Ok(plan)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let steps = if options.quick { 3 } else { 10 };
    let whole = alone(report.seed(), ALL)?;
    let (losses, params) = trace(&whole, steps)?;
    let gradients = first_gradients(&whole)?;
    let link = Link::FREE;
    let all = [
        ("memory", JobTransport::Memory),
        ("simulated", JobTransport::Simulated(link)),
        ("tcp", JobTransport::Tcp),
    ];
    for (i, shape) in SHAPES.iter().enumerate() {
        let planned = whole.with_plan(plan_of(shape, &whole)?)?;
        let lens: Vec<_> = planned.plan.parts.iter().map(|p| p.layers.len()).collect();
        let levels = if shape.regions.is_empty() { "" } else { ", in two levels" };
        let again = match shape.recompute {
            Recompute::None => String::new(),
            other => format!(", recompute {other}"),
        };
        let name = format!(
            "{:?} microbatches, layers {lens:?} on {} stages, {}{again}{levels}",
            shape.microbatches, shape.stages, shape.method
        );
        // Quick runs test each shape on one of the transports in turn.
        let over = if options.quick { &all[i % all.len()..][..1] } else { &all[..] };
        for (transport, over) in over {
            let mut job = planned.clone();
            set_transport(&mut job, *over);
            let (piped, ended) = trace(&job, steps)?;
            let metric = format!("{name}, {transport}: largest difference of losses");
            report.row(&metric, farthest(&piped, &losses), "nats", Threshold::AtMost(1e-5))?;
            if !shape.in_order {
                continue;
            }
            let metric = |what: &str| format!("{name}, {transport}: {what} whose bits differ");
            if shape.cuts.is_empty() {
                let differing = ended.iter().zip(&params).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                report.row(&metric("parameters"), differing as f64, "", Threshold::AtMost(0.0))?;
            }
            let seen = first_gradients(&job)?;
            ensure!(seen.len() > 1, "no gradients to compare");
            let mut differing = 0;
            for (tensor, mine) in seen {
                let theirs = gradients.get(&tensor).with_context(|| format!("no tensor {tensor}"))?;
                differing += mine.iter().zip(theirs).filter(|(a, b)| a != b).count();
            }
            report.row(
                &metric("gradients of the first step"),
                differing as f64,
                "",
                Threshold::AtMost(0.0),
            )?;
        }
    }
    Ok(())
}
