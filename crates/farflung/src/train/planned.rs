//! A job's plan: made from the settings, or read from a file. Both result in the same type, from which
//! everything else is derived.

use std::ops::Range;
use std::path::Path;

use farflung_base::{Axis, Link, Nanos, Rank};
use farflung_compress::AverageSpec;
use farflung_parallel::pipeline::{ComputeOrder, Method, Pools, Updates, slice_tokens};
use farflung_parallel::plan::{NO_CODEC, even_parts};
use farflung_parallel::{
    BoundaryCodecs, Cluster, Level, ParallelError, Part, PathLevel, Pipeline, Plan, PlannedModel, Recompute,
    ScheduleSource,
};
use farflung_zoo::ModelSpec;

use super::bound_plan::{BoundLevel, BoundPlan};
use super::costs::Work;

use super::division;
use super::links;
use super::replica_groups;
use crate::config::choice::SyncKind;
use crate::config::local_steps::LocalStepsKind;
use crate::config::pools::Numbers;
use crate::config::value::Setting as _;
use crate::config::zero::{Weights, ZeroWithin};
use crate::{Error, Result, RunSettings, TrainConfig, model_name};

/// Returns why `train` does not support a schedule; `None` if it does.
///
/// Both `farflung train --help` and the check of a run's settings use this function.
#[must_use]
pub const fn refusal(method: Method) -> Option<&'static str> {
    if method.trains() { None } else { Some("it has no backward passes, so nothing would be trained") }
}

#[expect(clippy::needless_pass_by_value, reason = "values of any kind are named, mostly made for it")]
fn refuse(field: &'static str, value: impl ToString, expected: impl Into<String>) -> Error {
    Error::Setting { field, value: value.to_string(), expected: expected.into() }
}

/// Returns the description of a model that a plan contains.
#[must_use]
pub fn planned_model(name: &str, model: &ModelSpec) -> PlannedModel {
    let layers = u32::try_from(model.layers()).unwrap_or(u32::MAX);
    PlannedModel { name: name.to_owned(), layers, parameters: model.parameters() }
}

/// Returns the microbatches of each replica in a step: `--microbatches` or `--accumulate`, else enough to keep
/// a pipeline busy.
pub(super) fn microbatches(config: &TrainConfig) -> usize {
    let unless_told = if config.stages > 1 { 2 * config.stages } else { 1 };
    let accumulated = Some(config.accumulate).filter(|&n| n > 1);
    config.microbatches.or(accumulated).unwrap_or(unless_told)
}

/// Makes the plan that follows from the settings, in which the parts of the model have nearly equal numbers of
/// layers.
///
/// Errors: [`Error::Setting`] with the invalid setting, and the values that are allowed.
pub(super) fn from_settings(
    config: &TrainConfig,
    model: &ModelSpec,
    world: usize,
    cluster: Option<&Cluster>,
) -> Result<BoundPlan> {
    divided(config, model, (world, cluster), None)
}

