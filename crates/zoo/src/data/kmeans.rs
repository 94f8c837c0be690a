//! K-means clustering of a text's chunks by their token histograms.

use std::borrow::Borrow;

use farflung_base::Philox;

use super::tokens::Split;

/// Number of buckets of a histogram. The bucket is the token id modulo this; for bytes it is the byte itself.
pub(super) const BUCKETS: usize = 256;
/// Maximum number of rounds. The loop ends earlier if no chunk changes its cluster.
const ROUNDS: usize = 50;
/// Stream of the random numbers for the initial centres.
const STREAM: u64 = u64::from_le_bytes(*b"kmeans\0\0");

/// Features of some tokens: the square roots of the frequencies of their buckets, from 0 to 1.
pub(super) type Point = [f64; BUCKETS];

/// Returns the cluster, from 0 on, of each chunk of `chunk` tokens of a split. The last chunk may be shorter.
///
/// A chunk's features are the square roots of its token frequencies, so their Euclidean distance is the
/// Hellinger distance (up to a constant factor). Initial centres are chosen by k-means++. Ties go to the lower
/// cluster, and an empty cluster keeps its centre. The result is a pure function of the tokens and the
/// arguments.
///
/// Sources: Lloyd 1982; Arthur and Vassilvitskii 2007, "k-means++".
pub(super) fn clusters(split: &Split, chunk: usize, count: usize, seed: u64) -> Vec<usize> {
    let starts = (0..split.len()).step_by(chunk.max(1));
    let points: Vec<Point> =
        starts.map(|start| features_at(split, start, chunk.min(split.len() - start))).collect();
    let mut centres = first_centres(&points, count, &Philox::new(seed, STREAM));
    let mut found = vec![usize::MAX; points.len()];
    for _ in 0..ROUNDS {
        let next: Vec<usize> = points.iter().map(|point| nearest(&centres, point).0).collect();
        if next == found {
            break;
        }
        found = next;
        for (number, centre) in centres.iter_mut().enumerate() {
            let members = points.iter().zip(&found).filter(|(_, cluster)| **cluster == number);
            if let Some(mean) = mean(members.map(|(point, _)| point)) {
                *centre = mean;
            }
        }
    }
    found
}

/// Returns the features of `len` tokens of a split from `start` on.
pub(super) fn features_at(split: &Split, start: usize, len: usize) -> Point {
    let mut tokens = Vec::with_capacity(len);
    split.append_to(start, len, &mut tokens);
    features(&tokens)
}

/// Returns the features of at least one token.
pub(super) fn features(tokens: &[u32]) -> Point {
    let mut counts = [0.0; BUCKETS];
    for &token in tokens {
        counts[token as usize % BUCKETS] += 1.0;
    }
    counts.map(|count: f64| (count / tokens.len() as f64).sqrt())
}

fn distance<T: Copy + Into<f64>>(centre: &[T; BUCKETS], point: &Point) -> f64 {
    let differences = centre.iter().zip(point).map(|(&a, b)| a.into() - b);
    differences.map(|difference| difference * difference).sum()
}

/// Returns the nearest centre, the first one in a tie, and its squared distance.
pub(super) fn nearest<T: Copy + Into<f64>>(centres: &[[T; BUCKETS]], point: &Point) -> (usize, f64) {
    let distances = centres.iter().map(|centre| distance(centre, point)).enumerate();
    distances.fold((0, f64::INFINITY), |best, next| if next.1 < best.1 { next } else { best })
}

/// Returns the mean of points; `None` if there are none.
pub(super) fn mean(points: impl Iterator<Item = impl Borrow<Point>>) -> Option<Point> {
    let (mut sum, mut count) = ([0.0; BUCKETS], 0_u32);
    for point in points {
        count += 1;
        sum.iter_mut().zip(point.borrow()).for_each(|(sum, x)| *sum += x);
    }
    (count > 0).then(|| sum.map(|x: f64| x / f64::from(count)))
}

/// Chooses the initial centres. The first one is a random point; each further one is drawn with probability
/// proportional to the squared distance to the nearest centre so far.
fn first_centres(points: &[Point], count: usize, random: &Philox) -> Vec<Point> {
    let mut centres: Vec<Point> = Vec::with_capacity(count);
    let uniform = |i: u64| random.below(i, 1 << 53) as f64 / (1_u64 << 53) as f64;
    for number in 0..count.min(points.len()) {
        let weights: Vec<f64> =
            points.iter().map(|point| if number == 0 { 1.0 } else { nearest(&centres, point).1 }).collect();
        let mut left = uniform(number as u64) * weights.iter().sum::<f64>();
        let at = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        centres.push(points[at.unwrap_or(0)]);
    }
    centres
}
