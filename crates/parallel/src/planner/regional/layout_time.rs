//! Computes the time of a layout.

use std::collections::BTreeMap;

use farflung_base::{Algorithm, Bandwidth, Bytes, Link, Nanos, Rank};

use super::layouts::Layout;
use super::{Exchange, RegionalChain, RegionalPlan, RegionalTime, Sites, direct_time, ring_time};
use crate::ParallelError;
use crate::pipeline::{Boundary, Method, PipelineCost, Settings, StageCost, simulate};
use crate::share::largest_remainder;

/// Number of simultaneous transfers that leave and enter each site.
struct Crossings {
    out: Vec<u64>,
    into: Vec<u64>,
}

impl Crossings {
    fn of(sites: &Sites, pairs: impl Iterator<Item = (Rank, Rank)>) -> Self {
        let none = vec![0; sites.all.len()];
        let mut crossings = Self { out: none.clone(), into: none };
        for (from, to) in pairs {
            let (from, to) = (sites.site(from), sites.site(to));
            if from != to {
                crossings.out[from] += 1;
                crossings.into[to] += 1;
            }
        }
        crossings
    }

    /// Returns the link of a pair of machines. Its bandwidth is limited to its part of the lines that the sites
    /// share.
    fn link(&self, sites: &Sites, from: Rank, to: Rank) -> Link {
        let mut link = sites.link(from, to);
        let (a, b) = (sites.site(from), sites.site(to));
        if a != b {
            let (up, down) = (sites.all[a].line.up, sites.all[b].line.down);
            link.bandwidth = link.bandwidth.min(part(up, self.out[a])).min(part(down, self.into[b]));
        }
        link
    }
}

fn part(line: Bandwidth, transfers: u64) -> Bandwidth {
    if line == Bandwidth::UNLIMITED { line } else { Bandwidth((line.0 / transfers.max(1)).max(1)) }
}

/// Counts the transfers of hidden states and their gradients if all pipelines send at once.
fn hops(sites: &Sites, pipelines: &[Vec<Rank>]) -> Crossings {
    let pairs = pipelines.iter().flat_map(|row| row.windows(2));
    Crossings::of(sites, pairs.flat_map(|pair| [(pair[0], pair[1]), (pair[1], pair[0])]))
}

/// Returns the time of one microbatch on a stage.
fn stage_time(chain: &RegionalChain, layers: &std::ops::Range<usize>, rank: Rank) -> u64 {
    let operations: u128 = chain.layers[layers.clone()].iter().map(|l| u128::from(l.operations)).sum();
    let time = operations * 1_000_000_000 / u128::from(chain.machines[rank.index()].flops);
    u64::try_from(time).unwrap_or(u64::MAX / 4)
}

/// Computes the plan and the time of a layout: divides microbatches by speed and uses closed forms.
pub(super) fn with_time(chain: &RegionalChain, sites: &Sites, layout: Layout) -> RegionalPlan {
    let Layout { groups, direction, pipelines, stages } = layout;
    let crossings = hops(sites, &pipelines);
    // For each pipeline: time of one microbatch through all stages and hops, and time of each further one.
    let times: Vec<[u64; 2]> = pipelines
        .iter()
        .map(|row| {
            let [mut once, mut each] = [0_u64; 2];
            for (stage, (layers, &rank)) in stages.iter().zip(row).enumerate() {
                let time = stage_time(chain, layers, rank);
                (once, each) = (once.saturating_add(time), each.max(time));
                if let Some(&next) = row.get(stage + 1) {
                    let bytes = chain.layers[layers.end - 1].output;
                    for link in [crossings.link(sites, rank, next), crossings.link(sites, next, rank)] {
                        once = once.saturating_add(link.time(bytes).0);
                        each = each.max(link.bandwidth.transfer(bytes).0);
                    }
                }
            }
            [once, each]
        })
        .collect();
    let speeds: Vec<u64> = times.iter().map(|[_, each]| u64::MAX / 8192 / (*each).max(1)).collect();
    let microbatches = shares(chain.microbatches, &speeds);
    let took = |(&[once, each], &share): (&[u64; 2], &u32)| {
        once.saturating_add(each.saturating_mul(u64::from(share.saturating_sub(1))))
    };
    let slowest = times.iter().zip(&microbatches).map(took).max().unwrap_or(0);
    let (algorithm, averages) = averages(chain, sites, &pipelines, &stages);
    let tied = tied(chain, sites, &pipelines);
    let time = RegionalTime { pipelines: Nanos(slowest), tied, averages };
    RegionalPlan { groups, direction, pipelines, stages, microbatches, algorithm, time }
}

/// Divides microbatches in proportion to speed, at least one each.
fn shares(microbatches: u32, speeds: &[u64]) -> Vec<u32> {
    let spare = u64::from(microbatches) - speeds.len() as u64;
    let quota = largest_remainder(u64::from(microbatches), speeds);
    if quota.iter().all(|&share| share > 0) {
        return quota.into_iter().map(|share| share as u32).collect();
    }
    largest_remainder(spare, speeds).into_iter().map(|share| share as u32 + 1).collect()
}

/// Returns the time of the slowest exchange of tied weights, if all pipelines exchange at once.
fn tied(chain: &RegionalChain, sites: &Sites, pipelines: &[Vec<Rank>]) -> Nanos {
    let ends = |row: &Vec<Rank>| [(row[0], row[row.len() - 1]), (row[row.len() - 1], row[0])];
    let pairs = || pipelines.iter().filter(|row| row.len() > 1).flat_map(ends);
    let crossings = Crossings::of(sites, pairs());
    pairs().map(|(from, to)| crossings.link(sites, from, to).time(chain.tied)).max().unwrap_or_default()
}

