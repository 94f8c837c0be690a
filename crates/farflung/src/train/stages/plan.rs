//! How a job's model lies on the ranks of a pipeline: which layers each part has, in which order the ranks work, and what
//! that is modelled to take. A pure function of the settings, so that every rank finds the same. It knows no tensors.

mod prices;

use std::ops::Range;
use std::path::Path;

use farflung_base::{Bytes, Link, Nanos, Rank, StageId};
use farflung_parallel::pipeline::{
    Action, Arrivals, Boundary, CollectivePrices, ComputeOrder, Lowering, Method, Op, PipelineCost,
    Placement, Schedule, Settings, SliceShare, StageCost, StepSimulation, Updates, slice_tokens,
};

use super::super::job::Job;
use super::super::links::topology;
use crate::config::choice::{Recompute, SyncKind};
use crate::{Error, Result, TrainConfig};
use prices::collective_prices;

/// Why `train` does not run a schedule; `None` if it does.
///
/// The one table behind `farflung train --help` and what a run refuses.
#[must_use]
pub const fn refusal(method: Method) -> Option<&'static str> {
    match method {
        Method::Inference => Some("it has no backward passes, so nothing would be trained"),
        _ => None,
    }
}

/// A pipeline of a job, the same on each of its replicas.
#[derive(Debug, Clone)]
pub struct PipelinePlan {
    /// The schedule's name, or the file that it comes from.
    pub name: String,
    /// A step's work.
    pub schedule: Schedule,
    /// The rule by which ranks follow arrivals, where the schedule is one; its lists are what is foreseen then.
    pub arrivals: Option<Arrivals>,
    /// The layers of each part of the model.
    pub layers: Vec<Range<usize>>,
    /// The positions of each slice of a sequence's tokens: one slice where microbatches pass whole.
    pub slices: Vec<Range<usize>>,
    /// What parts and links are modelled to take, on the first replica's ranks.
    pub cost: PipelineCost,
    /// What averaging each part with its other holders is modelled to take, and adding up the token table's gradients.
    pub prices: CollectivePrices,
    /// Pipelines that train side by side.
    pub replicas: usize,
}

fn refuse(field: &'static str, value: &dyn ToString, expected: impl Into<String>) -> Error {
    Error::Setting { field, value: value.to_string(), expected: expected.into() }
}

impl PipelinePlan {
    /// The plan of a job with more than one stage.
    ///
    /// Errors: [`Error::Setting`] with the setting that cannot be, and what a pipeline needs instead.
    pub fn new(job: &Job) -> Result<Self> {
        let config = &job.config;
        let method = config.schedule;
        check(config, job.world)?;
        let own = config.schedule_file.as_deref().map(|path| own_order(path, job)).transpose()?;
        let (ranks, microbatches) = (config.stages as u32, job.microbatches() as u32);
        let chunks = config.chunks.map(|chunks| chunks as u32);
        let per_rank = chunks.unwrap_or(method.default_chunks());
        let parts = match (&own, method) {
            (Some(own), _) => own.placement().depth(),
            (None, Method::Chimera | Method::DualPipe) => ranks,
            (None, _) => ranks.saturating_mul(per_rank),
        };
        let layers = cut(job.model.layers, parts as usize)?;
        let stages: Vec<_> = layers.iter().map(|layers| part_cost(job, layers)).collect();
        let topology = topology(config, job.world)?;
        let bytes = hidden_bytes(job);
        let link =
            |from, to| Link { bandwidth: topology.rate(from, to), latency: topology.link(from, to).latency };
        // The links of neighbours stand for all of them: no schedule depends on more.
        let links: Vec<Link> = (1..ranks).map(|r| link(Rank(r - 1), Rank(r))).collect();
        let slices = match (&own, method) {
            (Some(own), _) => even(job.model.context, own.slices().into())?,
            (None, Method::TeraPipe) => sliced(job, &layers, &links)?,
            (None, _) => even(job.model.context, 1)?,
        };
        let settings = Settings {
            chunks,
            slices: slices.len() as u16,
            hop: links.iter().map(|link| link.time(bytes)).max().unwrap_or_default(),
            cost: stages.clone(),
            memory: config.memory.map(|memory| memory as u32),
            ..Settings::new(ranks, microbatches)
        };
        let name =
            config.schedule_file.as_ref().map_or(method.to_string(), |path| path.display().to_string());
        let arrivals = own.is_none().then(|| method.arrivals(&settings)).flatten();
        let order = own.map_or_else(|| method.order(&settings).map_err(Error::schedule), Ok)?;
        let order = match order.updates() {
            Updates::Stashed { .. } => order.with_updates(Updates::Stashed { sync: config.version_sync }),
            _ => order,
        };
        let placement = order.placement();
        let between = |part: u32| {
            let link = link(placement.rank(StageId(part)), placement.rank(StageId(part + 1)));
            Boundary { link, forward: bytes, backward: bytes }
        };
        let boundaries = (0..placement.depth() - 1).map(between).collect();
        let share = |slice: &Range<usize>| SliceShare {
            tokens: slice.len() as u64,
            time: slice_flops(job, &(0..job.model.layers), slice) as u64,
        };
        let shares = slices.iter().map(share).collect();
        let cost = PipelineCost { stages, boundaries, slices: shares, overlap_percent: 0 };
        let order = match arrivals {
            Some(rule) => rule.foresee(&order, &cost).map_err(Error::schedule)?,
            None => order,
        };
        let order = if config.recompute == Recompute::None { order } else { order.with_recompute() };
        let placement = order.placement();
        let prices = collective_prices(job, placement, &layers, &topology)?;
        let replicas = job.replicas();
        let lowering = Lowering {
            replicas: replicas > 1,
            tied: Tie::of(placement) == Tie::Across,
            ..Lowering::default()
        };
        let schedule = Schedule::new(order, &lowering).map_err(Error::schedule)?;
        Ok(Self { name, schedule, arrivals, layers, slices, cost, prices, replicas })
    }

