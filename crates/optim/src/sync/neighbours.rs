//! Graphs of ranks that mix with each other: a pure function of the round, as data.

use farflung_base::Philox;

/// A graph over ranks, in which each rank mixes its parameters with those of a few others.
///
/// In every round of [`Graph::meeting`], the shares that ranks receive and keep form a doubly stochastic
/// matrix. So the mean over all ranks is preserved. For unequal ranks see [`Graph::weighted`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Graph {
    /// Both neighbours on a ring, with a weight of a third each (Lian et al. 2017, D-PSGD). Two ranks are one
    /// pair, with a weight of a half.
    Ring,
    /// Pairs of a rank of the lower half and one of the upper half, shifted by one in each round until all have
    /// met, as BAGUA's `shift_one`. If the number of ranks is odd, one rests, another in each round.
    ShiftOne,
    /// The rank `2^k` before it, with a weight of a half. Over the rounds `k` counts from 0, as long as `2^k`
    /// is below the number of ranks, and then starts again (Ying et al. 2021, one-peer exponential graphs;
    /// SGP's graph of Assran et al. 2019).
    Exponential,
    /// Random pairs, which all ranks draw alike. If the number of ranks is odd, one rests.
    RandomPairs {
        /// Seed of the random numbers.
        seed: u64,
    },
}

/// A rank that another rank receives from, and its weight in the result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Neighbour {
    /// Number of the rank.
    pub rank: u32,
    /// Weight of its values. The receiver's own values have the rest of the total weight of 1.
    pub weight: f64,
}

/// Neighbours of a rank in a round.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Neighbours {
    /// Ranks that it sends to.
    pub to: Vec<u32>,
    /// Ranks that it receives from.
    pub from: Vec<Neighbour>,
}

impl Neighbours {
    fn both(others: impl IntoIterator<Item = u32>, weight: f64) -> Self {
        let to: Vec<u32> = others.into_iter().collect();
        Self { from: to.iter().map(|&rank| Neighbour { rank, weight }).collect(), to }
    }
}

impl Graph {
    /// Returns the neighbours as [`Graph::meeting`] does, for ranks with these weights, which must be above 0.
    /// The weighted mean is preserved, and ranks converge to it.
    ///
    /// Two ranks that exchange only with each other take their weighted mean. On a ring, rank `i` takes `1/3
    /// min(1, w_j / w_i)` of neighbour `j` (Metropolis-Hastings). On an exponential graph, a rank takes half of
    /// `w_min / w_i` of the rank before it, where `w_min` is the least weight.
    #[must_use]
    pub fn weighted(self, rank: u32, weights: &[f64], round: u64) -> Neighbours {
        let mut meeting = self.meeting(rank, weights.len() as u32, round);
        let Some(&own) = weights.get(rank as usize) else { return meeting };
        let least = weights.iter().copied().fold(f64::INFINITY, f64::min);
        let most = weights.iter().copied().fold(0.0, f64::max);
        if least >= most {
            return meeting;
        }
        let pair = meeting.from.len() == 1;
        for neighbour in &mut meeting.from {
            let theirs = weights[neighbour.rank as usize];
            neighbour.weight *= match self {
                Self::Exponential => least / own,
                _ if pair => 2.0 * theirs / (theirs + own),
                Self::Ring | Self::ShiftOne | Self::RandomPairs { .. } => (theirs / own).min(1.0),
            };
        }
        meeting
    }

