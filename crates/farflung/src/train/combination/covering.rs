//! Finds a small set of runs that contains every pair of choices.

use std::collections::{BTreeMap, BTreeSet};

use super::axes::{AXES, Axis};
use super::{Refusal, pair};

/// A choice: the index of an axis, and the index of one of its values.
type Choice = (usize, usize);

/// Runs that cover every pair of values of two axes.
#[derive(Debug, Clone, Default)]
pub struct Covering {
    /// Valid runs, each with a value for each of [`AXES`].
    pub runs: Vec<Vec<String>>,
    /// Pairs that cannot be combined, with the reason.
    pub refused: Vec<RefusedPair>,
    /// Number of pairs that can be combined; each is in one of the runs.
    pub pairs: usize,
}

/// Two choices that cannot be combined.
#[derive(Debug, Clone)]
pub struct RefusedPair {
    /// The first choice: an axis of [`AXES`] and its value.
    pub a: (&'static Axis, String),
    /// The second choice.
    pub b: (&'static Axis, String),
    /// The reason why the two cannot be combined.
    pub refusal: Refusal,
}

/// Makes a covering array of strength 2 over [`AXES`], greedily: each run starts with a pair that is not in an
/// earlier run; on each other axis it takes, among the values that can be combined with all chosen ones, the
/// one that adds the most pairs.
///
/// Source of the method: Cohen et al. 1997, "The AETG system". Differs: ties take the first value, so that the
/// array is always the same.
#[must_use]
pub fn covering() -> Covering {
    let values: Vec<Vec<String>> = AXES.iter().map(|axis| (axis.values)()).collect();
    let named = |(axis, value): Choice| (&AXES[axis], values[axis][value].as_str());
    let choices: Vec<Choice> = values
        .iter()
        .enumerate()
        .flat_map(|(axis, of)| (0..of.len()).map(move |value| (axis, value)))
        .collect();
    let alone: BTreeMap<Choice, Option<Refusal>> =
        choices.iter().map(|&choice| (choice, pair(named(choice), named(choice)))).collect();
    let mut found = Covering::default();
    let mut open: BTreeSet<(Choice, Choice)> = BTreeSet::new();
    for (i, &a) in choices.iter().enumerate() {
        for &b in choices[i..].iter().filter(|b| b.0 > a.0) {
            let refusal = alone[&a].clone().or_else(|| alone[&b].clone());
            match refusal.or_else(|| pair(named(a), named(b))) {
                None => _ = open.insert((a, b)),
                Some(refusal) => found.refused.push(RefusedPair {
                    a: (&AXES[a.0], values[a.0][a.1].clone()),
                    b: (&AXES[b.0], values[b.0][b.1].clone()),
                    refusal,
                }),
            }
        }
    }
    let all = open.clone();
    let ordered = |a: Choice, b: Choice| if a < b { (a, b) } else { (b, a) };
    found.pairs = open.len();
    while let Some(&(a, b)) = open.first() {
        let mut row: Vec<Option<usize>> = vec![None; AXES.len()];
        (row[a.0], row[b.0]) = (Some(a.1), Some(b.1));
        for axis in 0..AXES.len() {
            if row[axis].is_some() {
                continue;
            }
            let chosen: Vec<Choice> =
                row.iter().enumerate().filter_map(|(i, value)| value.map(|value| (i, value))).collect();
            let fits =
                |value: &usize| chosen.iter().all(|&other| all.contains(&ordered(other, (axis, *value))));
            let adds = |value: usize| {
                chosen.iter().filter(|&&other| open.contains(&ordered(other, (axis, value)))).count()
            };
            let best = (0..values[axis].len()).filter(fits).max_by_key(|&v| (adds(v), std::cmp::Reverse(v)));
            row[axis] = best;
        }
        let row: Vec<usize> =
            row.into_iter().map(|value| value.expect("each axis has a value for any run")).collect();
        let before = open.len();
        for i in 0..row.len() {
            for j in i + 1..row.len() {
                open.remove(&((i, row[i]), (j, row[j])));
            }
        }
        assert!(open.len() < before, "a run has the pair that it began with");
        found.runs.push(row.iter().enumerate().map(|(axis, &value)| values[axis][value].clone()).collect());
    }
    found
}
