//! Compares simulated steps with closed forms and laws.

use super::*;
use crate::{Algorithm, Codec};
use proptest::prelude::*;

const MS: u64 = 1_000_000;

fn replicas(sync: Sync, shares: &[u32]) -> Replicas {
    Replicas { sync, algorithm: Algorithm::Ring, codec: Codec::F32, shares: shares.to_vec() }
}

fn equal(n: usize, forward: u64, backward: u64) -> Cost {
    let rank =
        RankCost { forward: Nanos(forward * MS), backward: Nanos(backward * MS), ..RankCost::default() };
    Cost { ranks: vec![rank; n] }
}

fn shape() -> ModelShape {
    ModelShape::dense(1000, 8, 64)
}

/// A millisecond for each 10 values: 100 ms for the whole model.
fn price(values: u64) -> Nanos {
    Nanos(values * MS / 10)
}

fn makespan(sync: Sync, share: &[u32], cost: &Cost, steps: u32) -> u64 {
    simulate_replicas(&replicas(sync, share), &shape(), cost, steps, &price).unwrap().makespan().0 / MS
}

const fn ddp(overlap: Overlap, buckets: u32) -> Sync {
    Sync::Ddp { overlap, buckets }
}

#[test]
fn ddp_by_hand() {
    let cost = equal(2, 40, 80);
    // Without overlap the time is the sum, whatever the number of buckets.
    assert_eq!(makespan(ddp(Overlap::None, 1), &[1, 1], &cost, 1), 220);
    assert_eq!(makespan(ddp(Overlap::None, 4), &[1, 1], &cost, 1), 220);
    // A single bucket cannot overlap with the backward.
    assert_eq!(makespan(ddp(Overlap::WithBackward, 1), &[1, 1], &cost, 1), 220);
    // Four buckets are ready at 60, 80, 100 and 120 ms and take 25 ms each: the link is the limit from the
    // first bucket on.
    assert_eq!(makespan(ddp(Overlap::WithBackward, 4), &[1, 1], &cost, 1), 60 + 100);
    // Slow compute: only the last bucket is exposed.
    assert_eq!(makespan(ddp(Overlap::WithBackward, 4), &[1, 1], &equal(2, 40, 400), 1), 440 + 25);
    // Only the last microbatch's backward is divided into buckets, and steps follow one another.
    assert_eq!(makespan(ddp(Overlap::WithBackward, 4), &[3, 3], &cost, 2), 2 * (2 * 120 + 160));
    // A single rank does not communicate.
    assert_eq!(makespan(ddp(Overlap::None, 4), &[1], &equal(1, 40, 80), 1), 120);
}

#[test]
fn the_slowest_rank_sets_the_pace() {
    let mut cost = equal(2, 40, 80);
    cost.ranks[1] = RankCost { forward: Nanos(80 * MS), backward: Nanos(160 * MS), ..RankCost::default() };
    assert_eq!(makespan(ddp(Overlap::WithBackward, 4), &[1, 1], &cost, 1), 240 + 25);
    // Shares in proportion to speed make the ranks equally fast again.
    assert_eq!(makespan(ddp(Overlap::None, 1), &[2, 1], &cost, 1), 240 + 100);
    let t = simulate_replicas(&replicas(ddp(Overlap::None, 1), &[1, 1]), &shape(), &cost, 1, &price).unwrap();
    assert_eq!(t.waited(Rank(0)), Nanos(120 * MS));
    assert_eq!(t.waited(Rank(1)), Nanos::ZERO);
    // A rank without a share takes part in the average.
    assert_eq!(makespan(ddp(Overlap::None, 1), &[0, 1], &cost, 2), 2 * 340);
}

#[test]
fn diloco_by_hand() {
    let mut cost = equal(2, 40, 80);
    assert_eq!(makespan(Sync::DiLoCo { every: 5 }, &[1, 1], &cost, 5), 5 * 120 + 100);
    assert_eq!(makespan(Sync::DiLoCo { every: 5 }, &[1, 1], &cost, 7), 7 * 120 + 2 * 100);
    for rank in &mut cost.ranks {
        rank.optimizer = Nanos(10 * MS);
        rank.outer = Nanos(20 * MS);
    }
    let t = simulate_replicas(&replicas(Sync::DiLoCo { every: 5 }, &[1, 1]), &shape(), &cost, 10, &price)
        .unwrap();
    assert_eq!(t.makespan().0 / MS, 10 * 130 + 2 * 120);
    assert_eq!(t.exposed(Rank(1)).0 / MS, 200);
    assert_eq!(t.sent(Rank(0)), Bytes(2 * 4000));
    assert_eq!(cost.step(Rank(0), 1), Nanos(130 * MS));
}

#[test]
fn lists_of_another_length_are_refused() {
    let refused = simulate_replicas(
        &replicas(Sync::DiLoCo { every: 1 }, &[1, 1]),
        &shape(),
        &equal(3, 1, 1),
        1,
        &price,
    );
    assert_eq!(refused, Err(ParallelError::PerRank { what: "cost.ranks", given: 3, ranks: 2 }));
}

proptest! {
    /// Overlap never increases the time, the time is never below max(compute, communication), and the spans of
    /// a lane never overlap.
    #[test]
    fn overlap_is_between_the_maximum_and_the_sum(
        forward in 0_u64..200, backward in 0_u64..400, per_byte in 0_u64..2000, alpha in 0_u64..5_000_000,
        buckets in 1_u32..20, share in prop::collection::vec(0_u32..4, 1..5), steps in 1_u32..4,
    ) {
        prop_assume!(share.iter().any(|&s| s > 0));
        let cost = equal(share.len(), forward, backward);
        let price = |values: u64| Nanos(alpha + 4 * values * per_byte);
        let run = |overlap| {
            simulate_replicas(&replicas(ddp(overlap, buckets), &share), &shape(), &cost, steps, &price).unwrap()
        };
        let (with, without) = (run(Overlap::WithBackward), run(Overlap::None));
        let compute: u64 = share.iter().map(|&s| u64::from(s) * (forward + backward) * MS).max().unwrap();
        let link = without.busy(Rank(0), Lane::Link).0;
        prop_assert_eq!(without.makespan().0, compute * u64::from(steps) + link);
        prop_assert!(with.makespan() <= without.makespan());
        prop_assert!(with.makespan().0 >= (compute * u64::from(steps)).max(link));
        for t in [&with, &without] {
            for rank in (0..t.ranks).map(Rank) {
                for lane in [Lane::Compute, Lane::Link] {
                    let spans: Vec<&Span> = t.lane(rank, lane).collect();
                    prop_assert!(spans.windows(2).all(|w| w[0].end <= w[1].start));
                }
                let sum = t.busy(rank, Lane::Compute) + t.exposed(rank) + t.waited(rank);
                prop_assert_eq!(sum, t.makespan());
            }
        }
    }
}
