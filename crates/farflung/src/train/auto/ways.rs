//! The plans of each kind.

use farflung_base::{Algorithm, Bytes, Link, Rank, Topology};
use farflung_parallel::pipeline::Method;
use farflung_parallel::plan::even_parts;
use farflung_parallel::planner::dtfm::{PairCosts, Workload, search};
use farflung_parallel::planner::path::shortest_path;
use farflung_parallel::planner::uneven::{Chain, ChainMachine, ChainPlan, ChainStage, uneven};
use farflung_parallel::share::largest_remainder;
use farflung_parallel::{Cluster, Level, Plan, ScheduleSource};
use farflung_zoo::GptConfig;

use super::candidate::{Candidate, Way, held, simulated};
use crate::Result;
use crate::train::chain::{PipelineSizes, chain, pipeline_plan};

/// Schedules that are tried for each division.
const SCHEDULES: [Method; 4] = [Method::OneFOneB, Method::OneFOneBSlope, Method::GPipe, Method::ZbH1];

/// All-reduce algorithms that are tried for averages.
const ALGORITHMS: [Algorithm; 3] = [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Direct];

/// Layouts that DT-FM's search may price for each number of stages.
const LAYOUTS: u64 = 300;

/// The most stages of pipelines side by side that are tried.
const STAGES: u32 = 16;

/// What a plan is wanted for.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) name: &'a str,
    pub(super) model: &'a GptConfig,
    pub(super) cluster: &'a Cluster,
    pub(super) sizes: PipelineSizes,
}

