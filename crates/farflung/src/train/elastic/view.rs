//! Where the members of a new view stand: they tell each other how far they are, and the plan is made for them.

use std::str::FromStr;

use farflung_base::Nanos;
use farflung_comm::Communicator;
use farflung_parallel::Plan;
use farflung_parallel::membership::View;
use farflung_parallel::plan::{Measured, Replica};
use serde::{Deserialize, Serialize};

use super::balance;
use super::share::Exchange;
use crate::train::job::{Base, Job};
use crate::train::steps::Last;
use crate::train::trainer::Progress;
use crate::{Error, Result};

/// What a member of a new view tells the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Standing {
    /// How far it is; none of a newcomer.
    progress: Option<Progress>,
    /// The plan that it has carried out so far, and whose replicas those were, by their endpoints.
    plan: String,
    members: Vec<u32>,
    /// Microbatches of all replicas in the run so far.
    microbatches: u64,
    /// When it last evaluated, saved and checked: all do so after the same steps.
    last: Last,
    /// What a microbatch takes each of those replicas, in nanoseconds; nothing where they have not told it.
    speeds: Vec<u64>,
}

/// What a rank brings into a view.
pub(super) struct Brings<'a> {
    /// The run's settings, data and the plan so far.
    pub(super) job: &'a Job,
    /// The members of the view before, by their endpoints, in the order of their ranks; empty of a newcomer.
    pub(super) before: Vec<u32>,
    /// How far it is; none of a newcomer.
    pub(super) progress: Option<Progress>,
    pub(super) last: Last,
    /// What the steps of the replicas of the plan so far take, where that is known.
    pub(super) measured: &'a [Measured],
}

/// What the members of a view know of each other.
pub(super) struct Stood {
    /// The run under their plan.
    pub(super) job: Job,
    /// Who gives the state to whom.
    pub(super) exchange: Exchange,
    /// When the furthest of them last evaluated, saved and checked.
    pub(super) last: Last,
}

/// The members of a view tell each other where they stand. All call it.
///
/// Errors: a member that is lost meanwhile; a plan that cannot be for so many.
pub(super) fn stand(view: &View, comm: &Communicator, brings: Brings<'_>) -> Result<Stood> {
    let Brings { job, before, progress, last, measured } = brings;
    let microbatches = job.microbatches_after(progress.map_or(0, |progress| progress.step));
    let speeds = measured.iter().map(|measured| measured.microbatch.0).collect();
    let standing =
        Standing { progress, plan: job.plan.to_string(), members: before, microbatches, last, speeds };
    let mine = postcard::to_stdvec(&standing).expect("numbers and texts are plain data");
    let told = comm.all_gather_bytes(mine)?;
    let wrong = |problem| Error::Message { message: "where a member stands".to_owned(), problem };
    let told: Vec<Standing> = told
        .iter()
        .map(|bytes| postcard::from_bytes(bytes).map_err(|_| wrong("does not read as that")))
        .collect::<Result<_>>()?;
    let standing: Vec<Option<Progress>> = told.iter().map(|told| told.progress).collect();
    let exchange = Exchange::new(&standing, job.averages_each_step())
        .ok_or_else(|| wrong("is nowhere: no member has the state"))?;
    let furthest = &told[exchange.furthest.index()];
    let plan = plan_for(view, furthest)?;
    let mut next = job.with_plan(plan)?;
    // Placed failures and departures are of ranks as they were.
    (next.failure, next.departure) = (None, None);
    next.base = Base { step: exchange.progress.step, microbatches: furthest.microbatches };
    Ok(Stood { job: next, exchange, last: furthest.last })
}

/// The plan of a view's members, from the one that the furthest of them carried out. Where shares follow
/// speed, those that have come or left change everyone's.
fn plan_for(view: &View, furthest: &Standing) -> Result<Plan> {
    let plan = Plan::from_str(&furthest.plan)?;
    // Each member brings as much to a step, whoever computes it.
    let each = plan.microbatches.iter().sum::<u32>() / plan.replicas().max(1);
    let old = |slot: u32| furthest.members.iter().position(|&old| old == slot);
    let replica = |slot: u32| match old(slot) {
        Some(old) => Replica::Stays(old as u32),
        None => Replica::New { machines: vec![format!("member.{slot}")], microbatches: each },
    };
    let slots = || view.members.iter().map(|member| member.slot);
    let mut next = plan.with_replicas(&slots().map(replica).collect::<Vec<_>>())?;
    if next.microbatches.iter().any(|&share| share != each) {
        let measured = |slot| {
            let microbatch = Nanos(*furthest.speeds.get(old(slot)?)?);
            Some(Measured { microbatch, rest: Nanos::ZERO })
        };
        let shares = balance::shares(each, &slots().map(measured).collect::<Vec<_>>());
        next.microbatches = shares.unwrap_or_else(|| vec![each; view.members.len()]);
    }
    Ok(next)
}
