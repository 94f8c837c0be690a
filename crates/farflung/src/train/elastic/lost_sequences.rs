//! Sequences of lost replicas that are in no average.

use farflung_parallel::Plan;

/// Returns the number of sequences that some replicas have trained on since the last average before `step`. 0
/// if every step is averaged.
pub(super) fn unaveraged(plan: &Plan, replicas: &[u32], step: u64) -> u64 {
    let level = plan.outermost();
    if level.every <= 1 {
        return 0;
    }
    let (local, since) = (plan.local_steps(), level.round_of(step).start);
    let taken = |&replica: &u32| local.taken(replica, step) - local.taken(replica, since);
    let of = |replica| taken(replica) * u64::from(plan.microbatches[*replica as usize] * plan.batch);
    replicas.iter().map(of).sum()
}
