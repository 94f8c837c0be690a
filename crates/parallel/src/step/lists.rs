//! A rank's step, list by list, made from its schedule.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use farflung_base::{Rank, StageId};

use super::{StepOp, Vote, pairs};
use crate::ParallelError;
use crate::pipeline::{
    Action, ComputeKind, Lowered, LoweredKind, Message, Op, Placement, Schedule, TiedWeights, Updates,
};

/// How replicas train.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaSteps {
    /// There is one replica.
    Alone,
    /// Replicas average the gradients of each step.
    Together,
    /// Replicas take local steps, and meet between them.
    Apart,
}

/// Who votes on the norm of the gradients, where one rank does not know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormVote {
    /// The ranks of one pipeline, once they have their averages: it may apply a step before the others have
    /// theirs. Losses of all ranks are voted on while gradients are averaged. Not where the members of a run
    /// may leave: all then apply a step or none does.
    Pipeline,
    /// All ranks, together with the losses, after the averages.
    All,
    /// All ranks, even if each has all layers, because ranks hold different parameters, or gradients of
    /// different ones: those of layers, of experts, or of shards, that they divide.
    Divided,
}

/// What decides a rank's step beside its schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSettings {
    /// How replicas train.
    pub replicas: ReplicaSteps,
    /// Whether averages of gradients run while gradients are computed.
    pub overlap: bool,
    /// Which ranks share weights of the first and the last part.
    pub tied: TiedWeights,
    /// Whether ranks choose the next computation by what has arrived. The list of the pass is then a
    /// prediction, and averages start after it.
    pub by_arrivals: bool,
    /// Who votes on the norm of the gradients.
    pub norm: NormVote,
    /// Whether each holder of a part updates a shard of its parameters, which it then sends to the others.
    pub shards: bool,
}

/// A moment of a step, with a list of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Moment {
    /// The microbatches. Without a flush, updates are within the pass.
    Pass,
    /// Averages, the sum of tied gradients, and the votes; nothing has changed yet.
    Reduce,
    /// The updates.
    Commit,
    /// The end of a local step.
    Mix,
    /// The meeting of replicas, after local steps at whose end one is due.
    Meet,
    /// The start of exchanges that later steps apply.
    Depart,
}

impl Moment {
    const ALL: [Self; 6] = [Self::Pass, Self::Reduce, Self::Commit, Self::Mix, Self::Meet, Self::Depart];

    const fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Reduce => "reduce",
            Self::Commit => "commit",
            Self::Mix => "mix",
            Self::Meet => "meet",
            Self::Depart => "depart",
        }
    }
}

/// The lists of one rank's step. In every value of this type, operations pair: what is opened or started is
/// waited for once, and an update that was put off is applied.
///
/// ```
/// use farflung_base::Rank;
/// use farflung_parallel::pipeline::{Lowering, Method, Schedule, Settings, TiedWeights};
/// use farflung_parallel::step::{NormVote, RankStep, ReplicaSteps, StepSettings};
///
/// let order = Method::OneFOneB.order(&Settings::new(2, 2))?;
/// let lowering = Lowering { replicas: true, tied: true, ..Lowering::default() };
/// let schedule = Schedule::new(order, &lowering)?;
/// let settings = StepSettings {
///     replicas: ReplicaSteps::Together,
///     overlap: true,
///     tied: TiedWeights::Across,
///     by_arrivals: false,
///     norm: NormVote::Pipeline,
///     shards: false,
/// };
/// let step = RankStep::new(&schedule, Rank(1), settings)?;
/// assert_eq!(
///     step.to_string(),
///     "pass: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD\n\
///      reduce: VOTE_LOSSES 1WAIT_GRAD WAIT_TIED 1CONTRIBUTE VOTE_NORM WAIT_VOTE_NORM WAIT_VOTE_LOSSES\n\
///      commit: 1STEP1\n"
/// );
/// assert_eq!(step.to_string().parse::<RankStep>()?, step);
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankStep {
    lists: BTreeMap<Moment, Vec<StepOp>>,
}