/// Returns the faster algorithm and its time for the slowest stage. All stages average at once.
fn averages(
    chain: &RegionalChain,
    sites: &Sites,
    pipelines: &[Vec<Rank>],
    stages: &[std::ops::Range<usize>],
) -> (Algorithm, Nanos) {
    let around = |stage: usize| {
        let next = pipelines.iter().cycle().skip(1);
        pipelines.iter().zip(next).map(move |(row, next)| (row[stage], next[stage]))
    };
    let crossings = Crossings::of(sites, (0..stages.len()).flat_map(around));
    let (mut ring, mut direct) = (Nanos::ZERO, Nanos::ZERO);
    let mut leaving = vec![0_u64; sites.all.len()];
    for (stage, layers) in stages.iter().enumerate() {
        let bytes = Bytes(chain.gradients[layers.clone()].iter().map(|bytes| bytes.0).sum());
        let links: Vec<Link> = around(stage).map(|(from, to)| crossings.link(sites, from, to)).collect();
        if pipelines.len() > 1 {
            ring = ring.max(ring_time(&links, bytes));
            direct = direct.max(direct_alone(sites, pipelines, stage, bytes, &mut leaving));
        }
    }
    // In each of the two phases, the shared lines carry the shards of all stages.
    for (site, &bytes) in sites.all.iter().zip(&leaving) {
        let slower = site.line.up.min(site.line.down);
        direct = direct.max(Nanos(slower.transfer(Bytes(bytes)).0.saturating_mul(2)));
    }
    if ring <= direct { (Algorithm::Ring, ring) } else { (Algorithm::Direct, direct) }
}

/// Returns the time of one stage's direct exchange without shared lines. Adds the bytes that leave each site to
/// `leaving`.
fn direct_alone(
    sites: &Sites,
    pipelines: &[Vec<Rank>],
    stage: usize,
    bytes: Bytes,
    leaving: &mut [u64],
) -> Nanos {
    let n = pipelines.len() as u64;
    let shard = Bytes(bytes.0.div_ceil(n));
    let mut kinds: BTreeMap<usize, u64> = BTreeMap::new();
    let mut at_site: BTreeMap<usize, u64> = BTreeMap::new();
    for row in pipelines {
        *kinds.entry(sites.kind(row[stage])).or_default() += 1;
        *at_site.entry(sites.site(row[stage])).or_default() += 1;
    }
    for (site, count) in at_site {
        leaving[site] = leaving[site].saturating_add(shard.0.saturating_mul(count * (n - count)));
    }
    let mut exchange = Exchange { ranks: n, slowest: Link::FREE, busiest: Nanos::ZERO };
    for (&a, &count) in &kinds {
        let port = sites.access_link(a);
        let sent = port.up.min(port.down).transfer(Bytes(shard.0.saturating_mul(n - 1)));
        exchange.busiest = exchange.busiest.max(sent);
        for &b in kinds.keys().filter(|b| **b != a || count > 1) {
            let link = sites.kind_link(a, b);
            let slowest = &mut exchange.slowest;
            slowest.bandwidth = slowest.bandwidth.min(link.bandwidth);
            slowest.latency = slowest.latency.max(link.latency);
        }
    }
    direct_time(exchange, bytes)
}

/// Returns the time of the slowest pipeline, simulated event by event under 1F1B. The backward's two halves are
/// equal.
pub(super) fn simulated(
    chain: &RegionalChain,
    sites: &Sites,
    plan: &RegionalPlan,
) -> Result<Nanos, ParallelError> {
    let crossings = hops(sites, &plan.pipelines);
    let mut seen: Vec<(PipelineCost, u32)> = Vec::new();
    let mut slowest = Nanos::ZERO;
    for (row, &microbatches) in plan.pipelines.iter().zip(&plan.microbatches) {
        let stage = |(layers, &rank): (&std::ops::Range<usize>, &Rank)| {
            let time = stage_time(chain, layers, rank);
            let all: u128 = chain.layers[layers.clone()].iter().map(|l| u128::from(l.operations)).sum();
            let ahead: u128 = chain.forward[layers.clone()].iter().map(|&f| u128::from(f)).sum();
            let forward = (u128::from(time) * ahead / all.max(1)) as u64;
            let input = (time - forward) / 2;
            StageCost {
                forward: Nanos(forward),
                input: Nanos(input),
                weight: Nanos(time - forward - input),
                ..StageCost::default()
            }
        };
        let boundary = |(layers, pair): (&std::ops::Range<usize>, &[Rank])| {
            let bytes = chain.layers[layers.end - 1].output;
            // Uses the slower direction of the link for both.
            let ways = [crossings.link(sites, pair[0], pair[1]), crossings.link(sites, pair[1], pair[0])];
            let link = ways.into_iter().max_by_key(|link| link.time(bytes)).unwrap_or(Link::FREE);
            Boundary { link, forward: bytes, backward: bytes }
        };
        let cost = PipelineCost {
            stages: plan.stages.iter().zip(row).map(stage).collect(),
            boundaries: plan.stages.iter().zip(row.windows(2)).map(boundary).collect(),
            slices: Vec::new(),
            overlap_percent: 0,
        };
        if seen.iter().any(|(other, more)| *more >= microbatches && *other == cost) {
            continue;
        }
        let order = Method::OneFOneB.order(&Settings::new(row.len() as u32, microbatches))?;
        slowest = slowest.max(simulate(&order, &cost)?.makespan());
        seen.push((cost, microbatches));
    }
    Ok(slowest)
}
