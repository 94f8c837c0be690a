//! Agreement of a new view's members on their progress and their plan, where each member holds the whole model.

use std::str::FromStr;

use farflung_base::Nanos;
use farflung_comm::Communicator;
use farflung_parallel::membership::View;
use farflung_parallel::plan::{Measured, Replica, is_worth_it, step_time};
use farflung_parallel::{LocalSteps, Plan};
use serde::{Deserialize, Serialize};

use super::all_gather::all_gather;
use super::nonsense::{Report, impossible_time};
use super::rank_speeds::work;
use super::shares;
use super::state_transfer::StateTransfer;
use super::team::wrong;
use crate::Result;
use crate::config::choice::BalanceKind;
use crate::config::member_name::MemberName;
use crate::train::job::Job;
use crate::train::plan_start::PlanStart;
use crate::train::steps::LastDone;
use crate::train::trainer::Progress;

/// Description that each member of a new view sends to the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ReplicaDescription {
    /// Its progress; `None` for a newcomer.
    progress: Option<Progress>,
    /// The plan that it has executed so far, and the endpoints of that plan's replicas in `members`.
    plan: String,
    members: Vec<u32>,
    /// Number of microbatches of all replicas in the run so far.
    microbatches: u64,
    /// Local steps that each replica of that plan takes.
    local: LocalSteps,
    /// Steps at which it last evaluated, saved and checked: the same on all replicas.
    last: LastDone,
    /// Time of a microbatch on each of those replicas, in nanoseconds; empty if not measured.
    speeds: Vec<u64>,
    /// Time of a microbatch on a newcomer, in nanoseconds, measured before it joined.
    speed: Option<u64>,
    /// Its name, if it has one.
    name: Option<MemberName>,
}

/// Data of a rank that enters a view.
pub(super) struct EnteringRank<'a> {
    /// The run's settings, data and the plan so far.
    pub(super) job: &'a Job,
    /// Endpoints of the members of the previous view, by rank; empty for a newcomer.
    pub(super) before: Vec<u32>,
    /// Its progress; `None` for a newcomer.
    pub(super) progress: Option<Progress>,
    pub(super) last: LastDone,
    /// Measured times of the replicas of the plan so far; empty if not known.
    pub(super) measured: &'a [Measured],
    /// Time of a microbatch on a newcomer, if it has measured that.
    pub(super) speed: Option<Nanos>,
}

/// Result of [`form_view`].
pub(super) struct FormedView {
    /// The job under the new plan.
    pub(super) job: Job,
    /// Which ranks send the state, and which receive it.
    pub(super) exchange: StateTransfer,
    /// Steps at which the member that has done the most steps last evaluated, saved and checked.
    pub(super) last: LastDone,
    /// Name of each member of the view, if it has one.
    pub(super) names: Vec<Option<MemberName>>,
    /// What the members have reported that cannot be true.
    pub(super) nonsense: Vec<Report>,
}

