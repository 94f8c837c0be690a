//! Direct scatter-gather: each rank reduces one share of the buffer for all ranks. Shares may be weighted, so
//! that ranks on slow links send and receive less.

use farflung_base::{Bandwidth, Rank};

use crate::steps::{Merge, Program, Step};

/// Returns the all-reduce in which each rank sends every other rank's block to that rank, reduces its own block
/// (rank `r` adds the values of ranks `r-1`, `r-2` and so on, after rank 0 those of `n-1`), and sends the
/// result to all. Takes two latencies; each rank sends `2 (n-1)/n` of the buffer.
/// The work is cut into `chunks` chunks: while one is scattered, another is gathered.
#[must_use]
pub fn direct(rank: Rank, size: usize, chunks: usize) -> Program {
    butterfly_lanes(rank, &vec![true; size], chunks)
}

/// Returns [`direct`] with shares of `counts[r]` elements; a rank whose count is 0 reduces nothing.
///
/// Source: Ryabinin et al. 2021, and hivemind's averaging. [`shares`] computes the counts.
#[must_use]
pub fn butterfly(rank: Rank, counts: &[usize], chunks: usize) -> Program {
    let owns: Vec<bool> = counts.iter().map(|&count| count > 0).collect();
    butterfly_lanes(rank, &owns, chunks).with_counts(&in_chunks(counts, chunks))
}

/// Cuts each share into `chunks` nearly equal blocks.
pub(crate) fn in_chunks(counts: &[usize], chunks: usize) -> Vec<usize> {
    let cut = |&count: &usize| (0..chunks).map(move |c| count * (c + 1) / chunks - count * c / chunks);
    counts.iter().flat_map(cut).collect()
}

fn butterfly_lanes(rank: Rank, owns: &[bool], chunks: usize) -> Program {
    let (n, me) = (owns.len(), rank.index());
    // Each rank starts with its next neighbour, so that not all send to the same rank first.
    let after = |owners: bool| (1..n).map(move |i| (me + i) % n).filter(move |&r| !owners || owns[r]);
    let before = |owners: bool| (1..n).map(move |i| (me + n - i) % n).filter(move |&r| !owners || owns[r]);
    let lanes = (0..chunks)
        .map(|chunk| {
            let block = |r: usize| r * chunks + chunk..r * chunks + chunk + 1;
            let to = |r: usize| Rank(r as u32);
            let mut scatter =
                Step { sends: after(true).map(|r| (to(r), block(r))).collect(), ..Step::default() };
            let mut gather = Step::default();
            if owns[me] {
                scatter.recvs = before(false).map(|r| (to(r), block(me), Merge::Reduce)).collect();
                gather.sends = after(false).map(|r| (to(r), block(me))).collect();
            }
            gather.recvs = before(true).map(|r| (to(r), block(r), Merge::Copy)).collect();
            [scatter, gather].into_iter().filter(|step| !step.is_empty()).collect()
        })
        .collect();
    Program::side_by_side(n * chunks, lanes)
}

/// Returns a reduce-scatter in one latency: rank `r` ends with block `r` of `size` reduced; its other blocks
/// are unchanged.
#[must_use]
pub fn direct_reduce_scatter(rank: Rank, size: usize) -> Program {
    let mut program = direct(rank, size, 1);
    program.lanes[0].truncate(1);
    program
}

/// Returns an all-gather in one latency: before it, rank `r` holds block `r`.
#[must_use]
pub fn direct_all_gather(rank: Rank, size: usize) -> Program {
    let mut program = direct(rank, size, 1);
    program.lanes[0].rotate_left(usize::from(size > 1));
    program.lanes[0].truncate(1);
    program
}

/// Returns a gather in one latency: each rank sends its block to the root.
#[must_use]
pub fn direct_gather(rank: Rank, size: usize, root: Rank) -> Program {
    let block = |r: Rank| r.index()..r.index() + 1;
    let others = (0..size as u32).map(Rank).filter(|&r| r != root);
    let step = if rank == root {
        Step { recvs: others.map(|r| (r, block(r), Merge::Copy)).collect(), ..Step::default() }
    } else {
        Step::send(root, block(rank))
    };
    Program::new(size, vec![step])
}

