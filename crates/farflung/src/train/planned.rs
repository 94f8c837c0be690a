//! A job's plan: made from the settings, or read from a file. Both give the same value, and all else follows
//! from it.

use std::ops::Range;
use std::path::Path;

use farflung_base::{Link, Nanos, Rank};
use farflung_compress::AverageSpec;
use farflung_compress::link::LinkSpec;
use farflung_optim::sync::SyncMethod;
use farflung_parallel::pipeline::{ComputeOrder, Method, Pools, Updates, slice_tokens};
use farflung_parallel::plan::{NO_CODEC, even_parts};
use farflung_parallel::{
    BoundaryCodecs, Cluster, Level, ParallelError, Part, Pipeline, Plan, PlannedModel, Recompute,
    ScheduleSource,
};
use farflung_zoo::GptConfig;

use super::costs::Work;
use super::{averages, links};
use crate::config::nearest::with_nearest;
use crate::config::value::Setting as _;
use crate::{Error, Result, TrainConfig, model_name};

/// Why `train` does not run a schedule; `None` if it does.
///
/// The one table behind `farflung train --help` and what a run refuses.
#[must_use]
pub const fn refusal(method: Method) -> Option<&'static str> {
    if method.trains() { None } else { Some("it has no backward passes, so nothing would be trained") }
}

#[expect(clippy::needless_pass_by_value, reason = "values of any kind are named, mostly made for it")]
fn refuse(field: &'static str, value: impl ToString, expected: impl Into<String>) -> Error {
    Error::Setting { field, value: value.to_string(), expected: expected.into() }
}

/// What a plan remembers of a model.
#[must_use]
pub fn planned_model(name: &str, model: &GptConfig) -> PlannedModel {
    let layers = u32::try_from(model.layers).unwrap_or(u32::MAX);
    PlannedModel { name: name.to_owned(), layers, parameters: model.parameters() }
}

/// Microbatches of each replica in a step: what `--microbatches` or `--accumulate` says, or what keeps a
/// pipeline busy.
pub(super) fn microbatches(config: &TrainConfig) -> usize {
    let unless_told = if config.stages > 1 { 2 * config.stages } else { 1 };
    let accumulated = Some(config.accumulate).filter(|&n| n > 1);
    config.microbatches.or(accumulated).unwrap_or(unless_told)
}