/// Makes the plan that follows from the settings. Its parts have the layers of `own_cut`, if that has as many
/// parts as the plan.
///
/// Errors: as [`from_settings`].
pub(super) fn divided(
    config: &TrainConfig,
    model: &ModelSpec,
    (world, cluster): (usize, Option<&Cluster>),
    own_cut: Option<Vec<Range<u32>>>,
) -> Result<BoundPlan> {
    check(config, world)?;
    let own = config.schedule_file.as_deref().filter(|_| config.stages > 1).map(read_schedule).transpose()?;
    let (stages, count) = (small("stages", config.stages)?, small("microbatches", microbatches(config))?);
    let replicas = small("workers", config.replicas_of(world))?;
    let tensor = small("tensor", config.tensor)?;
    let pools = config.pools();
    let method = if config.stages == 1 || pools.is_some() { Method::OneFOneB } else { config.schedule };
    let chunks = config
        .chunks
        .filter(|_| config.stages > 1 && pools.is_none())
        .map(|n| small("chunks", n))
        .transpose()?;
    let parts = match (&own, method) {
        _ if pools.is_some() => pools.as_ref().map_or(1, Pools::stages),
        (Some(own), _) => own.placement().depth(),
        (None, method) if method.copies() > 1 => stages,
        (None, _) => stages.saturating_mul(chunks.unwrap_or(method.default_chunks())),
    };
    let layers = small("layers", model.layers())?;
    let equal = cut(layers, parts)?;
    let cut = own_cut.filter(|cut| cut.len() == equal.len()).unwrap_or(equal);
    let part = |layers: Range<u32>| {
        let count = layers.end - layers.start;
        // A part with fewer layers than requested recomputes all of them.
        let recompute = match config.recompute {
            Recompute::Layers(_) if count == 0 => Recompute::None,
            Recompute::Layers(n) => Recompute::Layers(n.min(count)),
            other => other,
        };
        let offload = u32::try_from(config.offload).unwrap_or(u32::MAX).min(count - recompute.of(count));
        Part { layers, recompute, offload }
    };
    let schedule = match (&own, pools) {
        (_, Some(pools)) => ScheduleSource::Pools(pools),
        (Some(own), None) => ScheduleSource::Text(own.to_string()),
        (None, None) => ScheduleSource::Named(method),
    };
    let slices = match (&own, method) {
        (Some(own), _) => even(model.context, own.slices().into())?,
        (None, method) if method.slices() => {
            sliced(config, model, &cut, &links_of(config, world, stages, cluster)?)?
        }
        (None, _) => Vec::new(),
    };
    check_slices(&slices, model)?;
    let plan = Plan {
        model: planned_model(&model_name(model), model),
        mesh: Plan::mesh_of(replicas, stages)?.and(Axis::Tensor, tensor)?,
        context: config.context_cut(),
        tensor_weights: config.tensor_weights(),
        sequence_parallel: config.sequence_parallel,
        zero: small("zero", config.zero)?,
        zero_weights: config.zero_weights(),
        zero_tensors: config.zero > 0 && config.optimizer.row().per_tensor,
        zero_codec: if config.divides_weights() {
            config.zero_codec.to_string()
        } else {
            NO_CODEC.to_owned()
        },
        zero_groups: replica_groups::zero_groups(config, (world, cluster), replicas)?,
        machines: machines(world, cluster),
        precision: config.precision,
        batch: small("batch", config.batch)?,
        microbatches: vec![count; replicas as usize],
        expert_codec: expert_codec(config),
        experts: config.expert_weights(),
        paths: path_levels(config, layers)?,
        boundaries: vec![boundary(config); cut.len() - 1],
        parts: cut.into_iter().map(part).collect(),
        pipeline: Pipeline {
            schedule,
            chunks,
            memory: config.memory.filter(|_| config.stages > 1).map(|n| small("memory", n)).transpose()?,
            version_sync: config.version_sync,
            slices,
        },
        levels: vec![level(config, replicas).into_level()],
    };
    division::check(&plan, model).and_then(|()| BoundPlan::new(plan)).map_err(in_settings)
}

/// Returns a plan with what follows from the rates of the ranks' machines: the relative speeds of the ranks in
/// its pools, the number of local steps of each replica, and the shares of the experts of replicas that divide
/// them.
///
/// Errors: [`Error::Setting`] for numbers that the plan does not allow.
pub(super) fn with_rates(
    plan: &BoundPlan,
    (config, model): (&TrainConfig, &ModelSpec),
    rates: &[f64],
) -> Result<BoundPlan> {
    let steps = (!plan.averages_each_step()).then(|| local_steps(plan, config, rates));
    let experts = experts_by_speed(plan, model, rates).filter(|_| config.expert_weights.is_none());
    let pool_rates = config.pool_rates.is_none().then(|| Pools::whole_rates(rates));
    let set = |plan: &mut Plan| {
        if let (ScheduleSource::Pools(pools), Some(rates)) = (&mut plan.pipeline.schedule, pool_rates) {
            pools.rates = rates;
        }
        if let Some(experts) = experts {
            plan.experts = experts;
        }
        if let Some(steps) = steps {
            plan.levels.iter_mut().for_each(|level| level.steps.clone_from(&steps));
        }
    };
    plan.changed(set).map_err(in_settings)
}

