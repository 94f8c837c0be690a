//! The division of a model's layers among stages of unequal speed.

use std::ops::Range;

/// Returns the division of `layers` layers among stages for which the slowest stage takes the least time. Each
/// stage has at least one layer, and at most `most`. `work` returns the operations of a range of layers, which
/// must not fall as the range grows, and `speeds` has the operations a second of each stage. Among equally fast
/// divisions, later stages get as few layers as possible.
///
/// `None` if there are more stages than layers, if `most` is too few, or if a speed is not positive and finite.
///
/// The optimum is exact: dynamic programming over the stages and the layers before them, in
/// O(stages · layers · most) calls of `work`.
///
/// ```
/// use farflung_parallel::plan::layers_by_speed;
///
/// // Four stages of which the last is half as fast as the others.
/// let cut = layers_by_speed(7, &[2.0, 2.0, 2.0, 1.0], 7, |layers| layers.len() as f64).unwrap();
/// assert_eq!(cut, [0..2, 2..4, 4..6, 6..7]);
/// ```
#[must_use]
pub fn layers_by_speed(
    layers: u32,
    speeds: &[f64],
    most: u32,
    work: impl Fn(&Range<u32>) -> f64,
) -> Option<Vec<Range<u32>>> {
    if speeds.iter().any(|speed| !speed.is_finite() || *speed <= 0.0) {
        return None;
    }
    let all = layers as usize;
    // `least[end]`: the least time of the slowest of the stages so far, if they have the layers before `end`.
    let mut least = vec![f64::INFINITY; all + 1];
    least[0] = 0.0;
    // The first layer of each stage, by the end of its range.
    let mut begins: Vec<Vec<u32>> = Vec::with_capacity(speeds.len());
    for speed in speeds {
        let mut next = vec![f64::INFINITY; all + 1];
        let mut from = vec![0; all + 1];
        for end in 1..=layers {
            for begin in end.saturating_sub(most)..end {
                let time = least[begin as usize].max(work(&(begin..end)) / speed);
                // A later begin leaves fewer layers to this stage.
                if time <= next[end as usize] && time.is_finite() {
                    (next[end as usize], from[end as usize]) = (time, begin);
                }
            }
        }
        (least, begins) = (next, [begins, vec![from]].concat());
    }
    if speeds.is_empty() || !least[all].is_finite() {
        return None;
    }
    let mut end = layers;
    let mut cut: Vec<Range<u32>> = begins
        .iter()
        .rev()
        .map(|from| {
            let range = from[end as usize]..end;
            end = range.start;
            range
        })
        .collect();
    cut.reverse();
    Some(cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the least time of the slowest stage, by trying all divisions.
    fn exhaustive(
        from: u32,
        layers: u32,
        speeds: &[f64],
        most: u32,
        work: &dyn Fn(&Range<u32>) -> f64,
    ) -> f64 {
        let Some((speed, rest)) = speeds.split_first() else {
            return if from == layers { 0.0 } else { f64::INFINITY };
        };
        let time = |end| (work(&(from..end)) / speed).max(exhaustive(end, layers, rest, most, work));
        (from + 1..=layers.min(from + most)).map(time).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn the_slowest_stage_takes_the_least_time() {
        // The first layer has the embeddings beside it, and the last one the head.
        let work = |layers: &Range<u32>| {
            let ends = f64::from(u8::from(layers.start == 0)) + 2.5 * f64::from(u8::from(layers.end == 9));
            layers.len() as f64 + ends
        };
        for speeds in [&[1.0, 1.0, 1.0][..], &[3.0, 1.0, 2.0], &[0.5, 0.5, 4.0, 1.0], &[1.0; 9], &[7.0]] {
            for most in [1, 3, 5, 9] {
                let cut = layers_by_speed(9, speeds, most, work);
                let best = exhaustive(0, 9, speeds, most, &work);
                let Some(cut) = cut else {
                    assert!(best.is_infinite(), "{speeds:?} {most}");
                    continue;
                };
                assert_eq!((cut[0].start, cut.last().unwrap().end, cut.len()), (0, 9, speeds.len()));
                assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start), "{cut:?}");
                assert!(cut.iter().all(|range| (1..=most as usize).contains(&range.len())), "{cut:?}");
                let times = cut.iter().zip(speeds).map(|(range, speed)| work(range) / speed);
                let slowest = times.fold(0.0, f64::max);
                assert!((slowest - best).abs() < 1e-12, "{speeds:?} {most}: {cut:?}");
            }
        }
    }

    #[test]
    fn speeds_that_cannot_be_divide_nothing() {
        let len = |layers: &Range<u32>| layers.len() as f64;
        for speeds in [&[][..], &[1.0, 0.0], &[1.0, f64::NAN], &[1.0, f64::INFINITY], &[-1.0], &[1.0; 5]] {
            assert_eq!(layers_by_speed(4, speeds, 4, len), None, "{speeds:?}");
        }
        assert_eq!(layers_by_speed(4, &[1.0; 2], 1, len), None);
    }
}
