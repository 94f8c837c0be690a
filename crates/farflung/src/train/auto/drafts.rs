//! Drafts of plans of each kind.

use std::cmp::Reverse;

use farflung_base::{Algorithm, Axis, Bytes, Link, Rank, Topology};
use farflung_parallel::pipeline::Method;
use farflung_parallel::plan::even_parts;
use farflung_parallel::planner::dtfm::{PairCosts, Workload, search};
use farflung_parallel::planner::path::shortest_path;
use farflung_parallel::planner::ring::bottleneck_ring;
use farflung_parallel::planner::uneven::{Chain, ChainMachine, ChainPlan, ChainStage, uneven};
use farflung_parallel::share::largest_remainder;
use farflung_parallel::{Level, Machine, Mesh, Plan, ScheduleSource, Speed, whole_pipelines};

use super::candidate::{Draft, PlanKind};
use super::divided_state::Fitting;
use super::plan_request::PlanRequest;
use super::planners::{chain_stages, equal_replicas, rows};
use crate::Result;
use crate::train::chain::{chain, machines, pipeline_plan};

/// Schedules that are tried for each division of the layers.
const SCHEDULES: [Method; 4] = [Method::OneFOneB, Method::OneFOneBSlope, Method::GPipe, Method::ZbH1];

/// All-reduce algorithms that are tried for averages.
const ALGORITHMS: [Algorithm; 3] = [Algorithm::Direct, Algorithm::Ring, Algorithm::HalvingDoubling];

/// Number of layouts that DT-FM's search may evaluate for each number of stages.
const LAYOUTS: u64 = 300;

/// Highest number of stages that is tried for several pipelines.
const STAGES: u32 = 16;

/// Number of sets of machines that are tried by speed: the fastest kind, the two fastest kinds, and so on.
const KINDS: usize = 4;

/// A set of machines, and a suffix for the descriptions of its plans.
struct Pool {
    name: String,
    machines: Vec<Rank>,
}