impl RankStep {
    /// Makes the lists of a rank of a schedule. A schedule of forward passes alone has only the list of the
    /// pass.
    ///
    /// Errors: [`ParallelError::StepOp`] for a schedule, checked elsewhere, whose reductions or updates do not
    /// pair.
    ///
    /// # Panics
    /// If the schedule has no such rank.
    pub fn new(schedule: &Schedule, rank: Rank, settings: StepSettings) -> Result<Self, ParallelError> {
        let builder = Builder::new(schedule, rank, settings);
        let (pass, put_off) = builder.pass(&schedule.lists()[rank.index()]);
        if schedule.order().is_forward_only() {
            return Self::of_lists(BTreeMap::from([(Moment::Pass, pass)]));
        }
        let lists = [
            (Moment::Pass, pass),
            (Moment::Reduce, builder.reduce(&put_off)),
            (Moment::Commit, builder.commit()),
            (Moment::Mix, builder.after_local_step(StepOp::Mix)),
            (Moment::Meet, builder.meet()),
            (Moment::Depart, builder.after_local_step(StepOp::Depart)),
        ];
        Self::of_lists(lists.into_iter().collect())
    }

    fn of_lists(lists: BTreeMap<Moment, Vec<StepOp>>) -> Result<Self, ParallelError> {
        pairs::check(lists.values().flatten().copied())?;
        Ok(Self { lists: lists.into_iter().filter(|(_, list)| !list.is_empty()).collect() })
    }

    /// Returns the list of a moment; empty if nothing is done then.
    #[must_use]
    pub fn at(&self, moment: Moment) -> &[StepOp] {
        self.lists.get(&moment).map_or(&[], Vec::as_slice)
    }
}

/// Prints a line for each moment in which something is done.
impl fmt::Display for RankStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (moment, list) in &self.lists {
            write!(f, "{}:", moment.name())?;
            for op in list {
                write!(f, " {op}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl FromStr for RankStep {
    type Err = ParallelError;

    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let mut lists: BTreeMap<Moment, Vec<StepOp>> = BTreeMap::new();
        for line in text.lines() {
            let (name, ops) = line.split_once(':').unwrap_or((line, ""));
            let moment = Moment::ALL.into_iter().find(|moment| moment.name() == name);
            let Some(moment) = moment else {
                return Err(ParallelError::StepMoment { text: name.to_owned() });
            };
            let list = lists.entry(moment).or_default();
            for op in ops.split_whitespace() {
                list.push(op.parse()?);
            }
        }
        Self::of_lists(lists)
    }
}

/// Updates of a part that were put off, and those that were applied.
#[derive(Debug, Clone, Copy, Default)]
struct Versions {
    put_off: u32,
    applied: u32,
}

struct Builder<'a> {
    schedule: &'a Schedule,
    settings: StepSettings,
    /// The rank's stages in the order in which all ranks communicate over them: by part of the model. Two
    /// copies of a model have their stages in opposite orders, and would deadlock in the order of stages.
    homes: Vec<StageId>,
}

impl<'a> Builder<'a> {
    fn new(schedule: &'a Schedule, rank: Rank, settings: StepSettings) -> Self {
        let placement = schedule.order().placement();
        let mut homes: Vec<StageId> = placement.homes_of(rank).collect();
        homes.sort_by_key(|&stage| placement.part(stage));
        Self { schedule, settings, homes }
    }

