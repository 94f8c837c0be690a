//! Checks before the first step whether simulated links are fast enough for a run's deadline.

use farflung_base::{Algorithm, Axis, Bandwidth, Bytes, Link, Nanos, Rank, Topology};
use farflung_comm::{AllReduce, CodedAllReduce as _, CodedBuffer, Program, cost};
use farflung_compress::CodecSpec;
use farflung_optim::AverageConfig;
use farflung_parallel::{Coordinates, ScheduleSource};
use farflung_tensor::Device;

use super::apart::{self, ApartParams};
use super::division::Division;
use super::job::Job;
use crate::config::choice::TransportName;
use crate::{Error, Result};

/// An operation of a run's steps, and a lower bound of its time.
struct Operation {
    what: String,
    time: Nanos,
}

impl Operation {
    fn average(job: &Job, bytes: Bytes, time: Nanos) -> Self {
        Self { what: format!("the average of {bytes} among {} workers", job.world), time }
    }
}

/// Refuses a run on simulated links if one operation of a step takes longer than the deadline. The deadline of
/// a collective covers all of it, from its start on each rank; that of a message covers the receiver's wait.
///
/// The times are lower bounds, so that no run is refused that would work: an operation has the links to itself,
/// computing takes no time, and a codec whose payload depends on the values sends nothing. Real links are not
/// checked, since their speed is not declared.
///
/// Errors: [`Error::Setting`] with the time and the deadline; a topology that does not fit.
pub(super) fn check(job: &Job, transport: TransportName) -> Result<()> {
    let config = &job.config;
    if !transport.simulated || job.world == 1 {
        return Ok(());
    }
    let topology = job.topology()?;
    let Some(Operation { what, time }) =
        slowest(job, &topology)?.filter(|found| found.time > config.deadline)
    else {
        return Ok(());
    };
    let (field, value) = match &config.topology {
        Some(path) => ("topology", path.display().to_string()),
        None => ("link", config.link.to_string()),
    };
    let deadline = config.deadline;
    let expected = format!(
        "a link that is fast enough for the deadline: {what} takes at least {time}, `deadline` is {deadline}"
    );
    Err(Error::Setting { field, value, expected })
}

/// Returns the slowest operation of a step, among those whose time can be bounded.
fn slowest(job: &Job, topology: &Topology) -> Result<Option<Operation>> {
    if job.plan.stages() > 1 {
        return Ok(message(job, topology));
    }
    let mut config = job.average_config();
    let layers = (&job.model, 0..job.model.layers());
    let divided = Division::of(&job.plan);
    let stage = divided.counted_stage(layers, Coordinates::default(), &Device::cpu(1)?)?;
    let apart = ApartParams::of(&job.plan, &stage, 0);
    config.apart = apart::ranges(&apart);
    let (buckets, kinds) = (config.buckets(stage.layout()), config.apart_buckets(stage.layout()));
    let exchanges = config.exchanges(stage.layout());
    // Of those that divide layers, the first ones: a bound needs no larger pieces.
    let all = job.plan.group(Rank(0), Axis::Data);
    let holders = topology.among(&all);
    // The ranks vote in each step: each sends a loss, and whether to stop.
    let (numbers, algorithm) = (Bytes(16), job.plain_algorithm());
    let mut found = vec![average(job, topology, algorithm, |by| by.programs(2, numbers, topology), numbers)];
    for kind in std::iter::once(None).chain((0..apart.len()).map(Some)) {
        let among = kind.map(|kind| topology.among(&apart[kind].holders(&job.plan, &all)));
        let among = among.as_ref().unwrap_or(&holders);
        let of_kind = || (0..buckets.len()).filter(|&bucket| kinds[bucket] == kind);
        let Some(largest) = of_kind().map(|bucket| buckets[bucket]).max().filter(|_| among.size() > 1) else {
            continue;
        };
        let exchanged =
            exchanges.as_ref().and_then(|all| of_kind().flat_map(|bucket| &all[bucket]).max().copied());
        found.push(bucket(job, among, &config, (largest, exchanged))?);
        if job.config.warm_steps() > 0 || job.config.density_warmup > 0 {
            found.push(plainly(job, among, largest));
        }
    }
    Ok(found.into_iter().max_by_key(|found| found.time))
}

/// Returns a plain average of values.
fn plainly(job: &Job, topology: &Topology, values: usize) -> Operation {
    let bytes = Bytes((values * size_of::<f32>()) as u64);
    average(job, topology, job.plain_algorithm(), |by| by.programs(values, bytes, topology), bytes)
}