impl PlanRequest<'_> {
    /// Drafts one pipeline, over machines in several orders.
    ///
    /// Errors: as [`uneven`], if the model fits in no order.
    pub(super) fn pipelines(&self, drafts: &mut Vec<Draft>) -> Result<()> {
        let mut refused = None;
        for (name, order) in self.orders()? {
            let chain = chain(self.model, self.cluster, &order, self.sizes.batch, self.sizes.microbatches)?;
            match uneven(&chain) {
                Ok(planned) => {
                    self.pipeline(&format!("pipeline by speed, {name}"), &order, &planned, drafts)?;
                }
                Err(error) => refused = Some(error),
            }
            if let Some(even) = even(&chain) {
                let before = drafts.len();
                self.pipeline(&format!("pipeline of equal shares, {name}"), &order, &even, drafts)?;
                for draft in &mut drafts[before..] {
                    draft.is_baseline = name == LISTED && draft.has_usual_schedule();
                }
            }
        }
        self.alone(drafts)?;
        refused.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Drafts a pipeline on the fastest machine alone, if it holds the model: the division among several
    /// machines is planned without overlap, so its result may be slower.
    fn alone(&self, drafts: &mut Vec<Draft>) -> Result<()> {
        let machines = machines(self.model, self.cluster);
        let fastest = (0..).map(Rank).zip(&machines).min_by_key(|(_, machine)| Reverse(machine.flops));
        let Some((fastest, _)) = fastest.filter(|_| machines.len() > 1) else { return Ok(()) };
        let order = [fastest];
        let chain = chain(self.model, self.cluster, &order, self.sizes.batch, self.sizes.microbatches)?;
        match uneven(&chain) {
            Ok(planned) => self.pipeline("the fastest machine alone", &order, &planned, drafts),
            // Several machines together may hold it.
            Err(_) => Ok(()),
        }
    }

    fn pipeline(
        &self,
        what: &str,
        order: &[Rank],
        planned: &ChainPlan,
        drafts: &mut Vec<Draft>,
    ) -> Result<()> {
        let plan = pipeline_plan(self.name, self.model, self.cluster, order, planned, self.sizes)?;
        self.schedules(PlanKind::Pipeline, what, &plan, drafts)
    }

    /// Adds drafts of a plan, one for each schedule that supports its sizes and fits into memory.
    ///
    /// Errors: those of [`planned_memory`](crate::train::planned_memory).
    pub(super) fn schedules(
        &self,
        kind: PlanKind,
        what: &str,
        plan: &Plan,
        drafts: &mut Vec<Draft>,
    ) -> Result<()> {
        let methods = if plan.stages() > 1 { &SCHEDULES[..] } else { &SCHEDULES[..1] };
        for &method in methods {
            let mut plan = plan.clone();
            plan.pipeline.schedule = ScheduleSource::Named(method);
            if plan.check().is_err() {
                continue;
            }
            for Fitting { plan, how } in self.fitting(&plan)? {
                let what = if methods.len() > 1 { format!("{what}, {method}") } else { what.to_owned() };
                drafts.push(Draft { kind, what: what + how, plan, is_baseline: false });
            }
        }
        Ok(())
    }

    /// Returns the orders of machines that are tried: the file's order, and the shortest path by the time of a
    /// microbatch's hidden states between two machines, in both directions.
    pub(super) fn orders(&self) -> Result<Vec<(&'static str, Vec<Rank>)>> {
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

    /// Returns the bytes of the hidden states of a microbatch.
    fn hidden(&self) -> Bytes {
        Bytes(self.model.hidden_bytes(u64::from(self.sizes.batch)))
    }

    /// Drafts replicas on one machine each: shares by speed on a ring, and equal shares in the file's order.
    pub(super) fn data(&self, drafts: &mut Vec<Draft>) -> Result<()> {
        let whole = vec![ChainStage { layers: 0..self.model.layers(), machine: 0 }];
        let topology = self.cluster.topology()?;
        for Pool { name, machines } in self.pools() {
            let around = self.around(&topology.among(&machines), &machines);
            for (shares, equal) in [("replicas by speed", false), ("replicas of equal shares", true)] {
                let before = drafts.len();
                let order = if equal { &machines } else { &around };
                let rows: Vec<Vec<Rank>> = order.iter().map(|&rank| vec![rank]).collect();
                self.replicas(PlanKind::Data, &format!("{shares}{name}"), &rows, &whole, equal, drafts)?;
                for draft in &mut drafts[before..] {
                    draft.is_baseline = equal && name.is_empty();
                }
            }
        }
        Ok(())
    }

    /// Returns machines in the order of the ring whose slowest link is fastest, for the message size of a ring
    /// all-reduce.
    fn around(&self, topology: &Topology, machines: &[Rank]) -> Vec<Rank> {
        let n = machines.len();
        let bytes = Bytes(self.model.parameters() * 4 / n as u64);
        let rank = |i: usize| Rank(i as u32);
        let costs: Vec<u64> =
            (0..n * n).map(|at| one_way(topology, rank(at / n), rank(at % n), bytes)).collect();
        bottleneck_ring(&costs, n).ranks.into_iter().map(|i| machines[i]).collect()
    }

    /// Drafts several pipelines, for every number of stages up to [`STAGES`] that divides the number of
    /// machines.
    pub(super) fn both(&self, drafts: &mut Vec<Draft>) -> Result<()> {
        let topology = self.cluster.topology()?;
        for pool in self.pools() {
            let count = pool.machines.len() as u32;
            let most = STAGES.min(count / 2).min(self.model.layers() as u32);
            for stages in (2..=most).filter(|&stages| count.is_multiple_of(stages)) {
                self.placed(&pool, stages, &topology, drafts)?;
                if pool.name.is_empty() {
                    self.listed(stages, &topology, drafts)?;
                }
            }
        }
        Ok(())
    }

    /// Drafts pipelines of `stages` stages over the machines of a pool, placed by DT-FM's search.
    fn placed(&self, pool: &Pool, stages: u32, topology: &Topology, drafts: &mut Vec<Draft>) -> Result<()> {
        let replicas = whole_pipelines(pool.machines.len() as u32, stages);
        let each = self.sizes.microbatches.div_ceil(replicas);
        let parts = u64::from(stages);
        let workload = Workload {
            gradients: Bytes(self.model.parameters() * 4 / parts),
            activations: Bytes(self.hidden().0 * u64::from(each)),
        };
        // A pair of machines without bandwidth, or that needs more than 73 minutes, is an error here: then no
        // placement is drafted.
        let Ok(costs) = PairCosts::new(&topology.among(&pool.machines), stages, workload) else {
            return Ok(());
        };
        let machine = |rank: &Rank| pool.machines[rank.index()];
        let rows = search(&costs, LAYOUTS, 0)?.layout.pipelines;
        let rows: Vec<Vec<Rank>> = rows.iter().map(|row| row.iter().map(machine).collect()).collect();
        // This is not an error, since other machines may hold the model.
        let Ok(planned) = uneven(&self.slowest(topology, &rows)?) else { return Ok(()) };
        // Columns without layers are left out.
        let used = |row: &Vec<Rank>| planned.stages.iter().map(|stage| row[stage.machine]).collect();
        let rows: Vec<Vec<Rank>> = rows.iter().map(used).collect();
        let what = format!("{replicas} pipelines of {}, DT-FM{}", planned.stages.len(), pool.name);
        self.replicas(PlanKind::Both, &what, &rows, &planned.stages, false, drafts)
    }

    /// Drafts pipelines of `stages` stages with equal shares, with ranks numbered as in Megatron.
    fn listed(&self, stages: u32, topology: &Topology, drafts: &mut Vec<Draft>) -> Result<()> {
        let replicas = whole_pipelines(self.cluster.size() as u32, stages);
        let rows = Mesh::new(&[(Axis::Pipeline, stages), (Axis::Data, replicas)])?.groups(Axis::Pipeline);
        let Some(even) = even(&self.slowest(topology, &rows)?) else { return Ok(()) };
        let before = drafts.len();
        let what = format!("{replicas} pipelines of {stages}, as listed");
        self.replicas(PlanKind::Both, &what, &rows, &even.stages, true, drafts)?;
        for draft in &mut drafts[before..] {
            draft.is_baseline = draft.has_usual_schedule();
        }
        Ok(())
    }

    /// Returns the sets of machines on which replicas are tried: all machines, the fastest kinds, and those of
    /// each region.
    fn pools(&self) -> Vec<Pool> {
        let machines: Vec<&Machine> = self.cluster.ranks().collect();
        let of = |keep: &dyn Fn(&Machine) -> bool| -> Vec<Rank> {
            (0..)
                .map(Rank)
                .zip(&machines)
                .filter(|(_, machine)| keep(machine))
                .map(|(rank, _)| rank)
                .collect()
        };
        let all_flops = self.model.flops_per_token(self.model.context);
        let flops = |machine: &Machine| match machine.speed {
            Speed::Flops(rate) => rate,
            Speed::TokensPerSecond(rate) => rate.saturating_mul(all_flops),
        };
        let mut pools = vec![Pool { name: String::new(), machines: of(&|_| true) }];
        let mut add = |name: String, machines: Vec<Rank>| {
            if machines.len() > 1 && pools.iter().all(|pool| pool.machines != machines) {
                pools.push(Pool { name, machines });
            }
        };
        for region in &self.cluster.regions {
            let inside = of(&|machine| machine.region.as_ref() == Some(&region.name));
            add(format!(", {} alone", region.name), inside);
        }
        let mut rates: Vec<u64> = machines.iter().map(|machine| flops(machine)).collect();
        rates.sort_unstable();
        rates.dedup();
        for &rate in rates.iter().rev().take(KINDS) {
            let fast = of(&|machine| flops(machine) >= rate);
            add(format!(", the {} fastest", fast.len()), fast);
        }
        pools
    }

    /// Returns a chain that has in each column the slowest machine, the least memory and the slowest link of
    /// all rows.
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

    /// Drafts several pipelines with each schedule and algorithm.
    fn replicas(
        &self,
        kind: PlanKind,
        what: &str,
        rows: &[Vec<Rank>],
        stages: &[ChainStage],
        equal: bool,
        drafts: &mut Vec<Draft>,
    ) -> Result<()> {
        let count = rows.len() as u32;
        if count < 2 || self.sizes.microbatches < count {
            return Ok(());
        }
        let shares = if equal { vec![1; rows.len()] } else { self.rates(rows, stages)? };
        // Each replica gets at least one microbatch.
        let more = largest_remainder(u64::from(self.sizes.microbatches), &shares);
        let mut microbatches: Vec<u32> = more.into_iter().map(|share| (share as u32).max(1)).collect();
        while microbatches.iter().sum::<u32>() > self.sizes.microbatches {
            let Some(most) = microbatches.iter_mut().max() else { break };
            *most -= 1;
        }
        let planned = ChainPlan { stages: stages.to_vec(), time: farflung_base::Nanos::ZERO };
        // Renumbers the columns of the stages from 0.
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
            self.schedules(kind, &format!("{what}, {algorithm}"), &plan, drafts)?;
        }
        Ok(())
    }

    /// Drafts pipelines of given machines and layers: one, or several.
    pub(super) fn rows(
        &self,
        what: &str,
        rows: &[Vec<Rank>],
        stages: &[ChainStage],
        drafts: &mut Vec<Draft>,
    ) -> Result<()> {
        let [row] = rows else {
            let kind = if stages.len() == 1 { PlanKind::Data } else { PlanKind::Both };
            return self.replicas(kind, what, rows, stages, false, drafts);
        };
        let planned = ChainPlan { stages: stages.to_vec(), time: farflung_base::Nanos::ZERO };
        self.pipeline(what, row, &planned, drafts)
    }

    /// Drafts the plans of DAPPLE's planner, for every number of copies of a stage that divides the number of
    /// machines, up to the number of microbatches.
    pub(super) fn dapple(&self, drafts: &mut Vec<Draft>) -> Result<()> {
        let all = self.cluster.size() as u32;
        for copies in (1..=all.min(self.sizes.microbatches)).filter(|copies| all.is_multiple_of(*copies)) {
            // This is not an error, since other machines may hold the model.
            let Ok(stages) = equal_replicas(self.model, self.cluster, self.sizes, copies) else { continue };
            let what = format!("{copies} pipelines of {}, DAPPLE", stages.len());
            let (rows, stages) = (rows(&stages, copies as usize), chain_stages(&stages));
            self.rows(&what, &rows, &stages, drafts)?;
        }
        Ok(())
    }

    /// Returns the speed of each pipeline, by its slowest stage, scaled to keep nine digits.
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

/// Divides the layers equally among the machines, as Megatron does; `None` if that does not fit.
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