/// Returns how many experts of the smallest mixture each replica of a group has, by speed: a group computes as
/// much as it routes to its slowest replica. `None` if all are equally fast, or have all experts.
fn experts_by_speed(plan: &BoundPlan, model: &ModelSpec, rates: &[f64]) -> Option<Vec<u32>> {
    if !plan.divides_experts() {
        return None;
    }
    let mut speeds = vec![f64::INFINITY; plan.experts.len()];
    for (rank, &rate) in (0..).map(Rank).zip(rates) {
        let speed = &mut speeds[plan.expert_rank(plan.at(rank).data) as usize];
        *speed = speed.min(rate);
    }
    let equal = Pools::whole_rates(&speeds).iter().all(|rate| *rate == 1);
    let fewest = model.mixtures().map(|(_, experts)| experts.count).min()?;
    let mut shares = vec![1_u32; speeds.len()];
    for _ in shares.len()..fewest {
        // The next expert goes where it takes the least time.
        let time = |at: usize| f64::from(shares[at] + 1) / speeds[at];
        let next = (0..shares.len()).min_by(|&a, &b| time(a).total_cmp(&time(b)))?;
        shares[next] += 1;
    }
    (!equal).then_some(shares)
}

/// Returns the number of local steps of each replica, from the rates of the ranks' machines.
fn local_steps(plan: &BoundPlan, config: &TrainConfig, rates: &[f64]) -> Vec<u32> {
    // A replica is as fast as its slowest rank.
    let slowest = |ranks: &[Rank]| ranks.iter().map(|rank| rates[rank.index()]).fold(f64::INFINITY, f64::min);
    let replicas = (0..).zip(&plan.microbatches);
    let speeds: Vec<f64> =
        replicas.map(|(replica, &count)| slowest(&plan.ranks_of(replica)) / f64::from(count)).collect();
    let every = plan.outermost().every;
    // Workers that do not wait for each other need not meet at each average.
    let meets = config.meet_every.next_multiple_of(every.into());
    let timed = plan.outermost().method.timed;
    let period = if timed { u32::try_from(meets).unwrap_or(every) } else { every };
    config.local_steps.of(period, &speeds)
}

/// Checks that all replicas take the steps in which gradients are averaged, for methods that also have local
/// steps.
pub(super) fn check_warmup(config: &RunSettings, plan: &BoundPlan) -> Result<()> {
    let (method, steps) = (plan.outermost().method, &plan.outermost().steps);
    let averages = config.optimizer.averages.sync().is_some()
        || (method.reads.contains(&"sync-warmup") && config.sync_warmup > 0);
    if averages && steps.windows(2).any(|pair| pair[0] != pair[1]) {
        let expected =
            format!("equal numbers with {}: all replicas average gradients in its first steps", method.name);
        return Err(Error::Setting { field: "local-steps", value: format!("{steps:?}"), expected });
    }
    Ok(())
}

