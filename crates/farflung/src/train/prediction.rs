//! Predicts the time of a plan's steps: the lists that the trainer executes are priced, and played in virtual
//! time over the links that the ranks share. Nothing is computed or sent.

mod layer_exchanges;
mod operations;
mod pricing;

use farflung_base::{Bytes, Nanos, Rank, Topology};
use farflung_parallel::script::{Script, ScriptOp, ScriptTimes};
use farflung_parallel::step::Moment;
use farflung_parallel::{Cluster, Kind, Lane, LocalSteps, Plan, Span, Timeline};
use farflung_zoo::ModelSpec;

use super::bind::ReplicaSchedule;
use super::bound_plan::BoundPlan;
use super::costs::Machines;
use super::job::Job;
use crate::Result;
use operations::Operations;
use pricing::{Marks, Pricing, Worked};

/// Predicted time of a plan's steps.
///
/// With the links and rates of a run on the virtual clock, the prediction is within a percent of that run. It
/// does not contain evaluations, checkpoints, and comparisons that ranks do from time to time. Averages that
/// are in flight during the next steps are assumed to arrive in time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Number of steps after which the pattern repeats: from one average to the next.
    pub period: u32,
    /// Time of a whole period, until the last rank has agreed on its end.
    pub total: Nanos,
    /// Time from the common start of a step until the last microbatch has passed its last part.
    pub pass: Nanos,
    /// Time for which the busiest rank computes in a step.
    pub compute: Nanos,
    /// Fraction of the pass in which ranks are idle, from 0 to 1.
    pub bubble: f64,
}

impl Prediction {
    /// Predicts a plan for a model; `machines` has one machine per rank.
    ///
    /// Errors: those of [`ReplicaSchedule::new`]; a codec or algorithm of the plan whose time cannot be
    /// predicted.
    pub fn new(plan: &BoundPlan, model: &ModelSpec, machines: &Machines) -> Result<Self> {
        Self::scheduled(plan, model, machines, &schedules(plan, model, machines)?)
    }

    fn scheduled(
        plan: &BoundPlan,
        model: &ModelSpec,
        machines: &Machines,
        schedules: &[ReplicaSchedule],
    ) -> Result<Self> {
        let found = Self::limited((plan, model, machines), schedules, Nanos::MAX)?;
        Ok(found.expect("no time is later than Nanos::MAX"))
    }

    /// Like [`Prediction::new`], with the schedule of each replica; `None` if a step takes longer than `limit`.
    fn limited(
        (plan, model, machines): (&BoundPlan, &ModelSpec, &Machines),
        schedules: &[ReplicaSchedule],
        limit: Nanos,
    ) -> Result<Option<Self>> {
        let mut operations = Operations::new(plan, model, machines, &schedules[0])?;
        // With local steps this is true for a single replica too; its period is then one step. With
        // `parameter-server` and `bounded-stale`, a worker exchanges as many bytes with the servers after a
        // step as in an average.
        let meets = !plan.averages_each_step() && !plan.outermost().method.overlaps;
        let paces = plan.local_steps();
        let repeats = meets || !paces.are_equal();
        let period = if repeats && plan.replicas() > 1 { paces.period() } else { 1 };
        let steps = period.min(EXACT);
        // The last steps of a period, at whose end replicas synchronise.
        let first = u64::from(period - steps);
        let pace = Some(Pace { steps: &paces, first });
        let all = Sequence { schedules, machines, before: &[], steps, pace, meets };
        if period == steps {
            // Matches the rounding of the division in `step`.
            let limit = match limit {
                Nanos::MAX => limit,
                Nanos(limit) => Nanos((limit + 1).saturating_mul(period.into()) - 1),
            };
            let played = all.recorded(&mut operations)?.play_within(limit)?;
            return Ok(played.map(|played| played.predicted(period)));
        }
        // On each rank, the other local steps take as long as the last one that was played.
        let local = Sequence { meets: false, pace: None, ..all }.play(&mut operations)?;
        let taken = |rank: usize| paces.taken(plan.at(Rank(rank as u32)).data, first);
        let others = |(rank, took): (usize, Nanos)| Nanos(took.0.saturating_mul(taken(rank)));
        let before: Vec<Nanos> = local.last_steps().enumerate().map(others).collect();
        let last = Sequence { before: &before, ..all }.play(&mut operations)?;
        let found = Self { total: last.played.makespan(), ..local.predicted(period) };
        Ok(Some(found).filter(|found| found.step() <= limit))
    }

    /// Predicts a plan for a model on the machines of a topology file that the plan names. The members of a run
    /// are assumed to stay: where they may leave, pipelines wait for the averages of all others
    /// ([`Prediction::of`] knows).
    ///
    /// Errors: as [`Prediction::new`]; [`Error::Setting`](crate::Error::Setting) for a machine that the file
    /// does not have.
    pub fn on(plan: &Plan, model: &ModelSpec, cluster: &Cluster) -> Result<Self> {
        Self::new(&BoundPlan::new(plan.clone())?, model, &Machines::of_plan(plan, model, cluster)?)
    }