/// The plan of some settings.
///
/// Errors: [`Error::Setting`] with the setting that cannot be, and what would do instead.
pub(super) fn from_settings(
    config: &TrainConfig,
    model: &GptConfig,
    world: usize,
    cluster: Option<&Cluster>,
) -> Result<Plan> {
    check(config, world)?;
    let own = config.schedule_file.as_deref().filter(|_| config.stages > 1).map(read_schedule).transpose()?;
    let (stages, count) = (small("stages", config.stages)?, small("microbatches", microbatches(config))?);
    let replicas = small("workers", world)? / stages;
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
    let layers = small("layers", model.layers)?;
    let cut = cut(layers, parts)?;
    let part = |layers: Range<u32>| {
        let count = layers.end - layers.start;
        // Of a part with fewer layers than are asked for, all.
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
    let plan = Plan {
        model: planned_model(&model_name(model), model),
        mesh: Plan::mesh_of(replicas, stages)?,
        machines: machines(world, cluster),
        precision: config.precision,
        batch: small("batch", config.batch)?,
        microbatches: vec![count; replicas as usize],
        boundaries: vec![boundary(config); cut.len() - 1],
        parts: cut.into_iter().map(part).collect(),
        pipeline: Pipeline {
            schedule,
            chunks,
            memory: config.memory.filter(|_| config.stages > 1).map(|n| small("memory", n)).transpose()?,
            version_sync: config.version_sync,
            slices,
        },
        levels: vec![level(config, replicas)],
    };
    plan.check().map_err(in_settings)?;
    Ok(plan)
}

/// Writes into a plan how fast the ranks of its pools are beside each other, by the rates of their machines.
pub(super) fn set_pool_rates(plan: &mut Plan, config: &TrainConfig, rates: &[f64]) {
    if let ScheduleSource::Pools(pools) = &mut plan.pipeline.schedule
        && config.pool_rates.is_none()
    {
        pools.rates = Pools::whole_rates(rates);
    }
}

/// Writes into a plan how many local steps each replica takes, by the rates of the ranks' machines.
///
/// Errors: [`Error::Setting`] for numbers that the plan does not admit.
pub(super) fn set_local_steps(plan: &mut Plan, config: &TrainConfig, rates: &[f64]) -> Result<()> {
    if averages::each_step(plan) {
        return Ok(());
    }
    // The slowest of a pipeline's ranks is its speed.
    let slowest = |ranks: &[f64]| ranks.iter().copied().fold(f64::INFINITY, f64::min);
    let pipelines = rates.chunks(plan.stages() as usize).zip(&plan.microbatches);
    let speeds: Vec<f64> = pipelines.map(|(ranks, &count)| slowest(ranks) / f64::from(count)).collect();
    let every = plan.outermost().every;
    // Workers that do not wait for each other need not meet at each average.
    let meets = config.meet_every.next_multiple_of(every.into());
    let period = if config.sync.timed { u32::try_from(meets).unwrap_or(every) } else { every };
    let steps = config.local_steps.of(period, &speeds);
    for level in &mut plan.levels {
        level.steps.clone_from(&steps);
    }
    plan.check().and_then(|()| check_periods(plan)).map_err(in_settings)
}

/// Whether all replicas take the steps in which gradients are averaged, in a method that also has local steps.
pub(super) fn check_warmup(config: &TrainConfig, steps: &[u32]) -> Result<()> {
    let averages = config.optimizer.averages.sync().is_some()
        || (config.sync.reads.contains(&"sync-warmup") && config.sync_warmup > 0);
    if averages && steps.windows(2).any(|pair| pair[0] != pair[1]) {
        let expected = format!("equal with {}: all average gradients in its first steps", config.sync);
        return Err(Error::Setting { field: "local-steps", value: format!("{steps:?}"), expected });
    }
    Ok(())
}

/// Whether the replicas of each level reach its averages together.
fn check_periods(plan: &Plan) -> Result<(), ParallelError> {
    for (i, Level { method, every, steps, .. }) in plan.levels.iter().enumerate() {
        let waits = SyncMethod::by_name(method).is_some_and(|row| !row.timed);
        if waits && steps.iter().max().is_some_and(|most| most != every) {
            let (field, value) = (format!("level[{i}].steps"), format!("{steps:?}"));
            let expected = format!("{every} for the fastest with {method}: all meet then");
            return Err(ParallelError::Plan { field, value, expected });
        }
    }
    Ok(())
}

/// What a plan that was made of settings does not admit, as the setting that is wrong.
fn in_settings(error: ParallelError) -> Error {
    match error {
        ParallelError::Plan { field, value, expected } => {
            let field = match &*field {
                "pipeline.schedule" => "schedule-file",
                field if field.ends_with(".recompute") => "recompute",
                field if field.rsplit('.').next() == Some("steps") => "local-steps",
                _ => "plan",
            };
            Error::Setting { field, value, expected }
        }
        error => Error::schedule(error),
    }
}

/// Layers cut into parts as equal as they can be.
pub(super) fn cut(layers: u32, parts: u32) -> Result<Vec<Range<u32>>> {
    even_parts(layers, parts)
        .ok_or_else(|| refuse("stages", parts, format!("1 for a model of {layers} layer: it cannot be cut")))
}

/// A count as plans have it.
fn small(field: &'static str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| refuse(field, value, format!("at most {}", u32::MAX)))
}

/// The codecs of each boundary of some settings.
fn boundary(config: &TrainConfig) -> BoundaryCodecs {
    let (forward, backward) = (config.boundary.to_string(), config.boundary_backward.to_string());
    BoundaryCodecs { forward, backward }
}

/// How the replicas of some settings stay one model.
pub(super) fn level(config: &TrainConfig, replicas: u32) -> Level {
    // One copy has nobody to send to, and nothing to lose bits for.
    let alone = replicas == 1 && !has_copies(config);
    let codec = if alone { AverageSpec::default() } else { config.averaged_codec() };
    let period = u32::try_from(config.sync_every).unwrap_or(u32::MAX);
    let every = config.sync.every.map_or(period, |every| u32::try_from(every).unwrap_or(u32::MAX));
    let name = if codec.is_plain() { NO_CODEC.to_owned() } else { codec.to_string() };
    let algorithm = match codec {
        _ if config.was_given("algorithm") => config.algorithm,
        // What a protocol exchanges is summed plainly.
        AverageSpec::Protocol(_) => Level::unless_told(NO_CODEC),
        AverageSpec::Codec(_) => Level::unless_told(&name),
    };
    Level {
        groups: Vec::new(),
        method: config.sync.to_string(),
        every,
        steps: Vec::new(),
        codec: name,
        algorithm,
        bucket_bytes: ((config.bucket_mb * 1e6) as u64).max(4),
        overlap: config.overlap,
    }
}

/// Whether a pipeline of these settings holds parts of the model more than once.
fn has_copies(config: &TrainConfig) -> bool {
    if let Some(pools) = config.pools() {
        return pools.fewest() > 1;
    }
    config.stages > 1 && config.schedule.copies() > 1
}

/// The machines of a cluster by rank, or names for those of one process.
fn machines(world: usize, cluster: Option<&Cluster>) -> Vec<String> {
    cluster.map_or_else(|| (0..world).map(|rank| format!("worker.{rank}")).collect(), Cluster::rank_names)
}

/// Whether the ranks of pools are those of the run, and have work.
pub(super) fn check_pools(config: &TrainConfig, pools: &Pools, world: usize) -> Result<()> {
    let (ranks, fewest, microbatches) = (pools.ranks(), pools.fewest(), microbatches(config));
    if world != ranks as usize {
        return Err(refuse("workers", world, format!("{ranks}, the ranks of `pools`: they are one copy")));
    }
    if microbatches < fewest as usize {
        let expected = format!("at least {fewest}, so that each rank of the largest pool has one");
        return Err(refuse("microbatches", microbatches, expected));
    }
    Ok(())
}

/// Whether the settings go together.
fn check(config: &TrainConfig, world: usize) -> Result<()> {
    let (method, stages) = (config.schedule, config.stages);
    if !world.is_multiple_of(stages) {
        return Err(refuse("workers", world, format!("a multiple of the {stages} stages")));
    }
    let microbatches = microbatches(config);
    if let Some(pools) = config.pools() {
        return check_pools(config, &pools, world);
    }
    let named = config.schedule_file.is_none() && stages > 1;
    match method.updates(small("stages", stages)?, config.version_sync) {
        Updates::TwoVersions { every } if named && !microbatches.is_multiple_of(every as usize) => {
            let expected = format!("for {method} a multiple of the {stages} stages: as many make one update");
            Err(refuse("microbatches", microbatches, expected))
        }
        _ => Ok(()),
    }
}

/// Reads a plan and checks that it is for this model and this many ranks.
///
/// Errors: [`Error::Io`]; [`Error::Parallel`] with the line or field; [`Error::Setting`] for another model or
/// world.
pub(super) fn from_file(path: &Path, model: &GptConfig, world: usize) -> Result<Plan> {
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
    let tokens: u64 = plan.pipeline.slices.iter().map(|&n| u64::from(n)).sum();
    if tokens > 0 && tokens != model.context as u64 {
        let expected =
            format!("slices of {} tokens together, the model's context; they have {tokens}", model.context);
        return Err(refuse("plan", shown(), expected));
    }
    if world != plan.ranks() as usize {
        let expected =
            format!("a plan for {world} ranks, as many as the job has; it is for {}", plan.ranks());
        return Err(refuse("plan", shown(), expected));
    }
    Ok(plan)
}

/// Reads a plan whose fields and names are right.
///
/// Errors: [`Error::Io`]; [`Error::Parallel`] with the line or field.
pub fn read(path: &Path) -> Result<Plan> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read the plan", path))?;
    let plan: Plan = text.parse()?;
    plan.check()?;
    check_names(&plan)?;
    Ok(plan)
}

