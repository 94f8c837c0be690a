//! Bottleneck assignment: matches two sets of equal size so that the most expensive pair is as cheap as
//! possible.

/// A perfect matching of rows and columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matching {
    /// Cost of the most expensive pair.
    pub costliest: u64,
    /// Column of each row.
    pub column: Vec<usize>,
}

/// Returns a perfect matching of `n` rows and `n` columns whose most expensive pair costs least.
///
/// Shapes: `costs` is `[n, n]` by rows. Finds the threshold by binary search over the sorted costs. Augmenting
/// paths decide whether a threshold admits a perfect matching. The search starts at the largest of all rows'
/// and columns' minimum costs, which is often the result.
///
/// # Panics
/// If `costs` does not have `n * n` entries, or `n` is 0.
#[must_use]
pub fn bottleneck_matching(costs: &[u64], n: usize) -> Matching {
    assert!(n > 0 && costs.len() == n * n, "{} costs of {n} rows and columns", costs.len());
    let least_of_row = (0..n).map(|i| costs[i * n..][..n].iter().min()).max().flatten();
    let least_of_column = (0..n).map(|j| (0..n).map(|i| &costs[i * n + j]).min()).max().flatten();
    let floor = *least_of_row.max(least_of_column).expect("n is not 0");
    let mut search = Search::new(costs, n);
    if let Some(column) = search.within(floor) {
        return Matching { costliest: floor, column };
    }
    let mut limits: Vec<u64> = costs.iter().copied().filter(|&cost| cost > floor).collect();
    limits.sort_unstable();
    limits.dedup();
    // The largest cost admits every matching, and `high` always admits one.
    let (mut low, mut high) = (0, limits.len() - 1);
    let mut best = search.within(limits[high]).expect("all pairs are allowed");
    while low < high {
        let middle = usize::midpoint(low, high);
        match search.within(limits[middle]) {
            Some(column) => (best, high) = (column, middle),
            None => low = middle + 1,
        }
    }
    Matching { costliest: limits[high], column: best }
}

/// State of a search for augmenting paths. Sets of columns are bit sets.
struct Search<'a> {
    costs: &'a [u64],
    n: usize,
    /// Number of words in a set of columns.
    words: usize,
    /// For each row, the set of columns within the limit.
    allowed: Vec<u64>,
    /// Columns not yet visited in the current path.
    unseen: Vec<u64>,
    /// Row that is matched with each column.
    row: Vec<usize>,
}

const NONE: usize = usize::MAX;

impl<'a> Search<'a> {
    fn new(costs: &'a [u64], n: usize) -> Self {
        let words = n.div_ceil(64);
        Self { costs, n, words, allowed: vec![0; n * words], unseen: vec![0; words], row: vec![NONE; n] }
    }

    /// Returns the columns of a perfect matching without a pair above `limit`, if there is one.
    fn within(&mut self, limit: u64) -> Option<Vec<usize>> {
        self.allowed.fill(0);
        for (row, costs) in self.costs.chunks(self.n).enumerate() {
            for (column, _) in costs.iter().enumerate().filter(|(_, cost)| **cost <= limit) {
                self.allowed[row * self.words + column / 64] |= 1 << (column % 64);
            }
        }
        self.row.fill(NONE);
        for row in 0..self.n {
            self.unseen.fill(u64::MAX);
            if !self.augment(row) {
                return None;
            }
        }
        let mut columns = vec![0; self.n];
        self.row.iter().enumerate().for_each(|(column, &row)| columns[row] = column);
        Some(columns)
    }

    fn augment(&mut self, row: usize) -> bool {
        for word in 0..self.words {
            loop {
                let open = self.allowed[row * self.words + word] & self.unseen[word];
                if open == 0 {
                    break;
                }
                let column = word * 64 + open.trailing_zeros() as usize;
                self.unseen[word] &= !(1 << (column % 64));
                if self.row[column] == NONE || self.augment(self.row[column]) {
                    self.row[column] = row;
                    return true;
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the minimum over all permutations of the cost of the most expensive pair.
    fn by_brute_force(costs: &[u64], n: usize) -> u64 {
        fn rest(costs: &[u64], n: usize, row: usize, used: u32) -> u64 {
            if row == n {
                return 0;
            }
            let free = (0..n).filter(|column| used & (1 << column) == 0);
            free.map(|column| costs[row * n + column].max(rest(costs, n, row + 1, used | 1 << column)))
                .min()
                .unwrap_or(u64::MAX)
        }
        rest(costs, n, 0, 0)
    }

    proptest! {
        #[test]
        fn no_permutation_is_better(n in 1_usize..7, all in prop::collection::vec(0_u64..12, 36)) {
            let costs = &all[..n * n];
            let found = bottleneck_matching(costs, n);
            prop_assert_eq!(found.costliest, by_brute_force(costs, n));
            let worst = found.column.iter().enumerate().map(|(row, &column)| costs[row * n + column]).max();
            prop_assert_eq!(worst, Some(found.costliest));
            let mut columns = found.column;
            columns.sort_unstable();
            prop_assert_eq!(columns, (0..n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn more_columns_than_a_word_has_bits() {
        let n = 130;
        // Only the pairs on a shifted diagonal are cheap, so they are the matching.
        let cost = |i: usize| if i % n == (i / n + 1) % n { 3 } else { 9 };
        let found = bottleneck_matching(&(0..n * n).map(cost).collect::<Vec<_>>(), n);
        assert_eq!((found.costliest, found.column[129]), (3, 0));
    }
}