    /// Like [`Prediction::on`]; `None` if a step takes longer than `limit`. For periods of at most 8 steps this
    /// function is cheaper: no time beyond the limit is played, and nothing at all if the busiest processor or
    /// link alone takes longer.
    ///
    /// Errors: as [`Prediction::on`].
    pub fn within(plan: &Plan, model: &ModelSpec, cluster: &Cluster, limit: Nanos) -> Result<Option<Self>> {
        let machines = Machines::of_plan(plan, model, cluster)?;
        let plan = BoundPlan::new(plan.clone())?;
        Self::limited((&plan, model, &machines), &schedules(&plan, model, &machines)?, limit)
    }

    /// Returns a lower bound of the step time of a plan without local steps: the time of the busiest processor
    /// or link alone.
    ///
    /// Errors: as [`Prediction::on`].
    pub fn at_least(plan: &Plan, model: &ModelSpec, cluster: &Cluster) -> Result<Nanos> {
        let (plan, machines) = (&BoundPlan::new(plan.clone())?, &Machines::of_plan(plan, model, cluster)?);
        let schedules = schedules(plan, model, machines)?;
        let mut operations = Operations::new(plan, model, machines, &schedules[0])?;
        let recorded = Sequence::first(&schedules, machines).recorded(&mut operations)?;
        Ok(recorded.script.lower_bound(&machines.topology))
    }

    /// Predicts the plan of a job.
    ///
    /// Errors: as [`Prediction::new`].
    pub fn of(job: &Job) -> Result<Self> {
        let schedules = (0..job.plan.replicas()).map(|replica| ReplicaSchedule::new(job, replica));
        let schedules = schedules.collect::<Result<Vec<_>>>()?;
        Self::scheduled(&job.plan, &job.model, &job.machines()?, &schedules)
    }

    /// Returns the timeline of the first step of a plan with a flush, on machines of a topology file, for
    /// drawing: the computations of each rank, and one span on its link for its waits after the pass (averages,
    /// and the agreement on the step).
    ///
    /// Errors: as [`Prediction::on`].
    pub fn timeline(plan: &Plan, model: &ModelSpec, cluster: &Cluster) -> Result<Timeline> {
        let (plan, machines) = (&BoundPlan::new(plan.clone())?, &Machines::of_plan(plan, model, cluster)?);
        let schedules = schedules(plan, model, machines)?;
        let mut operations = Operations::new(plan, model, machines, &schedules[0])?;
        Ok(Sequence::first(&schedules, machines).play(&mut operations)?.timeline())
    }

    /// Returns the mean time of a step in a period, averages included.
    #[must_use]
    pub const fn step(&self) -> Nanos {
        Nanos(self.total.0 / self.period as u64)
    }
}

/// Returns the schedule of each replica of a plan.
fn schedules(plan: &BoundPlan, model: &ModelSpec, machines: &Machines) -> Result<Vec<ReplicaSchedule>> {
    (0..plan.replicas()).map(|replica| ReplicaSchedule::of(plan, model, machines, replica)).collect()
}

/// Number of local steps of a period that are simulated one by one. After a few steps, the delays between ranks
/// no longer change.
const EXACT: u32 = 8;

/// The local steps that each replica takes, in a sequence that begins after `first` steps of a period.
#[derive(Clone, Copy)]
struct Pace<'a> {
    steps: &'a LocalSteps,
    first: u64,
}

/// A number of steps of all replicas.
#[derive(Clone, Copy)]
struct Sequence<'a> {
    schedules: &'a [ReplicaSchedule],
    machines: &'a Machines,
    /// Time for which each rank is busy before the sequence; empty for none.
    before: &'a [Nanos],
    steps: u32,
    /// The steps that each replica takes; `None` if every replica takes all steps.
    pace: Option<Pace<'a>>,
    /// Whether replicas synchronise after the last step; only for plans without averages in each step.
    meets: bool,
}

/// The recorded actions of all ranks in a sequence.
struct Recorded<'a> {
    topology: &'a Topology,
    script: Script,
    marks: Vec<Marks>,
}

impl Recorded<'_> {
    /// Plays the sequence; `None` if it takes longer than `limit`.
    fn play_within(self, limit: Nanos) -> Result<Option<PlayedSequence>> {
        let Self { topology, script, marks } = self;
        let played = if limit == Nanos::MAX {
            Some(script.simulate(topology)?)
        } else if script.lower_bound(topology) > limit {
            None
        } else {
            script.simulate_within(topology, limit)
        };
        Ok(played.map(|played| PlayedSequence { played, ranks: script.ranks, marks }))
    }
}

