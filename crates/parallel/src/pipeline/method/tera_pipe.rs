//! `TeraPipe`: slices of tokens as units of the pipeline, and the best division of a sequence into slices.

use farflung_base::Nanos;

use super::Lists;
use super::row::{Row, Sizes, Unsupported, UsedSetting};
use crate::ParallelError;
use crate::pipeline::{Action, ComputeKind, Op};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "terapipe",
    summary: "each microbatch in slices of its tokens, one after the other",
    reads: &[UsedSetting::Slices],
    needs: |settings| {
        let none = settings.slices == 0;
        none.then(|| Unsupported { field: "slices", given: 0, needs: "at least 1".to_owned() })
    },
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, asked.settings.slices)),
    peak: |settings, Sizes { m, .. }| m * u64::from(settings.slices),
    ..Row::PLAIN
};

/// Generates the ranks' lists of computations: all slices of all microbatches forward in order, then backward
/// in reverse order. A slice's attention reads the keys of earlier slices, so the gradients of its keys are
/// complete only after the backwards of all later slices.
///
/// Source: Li et al. 2021, "`TeraPipe`", section 3.2.
pub(super) fn lists(p: u32, m: u32, slices: u16) -> Lists {
    let list = |s: u32| {
        let units = (0..m).flat_map(|i| (0..slices).map(move |slice| (i, slice)));
        let action =
            |kind, (microbatch, slice)| Op::Run(Action { slice, ..Action::new(kind, s, microbatch) });
        let forward = units.clone().map(|unit| action(ComputeKind::Forward, unit));
        let backward = units.rev().map(|unit| action(ComputeKind::Backward, unit));
        forward.chain(backward).collect()
    };
    (0..p).map(list).collect()
}

/// A sequence divided into slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slicing {
    /// Number of tokens of each slice.
    pub lengths: Vec<u64>,
    /// Time from the first slice's start on the first stage to the last slice's end on the last stage.
    pub total: Nanos,
    /// Longest time of a slice on a stage.
    pub longest: Nanos,
}

/// Divides `tokens` into slices of whole `grain`s so that a pipeline of `stages` takes the least time.
///
/// `time(length, before)` is the time of a stage for a slice of `length` tokens after `before` others. The
/// total is the sum over slices, plus `stages - 1` times the longest slice.
///
/// Dynamic programming finds the least sum under a bound on the longest slice. The first round has no bound.
/// Each further bound is below the longest slice found before; bounds between the two would give the same
/// slices. With a `tolerance`, the next bound is lower by that much, so the result can be up to `stages` times
/// `tolerance` above the optimum.
///
/// Errors: [`ParallelError::Zero`]; [`ParallelError::Grain`] if the tokens are not a multiple of the grain, or
/// more than 4096 grains. Source: Li et al. 2021, "`TeraPipe`", section 3.3, algorithm 1.
///
/// ```
/// use farflung_base::Nanos;
/// use farflung_parallel::pipeline::slice_tokens;
///
/// // 1 + 0.01 l + 0.00002 l c, in milliseconds.
/// let time = |l: u64, c: u64| Nanos(1_000_000 + 10_000 * l + 20 * l * c);
/// let slicing = slice_tokens(1024, 128, 4, Nanos::ZERO, time)?;
/// assert_eq!(slicing.lengths, [384, 128, 128, 128, 128, 128]);
/// assert_eq!(slicing.total, Nanos(38_952_000));
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
pub fn slice_tokens(
    tokens: u64,
    grain: u64,
    stages: u32,
    tolerance: Nanos,
    time: impl Fn(u64, u64) -> Nanos,
) -> Result<Slicing, ParallelError> {
    for (field, value) in [("tokens", tokens), ("grain", grain), ("stages", u64::from(stages))] {
        if value == 0 {
            return Err(ParallelError::Zero { of: "the slicing".to_owned(), field });
        }
    }
    let n = usize::try_from(tokens / grain).unwrap_or(usize::MAX);
    if !tokens.is_multiple_of(grain) || n > 4096 {
        return Err(ParallelError::Grain { tokens, grain });
    }
    // `times[i][k - 1]`: time of the slice of k grains that ends at grain i.
    let slice = |i: usize, k: usize| time(k as u64 * grain, (i - k) as u64 * grain);
    let times: Vec<Vec<Nanos>> = (0..=n).map(|i| (1..=i).map(|k| slice(i, k)).collect()).collect();
    let others = u64::from(stages - 1);
    let mut best: Option<Slicing> = None;
    let mut bound = Nanos::MAX;
    while let Some((sum, lengths)) = least_sum(&times, bound) {
        let mut end = 0;
        let ends = lengths.iter().map(|&k| {
            end += k;
            times[end][k - 1]
        });
        let longest = ends.max().unwrap_or_default();
        let total = sum.saturating_add(Nanos(longest.0.saturating_mul(others)));
        if best.as_ref().is_none_or(|b| total <= b.total) {
            let lengths = lengths.into_iter().map(|k| k as u64 * grain).collect();
            best = Some(Slicing { lengths, total, longest });
        }
        // A smaller bound on the longest slice never gives a smaller sum. So a better slicing needs a longest
        // slice of at most `(best total - sum) / (stages - 1)`.
        let least = best.as_ref().map_or(Nanos::MAX, |b| b.total);
        let left = least.saturating_sub(sum).0.checked_div(others).filter(|&left| left > 0);
        let lower = longest.0.checked_sub(tolerance.0.max(1));
        let (Some(left), Some(lower)) = (left, lower) else { break };
        bound = Nanos(left.min(lower));
    }
    Ok(best.expect("without a bound every slicing is admitted"))
}