/// Exchanges the members' progress and makes the plan of the view. All members call it.
///
/// Errors: a member that is lost meanwhile; a number of members for which there is no plan.
pub(super) fn form_view(view: &View, comm: &Communicator, brings: EnteringRank<'_>) -> Result<FormedView> {
    let EnteringRank { job, before, progress, last, measured, speed } = brings;
    let microbatches = job.microbatches_after(progress.map_or(0, |progress| progress.step));
    let speeds = measured.iter().map(|measured| measured.microbatch.0).collect();
    let speed = speed.map(|speed| speed.0);
    let name = job.config.name.clone();
    let (plan, local) = (job.plan.to_string(), job.local_steps());
    let standing = ReplicaDescription {
        progress,
        plan,
        members: before,
        microbatches,
        local,
        last,
        speeds,
        speed,
        name,
    };
    let mut told: Vec<ReplicaDescription> = all_gather(comm, &standing)?;
    let operations = work(&job.plan, &job.model).iter().sum();
    let mut nonsense = Vec::new();
    for (member, told) in view.members.iter().zip(&mut told) {
        let impossible = told.speed.and_then(|time| impossible_time(operations, Nanos(time)));
        if let Some(reason) = impossible {
            told.speed = None;
            nonsense.push(Report { member: member.slot, reason });
        }
        // Those of the other members, which were named when they reported them.
        told.speeds
            .iter_mut()
            .filter(|time| impossible_time(operations, Nanos(**time)).is_some())
            .for_each(|time| *time = 0);
    }
    let standing: Vec<Option<Progress>> = told.iter().map(|told| told.progress).collect();
    let exchange = StateTransfer::new(&standing, job.averages_each_step())
        .ok_or_else(|| wrong("is lost: no member has the run's state"))?;
    let furthest = &told[exchange.furthest.index()];
    let newcomers: Vec<Option<u64>> = told.iter().map(|told| told.speed).collect();
    let plan = plan_for(view, furthest, (job.config.balance, &newcomers))?;
    let mut next = job.with_plan(plan)?;
    if !next.averages_each_step() {
        // In the round in which members change, a replica's weight is given by the tokens on which it has
        // trained.
        if !furthest.local.is_sound() {
            return Err(wrong("has local steps that do not match its plan"));
        }
        let step = exchange.progress.step;
        let since = next.plan.outermost().round_of(step).start;
        let old = |slot: u32| furthest.members.iter().position(|&old| old == slot).map(|old| old as u32);
        let replicas: Vec<Option<u32>> = view.members.iter().map(|member| old(member.slot)).collect();
        let local = next.plan.local_steps().after(step, &furthest.local, &replicas, since);
        next.since_members_changed = Some(local);
    }
    // Failures and departures for tests are given by rank, and the ranks have changed.
    (next.failure, next.departure) = (None, None);
    next.plan_start = PlanStart { step: exchange.progress.step, microbatches: furthest.microbatches };
    let names = told.iter().map(|told| told.name.clone()).collect();
    Ok(FormedView { job: next, exchange, last: furthest.last, names, nonsense })
}

/// Makes the plan of a view's members from the plan of the member that has done the most steps. If shares
/// follow speed, they are computed anew when shares were unequal before, or when unequal shares make steps
/// shorter by enough ([`is_worth_it`]). `newcomers` has the times that newcomers measured themselves.
fn plan_for(
    view: &View,
    furthest: &ReplicaDescription,
    (balance, newcomers): (BalanceKind, &[Option<u64>]),
) -> Result<Plan> {
    let plan = Plan::from_str(&furthest.plan)?;
    let follows = balance == BalanceKind::BySpeed && plan.outermost().steps.is_empty();
    // A step has this many microbatches per member on average, independent of the shares.
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
    let shares = shares::by_speed(each, &times);
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
    use farflung_parallel::membership::{Member, MemberId, Start, ViewId};
    use farflung_parallel::plan::Digest;

    use super::*;

    const PLAN: &str = "version = 1\nmesh = \"data=2,pipeline=1\"\nmachines = [\"a\", \"b\"]\nprecision = \"f32\"\n\
                        batch = 1\nmicrobatches = [6, 6]\n[model]\nname = \"nano\"\nlayers = 4\n\
                        parameters = 834304\n[[part]]\nlayers = \"0..4\"\n[[level]]\nmethod = \"ddp\"\n";

    /// Returns the shares of two members whose microbatches take 10 ms, and of a newcomer with a time of
    /// `speed` nanoseconds.
    fn shares(balance: BalanceKind, speed: Option<u64>) -> Vec<u32> {
        let members: Vec<Member> = (0..3).map(|n| Member::new(MemberId::number(n), n)).collect();
        let start = Start { weights: Digest::new([0; 32]), plan: Digest::new([0; 32]) };
        let view = View::first(ViewId { incarnation: 1, epoch: 1 }, &members, start).unwrap();
        let furthest = ReplicaDescription {
            progress: None,
            plan: PLAN.to_owned(),
            members: vec![0, 1],
            microbatches: 0,
            local: LocalSteps::new(1, vec![1, 1], vec![6, 6]),
            last: LastDone::at(0),
            speeds: vec![10_000_000, 10_000_000],
            speed: None,
            name: None,
        };
        plan_for(&view, &furthest, (balance, &[None, None, speed])).unwrap().microbatches
    }

    #[test]
    fn a_newcomer_that_has_measured_itself_gets_its_share_at_once() {
        let slow = shares(BalanceKind::BySpeed, Some(30_000_000));
        assert_eq!((slow.iter().sum::<u32>(), slow[2]), (18, 2), "{slow:?}");
        // The share is equal if the newcomer is as fast as the others or nearly so, if its speed is not known,
        // or if equal shares are requested.
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
