//! Divides an integer in proportion to weights: a step among unequal devices, or a time among slices.

/// Divides `total` in proportion to `weights`: first rounds down, then adds one to the parts with the largest
/// remainders.
///
/// Ties go to the lower index. The parts sum to `total`, and each is within one of its exact quota. If all
/// weights are zero, divides evenly. Source: Hamilton's method of apportionment.
///
/// ```
/// use farflung_parallel::share::largest_remainder;
///
/// assert_eq!(largest_remainder(10, &[3, 3, 1]), [4, 4, 2]);
/// ```
#[must_use]
pub fn largest_remainder(total: u64, weights: &[u64]) -> Vec<u64> {
    let sum: u128 = weights.iter().map(|&w| u128::from(w)).sum();
    if sum == 0 {
        return if weights.is_empty() {
            Vec::new()
        } else {
            largest_remainder(total, &vec![1; weights.len()])
        };
    }
    let quota = |w: u64| (u128::from(total) * u128::from(w) / sum, u128::from(total) * u128::from(w) % sum);
    let mut parts: Vec<u64> = weights.iter().map(|&w| quota(w).0 as u64).collect();
    let left = total - parts.iter().sum::<u64>();
    let mut by_remainder: Vec<usize> = (0..weights.len()).collect();
    by_remainder.sort_by_key(|&i| std::cmp::Reverse(quota(weights[i]).1));
    for &i in by_remainder.iter().take(left as usize) {
        parts[i] += 1;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn by_hand() {
        assert_eq!(largest_remainder(8, &[1, 1, 1, 1]), [2, 2, 2, 2]);
        assert_eq!(largest_remainder(3, &[1, 1]), [2, 1]);
        assert_eq!(largest_remainder(12, &[10, 1, 1]), [10, 1, 1]);
        assert_eq!(largest_remainder(5, &[0, 0]), [3, 2]);
        assert!(largest_remainder(5, &[]).is_empty());
    }

    proptest! {
        #[test]
        fn sums_up_and_stays_within_one(total in any::<u64>(), weights in prop::collection::vec(0_u64..1 << 40, 1..20)) {
            let parts = largest_remainder(total, &weights);
            prop_assert_eq!(parts.iter().map(|&p| u128::from(p)).sum::<u128>(), u128::from(total));
            let sum: u128 = weights.iter().map(|&w| u128::from(w)).sum();
            prop_assume!(sum > 0);
            for (&p, &w) in parts.iter().zip(&weights) {
                let floor = u128::from(total) * u128::from(w) / sum;
                prop_assert!(u128::from(p) == floor || u128::from(p) == floor + 1);
            }
        }
    }
}