impl Asked<'_> {
    /// One pipeline, over machines in some orders.
    ///
    /// Errors: as [`uneven`] where no order holds the model.
    pub(super) fn pipelines(&self, candidates: &mut Vec<Candidate>) -> Result<()> {
        let mut refused = None;
        for (name, order) in self.orders()? {
            let chain = chain(self.model, self.cluster, &order, self.sizes.batch, self.sizes.microbatches)?;
            match uneven(&chain) {
                Ok(planned) => {
                    self.pipeline(&format!("pipeline by speed, {name}"), &order, &planned, candidates)?;
                }
                Err(error) => refused = Some(error),
            }
            if let Some(even) = even(&chain) {
                let before = candidates.len();
                self.pipeline(&format!("pipeline of equal shares, {name}"), &order, &even, candidates)?;
                for candidate in &mut candidates[before..] {
                    candidate.is_baseline = name == LISTED;
                }
            }
        }
        refused.map_or(Ok(()), |error| Err(error.into()))
    }

    fn pipeline(
        &self,
        what: &str,
        order: &[Rank],
        planned: &ChainPlan,
        candidates: &mut Vec<Candidate>,
    ) -> Result<()> {
        let plan = pipeline_plan(self.name, self.model, self.cluster, order, planned, self.sizes)?;
        self.schedules(Way::Pipeline, what, &plan, candidates)
    }

    /// A plan under each schedule that does its sizes.
    fn schedules(&self, way: Way, what: &str, plan: &Plan, candidates: &mut Vec<Candidate>) -> Result<()> {
        let methods = if plan.stages() > 1 { &SCHEDULES[..] } else { &SCHEDULES[..1] };
        for &method in methods {
            let mut plan = plan.clone();
            plan.pipeline.schedule = ScheduleSource::Named(method);
            if plan.check().is_ok() && self.fits(&plan)? {
                let what = if methods.len() > 1 { format!("{what}, {method}") } else { what.to_owned() };
                candidates.push(simulated(way, what, plan, self.model, self.cluster)?);
            }
        }
        Ok(())
    }

    /// Whether each machine holds its part. GPipe holds all microbatches, the other schedules as 1F1B or fewer.
    fn fits(&self, plan: &Plan) -> Result<bool> {
        let names = self.cluster.rank_names();
        let memory = |name: &String| {
            let at = names.iter().position(|known| known == name)?;
            self.cluster.ranks().nth(at)?.memory
        };
        let mut needs = held(plan, self.model, self.cluster)?;
        let all_held =
            matches!(plan.pipeline.schedule, ScheduleSource::Named(Method::GPipe | Method::OneFOneBSlope));
        if all_held && plan.stages() > 1 {
            // The last stage holds one microbatch, whatever the schedule: what a stage adds for each is more.
            needs = self.held_by_all(plan)?;
        }
        Ok(plan.machines.iter().zip(needs).all(|(name, needs)| memory(name).is_none_or(|has| needs <= has)))
    }

    /// What ranks hold where each keeps all microbatches.
    fn held_by_all(&self, plan: &Plan) -> Result<Vec<Bytes>> {
        let ranks = Rank(0);
        let one = chain(self.model, self.cluster, &[ranks], plan.batch, 1)?;
        let of = |rank: usize| {
            let (replica, part) = (rank / plan.parts.len(), &plan.parts[rank % plan.parts.len()]);
            let layers = part.layers.start as usize..part.layers.end as usize;
            let microbatches = u64::from(plan.microbatches[replica]);
            let held = one.layers[layers]
                .iter()
                .map(|l| l.state.0.saturating_add(l.activations.0.saturating_mul(microbatches)));
            Bytes(held.fold(0, u64::saturating_add))
        };
        Ok((0..plan.machines.len()).map(of).collect())
    }

    /// The orders of machines that are tried: the file's, and the shortest path over what a microbatch takes from one to another.
    fn orders(&self) -> Result<Vec<(&'static str, Vec<Rank>)>> {
        let topology = self.cluster.topology()?;
        let size = topology.size();
        let listed: Vec<Rank> = (0..size as u32).map(Rank).collect();
        let bytes = self.hidden();
        let hop = |a: Rank, b: Rank| {
            one_way(&topology, a, b, bytes).saturating_add(one_way(&topology, b, a, bytes)) / 2
        };
        let hops: Vec<u64> = listed
            .iter()
            .flat_map(|&a| listed.iter().map(move |&b| (a, b)))
            .map(|(a, b)| hop(a, b))
            .collect();
        let nearest: Vec<Rank> =
            shortest_path(&hops, size).nodes.into_iter().map(|i| Rank(i as u32)).collect();
        // The direction matters for memory and for the head.
        let back: Vec<Rank> = nearest.iter().rev().copied().collect();
        let all = [(LISTED, listed.clone()), ("nearest", nearest), ("nearest, reversed", back)];
        Ok(all.into_iter().filter(|(name, order)| *name == LISTED || *order != listed).collect())
    }

    /// Hidden states of a microbatch.
    fn hidden(&self) -> Bytes {
        let values = self.model.context * self.model.dim * size_of::<f32>();
        Bytes(u64::from(self.sizes.batch) * values as u64)
    }

    /// Replicas of one machine each: shares by speed, and equal shares.
    pub(super) fn data(&self, candidates: &mut Vec<Candidate>) -> Result<()> {
        let order: Vec<Rank> = (0..self.cluster.size() as u32).map(Rank).collect();
        let whole = vec![ChainStage { layers: 0..self.model.layers, machine: 0 }];
        let rows: Vec<Vec<Rank>> = order.iter().map(|&rank| vec![rank]).collect();
        for (what, equal) in [("replicas by speed", false), ("replicas of equal shares", true)] {
            let before = candidates.len();
            self.replicas(Way::Data, what, &rows, &whole, equal, candidates)?;
            for candidate in &mut candidates[before..] {
                candidate.is_baseline = equal;
            }
        }
        Ok(())
    }

    /// Pipelines side by side, for every number of stages that divides the machines.
    pub(super) fn both(&self, candidates: &mut Vec<Candidate>) -> Result<()> {
        let machines = self.cluster.size() as u32;
        let topology = self.cluster.topology()?;
        let most = STAGES.min(machines / 2).min(self.model.layers as u32);
        for stages in (2..=most).filter(|&stages| machines.is_multiple_of(stages)) {
            let replicas = machines / stages;
            let each = self.sizes.microbatches.div_ceil(replicas);
            let workload = Workload {
                gradients: Bytes(self.model.parameters() * 4 / u64::from(stages)),
                activations: Bytes(self.hidden().0 * u64::from(each)),
            };
            // Links that take over an hour are no links for this.
            let Ok(costs) = PairCosts::new(&topology, stages, workload) else { continue };
            let rows = search(&costs, LAYOUTS, 0)?.layout.pipelines;
            let chain = self.slowest(&topology, &rows)?;
            let what = format!("{replicas} pipelines of {stages}, DT-FM");
            if let Ok(planned) = uneven(&chain) {
                // Columns that hold nothing are left out.
                let used = |row: &Vec<Rank>| planned.stages.iter().map(|stage| row[stage.machine]).collect();
                let rows: Vec<Vec<Rank>> = rows.iter().map(used).collect();
                self.replicas(Way::Both, &what, &rows, &planned.stages, false, candidates)?;
            }
            let listed: Vec<Vec<Rank>> = (0..replicas)
                .map(|replica| (0..stages).map(|stage| Rank(stage * replicas + replica)).collect())
                .collect();
            if let Some(even) = even(&self.slowest(&topology, &listed)?) {
                let before = candidates.len();
                let what = format!("{replicas} pipelines of {stages}, as listed");
                self.replicas(Way::Both, &what, &listed, &even.stages, true, candidates)?;
                for candidate in &mut candidates[before..] {
                    candidate.is_baseline = true;
                }
            }
        }
        Ok(())
    }

    /// The chain of the slowest machine, the least memory and the slowest link of each column.
    fn slowest(&self, topology: &Topology, rows: &[Vec<Rank>]) -> Result<Chain> {
        let each = self.sizes.microbatches.div_ceil(rows.len() as u32).max(1);
        let chains: Vec<Chain> = rows
            .iter()
            .map(|row| chain(self.model, self.cluster, row, self.sizes.batch, each))
            .collect::<Result<_>>()?;
        let columns = rows[0].len();
        let machine = |column: usize| ChainMachine {
            flops: chains.iter().map(|chain| chain.machines[column].flops).min().unwrap_or(1),
            memory: chains.iter().filter_map(|chain| chain.machines[column].memory).min(),
        };
        let mut links = Topology::uniform(columns, Link::FREE);
        for (a, b) in (0..columns).flat_map(|a| (0..columns).map(move |b| (a, b))).filter(|(a, b)| a != b) {
            let slowest = rows.iter().map(|row| Link {
                bandwidth: topology.rate(row[a], row[b]),
                latency: topology.link(row[a], row[b]).latency,
            });
            let link = slowest.max_by_key(|link| link.time(self.hidden())).unwrap_or(Link::FREE);
            links.set_link(Rank(a as u32), Rank(b as u32), link);
        }
        Ok(Chain {
            layers: chains[0].layers.clone(),
            machines: (0..columns).map(machine).collect(),
            links,
            microbatches: each,
        })
    }

    /// Plans of pipelines side by side, under each schedule and algorithm.
    fn replicas(
        &self,
        way: Way,
        what: &str,
        rows: &[Vec<Rank>],
        stages: &[ChainStage],
        equal: bool,
        candidates: &mut Vec<Candidate>,
    ) -> Result<()> {
        let count = rows.len() as u32;
        if count < 2 || self.sizes.microbatches < count {
            return Ok(());
        }
        let shares = if equal { vec![1; rows.len()] } else { self.rates(rows, stages)? };
        // Each replica has one at least.
        let more = largest_remainder(u64::from(self.sizes.microbatches), &shares);
        let mut microbatches: Vec<u32> = more.into_iter().map(|share| (share as u32).max(1)).collect();
        while microbatches.iter().sum::<u32>() > self.sizes.microbatches {
            let Some(most) = microbatches.iter_mut().max() else { break };
            *most -= 1;
        }
        let planned = ChainPlan { stages: stages.to_vec(), time: farflung_base::Nanos::ZERO };
        // Stages count their columns anew.
        let renumbered = ChainPlan {
            stages: planned
                .stages
                .iter()
                .enumerate()
                .map(|(machine, stage)| ChainStage { layers: stage.layers.clone(), machine })
                .collect(),
            ..planned
        };
        let mut plan = pipeline_plan(self.name, self.model, self.cluster, &rows[0], &renumbered, self.sizes)?;
        let names = self.cluster.rank_names();
        plan.mesh = Plan::mesh_of(count, stages.len() as u32)?;
        plan.machines = rows.iter().flatten().map(|rank| names[rank.index()].clone()).collect();
        plan.microbatches = microbatches;
        for algorithm in ALGORITHMS {
            plan.levels = vec![Level { algorithm, ..Level::default() }];
            self.schedules(way, &format!("{what}, {algorithm}"), &plan, candidates)?;
        }
        Ok(())
    }

    /// How fast each pipeline is: by its slowest stage, in numbers that keep nine digits.
    fn rates(&self, rows: &[Vec<Rank>], stages: &[ChainStage]) -> Result<Vec<u64>> {
        let mut rates = Vec::new();
        for row in rows {
            let chain = chain(self.model, self.cluster, row, self.sizes.batch, 1)?;
            let time = |(at, stage): (usize, &ChainStage)| {
                let operations: u64 =
                    chain.layers[stage.layers.clone()].iter().map(|layer| layer.operations).sum();
                u128::from(operations) * 1_000_000_000 / u128::from(chain.machines[at].flops.max(1))
            };
            let slowest = stages.iter().enumerate().map(time).max().unwrap_or(1).max(1);
            rates.push(u64::try_from(u128::from(u64::MAX / 4) / slowest).unwrap_or(u64::MAX / 4).max(1));
        }
        Ok(rates)
    }
}

const LISTED: &str = "as listed";

fn one_way(topology: &Topology, a: Rank, b: Rank, bytes: Bytes) -> u64 {
    if a == b {
        return 0;
    }
    topology.rate(a, b).transfer(bytes).saturating_add(topology.link(a, b).latency).0
}

/// As many layers for each machine, as Megatron has it, where that fits.
fn even(chain: &Chain) -> Option<ChainPlan> {
    let machines = chain.machines.len().min(chain.layers.len());
    let parts = even_parts(chain.layers.len() as u32, machines as u32)?;
    let stage = |(machine, layers): (usize, std::ops::Range<u32>)| ChainStage {
        layers: layers.start as usize..layers.end as usize,
        machine,
    };
    let stages: Vec<ChainStage> = parts.into_iter().enumerate().map(stage).collect();
    if stages.iter().any(|stage| stage.layers.is_empty()) {
        return None;
    }
    let time = chain.time(&stages)?;
    Some(ChainPlan { stages, time })
}