/// Returns the least sum of times of slices that each take at most `bound`, and their lengths in grains.
fn least_sum(times: &[Vec<Nanos>], bound: Nanos) -> Option<(Nanos, Vec<usize>)> {
    // `sums[i]`: least sum for the first i grains, and the length of its last slice.
    let mut sums: Vec<Option<(Nanos, usize)>> = vec![Some((Nanos::ZERO, 0))];
    for ends in &times[1..] {
        let i = sums.len();
        let with = |(k, &time): (usize, &Nanos)| {
            let before = sums[i - k].filter(|_| time <= bound)?.0;
            Some((before.saturating_add(time), k))
        };
        // Among equal sums, takes the one with the shortest last slice.
        let least = (1..).zip(ends).filter_map(with).min_by_key(|&(sum, _)| sum);
        sums.push(least);
    }
    let (sum, _) = (*sums.last()?)?;
    let mut lengths = Vec::new();
    let mut i = sums.len() - 1;
    while i > 0 {
        let (_, k) = sums[i]?;
        lengths.push(k);
        i -= k;
    }
    lengths.reverse();
    Some((sum, lengths))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(l: u64, c: u64) -> Nanos {
        Nanos(100_000 + 1000 * l + 2 * l * c)
    }

    fn slices(first: &[u64], count: usize) -> Vec<u64> {
        [first, &vec![128; count]].concat()
    }

    #[test]
    fn slicings_that_others_found() {
        for (tokens, stages, lengths, total) in [
            (2048, 8, slices(&[640, 256], 9), 11_899_712),
            (1024, 4, slices(&[384], 5), 3_895_200),
            (2048, 48, slices(&[512, 256], 10), 40_768_224),
        ] {
            let found = slice_tokens(tokens, 128, stages, Nanos::ZERO, time).unwrap();
            assert_eq!((found.lengths, found.total), (lengths, Nanos(total)));
        }
    }

    /// Compares the result with all divisions of a short sequence: exactly without a tolerance, and within the
    /// tolerance with one.
    #[test]
    fn no_way_to_cut_is_better() {
        for (tokens, stages) in [(1, 3), (5, 1), (9, 4), (12, 30)] {
            let mut best = Nanos::MAX;
            for cuts in 0_u32..1 << (tokens - 1) {
                let (mut before, mut sum, mut longest) = (0, Nanos::ZERO, Nanos::ZERO);
                for end in (1..=tokens).filter(|&end| end == tokens || cuts >> (end - 1) & 1 == 1) {
                    let t = time(100 * (end - before), 100 * before);
                    (sum, longest, before) = (sum + t, longest.max(t), end);
                }
                best = best.min(sum + longest * (stages - 1));
            }
            let exact = slice_tokens(100 * tokens, 100, stages as u32, Nanos::ZERO, time).unwrap();
            assert_eq!(exact.total, best);
            let coarse = slice_tokens(100 * tokens, 100, stages as u32, Nanos(50_000), time).unwrap();
            assert!(coarse.total <= best + Nanos(50_000) * stages);
        }
    }

    /// There are thirty thousand possible bounds on the longest slice; the search must try only a few of them.
    #[test]
    fn fine_grains_take_no_time() {
        let fine = slice_tokens(2048, 8, 8, Nanos::ZERO, time).unwrap();
        let coarse = slice_tokens(2048, 128, 8, Nanos::ZERO, time).unwrap();
        assert!(fine.total <= coarse.total && fine.lengths.iter().sum::<u64>() == 2048);
    }

    #[test]
    fn what_cannot_be_cut_is_refused() {
        assert!(slice_tokens(100, 30, 2, Nanos::ZERO, time).is_err());
        assert!(slice_tokens(0, 1, 2, Nanos::ZERO, time).is_err());
        assert!(slice_tokens(1 << 40, 1, 2, Nanos::ZERO, time).is_err());
    }
}
