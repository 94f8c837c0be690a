//! Compares two runs line by line and finds the first step and field that differ.

use std::path::Path;

use serde::Serialize;

use crate::{Result, StepMetrics, metrics};

/// The first difference between two runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// The step.
    pub step: u64,
    /// The field of `metrics.jsonl`.
    pub field: &'static str,
    /// The field's value in the first run.
    pub left: String,
    /// The field's value in the second run.
    pub right: String,
}

/// Result of comparing two runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Number of equal steps from the first on.
    pub equal_steps: u64,
    /// The first difference; `None` if one run equals the beginning of the other.
    pub difference: Option<Difference>,
}

/// Compares the results of training: losses, tokens and digests of the parameters. Times and bytes are not
/// compared, since they differ between transports. If only one run has a digest or validation loss of a step,
/// or if one run is longer, this is not a difference.
///
/// `left` and `right` are run folders, or paths of `metrics.jsonl` files.
///
/// Errors: [`crate::Error::Io`], [`crate::Error::Metrics`] with the line.
pub fn compare(left: &Path, right: &Path) -> Result<Comparison> {
    let read = |path: &Path| {
        if path.is_dir() { metrics::read(&path.join("metrics.jsonl")) } else { metrics::read(path) }
    };
    Ok(compare_rows(&read(left)?, &read(right)?))
}

fn compare_rows(left: &[StepMetrics], right: &[StepMetrics]) -> Comparison {
    let mut equal_steps = 0;
    for (a, b) in left.iter().zip(right) {
        let difference = difference(a, b);
        if difference.is_some() {
            return Comparison { equal_steps, difference };
        }
        equal_steps += 1;
    }
    Comparison { equal_steps, difference: None }
}

fn difference(a: &StepMetrics, b: &StepMetrics) -> Option<Difference> {
    let number =
        |field, a: f64, b: f64| (field, (a.to_bits() != b.to_bits()).then(|| (a.to_string(), b.to_string())));
    let both = |a: Option<f64>, b: Option<f64>| a.zip(b).map_or((0.0, 0.0), |pair| pair);
    let (val_a, val_b) = both(a.val_loss, b.val_loss);
    let digests = a.digest.as_ref().zip(b.digest.as_ref()).filter(|(a, b)| a != b);
    let fields = [
        ("step", (a.step != b.step).then(|| (a.step.to_string(), b.step.to_string()))),
        ("tokens", (a.tokens != b.tokens).then(|| (a.tokens.to_string(), b.tokens.to_string()))),
        number("train_loss", a.train_loss, b.train_loss),
        number("val_loss", val_a, val_b),
        ("digest", digests.map(|(a, b)| (a.clone(), b.clone()))),
    ];
    let (field, (left, right)) = fields.into_iter().find_map(|(field, values)| Some((field, values?)))?;
    Some(Difference { step: a.step, field, left, right })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64, train_loss: f64) -> StepMetrics {
        StepMetrics {
            step,
            train_loss,
            tokens: 10 * step,
            time_s: train_loss * 7.0,
            ..StepMetrics::default()
        }
    }

    #[test]
    fn the_first_field_that_parts_is_named() {
        let a = [row(1, 3.0), row(2, 2.5), row(3, 2.0)];
        let same = Comparison { equal_steps: 3, difference: None };
        assert_eq!(compare_rows(&a, &a), same);
        assert_eq!(compare_rows(&a, &a[..2]), Comparison { equal_steps: 2, difference: None });
        // Times are not compared, and values that only one run has are not compared either.
        let mut b = a.clone();
        (b[0].time_s, b[1].val_loss, b[2].digest) = (9.0, Some(1.0), Some("x".to_owned()));
        assert_eq!(compare_rows(&a, &b), same);
        let mut c = b.clone();
        c[2].digest = Some("y".to_owned());
        let found = compare_rows(&b, &c).difference.unwrap();
        assert_eq!((found.step, found.field, &found.right[..]), (3, "digest", "y"));
        c[1].train_loss = 2.5_f64.next_up();
        let found = compare_rows(&b, &c);
        let difference = found.difference.unwrap();
        assert_eq!((found.equal_steps, difference.step, difference.field), (1, 2, "train_loss"));
    }
}