    /// Which rank holds which part.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        self.schedule.order().placement()
    }

    /// When weights change.
    #[must_use]
    pub fn updates(&self) -> Updates {
        self.schedule.order().updates()
    }

    /// Microbatches of a step on each replica.
    #[must_use]
    pub fn microbatches(&self) -> u32 {
        self.schedule.order().microbatches()
    }

    /// Microbatches whose gradients one update takes, on each replica.
    #[must_use]
    pub fn per_update(&self) -> u32 {
        match self.updates() {
            Updates::Flush => self.microbatches(),
            Updates::Stashed { .. } => 1,
            Updates::TwoVersions { every } => every,
        }
    }

    /// Forwards alone, on the same ranks: each stage all microbatches, those of two copies in turns.
    ///
    /// Errors: none that a placement of a method has.
    pub(super) fn forwards(&self, microbatches: u32) -> Result<Schedule> {
        let placement = self.placement();
        let list = |rank| {
            let stages = placement.stages_of(rank);
            let op = |stage: StageId| {
                let copy = stage.0 / placement.depth();
                let mine = (0..microbatches).filter(move |m| m % placement.copies() == copy);
                mine.map(move |m| Op::Run(Action::forward(stage.0, m)))
            };
            stages.flat_map(op).collect()
        };
        let lists = (0..placement.ranks()).map(Rank).map(list).collect();
        let order = ComputeOrder::new(placement.clone(), microbatches, 1, lists).map_err(Error::schedule)?;
        Schedule::new(order, &Lowering::default()).map_err(Error::schedule)
    }

    /// What a step is predicted to take, and the part of its computing in which ranks stand still.
    ///
    /// Errors: as [`PipelinePlan::predicted`].
    pub fn prediction(&self) -> Result<(Nanos, f64)> {
        let step = self.predicted()?;
        Ok((step.makespan(), step.compute().bubble_fraction()))
    }

    /// When each computation, message and average of a step is predicted to run. Each link has its rate to itself there:
    /// where a rank reaches both neighbours through one uplink, as with `--link`, and the links bind, a step takes up to
    /// half as long again. What ranks tell each other at a step's end is not in it.
    ///
    /// Errors: none for a plan of [`PipelinePlan::new`].
    pub fn predicted(&self) -> Result<StepSimulation<'_>> {
        Ok(self.schedule.simulate(&self.cost, &self.prices)?)
    }
}

/// Reads a schedule: lines such as `r0: 0F0 0F1 0B0 0B1`, or `PyTorch`'s form in a `.csv` file.
///
/// Errors: [`Error::Io`]; [`Error::Setting`] with the file and the line, or with why it could not run.
pub fn read_schedule(path: &Path) -> Result<ComputeOrder> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let csv = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("csv"));
    let order = if csv { ComputeOrder::from_csv(&text) } else { text.parse() };
    order.map_err(|cause| {
        refuse("schedule file", &path.display(), format!("a schedule that can run: {cause}"))
    })
}