/// Converts an error in a plan that was made from settings to an error on the setting.
fn in_settings(error: Error) -> Error {
    match error {
        Error::Parallel(ParallelError::Plan { field, value, expected }) => {
            let field = match &*field {
                "pipeline.schedule" => "schedule-file",
                field if field.ends_with(".recompute") => "recompute",
                "experts" => "expert",
                "mesh" => "tensor",
                "context_parallel" => "context-parallel",
                "ulysses" => "ulysses",
                "context_order" => "context-order",
                "tensor_weights" => "tensor-weights",
                "sequence_parallel" => "sequence-parallel",
                "zero" | "zero_tensors" => "zero",
                "zero_weights" => "zero-weights",
                "zero_codec" => "zero-codec",
                "zero_groups" => "zero-within",
                "expert_codec" => "expert-codec",
                field if field.starts_with("path") => "paths",
                field if field.rsplit('.').next() == Some("method") => "sync",
                field if field.rsplit('.').next() == Some("steps") => "local-steps",
                _ => "plan",
            };
            Error::Setting { field, value, expected }
        }
        error => error,
    }
}

/// Divides layers into parts that are as equal as possible.
pub(super) fn cut(layers: u32, parts: u32) -> Result<Vec<Range<u32>>> {
    even_parts(layers, parts)
        .ok_or_else(|| refuse("stages", parts, format!("1 for a model of {layers} layer: it cannot be cut")))
}

/// Converts a count to the type that plans use.
fn small(field: &'static str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| refuse(field, value, format!("at most {}", u32::MAX)))
}

/// Returns the codecs of each boundary, from the settings.
fn boundary(config: &TrainConfig) -> BoundaryCodecs {
    let (forward, backward) = (config.boundary.to_string(), config.boundary_backward.to_string());
    BoundaryCodecs { forward, backward }
}

/// Returns the codec of tokens for the experts of other replicas; `none` if all have all experts.
fn expert_codec(config: &TrainConfig) -> String {
    if config.expert > 1 { config.expert_codec.to_string() } else { NO_CODEC.to_owned() }
}

/// Returns the levels of modules of which replicas train paths.
fn path_levels(config: &TrainConfig, layers: u32) -> Result<Vec<PathLevel>> {
    let Some(Numbers(modules)) = config.paths.as_ref().filter(|_| config.path_count() > 1) else {
        return Ok(Vec::new());
    };
    let expected = || format!("at most {layers} levels, so that each has a layer");
    PathLevel::even(layers, modules)
        .ok_or_else(|| refuse("paths", format!("{} levels", modules.len()), expected()))
}

/// Returns the settings of synchronisation between replicas, as a level of the plan.
pub(super) fn level(config: &TrainConfig, replicas: u32) -> BoundLevel {
    // A single copy has no peers, so its values need not be encoded.
    let alone = replicas == 1 && !has_copies(config);
    let codec = if alone { AverageSpec::default() } else { config.averaged_codec() };
    let every = u32::try_from(config.period()).unwrap_or(u32::MAX);
    let name = if codec.is_plain() { NO_CODEC.to_owned() } else { codec.to_string() };
    let algorithm = match codec {
        _ if config.was_given("algorithm") => config.algorithm,
        // The exchanges of a protocol are summed uncompressed.
        AverageSpec::Protocol(_) => Level::unless_told(NO_CODEC),
        AverageSpec::Codec(_) => Level::unless_told(&name),
    };
    let level = Level {
        groups: Vec::new(),
        method: config.sync.to_string(),
        every,
        steps: Vec::new(),
        codec: name,
        algorithm,
        bucket_bytes: ((config.bucket_mb * 1e6) as u64).max(4),
        overlap: config.overlap,
    };
    BoundLevel::of_values(level, config.sync.row(), codec)
}

/// Returns whether a pipeline with these settings has several copies of parts of the model.
fn has_copies(config: &TrainConfig) -> bool {
    if let Some(pools) = config.pools() {
        return pools.fewest() > 1;
    }
    config.stages > 1 && config.schedule.copies() > 1
}

/// Returns the names of a cluster's machines by rank, or generated names without a cluster.
fn machines(world: usize, cluster: Option<&Cluster>) -> Vec<String> {
    cluster.map_or_else(|| (0..world).map(|rank| format!("worker.{rank}")).collect(), Cluster::rank_names)
}

