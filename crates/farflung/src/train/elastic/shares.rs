//! Shares of a step's microbatches by the speeds of replicas, for the plan of a new view.

use std::collections::BTreeMap;

use farflung_base::{Axis, Nanos, Rank};
use farflung_parallel::Plan;
use farflung_parallel::pipeline::{StageCost, peaks};
use farflung_parallel::plan::{Measured, is_worth_it, shares_by_speed, step_time};

use super::nonsense::{MOST_TIMES_THE_MIDDLE, is_possible_speed};

/// Returns the number of microbatches for each replica of a view, by speed; in total `each` times the number of
/// replicas. A replica without a known time, or with one that cannot be true ([`MOST_TIMES_THE_MIDDLE`]),
/// counts as having the median of the known ones. `None` if no time is known.
pub(super) fn by_speed(each: u32, measured: &[Option<Measured>]) -> Option<Vec<u32>> {
    let all = with_the_middle(measured)?;
    shares_by_speed(each.checked_mul(u32::try_from(all.len()).ok()?)?, &all)
}

/// Returns the times of all replicas, with the median of the known ones for the others.
fn with_the_middle(measured: &[Option<Measured>]) -> Option<Vec<Measured>> {
    let mut known: Vec<Nanos> = measured.iter().flatten().map(|measured| measured.microbatch).collect();
    known.retain(|&time| time > Nanos::ZERO);
    known.sort_unstable();
    let middle = *known.get(known.len() / 2)?;
    let time = |measured: &Option<Measured>| {
        let least = middle.0 / MOST_TIMES_THE_MIDDLE;
        let told = measured.map(|measured| measured.microbatch).filter(|time| time.0 > least);
        Measured { microbatch: told.unwrap_or(middle), rest: Nanos::ZERO }
    };
    Some(measured.iter().map(time).collect())
}

/// Returns the number of microbatches for each pipeline of a plan whose members have these endpoints, by rank:
/// in total as many as before. `work` is the operations of a microbatch in each stage, and `speeds` has the
/// speed of each endpoint in operations a second, as far as it is known. `None` if equal shares are as good, or
/// if the pipelines cannot have others.
pub(super) fn of_pipelines(
    plan: &Plan,
    slots: &[u32],
    (work, speeds): (&[f64], &BTreeMap<u32, f64>),
) -> Option<Vec<u32>> {
    if work.len() != plan.stages() as usize || slots.len() != plan.ranks() as usize || plan.replicas() < 2 {
        return None;
    }
    let time = |(rank, work): (&Rank, &f64)| {
        let speed = speeds.get(&slots[rank.index()]).filter(|speed| is_possible_speed(**speed))?;
        Some(Nanos::from_secs_f64(work / speed))
    };
    // A pipeline is as fast as its slowest rank. If the speed of a rank is not known, its pipeline counts as
    // the middle one.
    let slowest = |ranks: &Vec<Rank>| {
        let times: Option<Vec<Nanos>> = ranks.iter().zip(work).map(time).collect();
        Some(Measured { microbatch: times?.into_iter().max()?, rest: Nanos::ZERO })
    };
    let pipelines = plan.mesh.groups(Axis::Pipeline);
    let measured = with_the_middle(&pipelines.iter().map(slowest).collect::<Vec<_>>())?;
    let equal = &plan.microbatches;
    let shares = shares_by_speed(equal.iter().sum(), &measured)?;
    let is_better = is_worth_it(step_time(equal, &measured), step_time(&shares, &measured));
    (is_better && is_possible(plan, &shares)).then_some(shares)
}

/// Returns whether pipelines can have these shares, and hold as many activations as now. With a schedule that
/// holds those of all microbatches, a larger share could take more memory than a rank has; others require
/// certain numbers of microbatches.
pub(super) fn is_possible(plan: &Plan, shares: &[u32]) -> bool {
    // This is asked after each step; only other shares need the orders of work.
    if shares == plan.microbatches {
        return true;
    }
    let moment = Nanos(1);
    let cost = StageCost { forward: moment, input: moment, weight: moment, ..StageCost::default() };
    let cost = vec![cost; plan.parts.len()];
    let most = |&count: &u32| peaks(&plan.order_with(count, &cost, Nanos::ZERO).ok()?).into_iter().max();
    let most = |shares: &[u32]| shares.iter().map(most).collect::<Option<Vec<u32>>>()?.into_iter().max();
    plan.stages() == 1 || most(shares).zip(most(&plan.microbatches)).is_some_and(|(then, now)| then <= now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_has_the_share_of_its_slowest_member() {
        let plan = |schedule: &str| -> Plan {
            let text = "version = 1\nmesh = \"data=3,pipeline=2\"\nmachines = [\"a\", \"b\", \"c\", \"d\", \"e\", \
                        \"f\"]\nprecision = \"f32\"\nbatch = 1\nmicrobatches = [4, 4, 4]\n[model]\nname = \"nano\"\n\
                        layers = 4\nparameters = 834304\n[[part]]\nlayers = \"0..2\"\n[[part]]\n\
                        layers = \"2..4\"\n[[boundary]]\n[pipeline]\nschedule = \"SCHEDULE\"\n[[level]]\n\
                        method = \"ddp\"\n";
            text.replace("SCHEDULE", schedule).parse().unwrap()
        };
        let shares = |schedule, known: &[(u32, f64)]| {
            of_pipelines(
                &plan(schedule),
                &[3, 4, 5, 6, 8, 9],
                (&[1.0, 2.0], &known.iter().copied().collect()),
            )
        };
        // The slowest members of the pipelines take 10, 10 and 40 ms.
        let known = [(3, 100.0), (4, 200.0), (5, 100.0), (6, 400.0), (8, 1000.0), (9, 50.0)];
        assert_eq!(shares("1f1b", &known), Some(vec![5, 6, 1]));
        assert_eq!(shares("gpipe", &known), None);
        // The speed of a member of the second one is not known: it counts as the higher of the middle two.
        assert_eq!(shares("1f1b", &[&known[..2], &known[4..]].concat()), Some(vec![8, 2, 2]));
        assert_eq!(shares("1f1b", &known[..4]), None);
        assert_eq!(shares("1f1b", &[]), None);
    }

    #[test]
    fn a_newcomer_counts_as_the_middle_one() {
        let of = |ms| Some(Measured { microbatch: Nanos::from_millis(ms), rest: Nanos::ZERO });
        assert_eq!(by_speed(4, &[of(10), of(40), of(10), None]), Some(vec![5, 1, 5, 5]));
        assert_eq!(by_speed(4, &[None, None]), None);
        // One that reports a time that no machine needs does not get all microbatches.
        assert_eq!(
            by_speed(
                4,
                &[of(10), of(10), of(10), Some(Measured { microbatch: Nanos(1), rest: Nanos::ZERO })]
            ),
            Some(vec![4; 4])
        );
        assert_eq!(by_speed(4, &[of(1000), of(1000), of(2)]).map(|shares| shares[2]), Some(10));
    }
}
