//! Checks plans as text: they can be read back, keep their digest, and ranks whose plans differ are told the
//! field.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use farflung::base::{Algorithm, Axis, Bytes, ContextCut, ContextOrder, Philox, Precision};
use farflung::comm::{Communicator, memory};
use farflung::parallel::pipeline::{Method, VersionSync};
use farflung::parallel::{
    BoundaryCodecs, Level, Part, PathLevel, Pipeline, Plan, PlannedModel, Recompute, ScheduleSource,
};
use farflung::train::same_plan;

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "plan-text",
    claim: "plans can be printed and read back, and keep their digest; a field that differs on one rank is \
            rejected by name on all ranks",
    source: "ours",
    seed: 1337,
    run,
};

/// Returns a random plan.
fn drawn(random: &Philox, i: u64) -> Result<Plan> {
    let draw = |field: u64, below: u64| random.below(i * 64 + field, below);
    let (replicas, stages) = (1 + draw(0, 4) as u32, 1 + draw(1, 4) as u32);
    let mut end = 0;
    let part = |p: u32, end: &mut u32| {
        let count = 1 + draw(8 + u64::from(p), 5) as u32;
        *end += count;
        let recompute = match draw(16 + u64::from(p), if stages == 1 { 5 } else { 4 }) {
            4 => Recompute::Within(Bytes(1 + draw(20 + u64::from(p), 1 << 40))),
            0 => Recompute::None,
            1 => Recompute::Full,
            2 => Recompute::EachLayer,
            _ => Recompute::Layers(1),
        };
        let room = count - recompute.of(count);
        Part {
            layers: *end - count..*end,
            recompute,
            offload: draw(24 + u64::from(p), u64::from(room) + 1) as u32,
        }
    };
    let parts: Vec<Part> = (0..stages).map(|p| part(p, &mut end)).collect();
    let methods = [Method::OneFOneB, Method::GPipe, Method::ZbH1, Method::Varuna];
    let codecs = ["none", "int8+ef", "topk:0.01/f16+ef", "sign"];
    let codec = |field: u64| codecs[draw(field, 4) as usize].to_owned();
    let divides = replicas > 1 && draw(53, 2) == 1;
    let weight = |replica: u32| 1 + draw(54 + u64::from(replica), 3) as u32;
    let paths = (!divides && draw(61, 2) == 1)
        .then(|| PathLevel { layers: draw(62, u64::from(end)) as u32..end, modules: replicas });
    let experts: Vec<u32> = (0..replicas).filter(|_| divides).map(weight).collect();
    let tensor = 1 + draw(58, 3) as u32;
    let mesh = Plan::mesh_of(replicas, stages)?.and(Axis::Tensor, tensor)?;
    let weighted = tensor > 1 && draw(59, 2) == 1;
    let zero = u32::from(replicas > 1 && draw(12, 4) == 0);
    Ok(Plan {
        model: PlannedModel {
            name: format!("m{}", draw(2, 9)),
            layers: end,
            parameters: 1 + draw(3, 1 << 40),
        },
        context: match draw(31, 4) {
            0 if replicas > 1 => {
                ContextCut { ring: replicas, ulysses: 1, order: ContextOrder::ALL[draw(7, 3) as usize] }
            }
            _ => ContextCut::default(),
        },
        tensor_weights: (0..u64::from(tensor))
            .filter(|_| weighted)
            .map(|r| 1 + draw(28 + r, 9) as u32)
            .collect(),
        sequence_parallel: tensor > 1 && draw(63, 2) == 1,
        zero,
        zero_weights: (0..replicas).filter(|_| zero > 0 && draw(13, 2) == 1).map(|r| 1 + r).collect(),
        zero_tensors: zero > 0 && draw(14, 2) == 1,
        zero_codec: "none".to_owned(),
        zero_groups: Vec::new(),
        machines: (0..mesh.size()).map(|r| format!("site-{}.{r}", draw(4, 9))).collect(),
        mesh,
        precision: Precision::ALL[draw(5, 3) as usize],
        batch: 1 + draw(6, 64) as u32,
        microbatches: (0..replicas)
            .map(|r| 1 + draw(32 + if divides || paths.is_some() { 0 } else { u64::from(r) }, 9) as u32)
            .collect(),
        expert_codec: if experts.is_empty() { "none".to_owned() } else { codec(60) },
        experts,
        paths: paths.into_iter().collect(),
        boundaries: (1..parts.len())
            .map(|b| BoundaryCodecs { forward: codec(36 + b as u64), backward: codec(40 + b as u64) })
            .collect(),
        parts,
        pipeline: Pipeline {
            schedule: ScheduleSource::Named(methods[draw(44, 4) as usize]),
            chunks: None,
            memory: Some(draw(45, 9) as u32 + 4).filter(|&m| m > 6),
            version_sync: [VersionSync::Newest, VersionSync::Vertical][draw(46, 2) as usize],
            slices: Vec::new(),
        },
        levels: vec![Level {
            groups: Vec::new(),
            method: ["ddp", "diloco"][draw(47, 2) as usize].to_owned(),
            every: 1 + draw(48, 500) as u32,
            steps: Vec::new(),
            codec: codec(49),
            algorithm: Algorithm::ALL[draw(50, 9) as usize],
            bucket_bytes: 4 + draw(51, 1 << 30),
            overlap: draw(52, 2) == 1,
        }],
    })
}