/// Checks that pools have as many ranks as the run, and that there are enough microbatches for them.
pub(super) fn check_pools(config: &TrainConfig, pools: &Pools, world: usize) -> Result<()> {
    let (ranks, fewest, microbatches) = (pools.ranks(), pools.fewest(), microbatches(config));
    if world != ranks as usize {
        return Err(refuse(
            "workers",
            world,
            format!("{ranks}, the ranks of `pools`, which together hold one copy of the model"),
        ));
    }
    if microbatches < fewest as usize {
        let expected = format!("at least {fewest}, so that each rank of the largest pool has one");
        return Err(refuse("microbatches", microbatches, expected));
    }
    Ok(())
}

/// Checks that the settings are consistent.
fn check(config: &TrainConfig, world: usize) -> Result<()> {
    let (method, stages) = (config.schedule, config.stages);
    if !world.is_multiple_of(stages) {
        return Err(refuse("workers", world, format!("a multiple of the {stages} stages")));
    }
    let (replicas, tensor) = (config.replicas_of(world), config.tensor);
    let whole = Plan::mesh_of(small("workers", replicas)?, small("stages", stages)?)
        .and_then(|mesh| mesh.and(Axis::Tensor, small("tensor", tensor).unwrap_or(u32::MAX)));
    if replicas == 0 || whole?.size() as usize != world {
        let expected =
            format!("a multiple of the ranks of {stages} stages, each of {tensor} ranks (`tensor`)");
        return Err(refuse("workers", world, expected));
    }
    if let Some(mesh) = config.mesh.as_ref().filter(|mesh| mesh.size() as usize != world) {
        return Err(refuse("mesh", mesh, format!("one of {world} ranks, as many as the run has")));
    }
    let readers = config.context_parallel;
    if !replicas.is_multiple_of(readers) {
        return Err(refuse("context-parallel", readers, format!("a divisor of the {replicas} replicas")));
    }
    if !replicas.is_multiple_of(config.expert) {
        return Err(refuse("expert", config.expert, format!("a divisor of the {replicas} replicas")));
    }
    let paths = config.path_count();
    if paths > 1 && config.local_steps != LocalStepsKind::Equal {
        let expected = "equal with `paths`, since those that share a module count alike".to_owned();
        return Err(refuse("local-steps", config.local_steps.value(), expected));
    }
    if !replicas.is_multiple_of(paths) {
        return Err(refuse(
            "paths",
            format!("{paths} paths"),
            format!("as many as divide the {replicas} replicas"),
        ));
    }
    let microbatches = microbatches(config);
    if let Some(pools) = config.pools() {
        return check_pools(config, &pools, world);
    }
    let named = config.schedule_file.is_none() && stages > 1;
    match method.updates(small("stages", stages)?, config.version_sync) {
        Updates::TwoVersions { every } if named && !microbatches.is_multiple_of(every as usize) => {
            let expected = format!(
                "for {method} a multiple of the {stages} stages: each update takes this many microbatches"
            );
            Err(refuse("microbatches", microbatches, expected))
        }
        _ => Ok(()),
    }
}