    fn placement(&self) -> &'a Placement {
        self.schedule.order().placement()
    }

    fn updates(&self) -> Updates {
        self.schedule.order().updates()
    }

    fn is_local(&self) -> bool {
        self.settings.replicas == ReplicaSteps::Apart
    }

    /// Returns whether averages of gradients start within the pass.
    fn starts_averages(&self) -> bool {
        self.settings.overlap
            && match self.settings.replicas {
                ReplicaSteps::Alone => self.placement().copies() > 1,
                ReplicaSteps::Together => true,
                ReplicaSteps::Apart => false,
            }
    }

    /// Returns whether gradients leave while they are computed. Those of pools are multiplied by the number of
    /// a part's holders when all are complete.
    fn opens_averages(&self) -> bool {
        self.starts_averages() && !self.settings.by_arrivals && !self.placement().is_pooled()
    }

    /// Returns whether sums of tied gradients start within the pass: they are exchanged with another rank, and
    /// complete on this one without an average over others.
    fn starts_sums(&self) -> bool {
        let averaged_first = self.settings.replicas == ReplicaSteps::Together;
        self.settings.tied == TiedWeights::Across && !self.placement().is_pooled() && !averaged_first
    }

    /// Returns whether this rank has tied weights, whose other part may be on another rank.
    fn shares_weights(&self) -> bool {
        self.settings.tied != TiedWeights::Whole
            && self.homes.iter().any(|&stage| self.placement().is_end(stage))
    }

    /// Returns the list of the pass, and the updates that it leaves to be applied, by stage.
    fn pass(&self, entries: &[Lowered]) -> (Vec<StepOp>, BTreeMap<StageId, u32>) {
        let mut versions: BTreeMap<StageId, Versions> = BTreeMap::new();
        let mut list: Vec<StepOp> = Vec::with_capacity(entries.len());
        for &entry in entries {
            match entry {
                Lowered::Compute(Op::Run(Action { kind: ComputeKind::Step, stage, microbatch, .. })) => {
                    self.update(stage, microbatch, &mut list, versions.entry(stage).or_default());
                }
                Lowered::Compute(op) => {
                    for action in op.actions().filter(|action| action.kind == ComputeKind::Forward) {
                        let home = self.placement().storage_stage(action.stage);
                        self.catch_up(action, &mut list, home, versions.entry(home).or_default());
                    }
                    list.push(StepOp::Pass(entry));
                }
                Lowered::Move { kind: LoweredKind::Reduce, stage, .. } => {
                    if self.opens_averages() {
                        self.open_before_last_backward(&mut list, stage);
                    }
                    if self.starts_averages() {
                        list.push(StepOp::Pass(entry));
                    }
                }
                Lowered::Move { kind: LoweredKind::ReduceTied, .. } if !self.starts_sums() => {}
                Lowered::Move { .. } => list.push(StepOp::Pass(entry)),
            }
        }
        (list, versions.into_iter().map(|(stage, versions)| (stage, versions.put_off)).collect())
    }

    /// Adds an update within the pass. It is put off if its tied gradients come from another rank: waiting for
    /// them here would stall the pipeline.
    fn update(&self, stage: StageId, microbatch: u32, list: &mut Vec<StepOp>, versions: &mut Versions) {
        if self.updates() == Updates::Flush {
            // All parts are updated after the votes.
            return;
        }
        list.push(StepOp::FinishReduce(stage));
        if self.settings.tied == TiedWeights::Across && self.placement().is_end(stage) {
            versions.put_off += 1;
            list.push(StepOp::Defer { stage, microbatch });
        } else {
            versions.applied += 1;
            list.push(StepOp::Update { stage, microbatch });
        }
    }

    /// Applies updates that were put off and that a forward pass needs.
    fn catch_up(&self, forward: Action, list: &mut Vec<StepOp>, home: StageId, versions: &mut Versions) {
        let placement = self.placement();
        let part = placement.part(forward.stage);
        let needed = self.updates().version(part, placement.depth(), forward.microbatch);
        while versions.applied < needed && versions.put_off > 0 {
            versions.put_off -= 1;
            versions.applied += 1;
            list.push(StepOp::CatchUp(home));
        }
    }

    /// Opens the average of a part before the last computation in the list, which completes its gradients. Not
    /// if another rank waits for what that computation sends: its message would share the link with gradients,
    /// and the pass would take longer on all ranks before it.
    fn open_before_last_backward(&self, list: &mut Vec<StepOp>, stage: StageId) {
        let completing = |op: &StepOp| match op {
            StepOp::Pass(Lowered::Compute(op)) => op.actions().find(|action| action.releases()),
            _ => None,
        };
        let last = list.iter().enumerate().rev().find_map(|(at, op)| Some((at, completing(op)?)));
        let Some((at, action)) = last else { return };
        let message = Message::made_by(action, self.placement());
        if message.is_none_or(|message| message.wire(self.placement()).is_none()) {
            list.insert(at, StepOp::OpenReduce(stage));
        }
    }

    /// Returns the votes on a step: the one that starts with the averages, and the one that starts after them.
    fn votes(&self) -> [Option<Vote>; 2] {
        let has_norm_of_all = self.updates() == Updates::Flush && !self.placement().is_pooled();
        let together = self.settings.replicas == ReplicaSteps::Together;
        if self.settings.norm == NormVote::Divided {
            [None, Some(Vote::Whole)]
        } else if self.placement().depth() == 1 {
            // The norm of a whole model is known to each rank alone.
            [Some(Vote::Losses), None]
        } else if self.settings.norm == NormVote::Pipeline && together && has_norm_of_all {
            [Some(Vote::Losses), Some(Vote::Norm)]
        } else {
            [None, Some(Vote::Whole)]
        }
    }

    fn reduce(&self, put_off: &BTreeMap<StageId, u32>) -> Vec<StepOp> {
        let [early, late] = self.votes();
        let mut list = Vec::new();
        list.extend(early.map(StepOp::StartVote));
        if self.updates() == Updates::Flush {
            let averages = self.homes.iter().copied().map(StepOp::FinishReduce);
            let tied = self.shares_weights().then_some(StepOp::FinishTied);
            if self.is_local() {
                // The tied gradients of one replica are summed before any average.
                list.extend(tied);
                list.extend(averages);
                list.extend(self.shares_weights().then_some(StepOp::TakeTied));
            } else {
                list.extend(averages);
                list.extend(tied);
            }
            list.extend(self.homes.iter().copied().map(StepOp::Contribute));
        }
        for &home in &self.homes {
            let count = put_off.get(&home).copied().unwrap_or(0);
            list.extend((0..count).map(|_| StepOp::CatchUp(home)));
        }
        list.extend(late.map(StepOp::StartVote));
        list.extend(late.map(StepOp::FinishVote));
        list.extend(early.map(StepOp::FinishVote));
        list
    }

    fn commit(&self) -> Vec<StepOp> {
        if self.updates() != Updates::Flush {
            return Vec::new();
        }
        let microbatch = self.schedule.order().microbatches() - 1;
        let updates = self.homes.iter().map(|&stage| StepOp::Update { stage, microbatch });
        let gathers =
            self.homes.iter().copied().filter(|_| self.settings.shards).map(StepOp::GatherParameters);
        updates.chain(gathers).collect()
    }

    fn after_local_step(&self, of: fn(StageId) -> StepOp) -> Vec<StepOp> {
        if self.is_local() { self.homes.iter().copied().map(of).collect() } else { Vec::new() }
    }

    fn meet(&self) -> Vec<StepOp> {
        if !self.is_local() {
            return Vec::new();
        }
        let each = |of: fn(StageId) -> StepOp| self.homes.iter().copied().map(of);
        let mut list = vec![StepOp::StartVote(Vote::Window)];
        list.extend(each(StepOp::Exchange));
        list.extend(self.shares_weights().then_some(StepOp::TakeExchanged));
        list.extend(each(StepOp::Prepare));
        // Holders of one part come to the same decision from the same average. Only holders of other parts
        // must be asked.
        list.extend((self.placement().depth() > 1).then_some(StepOp::Agree));
        list.push(StepOp::FinishVote(Vote::Window));
        list.extend(each(StepOp::Apply));
        list
    }
}