/// Returns the average of the largest bucket among its holders. `exchanged` are the values of the largest
/// exchange of a protocol, if one is used.
fn bucket(
    job: &Job,
    topology: &Topology,
    config: &AverageConfig,
    (largest, exchanged): (usize, Option<usize>),
) -> Result<Operation> {
    if let Some(exchanged) = exchanged {
        return Ok(plainly(job, topology, exchanged));
    }
    let spec = job.codec();
    let Some(codec) = spec.codec().filter(|_| !spec.is_plain()) else {
        return Ok(plainly(job, topology, largest));
    };
    let bytes = payload(codec, largest);
    let payload = |values| payload(codec, values).0 as usize;
    let buffer = CodedBuffer { len: largest, payload: &payload, topology, regions: None };
    let same_for_all = matches!(config.algorithm, Algorithm::Ring | Algorithm::Direct);
    let time = if job.config.topology.is_none() && same_for_all {
        config.algorithm.coded_cost(&buffer)?
    } else {
        least(topology, bytes)
    };
    Ok(Operation::average(job, bytes, time))
}

/// Returns an average of `bytes` bytes with an algorithm's programs, and its time.
fn average(
    job: &Job,
    topology: &Topology,
    by: Algorithm,
    programs: impl Fn(Algorithm) -> Vec<Program>,
    bytes: Bytes,
) -> Operation {
    let by = by.resolve(bytes, topology);
    let same_for_all = matches!(by, Algorithm::Ring | Algorithm::BidirectionalRing | Algorithm::Direct);
    let time = if job.config.topology.is_none() && same_for_all {
        // All ranks take the same time from a common start, so the first one to start waits at least that long.
        cost(&programs(by), bytes, topology)
    } else {
        least(topology, bytes)
    };
    Operation::average(job, bytes, time)
}

/// Returns a lower bound of the time of an average, at the rank with the slowest link.
///
/// With any algorithm, each value leaves each rank once and reaches each rank once, as part of a sum or as a
/// result. If a rank starts first, the others' values arrive after its start. If it does not, its own values
/// leave after the start of a rank that waits for them. So some rank waits for at least the faster of the two
/// directions.
fn least(topology: &Topology, bytes: Bytes) -> Nanos {
    let ranks = || (0..topology.size() as u32).map(Rank);
    let time = |rank: Rank| {
        let others = ranks().filter(|&other| other != rank);
        let (out, back): (Vec<Link>, Vec<Link>) =
            others.map(|other| (topology.link(rank, other), topology.link(other, rank))).unzip();
        let port = topology.access_link(rank);
        together(&out, port.up).time(bytes).min(together(&back, port.down).time(bytes))
    };
    ranks().map(time).max().unwrap_or_default()
}

/// Returns the best case for several links in parallel behind one access link: their total rate and least
/// latency.
fn together(links: &[Link], access: Bandwidth) -> Link {
    let all = links.iter().fold(0_u64, |sum, link| sum.saturating_add(link.bandwidth.0));
    let latency = links.iter().map(|link| link.latency).min().unwrap_or_default();
    Link { bandwidth: Bandwidth(all).min(access), latency }
}

/// Returns a lower bound of the bytes of a codec's payload for this number of values.
fn payload(codec: CodecSpec, values: usize) -> Bytes {
    let fixed = codec.method().is_some() && codec.packing().is_none();
    Bytes(if fixed { codec.build().max_payload(values) as u64 } else { 0 })
}

/// Returns a lower bound of the time for which a rank waits for a microbatch's hidden states: the time on the
/// slowest link from a rank to the next, minus the time by which the receiver may start later than the sender.
/// (Ranks start after a barrier.)
fn message(job: &Job, topology: &Topology) -> Option<Operation> {
    let (plan, model) = (&job.plan, &job.model);
    // With slices, pools or a user's own schedule, the messages of a step are not known here.
    let elsewhere = !matches!(plan.pipeline.schedule, ScheduleSource::Named(_));
    if !plan.pipeline.slices.is_empty() || elsewhere {
        return None;
    }
    // The fewest positions that a rank's hidden states have.
    let whole = 0..model.context;
    let lengths = (0..plan.tensor_ranks())
        .map(|tensor| Division::of(plan).positions(tensor, std::slice::from_ref(&whole)));
    let fewest = lengths.map(|found| found.map_or(0, |found| found[0].len())).min()?;
    let all = model.hidden_bytes(u64::from(plan.batch));
    let bytes = Bytes(all / model.context as u64 * fewest as u64);
    let ranks = || (0..job.world as u32).map(Rank);
    let latency = |from| ranks().map(move |to| topology.link(from, to).latency);
    let rounds = u64::from(usize::BITS - (job.world - 1).leading_zeros());
    let late = Nanos(ranks().flat_map(latency).max().unwrap_or_default().0.saturating_mul(rounds));
    let time = |(from, to)| topology.rate(from, to).transfer(bytes).saturating_sub(late);
    let pipelines = plan.mesh.groups(Axis::Pipeline);
    let ways = pipelines.iter().flat_map(|ranks| ranks.windows(2)).map(|pair| (pair[0], pair[1]));
    let time = ways.map(time).max()?;
    Some(Operation { what: format!("a microbatch's hidden states of {bytes}"), time })
}

#[cfg(test)]
mod tests;