/// Returns a scatter in one latency: the root sends each rank its block.
#[must_use]
pub fn direct_scatter(rank: Rank, size: usize, root: Rank) -> Program {
    let mut program = direct_gather(rank, size, root);
    for step in &mut program.lanes[0] {
        let sends = step.recvs.drain(..).map(|(from, blocks, _)| (from, blocks)).collect();
        let recvs = step.sends.drain(..).map(|(to, blocks)| (to, blocks, Merge::Copy)).collect();
        *step = Step { sends, recvs, ..Step::default() };
    }
    program
}

/// Returns the number of elements, of `len`, that each rank should reduce so that the slowest rank finishes as
/// early as possible.
///
/// With share `w_i`, rank `i` sends and receives `1 + (n-2) w_i` buffers; the shares minimise the maximum of
/// this over its bandwidth. A rank with bandwidth 0 reduces nothing. A share of less than `least` elements is
/// given to other ranks, provided that some rank has at least `least`.
///
/// The linear program has a closed form: with `x` the least time, `w_i` is proportional to `max(0, x B_i - 1)`,
/// where `x = (n - 2 + k) / sum B` over the `k` ranks with `x B > 1`, and `x` is at least `1 / min B`.
///
/// Source: hivemind's `load_balancing.py`, which solves the program numerically. As there, shares are rounded
/// to integers by Hagenbach-Bischoff division.
#[must_use]
pub fn shares(len: usize, bandwidths: &[Bandwidth], least: usize) -> Vec<usize> {
    let n = bandwidths.len();
    let speeds: Vec<f64> = bandwidths.iter().map(|b| b.0 as f64).collect();
    let working = speeds.iter().filter(|&&b| b > 0.0).count();
    let mut weights: Vec<f64> = if n <= 2 || working == 0 {
        speeds.iter().map(|&b| if b > 0.0 || working == 0 { 1.0 } else { 0.0 }).collect()
    } else {
        let time = least_time(&speeds);
        speeds.iter().map(|b| (time * b - 1.0).max(0.0)).collect()
    };
    let sum: f64 = weights.iter().sum();
    if sum <= 0.0 {
        // The speeds differ only by rounding: equal shares.
        weights = speeds.iter().map(|&b| f64::from(u8::from(b > 0.0))).collect();
    }
    let sum: f64 = weights.iter().sum();
    // Rounded as in hivemind, so that a share that is only rounding error becomes 0.
    for weight in &mut weights {
        *weight = (*weight / sum * 1e9).round() / 1e9;
    }
    let bound = least as f64 / len.max(1) as f64;
    if weights.iter().any(|&w| w >= bound) {
        weights.iter_mut().filter(|w| **w < bound).for_each(|w| *w = 0.0);
    }
    divide(len, &weights)
}

/// Returns the least time in which one buffer is reduced, with speeds in buffers per second.
fn least_time(speeds: &[f64]) -> f64 {
    let n = speeds.len() as f64;
    let mut sorted: Vec<f64> = speeds.iter().copied().filter(|&b| b > 0.0).collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let floor = sorted.last().map_or(0.0, |b| 1.0 / b);
    let mut sum = 0.0;
    let mut time = f64::INFINITY;
    for (k, speed) in sorted.iter().enumerate() {
        // A rank that in this time can send at most its own buffer reduces no share, nor do slower ranks.
        if time * speed <= 1.0 {
            break;
        }
        sum += speed;
        time = (n - 2.0 + (k + 1) as f64) / sum;
    }
    time.max(floor)
}