/// Result of playing a sequence in virtual time.
struct PlayedSequence {
    played: ScriptTimes,
    ranks: Vec<Vec<ScriptOp>>,
    marks: Vec<Marks>,
}

impl<'a> Sequence<'a> {
    /// Returns the first step, without the synchronisation of replicas.
    const fn first(schedules: &'a [ReplicaSchedule], machines: &'a Machines) -> Self {
        Self { schedules, machines, before: &[], steps: 1, pace: None, meets: false }
    }

    fn play(&self, operations: &mut Operations<'_>) -> Result<PlayedSequence> {
        let played = self.recorded(operations)?.play_within(Nanos::MAX)?;
        Ok(played.expect("no time is later than Nanos::MAX"))
    }

    fn recorded(&self, operations: &mut Operations<'_>) -> Result<Recorded<'a>> {
        operations.begin();
        let (mut ranks, mut marks) = (Vec::new(), Vec::new());
        for (replica, schedule) in (0..).zip(self.schedules) {
            for rank in operations.plan.ranks_of(replica) {
                let mut pricing = Pricing::new(schedule, rank, operations)?;
                if let Some(&before) = self.before.get(ranks.len()) {
                    pricing.compute(before);
                }
                for step in 0..self.steps {
                    pricing.begin_step(step);
                    let number = |first: u64| first + 1 + u64::from(step);
                    let takes = |pace: Pace<'_>| pace.steps.takes(replica, number(pace.first));
                    if self.pace.is_none_or(takes) {
                        pricing.run(Moment::Pass)?;
                        pricing.run(Moment::Reduce)?;
                        pricing.run(Moment::Commit)?;
                    }
                    if self.meets && step + 1 == self.steps {
                        pricing.run(Moment::Meet)?;
                    }
                    pricing.end_step();
                }
                let (ops, mark) = pricing.done();
                ranks.push(ops);
                marks.push(mark);
            }
        }
        let script = Script { operations: operations.take(), ranks };
        Ok(Recorded { topology: &self.machines.topology, script, marks })
    }
}

impl PlayedSequence {
    /// Returns the time at which a rank has done the first `ops` of its script.
    fn ended(&self, rank: usize, ops: usize) -> Nanos {
        self.played.ends[rank][..ops].last().copied().unwrap_or_default()
    }

    /// Returns the time of the last step on each rank.
    fn last_steps(&self) -> impl Iterator<Item = Nanos> {
        self.marks.iter().enumerate().map(|(rank, marks)| {
            let before = marks.steps.len().checked_sub(2).map_or(0, |step| marks.steps[step]);
            self.ended(rank, self.ranks[rank].len()).saturating_sub(self.ended(rank, before))
        })
    }

    /// Returns the timeline of the first step.
    fn timeline(&self) -> Timeline {
        let mut spans = Vec::new();
        for (rank, marks) in self.marks.iter().enumerate() {
            let of = |lane, kind, start: Nanos, end: Nanos| {
                let rank = Rank(rank as u32);
                Span { rank, lane, kind, step: 0, part: 0, op: None, start, end, sent: Bytes(0) }
            };
            for Worked { action, ops } in &marks.worked {
                for op in ops.clone() {
                    let ScriptOp::Compute(time) = self.ranks[rank][op] else { continue };
                    let end = self.played.ends[rank][op];
                    let span = of(Lane::Compute, action.kind.into(), end.saturating_sub(time), end);
                    spans.push(Span { part: action.microbatch, op: Some((*action).into()), ..span });
                }
            }
            let (passed, end) = (self.ended(rank, marks.passed), self.ended(rank, self.ranks[rank].len()));
            spans.push(of(Lane::Link, Kind::AllReduce, passed, end));
        }
        spans.retain(|span| span.end > span.start);
        Timeline { ranks: self.ranks.len() as u32, steps: 1, spans }
    }

    fn predicted(&self, period: u32) -> Prediction {
        let marks = || self.marks.iter().enumerate();
        let pass = marks().map(|(rank, marks)| self.ended(rank, marks.passed)).max().unwrap_or_default();
        let busy = |op: &ScriptOp| if let ScriptOp::Compute(time) = op { time.0 } else { 0 };
        let first_step = |(rank, marks): (usize, &Marks)| &self.ranks[rank][..marks.steps[0]];
        let busy: Vec<u64> = marks().map(first_step).map(|ops| ops.iter().map(busy).sum()).collect();
        let whole = (pass.0 * self.ranks.len() as u64).max(1);
        Prediction {
            period,
            total: self.played.makespan(),
            pass,
            compute: Nanos(busy.iter().copied().max().unwrap_or_default()),
            bubble: 1.0 - busy.iter().sum::<u64>() as f64 / whole as f64,
        }
    }
}