/// Whether there are codecs and methods of the plan's names.
///
/// Errors: [`ParallelError::Plan`] with the field.
pub(super) fn check_names(plan: &Plan) -> Result<()> {
    let wrong = |field: String, value: &str, expected: String| {
        Error::from(ParallelError::Plan { field, value: format!("{value:?}"), expected })
    };
    for (i, level) in plan.levels.iter().enumerate() {
        let Some(method) = SyncMethod::by_name(&level.method) else {
            let names: Vec<_> = farflung_optim::sync::METHODS.iter().map(|m| m.name).collect();
            let expected = with_nearest(format!("one of {}", names.join(", ")), &level.method, &names);
            return Err(wrong(format!("level[{i}].method"), &level.method, expected));
        };
        if method.each_step && level.every > 1 {
            return Err(wrong(
                format!("level[{i}].every"),
                &level.every.to_string(),
                format!("1 with {}", method.name),
            ));
        }
        let codec = &level.codec;
        codec
            .parse::<AverageSpec>()
            .map_err(|_| wrong(format!("level[{i}].codec"), codec, AverageSpec::wanted(codec)))?;
    }
    check_periods(plan)?;
    averages::check(plan)?;
    for (i, boundary) in plan.boundaries.iter().enumerate() {
        for (direction, name) in [("forward", &boundary.forward), ("backward", &boundary.backward)] {
            name.parse::<LinkSpec>()
                .map_err(|_| wrong(format!("boundary[{i}].{direction}"), name, LinkSpec::wanted(name)))?;
        }
    }
    Ok(())
}