/// A schedule of the user's own, if it fits the job.
fn own_order(path: &Path, job: &Job) -> Result<ComputeOrder> {
    let order = read_schedule(path)?;
    let refuse = |what: &str| Err(refuse("schedule-file", &path.display(), format!("a schedule {what}")));
    let placement = order.placement();
    if placement.ranks() as usize != job.config.stages {
        return refuse(&format!("for {} ranks, as `stages` says", job.config.stages));
    }
    if order.microbatches() as usize != job.microbatches() {
        return refuse(&format!("of {} microbatches, as `microbatches` says", job.microbatches()));
    }
    if order.is_forward_only() {
        return refuse("with backward passes");
    }
    if placement.copies() > 1 && Tie::of(placement) == Tie::Across {
        return refuse("whose copies of the model begin and end on the same ranks: they share a token table");
    }
    Ok(order)
}

/// Whether the settings go together with a pipeline.
fn check(config: &TrainConfig, world: usize) -> Result<()> {
    let (method, stages) = (config.schedule, config.stages);
    if config.schedule_file.is_none()
        && let Some(reason) = refusal(method)
    {
        return Err(refuse("schedule", &method, format!("one that trains: {reason}")));
    }
    if !world.is_multiple_of(stages) {
        return Err(refuse("workers", &world, format!("a multiple of the {stages} stages")));
    }
    if config.sync == SyncKind::Diloco {
        let expected =
            "ddp with `stages`: an outer step would have to be taken by all stages of a replica at once";
        return Err(refuse("sync", &config.sync, expected));
    }
    let own = config.schedule_file.is_some();
    if !own && !method.is_synchronous() && config.clip > 0.0 {
        let expected =
            format!("0 with {method}: its stages step at different times, so no step has a global norm");
        return Err(refuse("clip", &config.clip, expected));
    }
    let microbatches = microbatches(config);
    if !own && method == Method::PipeDream2Bw && !microbatches.is_multiple_of(stages) {
        let expected = format!("for {method} a multiple of the {stages} stages: as many make one update");
        return Err(refuse("microbatches", &microbatches, expected));
    }
    Ok(())
}

/// Microbatches of a step: what `--microbatches` or `--accumulate` says, or what keeps a pipeline busy.
pub(in super::super) fn microbatches(config: &TrainConfig) -> usize {
    let unless_told = if config.stages > 1 { 2 * config.stages } else { 1 };
    let accumulated = Some(config.accumulate).filter(|&n| n > 1);
    config.microbatches.or(accumulated).unwrap_or(unless_told)
}

/// Cuts layers into parts as equal as they can be; the first and the last have one at least.
pub(in super::super) fn cut(layers: usize, parts: usize) -> Result<Vec<Range<usize>>> {
    if parts > 1 && layers < 2 {
        return Err(refuse("stages", &parts, format!("1 for a model of {layers} layer: it cannot be cut")));
    }
    let bound = |part: usize| match part {
        0 => 0,
        part if part == parts => layers,
        part => ((2 * part * layers + parts) / (2 * parts)).clamp(1, layers - 1),
    };
    Ok((0..parts).map(|part| bound(part)..bound(part + 1)).collect())
}

/// Positions cut into slices as equal as they can be.
fn even(context: usize, slices: usize) -> Result<Vec<Range<usize>>> {
    if slices > context {
        let expected = format!("at least {slices}, as many as the schedule has slices");
        return Err(refuse("context", &context, expected));
    }
    let bound = |slice: usize| slice * context / slices;
    Ok((0..slices).map(|slice| bound(slice)..bound(slice + 1)).collect())
}

/// The slices with which a pipeline of these parts takes least, where each takes its forward and backward and holds the
/// slowest link. That links have latency changes nothing: it passes while the next slice is computed.
fn sliced(job: &Job, parts: &[Range<usize>], links: &[Link]) -> Result<Vec<Range<usize>>> {
    let context = job.model.context;
    let grain = job.config.slice_grain.unwrap_or_else(|| {
        let fits = |grain: &usize| context.is_multiple_of(*grain);
        (context.div_ceil(SLICES)..=context).find(fits).expect("a number divides itself")
    });
    if !context.is_multiple_of(grain) || context / grain > MOST_GRAINS {
        let expected = format!("a divisor of the context, {context}, and at least a {MOST_GRAINS}th of it");
        return Err(refuse("slice-grain", &grain, expected));
    }
    let whole = hidden_bytes(job);
    let time = |len: u64, before: u64| {
        let slice = before as usize..(before + len) as usize;
        let work = parts.iter().map(|part| job.modelled(slice_flops(job, part, &slice))).max();
        let bytes = Bytes(whole.0 * len / context as u64);
        let wire = links.iter().map(|link| link.bandwidth.transfer(bytes)).max();
        work.unwrap_or_default().saturating_add(wire.unwrap_or_default() * 2)
    };
    let cut = slice_tokens(context as u64, grain as u64, parts.len() as u32, Nanos::ZERO, time)
        .map_err(Error::schedule)?;
    let mut end = 0;
    let slice = |len: u64| {
        let start = end;
        end += len as usize;
        start..end
    };
    Ok(cut.lengths.into_iter().map(slice).collect())
}