/// Name of a field, and a function that changes it.
type Change = (&'static str, fn(&mut Plan));

/// Returns a change for each field of a plan; of a list, for a field of its first element.
fn changes() -> Vec<Change> {
    vec![
        ("model.name", |p| p.model.name.push('x')),
        ("model.layers", |p| p.model.layers += 1),
        ("model.parameters", |p| p.model.parameters += 1),
        ("mesh", |p| p.mesh = Plan::mesh_of(p.replicas() + 1, p.stages()).unwrap_or_else(|_| p.mesh.clone())),
        ("context_parallel", |p| p.context.ring += 1),
        ("ulysses", |p| p.context = ContextCut { ulysses: p.context.ulysses + 1, ..p.context }),
        ("context_order", |p| {
            let order = if p.context.order == ContextOrder::Striped {
                ContextOrder::Zigzag
            } else {
                ContextOrder::Striped
            };
            p.context = ContextCut { ring: p.context.ring.max(2), order, ..p.context };
        }),
        ("tensor_weights", |p| p.tensor_weights.push(7)),
        ("sequence_parallel", |p| p.sequence_parallel ^= true),
        ("zero", |p| p.zero += 1),
        ("zero_weights", |p| p.zero_weights.push(7)),
        ("zero_tensors", |p| p.zero_tensors ^= true),
        ("zero_codec", |p| p.zero_codec.push('x')),
        ("zero_groups", |p| p.zero_groups.push(vec![7])),
        ("machines", |p| p.machines[0].push('x')),
        ("precision", |p| {
            p.precision = if p.precision == Precision::F32 { Precision::F16 } else { Precision::F32 };
        }),
        ("batch", |p| p.batch += 1),
        ("microbatches", |p| p.microbatches[0] += 1),
        ("experts", |p| p.experts.push(7)),
        ("expert_codec", |p| p.expert_codec.push('x')),
        ("path[0].layers", |p| p.paths[0].layers.end += 1),
        ("path[0].modules", |p| p.paths[0].modules += 1),
        ("part[0].layers", |p| p.parts[0].layers.end += 1),
        ("part[0].recompute", |p| p.parts[0].recompute = Recompute::Layers(77)),
        ("part[0].offload", |p| p.parts[0].offload += 1),
        ("pipeline.schedule", |p| p.pipeline.schedule = ScheduleSource::Named(Method::ZbV)),
        ("pipeline.chunks", |p| p.pipeline.chunks = Some(9)),
        ("pipeline.memory", |p| p.pipeline.memory = Some(99)),
        ("pipeline.version_sync", |p| {
            p.pipeline.version_sync = match p.pipeline.version_sync {
                VersionSync::Newest => VersionSync::Vertical,
                VersionSync::Vertical => VersionSync::Newest,
            };
        }),
        ("pipeline.slices", |p| p.pipeline.slices = vec![3, 4]),
        ("boundary[0].forward", |p| p.boundaries[0].forward.push('x')),
        ("boundary[0].backward", |p| p.boundaries[0].backward.push('x')),
        ("level[0].groups", |p| p.levels[0].groups = vec![vec![0]]),
        ("level[0].method", |p| p.levels[0].method.push('x')),
        ("level[0].every", |p| p.levels[0].every += 1),
        ("level[0].steps", |p| p.levels[0].steps = vec![2, 1]),
        ("level[0].codec", |p| p.levels[0].codec.push('x')),
        ("level[0].algorithm", |p| {
            let other = p.levels[0].algorithm == Algorithm::Ring;
            p.levels[0].algorithm = if other { Algorithm::Direct } else { Algorithm::Ring };
        }),
        ("level[0].bucket_bytes", |p| p.levels[0].bucket_bytes += 1),
        ("level[0].overlap", |p| p.levels[0].overlap ^= true),
    ]
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let count = if options.quick { 100 } else { 1000 };
    let random = Philox::new(report.seed(), 0);
    let (mut wrong, mut refused) = (0_u32, 0_u32);
    let mut staged = None;
    for i in 0..count {
        let plan = drawn(&random, i)?;
        refused += u32::from(plan.check().is_err());
        let read: Plan = plan.to_string().parse()?;
        wrong += u32::from(read != plan || read.digest() != plan.digest());
        staged = staged.or_else(|| {
            Some(plan).filter(|p| p.stages() > 1 && !p.paths.is_empty() && !p.tensor_weights.is_empty())
        });
    }
    report.row("random plans", count as f64, "plans", Threshold::None)?;
    report.row(
        "random plans that cannot be read back, or have another digest then",
        f64::from(wrong),
        "plans",
        Threshold::AtMost(0.0),
    )?;
    report.row(
        "random plans that are rejected because of what they combine",
        f64::from(refused),
        "plans",
        Threshold::None,
    )?;

    let plan =
        staged.ok_or_else(|| anyhow!("no plan with stages, paths and weights of tensor ranks was drawn"))?;
    let named: std::collections::BTreeSet<&str> = changes().iter().map(|(field, _)| *field).collect();
    let fields: Vec<String> =
        plan.fields().into_keys().filter(|f| !f.contains("[1]") && !f.contains("[2]")).collect();
    let without =
        fields.iter().filter(|f| !f.contains("[3]") && *f != "version" && !named.contains(f.as_str()));
    report.row(
        "fields that none of the changes below covers",
        without.count() as f64,
        "fields",
        Threshold::AtMost(0.0),
    )?;
    let mut silent = 0;
    for (field, change) in changes() {
        let mut other = plan.clone();
        change(&mut other);
        let said = meet(&plan, &other)?;
        let good =
            said.iter().all(|message| message.as_ref().is_some_and(|m| m.contains(&format!("`{field}`"))));
        silent += u32::from(!good);
    }
    report.row(
        "fields that were changed, one at a time",
        changes().len() as f64,
        "fields",
        Threshold::AtLeast(26.0),
    )?;
    report.row(
        "changed fields that are not rejected by name on all ranks",
        f64::from(silent),
        "fields",
        Threshold::AtMost(0.0),
    )
}

/// Returns the errors of three ranks that compare plans, when the second rank has another plan.
fn meet(plan: &Plan, other: &Plan) -> Result<Vec<Option<String>>> {
    let rank = |endpoint: Arc<memory::Memory>| {
        let comm = Communicator::new(endpoint);
        let mine = if comm.rank().0 == 1 { other } else { plan };
        same_plan(mine, &comm).err().filter(|e| e.exit_code() == 2).map(|e| e.to_string())
    };
    let rank = &rank;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = memory::cluster(3).into_iter().map(|e| scope.spawn(move || rank(e))).collect();
        ranks.into_iter().map(|r| r.join().map_err(|_| anyhow!("a rank panicked"))).collect()
    })
}