/// Reads a schedule: lines such as `r0: 0F0 0F1 0B0 0B1`, or `PyTorch`'s form in a `.csv` file.
///
/// Errors: [`Error::Io`]; [`Error::Setting`] with the file and the line, or with why it could not run.
pub fn read_schedule(path: &Path) -> Result<ComputeOrder> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let csv = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("csv"));
    let order = if csv { ComputeOrder::from_csv(&text) } else { text.parse() };
    order
        .map_err(|cause| refuse("schedule-file", path.display(), format!("a schedule that can run: {cause}")))
}

/// Positions cut into slices as equal as they can be; none where sequences pass whole.
fn even(context: usize, slices: usize) -> Result<Vec<u32>> {
    if slices > context {
        let expected = format!("at least {slices}, as many as the schedule has slices");
        return Err(refuse("context", context, expected));
    }
    let bound = |slice: usize| (slice * context / slices) as u32;
    Ok(if slices == 1 { Vec::new() } else { (0..slices).map(|s| bound(s + 1) - bound(s)).collect() })
}

/// The links between neighbours of the first pipeline.
fn links_of(config: &TrainConfig, world: usize, stages: u32, cluster: Option<&Cluster>) -> Result<Vec<Link>> {
    let topology = links::declared(config, world, cluster)?;
    let link = |from, to| Link { bandwidth: topology.rate(from, to), ..topology.link(from, to) };
    Ok((1..stages).map(|r| link(Rank(r - 1), Rank(r))).collect())
}

/// As many slices a sequence has at most unless the settings say otherwise: shorter ones compute worse, which
/// the modelled times do not show.
const SLICES: usize = 8;

/// What keeps the search for the best slices within a second.
const MOST_GRAINS: usize = 256;

/// The slices with which a pipeline of these parts takes least, where each takes its forward and backward and
/// holds the slowest link. That links have latency changes nothing: it passes while the next slice is computed.
fn sliced(config: &TrainConfig, model: &GptConfig, parts: &[Range<u32>], links: &[Link]) -> Result<Vec<u32>> {
    let context = model.context;
    let grain = config.slice_grain.unwrap_or_else(|| {
        let fits = |grain: &usize| context.is_multiple_of(*grain);
        (context.div_ceil(SLICES)..=context).find(fits).expect("a number divides itself")
    });
    if grain == 0 || !context.is_multiple_of(grain) || context / grain > MOST_GRAINS {
        let expected = format!("a divisor of the context, {context}, and at least a {MOST_GRAINS}th of it");
        return Err(refuse("slice-grain", grain, expected));
    }
    let work = Work { model, batch: config.batch };
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