/// As many slices a sequence has at most unless the settings say otherwise: shorter ones compute worse, of which the
/// modelled times know nothing.
const SLICES: usize = 8;

/// What keeps the search for the best slices within a second.
const MOST_GRAINS: usize = 256;

/// Bytes of the hidden states of a microbatch.
fn hidden_bytes(job: &Job) -> Bytes {
    Bytes((job.config.batch * job.model.context * job.model.dim * size_of::<f32>()) as u64)
}

/// Floating-point operations of one token on a part: of its matrices, of its attention over a whole context, of its head.
fn token_flops(job: &Job, layers: &Range<usize>) -> [f64; 3] {
    let model = &job.model;
    let (blocks, d, context) = (layers.len() as f64, model.dim as f64, model.context as f64);
    let head = if layers.end == model.layers { 2.0 * d * model.vocab as f64 } else { 0.0 };
    [blocks * 24.0 * d * d, blocks * 4.0 * d * context, head]
}

/// Those of a part for a slice of a microbatch, forward and backward. Those of all slices are those of the whole.
fn slice_flops(job: &Job, layers: &Range<usize>, slice: &Range<usize>) -> f64 {
    let [matrices, attention, head] = token_flops(job, layers);
    let pairs = |tokens: usize| (tokens * (tokens + 1)) as f64;
    let seen = (pairs(slice.end) - pairs(slice.start)) / pairs(job.model.context) * job.model.context as f64;
    3.0 * job.config.batch as f64 * (slice.len() as f64 * (matrices + head) + seen * attention)
}

/// The modelled times of a part for a microbatch. Together they are those of the whole model.
fn part_cost(job: &Job, layers: &Range<usize>) -> StageCost {
    let tokens = (job.config.batch * job.model.context) as f64;
    let [matrices, attention, head] = token_flops(job, layers);
    let time = |flops: f64| job.modelled(tokens * flops);
    let forward = matrices + attention;
    StageCost {
        forward: time(forward + head),
        input: time(matrices + 2.0 * attention + head),
        weight: time(matrices + head),
        recompute: match job.config.recompute {
            Recompute::Layers(again) if !layers.is_empty() => {
                time(forward * again.min(layers.len()) as f64 / layers.len() as f64)
            }
            Recompute::Layers(_) => Nanos::ZERO,
            _ => time(forward + head),
        },
        ..StageCost::default()
    }
}

/// Where the two users of the token table are: the embedding and the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tie {
    /// One part has both.
    Whole,
    /// Each rank that holds one holds the other.
    Local,
    /// On two ranks.
    Across,
}

impl Tie {
    pub(super) fn of(placement: &Placement) -> Self {
        let holders = |wanted: fn(&Placement, StageId) -> bool| {
            let stages = (0..placement.stages()).map(StageId).filter(|&s| wanted(placement, s));
            let mut ranks: Vec<Rank> = stages.map(|s| placement.rank(s)).collect();
            ranks.sort_unstable();
            ranks
        };
        match placement.depth() {
            1 => Self::Whole,
            _ if holders(Placement::is_first) == holders(Placement::is_last) => Self::Local,
            _ => Self::Across,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_cut_evenly_and_the_ends_have_one() {
        let lens = |layers, parts| cut(layers, parts).unwrap().iter().map(Range::len).collect::<Vec<_>>();
        assert_eq!(lens(4, 2), [2, 2]);
        assert_eq!(lens(12, 5).iter().sum::<usize>(), 12);
        assert_eq!(lens(4, 8), [1, 0, 1, 0, 1, 0, 0, 1]);
        assert_eq!(lens(2, 8), [1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(lens(3, 1), [3]);
        assert!(cut(1, 2).is_err());
    }

    #[test]
    fn the_table_is_shared_within_a_rank_or_across_two() {
        assert_eq!(Tie::of(&Placement::looped(4, 1)), Tie::Across);
        assert_eq!(Tie::of(&Placement::looped(4, 2)), Tie::Across);
        assert_eq!(Tie::of(&Placement::wave(4, 2)), Tie::Local);
        assert_eq!(Tie::of(&Placement::both_ways(4)), Tie::Local);
        assert_eq!(Tie::of(&Placement::looped(1, 1)), Tie::Whole);
    }
}