/// Returns the settings with the wishes that a plan shows, as far as wishes can express it. They are for notes
/// and for estimates before a run; training reads the plan.
pub(super) fn as_planned(config: &TrainConfig, plan: &BoundPlan) -> TrainConfig {
    let level = plan.outermost();
    let links = plan.links().first().copied();
    TrainConfig {
        workers: plan.ranks() as usize,
        stages: plan.stages() as usize,
        batch: plan.batch as usize,
        microbatches: plan.microbatches.iter().max().map(|&m| m as usize),
        accumulate: 1,
        tensor: plan.tensor_ranks() as usize,
        tensor_weights: Some(Numbers(plan.tensor_weights.clone())).filter(|weights| !weights.0.is_empty()),
        context_parallel: plan.context.readers() as usize,
        ulysses: plan.context.ulysses as usize,
        context_order: plan.context.order,
        sequence_parallel: plan.sequence_parallel,
        zero: plan.zero as usize,
        zero_weights: Some(Weights(plan.zero_weights.clone())).filter(|weights| !weights.0.is_empty()),
        zero_codec: plan.zero_codecs(),
        zero_within: match plan.zero_groups.first() {
            Some(group) => ZeroWithin::Neighbours(group.len() as u32),
            None => ZeroWithin::No,
        },
        mesh: None,
        expert: plan.expert_ranks() as usize,
        expert_codec: plan.expert_codec(),
        expert_weights: plan.divides_experts().then(|| Numbers(plan.experts.clone())),
        paths: (plan.paths() > 1).then(|| Numbers(plan.paths.iter().map(|level| level.modules).collect())),
        precision: plan.precision,
        schedule: match &plan.pipeline.schedule {
            ScheduleSource::Named(method) => *method,
            ScheduleSource::Text(_) | ScheduleSource::Pools(_) => Method::OneFOneB,
        },
        pools: plan.pools().map(|pools| Numbers(pools.sizes.clone())),
        pool_rates: plan.pools().map(|pools| Numbers(pools.rates.clone())),
        schedule_file: None,
        version_sync: plan.pipeline.version_sync,
        // If boundaries differ, the first one is shown.
        boundary: links.map_or(config.boundary, |links| links.forward),
        boundary_backward: links.map_or(config.boundary_backward, |links| links.backward),
        algorithm: level.algorithm,
        sync_every: level.every.into(),
        local_steps: match &level.steps[..] {
            [] => LocalStepsKind::Equal,
            steps => LocalStepsKind::Each(steps.to_vec()),
        },
        bucket_mb: level.bucket_bytes as f64 / 1e6,
        overlap: level.overlap,
        codec: level.codec,
        sync: SyncKind::of(level.method),
        ..config.clone()
    }
}

/// Reads a plan and checks that it is for this model and this number of ranks.
///
/// Errors: [`Error::Io`]; [`Error::Parallel`] with the line or field; [`Error::Setting`] for another model or
/// number of ranks.
pub(super) fn from_file(path: &Path, model: &ModelSpec, world: usize) -> Result<BoundPlan> {
    let plan = read(path)?;
    let shown = || path.display().to_string();
    let (planned, here) = (&plan.model, planned_model("", model));
    for (what, there, here) in [
        ("layers", u64::from(planned.layers), u64::from(here.layers)),
        ("parameters", planned.parameters, here.parameters),
    ] {
        if there != here {
            let expected =
                format!("a plan for a model of {here} {what}; it is for {} with {there}", planned.name);
            return Err(refuse("plan", shown(), expected));
        }
    }
    check_slices(&plan.pipeline.slices, model)?;
    division::check(&plan, model)?;
    let tokens: u64 = plan.pipeline.slices.iter().map(|&n| u64::from(n)).sum();
    if tokens > 0 && tokens != model.context as u64 {
        let expected =
            format!("slices with {} tokens in total, the model's context; they have {tokens}", model.context);
        return Err(refuse("plan", shown(), expected));
    }
    if world != plan.ranks() as usize {
        let expected =
            format!("a plan for {world} ranks, as many as the job has; it is for {}", plan.ranks());
        return Err(refuse("plan", shown(), expected));
    }
    Ok(plan)
}

/// Checks that sequences are whole where experts need them.
fn check_slices(slices: &[u32], model: &ModelSpec) -> Result<()> {
    if slices.len() > 1 && model.routes_by_sequence() {
        let expected = "1, since the experts of the model have a capacity, or a balancing loss, by sequence";
        return Err(refuse("slices", slices.len(), expected));
    }
    Ok(())
}

