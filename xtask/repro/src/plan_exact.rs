//! Whatever the plan, a run is one process: meshes, unequal shares and layers, schedules, transports.

use anyhow::Result;
use farflung::TrainConfig;
use farflung::base::Link;
use farflung::parallel::pipeline::Method;
use farflung::parallel::{BoundaryCodecs, Part, Pipeline, Plan, Recompute, ScheduleSource};
use farflung::train::{Job, Trainer};

use crate::harness::{Bench, Mark, Options, Report};
use crate::workers::{Over, config, farthest, job, on_all, with_transport};

pub(crate) const BENCH: Bench = Bench {
    name: "plan-exact",
    claim: "plans of any mesh, with unequal shares and layers, under any schedule and over any transport, have the losses of \
            one process, and its bits where gradients are summed in the same order",
    source: "ours",
    seed: 1337,
    run,
};

const LAYERS: u32 = 4;

/// Microbatches of a step, whoever has them.
const ALL: u32 = 8;

/// A plan in short: microbatches of each replica, where the model is cut, and the order of work.
#[derive(Clone, Copy)]
struct Shape {
    microbatches: &'static [u32],
    /// Ranks of a pipeline.
    stages: u32,
    /// The layers at which a part begins, but for the first.
    cuts: &'static [u32],
    method: Method,
    recompute: Recompute,
    /// Whether gradients are summed as one process sums them.
    in_order: bool,
}

const fn shape(microbatches: &'static [u32], stages: u32, cuts: &'static [u32], method: Method) -> Shape {
    Shape { microbatches, stages, cuts, method, recompute: Recompute::None, in_order: false }
}

const fn same_order(shape: Shape) -> Shape {
    Shape { in_order: true, ..shape }
}

const SHAPES: [Shape; 24] = [
    same_order(shape(&[8], 1, &[], Method::OneFOneB)),
    same_order(Shape { recompute: Recompute::Layers(2), ..shape(&[8], 1, &[], Method::OneFOneB) }),
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
];

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
        machines: (0..replicas * stages).map(|rank| format!("worker.{rank}")).collect(),
        microbatches: microbatches.to_vec(),
        parts: bounds.windows(2).map(part).collect(),
        boundaries: vec![BoundaryCodecs::default(); cuts.len()],
        pipeline: Pipeline { schedule: ScheduleSource::Named(method), ..Pipeline::default() },
        ..base.clone()
    })
}

/// The job of one process with all microbatches.
pub(crate) fn alone(seed: u64, microbatches: u32) -> Result<Job> {
    let base = TrainConfig { layers: Some(LAYERS as usize), batch: 2, workers: 1, ..config(seed, false) };
    job(TrainConfig { accumulate: microbatches as usize, ..base }, Over::Memory)
}

/// The losses of so many steps, and the parameters behind them.
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

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let steps = if options.quick { 3 } else { 10 };
    let whole = alone(report.seed(), ALL)?;
    let (losses, params) = trace(&whole, steps)?;
    let link = Link::FREE;
    let over = [("memory", Over::Memory), ("simulated", Over::Simulated(link)), ("tcp", Over::Tcp)];
    for (i, shape) in SHAPES.iter().enumerate() {
        let mut plan = plan(&whole.plan, shape.microbatches, shape.stages, shape.cuts, shape.method)?;
        for part in &mut plan.parts {
            let count = part.layers.end - part.layers.start;
            part.recompute = match shape.recompute {
                Recompute::Layers(n) if count > 0 => Recompute::Layers(n.min(count)),
                Recompute::Layers(_) => Recompute::None,
                other => other,
            };
        }
        let (transport, over) = over[i % over.len()];
        let mut job = whole.with_plan(plan)?;
        job.config = with_transport(job.config, over);
        let (piped, ended) = trace(&job, steps)?;
        let lens: Vec<_> = job.plan.parts.iter().map(|p| p.layers.len()).collect();
        let name = format!(
            "{:?} microbatches, layers {lens:?} on {}, {}, {transport}",
            shape.microbatches, shape.stages, shape.method
        );
        let off = farthest(&piped, &losses);
        report.row(&format!("{name}: largest difference of losses"), off, "nats", Mark::AtMost(1e-5))?;
        // The token table's two users are summed on their own where they are apart.
        let table = if shape.cuts.is_empty() { 0 } else { whole.model.vocab * whole.model.dim };
        let differing = match steps {
            _ if !shape.in_order || table > 0 => None,
            _ => Some(ended.iter().zip(&params).filter(|(a, b)| a.to_bits() != b.to_bits()).count()),
        };
        if let Some(differing) = differing {
            let metric = format!("{name}: parameters whose bits differ");
            report.row(&metric, differing as f64, "", Mark::AtMost(0.0))?;
        }
    }
    Ok(())
}