/// Divides by Hagenbach-Bischoff: rounds down, then gives each remaining element to the rank with the greatest
/// weight per element.
fn divide(len: usize, weights: &[f64]) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    let mut counts: Vec<usize> = weights.iter().map(|w| (len as f64 * w / sum) as usize).collect();
    while counts.iter().sum::<usize>() < len {
        let quotient = |i: usize| weights[i] / (counts[i] + 1) as f64;
        let best = (1..counts.len()).fold(0, |best, i| if quotient(i) > quotient(best) { i } else { best });
        counts[best] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bandwidths(speeds: &[f64]) -> Vec<Bandwidth> {
        speeds.iter().map(|s| Bandwidth((s * 1e9) as u64)).collect()
    }

    fn time(len: usize, counts: &[usize], speeds: &[f64]) -> f64 {
        let carries = |count: usize| (len - count + (counts.len() - 1) * count) as f64;
        counts.iter().zip(speeds).map(|(&c, s)| carries(c) / s.max(1e-9)).fold(0.0, f64::max)
    }

    /// The cases of hivemind's `test_load_balancing`, which compares times. In the last case, two ranks are
    /// clients (bandwidth 0), which `time` counts at a speed of 1e-9.
    #[test]
    fn shares_are_as_good_as_the_linear_programs() {
        let cases: [(usize, &[f64], &[usize]); 6] = [
            (60, &[0.25, 0.25, 0.25, 0.25], &[15, 15, 15, 15]),
            (1024, &[0.3, 0.5, 0.9], &[0, 255, 769]),
            (60, &[0.44, 0.33, 0.22], &[42, 18, 0]),
            (60, &[0.55, 0.44, 0.40], &[35, 16, 9]),
            (1024 * 1024, &[0.3, 0.5, 0.9, 0.6], &[0, 169_327, 602_629, 276_620]),
            (1024 * 1024, &[0.0, 0.5, 0.0, 0.6], &[0, 428_963, 0, 619_613]),
        ];
        for (len, speeds, reference) in cases {
            let counts = shares(len, &bandwidths(speeds), 0);
            assert_eq!(counts.iter().sum::<usize>(), len);
            let (ours, theirs) = (time(len, &counts, speeds), time(len, reference, speeds));
            assert!(ours <= theirs * (1.0 + 1e-9), "{speeds:?}: {counts:?} takes {ours}, theirs {theirs}");
        }
        assert_eq!(shares(60, &bandwidths(&[0.55, 0.44, 0.40]), 10), [41, 19, 0]);
        assert_eq!(shares(60, &bandwidths(&[0.32, 0.55, 0.44]), 10), [0, 40, 20]);
        assert_eq!(shares(2, &bandwidths(&[0.55, 0.20, 0.44]), 10), [1, 0, 1]);
        assert_eq!(shares(1, &bandwidths(&[0.55, 0.20, 0.44]), 10), [1, 0, 0]);
        assert_eq!(shares(100, &bandwidths(&[1.0, 1.0]), 0), [50, 50]);
        assert_eq!(shares(100, &bandwidths(&[1.0; 5]), 0), [20; 5]);
        assert_eq!(shares(100, &bandwidths(&[0.0, 0.0, 0.0, 1.0, 1.0]), 0), [0, 0, 0, 50, 50]);
        assert_eq!(shares(100, &bandwidths(&[4.0, 2.0, 1.0, 1.0]), 0), [75, 25, 0, 0]);
        assert_eq!(shares(100, &bandwidths(&[0.0; 4]), 0), [25; 4]);
    }

    #[test]
    fn shares_always_add_up() {
        let rng = farflung_base::Philox::new(4, 4);
        for case in 0..200 {
            let n = 1 + rng.below(10 * case, 40) as usize;
            let len = rng.below(10 * case + 1, 1 << 30) as usize;
            let speeds: Vec<f64> =
                (0..n).map(|i| f64::from(rng.uniform(1000 + 100 * case + i as u64)) * 1e5).collect();
            let counts = shares(len, &bandwidths(&speeds), len / 20);
            assert_eq!(counts.iter().sum::<usize>(), len);
        }
    }
}