/// Reads a plan and checks its fields and names.
///
/// Errors: [`Error::Io`]; [`Error::Parallel`] with the line or field.
pub fn read(path: &Path) -> Result<BoundPlan> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read the plan", path))?;
    BoundPlan::new(text.parse()?)
}

/// Reads a schedule: lines such as `r0: 0F0 0F1 0B0 0B1`, or `PyTorch`'s form in a `.csv` file.
///
/// Errors: [`Error::Io`]; [`Error::Setting`] with the file and the line, or with the reason why the schedule
/// cannot run.
pub fn read_schedule(path: &Path) -> Result<ComputeOrder> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let csv = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("csv"));
    let order = if csv { ComputeOrder::from_csv(&text) } else { text.parse() };
    order
        .map_err(|cause| refuse("schedule-file", path.display(), format!("a schedule that can run: {cause}")))
}

/// Divides positions into slices that are as equal as possible; empty for a single slice.
fn even(context: usize, slices: usize) -> Result<Vec<u32>> {
    if slices > context {
        let expected = format!("at least {slices}, as many as the schedule has slices");
        return Err(refuse("context", context, expected));
    }
    let bound = |slice: usize| (slice * context / slices) as u32;
    Ok(if slices == 1 { Vec::new() } else { (0..slices).map(|s| bound(s + 1) - bound(s)).collect() })
}

/// Returns the links between neighbours of the first pipeline.
fn links_of(config: &TrainConfig, world: usize, stages: u32, cluster: Option<&Cluster>) -> Result<Vec<Link>> {
    let topology = links::declared(&config.run_settings(), world, cluster)?;
    let link = |from, to| Link { bandwidth: topology.rate(from, to), ..topology.link(from, to) };
    Ok((1..stages).map(|r| link(Rank(r - 1), Rank(r))).collect())
}

/// Default limit on the number of slices of a sequence: shorter slices are less efficient, which the predicted
/// times do not show.
const SLICES: usize = 8;

/// Limit on the number of grains of a sequence (the units of slice lengths), so that the search for the best
/// slices takes less than a second.
const MOST_GRAINS: usize = 256;

/// Returns the slices with which a pipeline of these parts takes the least time, where each slice costs its
/// forward and backward pass and the time on the slowest link. Latency is ignored, since it passes while the
/// next slice is computed.
fn sliced(config: &TrainConfig, model: &ModelSpec, parts: &[Range<u32>], links: &[Link]) -> Result<Vec<u32>> {
    let context = model.context;
    let grain = config.slice_grain.unwrap_or_else(|| {
        let fits = |grain: &usize| context.is_multiple_of(*grain);
        (context.div_ceil(SLICES)..=context).find(fits).expect("a number divides itself")
    });
    if grain == 0 || !context.is_multiple_of(grain) || context / grain > MOST_GRAINS {
        let expected = format!("a divisor of the context, {context}, and at least a {MOST_GRAINS}th of it");
        return Err(refuse("slice-grain", grain, expected));
    }
    let work = Work::new(model, config.batch);
    let whole = work.hidden_bytes();
    let time = |len: u64, before: u64| {
        let slice = before as usize..(before + len) as usize;
        let seconds = |part: &Range<u32>| work.slice_flops(part, &slice) / config.compute_rate;
        let compute = parts.iter().map(|part| Nanos::from_secs_f64(seconds(part))).max();
        let bytes = farflung_base::Bytes(whole.0 * len / context as u64);
        let wire = links.iter().map(|link| link.bandwidth.transfer(bytes)).max();
        compute.unwrap_or_default().saturating_add(wire.unwrap_or_default() * 2)
    };
    let cut = slice_tokens(context as u64, grain as u64, parts.len() as u32, Nanos::ZERO, time)
        .map_err(Error::schedule)?;
    let lengths: Vec<u32> = cut.lengths.into_iter().map(|len| len as u32).collect();
    Ok(if lengths.len() == 1 { Vec::new() } else { lengths })
}
