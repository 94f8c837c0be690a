//! Where the members of a new view stand: they tell each other how far they are, and the plan is made for them.

use std::str::FromStr;

use farflung_base::Nanos;
use farflung_comm::Communicator;
use farflung_parallel::membership::View;
use farflung_parallel::plan::{Measured, Replica, is_worth_it, step_time};
use farflung_parallel::{LocalSteps, Plan};
use serde::{Deserialize, Serialize};

use super::balance;
use super::share::Exchange;
use crate::config::choice::BalanceKind;
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
    /// Who took a local step when, as far as replicas have not met since.
    local: LocalSteps,
    /// When it last evaluated, saved and checked: all do so after the same steps.
    last: Last,
    /// What a microbatch takes each of those replicas, in nanoseconds; nothing where they have not told it.
    speeds: Vec<u64>,
    /// What a microbatch takes a newcomer, as it has measured before it came.
    speed: Option<u64>,
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
    /// What a microbatch takes it, where it is a newcomer and has measured that.
    pub(super) speed: Option<Nanos>,
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
    let Brings { job, before, progress, last, measured, speed } = brings;
    let microbatches = job.microbatches_after(progress.map_or(0, |progress| progress.step));
    let speeds = measured.iter().map(|measured| measured.microbatch.0).collect();
    let speed = speed.map(|speed| speed.0);
    let (plan, local) = (job.plan.to_string(), job.local_steps());
    let standing = Standing { progress, plan, members: before, microbatches, local, last, speeds, speed };
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
    let newcomers: Vec<Option<u64>> = told.iter().map(|told| told.speed).collect();
    let plan = plan_for(view, furthest, (job.config.balance, &newcomers))?;
    let mut next = job.with_plan(plan)?;
    if !next.averages_each_step() {
        // Tokens of the round in which members change count as they were trained on.
        if !furthest.local.is_sound() {
            return Err(wrong("has steps of other replicas than its plan"));
        }
        let step = exchange.progress.step;
        let since = step.saturating_sub(1) / u64::from(next.plan.outermost().every.max(1));
        let since = since * u64::from(next.plan.outermost().every);
        let old = |slot: u32| furthest.members.iter().position(|&old| old == slot).map(|old| old as u32);
        let replicas: Vec<Option<u32>> = view.members.iter().map(|member| old(member.slot)).collect();
        let local = next.plan.local_steps().after(step, &furthest.local, &replicas, since);
        next.since_members_changed = Some(local);
    }
    // Placed failures and departures are of ranks as they were.
    (next.failure, next.departure) = (None, None);
    next.base = Base { step: exchange.progress.step, microbatches: furthest.microbatches };
    Ok(Stood { job: next, exchange, last: furthest.last })
}

/// The plan of a view's members, from the one that the furthest of them carried out. Where shares follow speed,
/// those that have come or left change everyone's, once the shares of all are not the same anyway or steps
/// become shorter by it; `newcomers` have measured themselves.
fn plan_for(
    view: &View,
    furthest: &Standing,
    (balance, newcomers): (BalanceKind, &[Option<u64>]),
) -> Result<Plan> {
    let plan = Plan::from_str(&furthest.plan)?;
    let follows = balance == BalanceKind::BySpeed && plan.outermost().steps.is_empty();
    // Each member brings as much to a step, whoever computes it.
    let each = plan.microbatches.iter().sum::<u32>() / plan.replicas().max(1);
    let old = |slot: u32| furthest.members.iter().position(|&old| old == slot);
    let replica = |slot: u32| match old(slot) {
        Some(old) => Replica::Stays(old as u32),
        None => Replica::New { machines: vec![format!("member.{slot}")], microbatches: each },
    };
    let slots = || view.members.iter().map(|member| member.slot);
    let mut next = plan.with_replicas(&slots().map(replica).collect::<Vec<_>>())?;
    let measured = |(member, slot): (usize, u32)| {
        let told = || newcomers.get(member).copied().flatten();
        let time = old(slot).map_or_else(told, |old| furthest.speeds.get(old).copied());
        time.map(|time| Measured { microbatch: Nanos(time), rest: Nanos::ZERO })
    };
    let times: Vec<Option<Measured>> = slots().enumerate().map(measured).collect();
    let shares = balance::shares(each, &times);
    let equal = vec![each; view.members.len()];
    if next.microbatches != equal {
        next.microbatches = shares.unwrap_or(equal);
    } else if follows {
        let known: Option<Vec<Measured>> = times.into_iter().collect();
        if let Some((shares, known)) = shares.zip(known)
            && is_worth_it(step_time(&equal, &known), step_time(&shares, &known))
        {
            next.microbatches = shares;
        }
    }
    Ok(next)
}

#[cfg(test)]
mod tests {
    use farflung_parallel::membership::{Member, MemberId, Place, Start};
    use farflung_parallel::plan::Digest;

    use super::*;

    const PLAN: &str = "version = 1\nmesh = \"data=2,pipeline=1\"\nmachines = [\"a\", \"b\"]\nprecision = \"f32\"\n\
                        batch = 1\nmicrobatches = [6, 6]\n[model]\nname = \"nano\"\nlayers = 4\n\
                        parameters = 834304\n[[part]]\nlayers = \"0..4\"\n[[level]]\nmethod = \"ddp\"\n";

    /// The shares of two members whose microbatches take 10 ms, and of a newcomer that has measured this.
    fn shares(balance: BalanceKind, speed: Option<u64>) -> Vec<u32> {
        let members: Vec<Member> = (0..3).map(|n| Member::new(MemberId::number(n), n)).collect();
        let start = Start { weights: Digest::new([0; 32]), plan: Digest::new([0; 32]) };
        let view = View::first(Place { incarnation: 1, epoch: 1 }, &members, start).unwrap();
        let furthest = Standing {
            progress: None,
            plan: PLAN.to_owned(),
            members: vec![0, 1],
            microbatches: 0,
            local: LocalSteps::new(1, vec![1, 1], vec![6, 6]),
            last: Last::at(0),
            speeds: vec![10_000_000, 10_000_000],
            speed: None,
        };
        plan_for(&view, &furthest, (balance, &[None, None, speed])).unwrap().microbatches
    }

    #[test]
    fn a_newcomer_that_has_measured_itself_gets_its_share_at_once() {
        let slow = shares(BalanceKind::BySpeed, Some(30_000_000));
        assert_eq!((slow.iter().sum::<u32>(), slow[2]), (18, 2), "{slow:?}");
        // As fast as the others, or nearly, or not known, or not asked for: as all.
        for (balance, speed) in [
            (BalanceKind::BySpeed, Some(10_000_000)),
            (BalanceKind::BySpeed, Some(10_500_000)),
            (BalanceKind::BySpeed, None),
            (BalanceKind::Equal, Some(30_000_000)),
        ] {
            assert_eq!(shares(balance, speed), [6, 6, 6], "{balance:?} {speed:?}");
        }
    }
}