    /// Returns the neighbours of `rank` among `size` ranks in a round, counted from 0.
    #[must_use]
    pub fn meeting(self, rank: u32, size: u32, round: u64) -> Neighbours {
        let others = |shift: u32| (rank + shift) % size;
        match self {
            _ if size < 2 => Neighbours::default(),
            Self::Ring if size == 2 => Neighbours::both([1 - rank], 0.5),
            Self::Ring => Neighbours::both([others(size - 1), others(1)], 1.0 / 3.0),
            Self::Exponential => {
                let rounds = u64::from(size.next_power_of_two().trailing_zeros());
                let shift = 1 << (round % rounds);
                let from = vec![Neighbour { rank: others(size - shift), weight: 0.5 }];
                Neighbours { to: vec![others(shift)], from }
            }
            Self::ShiftOne => {
                let half = size.div_ceil(2);
                let step = (round % u64::from(half)) as u32;
                let other = if rank < half {
                    half + (step + rank) % half
                } else {
                    (rank - half + half - step) % half
                };
                Neighbours::both((other < size).then_some(other), 0.5)
            }
            Self::RandomPairs { seed } => {
                let mut order: Vec<u32> = (0..size).collect();
                let draw = Philox::new(seed, round);
                for i in (1..order.len()).rev() {
                    order.swap(i, (f64::from(draw.uniform(i as u64)) * (i + 1) as f64) as usize);
                }
                let mut pairs = order.chunks_exact(2);
                let other = pairs.find_map(|pair| match *pair {
                    [a, b] if a == rank => Some(b),
                    [a, b] if b == rank => Some(a),
                    _ => None,
                });
                Neighbours::both(other, 0.5)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRAPHS: [Graph; 4] =
        [Graph::Ring, Graph::ShiftOne, Graph::Exponential, Graph::RandomPairs { seed: 7 }];

    /// Returns the matrix of a round: a row for each rank, with the shares of all ranks' values in its result.
    fn matrix(graph: Graph, size: u32, round: u64) -> Vec<Vec<f64>> {
        let row = |rank: u32| {
            let mut row = vec![0.0; size as usize];
            row[rank as usize] = 1.0;
            for Neighbour { rank: from, weight } in graph.meeting(rank, size, round).from {
                row[from as usize] += weight;
                row[rank as usize] -= weight;
            }
            row
        };
        (0..size).map(row).collect()
    }

    #[test]
    fn with_weights_the_mean_by_weights_stays_and_is_what_ranks_come_to() {
        for graph in GRAPHS {
            for size in 2..9_usize {
                let weights: Vec<f64> = (0..size).map(|i| [0.5, 1.0, 2.5, 1.0][i % 4]).collect();
                let all: f64 = weights.iter().sum();
                let mean =
                    |values: &[f64]| values.iter().zip(&weights).map(|(x, w)| x * w).sum::<f64>() / all;
                let mut values: Vec<f64> = (0..size).map(|i| (i * i) as f64).collect();
                let wanted = mean(&values);
                for round in 0..400 {
                    let before = values.clone();
                    for rank in 0..size as u32 {
                        let meeting = graph.weighted(rank, &weights, round);
                        let taken: f64 = meeting.from.iter().map(|n| n.weight).sum();
                        assert!((0.0..=1.0 + 1e-12).contains(&taken), "{graph:?} {size}");
                        for Neighbour { rank: from, weight } in meeting.from {
                            values[rank as usize] += weight * (before[from as usize] - before[rank as usize]);
                        }
                    }
                    assert!((mean(&values) - wanted).abs() < 1e-9 * wanted, "{graph:?} {size} {round}");
                }
                assert!(values.iter().all(|x| (x - wanted).abs() < 1e-3 * wanted), "{graph:?} {size}");
                // Equal weights change no bit.
                for rank in 0..size as u32 {
                    let equal = graph.weighted(rank, &vec![0.7; size], 3);
                    assert_eq!(equal, graph.meeting(rank, size as u32, 3));
                }
            }
        }
    }

    #[test]
    fn the_mean_stays_and_whoever_receives_is_sent_to() {
        for graph in GRAPHS {
            for size in 1..12 {
                for round in 0..20 {
                    let matrix = matrix(graph, size, round);
                    for i in 0..size as usize {
                        let column: f64 = matrix.iter().map(|row| row[i]).sum();
                        assert!((column - 1.0).abs() < 1e-12, "{graph:?} {size} {round}");
                        assert!(matrix[i].iter().all(|&x| x >= -1e-12));
                    }
                    for rank in 0..size {
                        let meeting = graph.meeting(rank, size, round);
                        assert!(meeting.from.iter().all(|n| n.rank != rank));
                        for to in meeting.to {
                            let from = graph.meeting(to, size, round).from;
                            assert_eq!(from.iter().filter(|n| n.rank == rank).count(), 1);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_come_together_in_time() {
        for graph in GRAPHS {
            for size in 2..12_u32 {
                let mut values: Vec<f64> = (0..size).map(f64::from).collect();
                for round in 0..200 {
                    let mixed = matrix(graph, size, round).into_iter();
                    values = mixed.map(|row| row.iter().zip(&values).map(|(w, x)| w * x).sum()).collect();
                }
                let mean = f64::from(size - 1) / 2.0;
                assert!(values.iter().all(|x| (x - mean).abs() < 1e-3), "{graph:?} {size}: {values:?}");
            }
        }
        // If the number of ranks is a power of two, an exponential graph gives the exact mean after
        // `log2(ranks)` rounds.
        let mut values = vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        for round in 0..3 {
            let mixed = matrix(Graph::Exponential, 8, round).into_iter();
            values = mixed.map(|row| row.iter().zip(&values).map(|(w, x)| w * x).sum()).collect();
        }
        assert!(values.iter().all(|x: &f64| (x - 3.5).abs() < 1e-12), "{values:?}");
    }

    /// BAGUA's formula for an even number of ranks.
    #[test]
    fn shift_one_is_baguas() {
        for n in [2_u32, 4, 6, 8] {
            for step in 0..9_u32 {
                for r in 0..n {
                    let (half, shifted) = (n / 2, i64::from(r) - i64::from(n / 2) - i64::from(step));
                    let peer = if r < half {
                        (step + r) % half + half
                    } else {
                        shifted.rem_euclid(i64::from(half)) as u32
                    };
                    assert_eq!(Graph::ShiftOne.meeting(r, n, step.into()).to, [peer]);
                }
            }
        }
    }
}
